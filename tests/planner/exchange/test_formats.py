"""What every exchange format promises."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings

from planner.exchange.formats import ExchangeFormat, rounded, roundings
from planner.exchange.registry import FORMATS
from planner.exchange.training_config import TrainingConfig
from simulator.errors import InputError
from tests.planner.exchange.training_configs import training_configs, usual

every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def runnable(form: ExchangeFormat, config: TrainingConfig) -> TrainingConfig | None:
    """The nearest configuration that the framework can run, None where there is none."""
    try:
        return rounded(config, form.table)
    except InputError:
        return None


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@every_format
@given(config=training_configs())
@settings(unhurried, max_examples=20)
def test_what_is_written_is_read_again(form: ExchangeFormat, config: TrainingConfig) -> None:
    check_round_trip(form, config)


@pytest.mark.slow
@every_format
@given(config=training_configs())
@settings(unhurried, max_examples=200)
def test_what_is_written_is_read_again_on_many_plans(form: ExchangeFormat, config: TrainingConfig) -> None:
    check_round_trip(form, config)


def check_round_trip(form: ExchangeFormat, config: TrainingConfig) -> None:
    """Write the nearest configuration that the framework can run, and read it again."""
    found = runnable(form, config)
    assume(found is not None and not form.violations(found))
    assert found is not None
    written = form.write(found)
    read = form.read(written.text, f"file{form.suffix}")
    said = form.spoken(found).said()
    assert {name: value for name, value in read.config.said().items() if name in said} == said
    assert form.spoken(read.config).said() == said
    assert not read.not_read
    assert not read.violations
    assert form.recognises(f"file{form.suffix}", written.text)
    assert next(one.name for one in FORMATS.values() if one.recognises(f"file{form.suffix}", written.text)) == form.name


@every_format
@given(config=training_configs())
@settings(unhurried, max_examples=20)
def test_what_a_framework_cannot_run_is_refused_or_rounded_and_named(
    form: ExchangeFormat, config: TrainingConfig
) -> None:
    changes = roundings(config, form.table)
    assert all(change.what and change.to for change in changes)
    assert bool(changes) == any("cannot run" in violation.rule for violation in form.violations(config))
    found = runnable(form, config)
    if found is not None:
        assert roundings(found, form.table) == []
        assert found == config if not changes else found != config


@every_format
def test_files_state_the_version_they_are_for(form: ExchangeFormat) -> None:
    text = form.write(rounded(usual(), form.table)).text
    assert form.version.split()[0] in text
