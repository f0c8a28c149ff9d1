"""Rules about single sources: a data file, one vocabulary of conditions and settings."""

from __future__ import annotations

import pytest

from planner.published.measurement_file import FileRow
from planner.published.source_rules import parse_rules, suite_batch
from simulator.errors import InputError


def row(numbers: dict[str, float] | None = None, **texts: str) -> FileRow:
    return FileRow(file="", line=1, texts=texts, numbers=numbers or {})


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("model: '^net$'", True),
        ("model: '^et'", False),
        ("framework+model: 'torch net'", True),
        ("n_accels: {above: 1}", True),
        ("n_accels: 4", False),
        ("network: '^read'", True),
    ],
)
def test_conditions(condition: str, holds: bool) -> None:
    (rule,) = parse_rules(f"- {{when: {{{condition}}}, then: {{copied_time: true}}, source: made}}", "made.yaml")
    made = row({"n_accels": 8.0}, model="Net", framework="PyTorch")
    assert rule.holds(made, {"network": "read before"}) is holds


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("{when: {model: x}, then: {copied_time: true}}", "when, then and source"),
        ("{when: {model: x}, then: {copied: true}, source: made}", "'copied' is no setting"),
        ("{when: {model: true}, then: {copied_time: true}, source: made}", "condition True"),
    ],
)
def test_a_rule_that_is_none_is_named(rule: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_rules(f"- {rule}", "made.yaml")


@pytest.mark.parametrize(("gigabytes", "batch"), [(16, 256), (36, 256), (40, 256)])
def test_a_batch_is_that_of_the_nearest_memory(gigabytes: int, batch: int) -> None:
    made = row(source="NVIDIA/DeepLearningExamples", framework="PyTorch", model="ResNet50", precision="AMP")
    assert suite_batch(made, gigabytes * 1e9) == batch
