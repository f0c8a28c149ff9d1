"""A context becomes a request: pins of what is set, refusals of what nothing follows."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

from planner import AutoParallelContext, ContextError
from planner.exchange.mindspore.context import KEYS
from planner.exchange.mindspore.requests import DATA_ONLY, request_of
from planner.plans.pins import FREE, Pins
from planner.plans.request import PlanRequest, checked_pins
from simulator.errors import InputError


def requested(pins: dict[str, str] | None = None, options: dict[str, Any] | None = None, **keys: Any) -> PlanRequest:
    keys = {"parallel_mode": "auto_parallel", "device_num": 8, **keys}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context = AutoParallelContext(**{name: value for name, value in keys.items() if value is not None})
    return request_of(context, "zoo:mlp", "dgx-a100", pins=pins, **(options or {}))


def test_nothing_but_the_mode_leaves_everything_free() -> None:
    request = requested()
    assert (request.devices, request.parallel_mode, request.search_mode) == (8, "auto_parallel", "dynamic_programming")
    assert request.pins == FREE


def test_the_default_context_is_one_device() -> None:
    request = request_of(AutoParallelContext(), "zoo:mlp", "dgx-a100")
    assert (request.devices, request.parallel_mode, request.pins) == (1, "stand_alone", FREE)


ZERO2 = {"optimizer_sharding": "zero2", "sharding_threshold_kb": "64"}


@pytest.mark.parametrize(
    ("keys", "pins"),
    [
        ({"pipeline_stages": 1}, {"pp": "1"}),
        ({"pipeline_stages": 4}, {"pp": "4"}),
        ({"grad_accumulation_step": 4}, {"micro_batches": "4"}),
        ({"comm_fusion": {}}, {}),
        ({"comm_fusion": {"openstate": True}}, {"bucket_mb": "64"}),
        ({"comm_fusion": {"allreduce": {"mode": "auto"}}}, {"bucket_mb": "64"}),
        ({"comm_fusion": {"allreduce": {"mode": "size", "config": 32}}}, {"bucket_mb": "32"}),
        (
            {
                "comm_fusion": {
                    "allgather": {"mode": "size", "config": 16},
                    "reducescatter": {"mode": "size", "config": 16},
                }
            },
            {"bucket_mb": "64"},
        ),
        ({"enable_parallel_optimizer": False}, {"optimizer_sharding": "none"}),
        ({"enable_parallel_optimizer": True}, ZERO2),
        (
            {
                "enable_parallel_optimizer": True,
                "parallel_optimizer_config": {"gradient_accumulation_shard": False, "parallel_optimizer_threshold": 24},
            },
            {"optimizer_sharding": "zero1", "sharding_threshold_kb": "24"},
        ),
        (
            {
                "enable_parallel_optimizer": True,
                "parallel_optimizer_config": {"optimizer_level": "level3", "optimizer_weight_shard_size": 4},
            },
            {"optimizer_sharding": "zero3", "sharding_threshold_kb": "64", "shard_size": "4"},
        ),
        ({"parallel_mode": "data_parallel"}, {}),
        ({"parallel_mode": "data_parallel", "enable_parallel_optimizer": True}, {**DATA_ONLY, **ZERO2}),
        ({"parallel_mode": "data_parallel", "pipeline_stages": 2}, {}),
        ({"enable_alltoall": False, "dataset_strategy": "data_parallel", "loss_repeated_mean": True}, {}),
        ({"gradients_mean": False, "cross_batch": False, "parameter_broadcast": False, "full_batch": False}, {}),
        ({"parallel_mode": "data_parallel", "gradients_mean": True}, {}),
        ({"gradient_fp32_sync": False}, {}),
    ],
)
def test_keys_become_pins(keys: dict[str, Any], pins: dict[str, str]) -> None:
    request = requested(**keys)
    assert request.pins == Pins.read(pins)
    checked_pins(request)


@pytest.mark.parametrize("mode", ["dynamic_programming", "recursive_programming", "sharding_propagation"])
def test_the_search_mode_is_asked_for(mode: str) -> None:
    assert requested(search_mode=mode).search_mode == mode


def test_options_and_pins_are_passed_on() -> None:
    request = requested(
        pins={"tp": "2"}, options={"global_batch": 64, "precision": "fp32", "top": 2}, pipeline_stages=2
    )
    assert (request.global_batch, request.precision, request.top) == (64, "fp32", 2)
    assert request.pins == Pins(pp=2, tp=2)


DATA = {"parallel_mode": "data_parallel"}
HYBRID = {"parallel_mode": "hybrid_parallel"}
MIB = 2**20


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, {}),
        ({"gradient_fp32_sync": True}, {"gradient_dtype": "float32"}),
        ({"gradient_fp32_sync": False}, {}),
        ({"enable_alltoall": False}, {"all_to_all": False}),
        ({"enable_alltoall": True}, {}),
        ({"gradients_mean": False}, {}),
        ({"gradients_mean": True}, {"group_power": -1}),
        ({"mirror_mean": True}, {"group_power": -1}),
        ({**DATA, "gradients_mean": True}, {}),
        ({**DATA, "gradients_mean": False}, {"group_power": 1}),
        ({**HYBRID, "gradients_mean": False}, {"group_power": 1}),
        ({"loss_repeated_mean": False}, {"repeated_loss": True}),
        ({**DATA, "loss_repeated_mean": False}, {}),
        ({"cross_batch": True}, {"cross_batch": True}),
        ({"parameter_broadcast": True}, {"broadcast": True}),
        ({"full_batch": True}, {"data": "full_batch"}),
        ({"full_batch": False}, {"data": "data_parallel"}),
        ({"dataset_strategy": "full_batch"}, {"data": "full_batch"}),
        ({"dataset_strategy": ((8, 1), (8,))}, {"data": ((8, 1), (8,))}),
        ({"all_reduce_fusion_config": [3, 5]}, {"fusion_places": (3, 5)}),
        (
            {"comm_fusion": {"allreduce": {"mode": "index", "config": [3]}}},
            {
                "fusion_places": (3,),
                "all_reduce_bytes": 64 * MIB,
                "all_gather_bytes": 64 * MIB,
                "reduce_scatter_bytes": 64 * MIB,
            },
        ),
        (
            {"comm_fusion": {"openstate": False, "allreduce": {"mode": "auto"}}},
            {"all_reduce_bytes": 0, "all_gather_bytes": 0, "reduce_scatter_bytes": 0},
        ),
        (
            {"comm_fusion": {"allreduce": {"mode": "auto"}, "allgather": {"mode": "size", "config": 8}}},
            {"all_reduce_bytes": 64 * MIB, "all_gather_bytes": 8 * MIB, "reduce_scatter_bytes": 64 * MIB},
        ),
    ],
)
def test_keys_say_how_tensors_travel(keys: dict[str, Any], said: dict[str, Any]) -> None:
    assert requested(**keys).exchange.named() == said


@pytest.mark.parametrize(
    ("keys", "pins"),
    [
        ({"all_reduce_fusion_config": [3, 5]}, {}),
        ({**DATA, "all_reduce_fusion_config": [3, 5]}, {}),
        ({"comm_fusion": {"openstate": False}}, {"bucket_mb": "1"}),
        ({"dataset_strategy": ((8, 1), (8,))}, {"dp": "8"}),
        ({"dataset_strategy": ((4, 2), (4,))}, {"dp": "4", "tp": "2"}),
        ({"dataset_strategy": ((1, 1), (1,))}, {}),
        ({"full_batch": True}, {}),
    ],
)
def test_messages_and_data_ask_for_pins(keys: dict[str, Any], pins: dict[str, str]) -> None:
    assert requested(**keys).pins == Pins.read(pins)


def test_shards_of_everything_are_searched_with_the_batch_alone() -> None:
    keys = {**DATA, "enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
    assert requested(**keys).pins.named() == {**DATA_ONLY, **ZERO2, "sharding_threshold_kb": "0", "shard_size": "8"}


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        ({"dataset_strategy": ((8, 1), (8,)), "pipeline_stages": 2}, {}, ("dataset_strategy[0]=(8, 1)", "4 devices")),
        (DATA, {"layerwise_parallel": ["layers.0.*"]}, ("layerwise_parallel", "parallel_mode='hybrid_parallel'")),
        (HYBRID, {"layerwise_parallel": "layers.0.*"}, ("'layers.0.*'", "list of names")),
    ],
)
def test_contradictions_are_said(keys: dict[str, Any], options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ContextError) as error:
        requested(options=options, **keys)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_ranks_have_in_common_is_sharded_in_hybrid_parallelism() -> None:
    found = requested(**HYBRID, enable_parallel_optimizer=True)
    assert (found.parallel_mode, found.pins.named()) == ("hybrid_parallel", {**DATA_ONLY, **ZERO2})
    assert checked_pins(found).optimizer_sharding == "zero2"
    with pytest.raises(InputError, match="tp=2 contradicts parallel mode hybrid_parallel"):
        checked_pins(replace(found, pins=replace(found.pins, tp=2)))


def test_gradients_in_single_precision_are_synchronised_in_it() -> None:
    assert requested(options={"precision": "fp32"}, gradient_fp32_sync=True).pins == FREE


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"parallel_mode": None, "device_num": None, "pipeline_stages": 2}, ("pipeline_stages=2", "'auto_parallel'")),
        ({"parallel_mode": None}, ("device_num=8", "one device", "'auto_parallel'")),
    ],
)
def test_keys_without_a_mode_are_not_passed_over(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ContextError) as error:
        requested(**keys)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_pin_that_contradicts_a_key() -> None:
    assert requested(pins={"pp": "2"}, pipeline_stages=2).pins == Pins(pp=2)
    with pytest.raises(ContextError, match="pin pp=4 contradicts pp=2"):
        requested(pins={"pp": "4"}, pipeline_stages=2)


def test_an_unknown_option() -> None:
    with pytest.raises(ContextError, match="no option 'global_bach'; did you mean 'global_batch'"):
        requested(options={"global_bach": 4})


PLANNED = {"device_num", "parallel_mode", "search_mode", "auto_parallel_search_mode"}
CHECKED = {"global_rank"}
FILES = {"strategy_ckpt_load_file", "strategy_ckpt_save_file"}
PINNING = {"pipeline_stages", "grad_accumulation_step", "enable_parallel_optimizer", "parallel_optimizer_config"}
TRAVEL = {
    "gradients_mean": True,
    "mirror_mean": True,
    "gradient_fp32_sync": True,
    "loss_repeated_mean": False,
    "cross_batch": True,
    "parameter_broadcast": True,
    "full_batch": True,
    "dataset_strategy": "full_batch",
    "enable_alltoall": False,
    "all_reduce_fusion_config": [2],
    "comm_fusion": {"openstate": False},
}


def test_every_key_has_an_effect() -> None:
    assert PLANNED | CHECKED | FILES | PINNING | set(TRAVEL) == set(KEYS)
    plain = requested()
    for key, value in TRAVEL.items():
        assert requested(**{key: value}).exchange != plain.exchange, key
