"""Sweeps over clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner.planning.planning
from planner.planning.planning import Candidate, PlanRequest, SearchResult
from planner.plans.plan import Status
from planner.what_if import WhatIfOptions, batch_rule, row_document, what_if
from simulator.errors import InputError, ProfileError, UnsupportedError
from simulator.profiles import load_profile
from tests.results import infeasible_result, make_plan, make_prediction, make_result

OPTIONS = WhatIfOptions(network="zoo:mlp", hardware=("dgx-a100", "dgx1-v100"), device_counts=(8, 16, 32))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    """Plan without searching: no plan for 8 devices, a refusal for 32 V100."""
    made: list[PlanRequest] = []

    def plan_network(request: PlanRequest, *, shared: object, **_: object) -> SearchResult:
        made.append(request)
        if request.devices == 8:
            return infeasible_result()
        if request.devices == 32 and request.hardware == "dgx1-v100":
            raise ProfileError("32 devices do not fit")
        samples = request.global_batch or 0
        seconds = 0.1 if request.devices == 16 else 0.125
        candidate = Candidate(
            plan=make_plan(request.devices, 1), prediction=make_prediction(seconds, samples), reason=""
        )
        return replace(make_result(), candidates=(candidate,))

    monkeypatch.setattr(planner.planning.planning, "plan_network", plan_network)
    monkeypatch.setattr(planner.planning.planning, "capture_for", lambda request: None)
    return made


def test_rows_come_by_profile_and_count_with_their_efficiency(requests: list[PlanRequest]) -> None:
    rows = what_if(OPTIONS)
    assert [(row.hardware, row.devices) for row in rows] == [
        *(("dgx-a100", count) for count in (8, 16, 32)),
        *(("dgx1-v100", count) for count in (8, 16, 32)),
    ]
    assert [row.scaling_efficiency for row in rows] == [None, 1.0, 0.8, None, 1.0, None]
    assert [row.refused for row in rows] == [False] * 5 + [True]
    assert not any(request.sensitivity for request in requests)
    assert rows[5].reason == "32 devices do not fit"
    assert rows[0].result.status is Status.INFEASIBLE


def test_the_batch_grows_with_the_devices_unless_it_is_given(requests: list[PlanRequest]) -> None:
    assert [row.global_batch for row in what_if(OPTIONS)][:3] == [64, 128, 256]
    words, _ = batch_rule(OPTIONS)
    assert words.startswith("weak scaling: the global batch is 8 × devices")
    fixed = replace(OPTIONS, global_batch=96)
    assert [row.global_batch for row in what_if(fixed)][:3] == [96, 96, 96]
    assert batch_rule(fixed)[0] == "strong scaling: a global batch of 96 at every device count"


def test_the_batch_of_a_device_may_be_given(requests: list[PlanRequest]) -> None:
    options = replace(OPTIONS, batch_per_device=3)
    assert [row.global_batch for row in what_if(options)][:3] == [24, 48, 96]
    assert batch_rule(options)[0] == "weak scaling: the global batch is 3 × devices"
    with pytest.raises(InputError, match=r"--global-batch 96 and --batch-per-device 3.*give one"):
        batch_rule(replace(options, global_batch=96))


def test_documents_have_the_promised_keys(requests: list[PlanRequest]) -> None:
    rows = what_if(OPTIONS)
    for row in rows:
        document = row_document(row)
        assert set(document) >= {"hw", "devices", "plan", "prediction", "status", "scaling_efficiency"}
        assert (document["plan"] is None) == (document["status"] == "infeasible")
    assert row_document(rows[1])["plan"]["dp"] == 16
    assert "42 GiB over" in row_document(rows[0])["reason"]


def test_what_is_wrong_for_every_row_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: PlanRequest, *, shared: object, **_: object) -> SearchResult:
        raise InputError("a wrong batch")

    monkeypatch.setattr(planner.planning.planning, "plan_network", refuse)
    monkeypatch.setattr(planner.planning.planning, "capture_for", lambda request: None)
    with pytest.raises(InputError, match="a wrong batch"):
        what_if(OPTIONS)


def test_what_is_not_supported_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: PlanRequest, *, shared: object, **_: object) -> SearchResult:
        raise UnsupportedError("pp is not supported yet")

    monkeypatch.setattr(planner.planning.planning, "plan_network", refuse)
    monkeypatch.setattr(planner.planning.planning, "capture_for", lambda request: None)
    with pytest.raises(UnsupportedError):
        what_if(OPTIONS)


def test_an_unknown_profile_is_an_error_before_anything_is_planned(requests: list[PlanRequest]) -> None:
    with pytest.raises(ProfileError, match="'none'"):
        what_if(replace(OPTIONS, hardware=("dgx-a100", "none")))
    assert requests == []


def test_every_combination_of_settings_is_a_row(requests: list[PlanRequest]) -> None:
    options = replace(
        OPTIONS, device_counts=(16, 32), settings=(("network", ("100Gb", "400Gb")), ("batch", ("32", "64")))
    )
    rows = what_if(options)
    assert [(row.profile, row.setting, row.devices) for row in rows][:5] == [
        ("dgx-a100", "network=100Gb, batch=32", 16),
        ("dgx-a100", "network=100Gb, batch=32", 32),
        ("dgx-a100", "network=100Gb, batch=64", 16),
        ("dgx-a100", "network=100Gb, batch=64", 32),
        ("dgx-a100", "network=400Gb, batch=32", 16),
    ]
    assert len(rows) == 16
    assert [row.profile for row in rows] == ["dgx-a100"] * 8 + ["dgx1-v100"] * 8
    assert requests[-1].global_batch in (32, 64)
    assert {request.hardware for request in requests} >= {"dgx-a100:network=100Gb", "dgx-a100:network=400Gb"}
    assert rows[1].scaling_efficiency == 0.4, "against the smaller count with the same settings"
    assert row_document(rows[0])["settings"] == {"network": "100Gb", "batch": "32"}
    assert row_document(rows[0])["hw"] == "dgx-a100"


def test_settings_are_options_pins_and_numbers_of_the_profile(requests: list[PlanRequest]) -> None:
    settings = (("seq_len", ("64",)), ("tp", ("2",)), ("precision", ("fp32",)), ("device.bandwidth", ("1TB/s",)))
    what_if(replace(OPTIONS, network="zoo:gpt2", hardware=("dgx-a100",), device_counts=(16,), settings=settings))
    request = requests[0]
    assert (request.sequence_length, request.pins.tp, request.precision) == (64, 2, "fp32")
    assert load_profile(request.hardware).memory_bandwidth == 1e12


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((("seq_len", ("x",)),), r"seq_len=x: not a number"),
        ((("batch", ("0",)),), r"batch=0: not a number"),
        ((("netwrk", ("1Gb",)),), r"the base has no number 'netwrk'"),
        ((("tp", ("1", "2")), ("tp", ("4",))), r"a key stands twice"),
        ((("tp", tuple(map(str, range(1, 400)))),), r"2394 points; give fewer values"),
    ],
)
def test_wrong_settings_are_errors(
    requests: list[PlanRequest], settings: tuple[tuple[str, tuple[str, ...]], ...], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        what_if(replace(OPTIONS, settings=settings))


def test_numbers_are_not_set_of_a_file(requests: list[PlanRequest]) -> None:
    with pytest.raises(InputError, match=r"network=1Gb for 'mine.yaml': numbers are set of shipped profiles"):
        what_if(replace(OPTIONS, hardware=("mine.yaml",), settings=(("network", ("1Gb",)),)))
