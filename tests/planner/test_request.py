"""Requests are refused where they are wrong, with the value, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from planner.planning.planning import PlanRequest, plan_network
from planner.plans.pins import Pins
from planner.plans.plan import MOST_MICRO_BATCHES
from planner.plans.request import PRECISIONS, SEARCH_MODES, checked_pins
from simulator.errors import InputError, ProfileError, UnsupportedError
from tests.planner.search.problems import captured


def request(devices: int = 4, pins: Mapping[str, str] | None = None, **fields: object) -> PlanRequest:
    fields = {"network": "zoo:mlp", "hardware": "dgx-a100", **fields}
    return PlanRequest(devices=devices, pins=Pins.read(pins or {}), **fields)  # type: ignore[arg-type]


def test_nothing_pinned_leaves_everything_free() -> None:
    assert checked_pins(request()) == Pins()


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"dp": "2", "tp": "2"}, Pins(dp=2, tp=2)),
        ({"micro_batch": "4"}, Pins(micro_batch=4)),
        ({"optimizer_sharding": "none"}, Pins(optimizer_sharding="none")),
        ({"optimizer_sharding": "zero2"}, Pins(optimizer_sharding="zero2")),
        (
            {"pp": "1", "cp": "1", "recompute": "none", "schedule": "none", "sequence_parallel": "False"},
            Pins(pp=1, cp=1, recompute="none", schedule="none", sequence_parallel=False),
        ),
        ({"offload_to": "disk"}, Pins(offload_to="disk", offload_optimizer=True)),
        ({"offload_parameters": "true"}, Pins(offload_parameters=True, offload_optimizer=True)),
        ({"offload_parameters": "false"}, Pins(offload_parameters=False)),
        (
            {"vpp": "2", "ep": "4", "shard_size": "8", "offload_optimizer": "true", "context_algorithm": "ring"},
            Pins(vpp=2, ep=4, shard_size=8, offload_optimizer=True, context_algorithm="ring"),
        ),
    ],
)
def test_pins_are_read(pins: Mapping[str, str], expected: Pins) -> None:
    assert checked_pins(request(pins=pins)) == expected


def test_data_parallel_mode_replicates_parameters_and_shards_only_batches() -> None:
    expected = Pins(tp=1, pp=1, cp=1, ep=1, optimizer_sharding="none", batch_only=True)
    assert expected.storage == "replicated"
    assert checked_pins(request(parallel_mode="data_parallel")) == expected
    assert checked_pins(request(parallel_mode="data_parallel", pins={"tp": "1"})) == expected


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"pins": {"tp": "zero"}}, ("tp=zero", "whole number from 1")),
        ({"pins": {"tp": "0"}}, ("tp=0", "whole number")),
        ({"pins": {"dp": "-2"}}, ("dp=-2",)),
        ({"pins": {"dp": "2.0"}}, ("dp=2.0",)),
        ({"pins": {"dp": "²"}}, ("dp=²", "whole number")),
        ({"pins": {"tpp": "2"}}, ("'tpp'", "did you mean 'tp'")),
        ({"pins": {"optimizer_sharding": "zero4"}}, ("optimizer_sharding=zero4", "did you mean 'zero")),
        (
            {"search_mode": "dynamic_programing"},
            ("search mode 'dynamic_programing'", "did you mean 'dynamic_programming'"),
        ),
        (
            {"pins": {"offload_to": "disk", "offload_optimizer": "false"}},
            ("offload_optimizer=false offload_to=disk", "offload_optimizer=true"),
        ),
        (
            {"pins": {"offload_parameters": "true", "offload_optimizer": "false"}},
            ("offload_optimizer=false offload_parameters=true", "the host updates what it holds"),
        ),
        ({"parallel_mode": "auto"}, ("parallel mode 'auto'", "auto_parallel")),
        ({"parallel_mode": "stand_alone"}, ("stand_alone", "not 4", "--devices 1")),
        ({"parallel_mode": "data_parallel", "pins": {"tp": "2"}}, ("tp=2", "data_parallel")),
    ],
)
def test_wrong_pins_and_modes_are_refused(fields: Mapping[str, object], texts: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as error:
        checked_pins(request(**fields))  # type: ignore[arg-type]
    assert not isinstance(error.value, UnsupportedError)
    assert error.value.exit_code == 2
    assert all(text in str(error.value) for text in texts), str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"pins": {"schedule": "dualpipe", "pp": "2"}},
    ],
)
def test_what_no_search_covers_yet_is_refused_as_such(fields: Mapping[str, object]) -> None:
    with pytest.raises(UnsupportedError, match=r"not supported yet|not searched yet"):
        plan_network(request(**fields), graph=captured("mlp"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"pins": {"dp": "3"}}, ("dp=3", "device count, 4", "dp=2")),
        ({"pins": {"dp": "2", "tp": "4"}}, ("dp=2 tp=4", "must divide the device count, 4", "tp=2")),
        (
            {"pins": {"dp": "4"}, "global_batch": 6},
            ("global batch 6", "dp=4 must divide it", "smallest possible is 4", "--global-batch 8", "--pin dp=2"),
        ),
        (
            {"pins": {"dp": "4", "micro_batch": "3"}, "global_batch": 64},
            ("global batch 64", "dp=4 × micro_batch=3", "--global-batch 60", "--pin micro_batch=2"),
        ),
        ({"parallel_mode": "data_parallel", "global_batch": 2}, ("global batch 2", "--global-batch 4")),
        ({"global_batch": 0}, ("global batch 0", "not positive")),
        ({"global_batch": -8}, ("global batch -8", "not positive")),
        ({"global_batch": 10**9}, ("global batch 1000000000", "16777216 samples a device", "--global-batch 67108864")),
        ({"global_batch": 2**20, "pins": {"micro_batch": "1"}}, ("262144 micro-batches", "32768", "larger")),
        (
            {"global_batch": 2**20, "pins": {"micro_batches": "65536"}},
            ("65536 micro-batches", "32768", "--global-batch"),
        ),
        (
            {"global_batch": 2**20, "pins": {"dp": "1", "micro_batch": "8"}},
            ("dp=1 micro_batch=8", "32768 micro-batches", "dp=4", "micro_batch=32"),
        ),
        ({"precision": "fp12"}, ("'fp12'", "bf16")),
        ({"precision": "fp8", "hardware": "dgx-a100"}, ("fp8", "float8", "--precision bf16")),
        ({"precision": "fp4", "hardware": "dgx-h100"}, ("fp4", "float4", "--precision bf16", "dgx-b200")),
        ({"optimizer": "lion"}, ("'lion'", "adamw")),
        ({"sequence_length": 32}, ("zoo:mlp", "sequence length")),
        ({"network": "zoo:mlpp"}, ("mlpp", "zoo:mlp")),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: Mapping[str, object], texts: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as error:
        plan_network(request(**fields), graph=captured("mlp"))  # type: ignore[arg-type]
    assert all(text in str(error.value) for text in texts), str(error.value)


def test_a_plan_has_no_more_micro_batches_than_can_be_simulated() -> None:
    for mode in SEARCH_MODES:
        result = plan_network(request(global_batch=2**24, search_mode=mode), graph=captured("mlp"))
        assert max(c.plan.micro_batches for c in result.candidates) <= MOST_MICRO_BATCHES


def test_a_batch_that_only_some_meshes_divide_leaves_those_out() -> None:
    result = plan_network(request(global_batch=6), graph=captured("mlp"))
    assert {c.plan.degree("data") for c in result.candidates} <= {1, 2}


def test_device_counts_that_the_cluster_does_not_have_are_refused() -> None:
    with pytest.raises(ProfileError, match="use 8 or 16"):
        plan_network(request(devices=12), graph=captured("mlp"))
    with pytest.raises(ProfileError, match="no hardware profile is named"):
        plan_network(request(hardware="dgx-a200"), graph=captured("mlp"))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_plans(precision: str) -> None:
    hardware = {"fp8": "dgx-h100", "fp4": "dgx-b200"}.get(precision, "dgx-a100")
    result = plan_network(request(devices=2, precision=precision, hardware=hardware), graph=captured("mlp"))
    assert result.candidates[0].plan.precision == precision
