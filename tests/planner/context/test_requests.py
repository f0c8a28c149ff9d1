"""A context becomes a request: pins of what is set, refusals of what nothing follows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from planner import AutoParallelContext, ContextError
from planner.context.keys import KEYS
from planner.context.requests import DATA_ONLY, request_of
from planner.request import PlanRequest, read_pins
from simulator.errors import UnsupportedError


def requested(pins: dict[str, str] | None = None, options: dict[str, Any] | None = None, **keys: Any) -> PlanRequest:
    keys = {"parallel_mode": "auto_parallel", "device_num": 8, **keys}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context = AutoParallelContext(**{name: value for name, value in keys.items() if value is not None})
    return request_of(context, "zoo:mlp", "dgx-a100", pins=pins, **(options or {}))


def test_nothing_but_the_mode_leaves_everything_free() -> None:
    request = requested()
    assert (request.devices, request.parallel_mode, request.search_mode) == (8, "auto_parallel", "dynamic_programming")
    assert request.pins == {}


def test_the_default_context_is_one_device() -> None:
    request = request_of(AutoParallelContext(), "zoo:mlp", "dgx-a100")
    assert (request.devices, request.parallel_mode, dict(request.pins)) == (1, "stand_alone", {})


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
            {"bucket_mb": "16"},
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
    assert request.pins == pins
    read_pins(request)


@pytest.mark.parametrize("mode", ["dynamic_programming", "recursive_programming", "sharding_propagation"])
def test_the_search_mode_is_asked_for(mode: str) -> None:
    assert requested(search_mode=mode).search_mode == mode


def test_options_and_pins_are_passed_on() -> None:
    request = requested(
        pins={"tp": "2"}, options={"global_batch": 64, "precision": "fp32", "top": 2}, pipeline_stages=2
    )
    assert (request.global_batch, request.precision, request.top) == (64, "fp32", 2)
    assert request.pins == {"pp": "2", "tp": "2"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"parallel_mode": "hybrid_parallel"}, ("hybrid_parallel", "use data_parallel")),
        ({"parallel_mode": "semi_auto_parallel"}, ("semi_auto_parallel", "auto_parallel with pins")),
        ({"gradients_mean": True}, ("gradients_mean=False",)),
        ({"parallel_mode": "data_parallel", "gradients_mean": False}, ("gradients_mean=True",)),
        ({"mirror_mean": True}, ("gradients_mean=True", "leave it out")),
        ({"gradient_fp32_sync": True}, ("bf16", "gradient_fp32_sync=False")),
        ({"loss_repeated_mean": False}, ("loss_repeated_mean=True",)),
        ({"cross_batch": True}, ("cross_batch=False",)),
        ({"parameter_broadcast": True}, ("parameter_broadcast=False",)),
        ({"full_batch": True}, ("dataset_strategy='data_parallel'",)),
        ({"dataset_strategy": "full_batch"}, ("leave it out",)),
        ({"dataset_strategy": ((8, 1),)}, ("((8, 1),)", "leave it out")),
        ({"all_reduce_fusion_config": [3, 5]}, ("comm_fusion=", "size")),
        ({"comm_fusion": {"allreduce": {"mode": "index", "config": [3]}}}, ("'mode': 'size'",)),
        ({"comm_fusion": {"openstate": False}}, ("leave openstate out",)),
        (
            {"parallel_mode": "data_parallel", "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}},
            ("parallel_optimizer_threshold=1",),
        ),
        (
            {"comm_fusion": {"allreduce": {"mode": "auto"}, "allgather": {"mode": "size", "config": 8}}},
            ("allreduce, allgather", "the same mode and config"),
        ),
    ],
)
def test_what_nothing_follows_is_refused(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError) as error:
        requested(**keys)
    assert "not supported yet" in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_gradients_in_single_precision_are_synchronised_in_it() -> None:
    assert requested(options={"precision": "fp32"}, gradient_fp32_sync=True).pins == {}


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
    assert requested(pins={"pp": "2"}, pipeline_stages=2).pins == {"pp": "2"}
    with pytest.raises(ContextError, match="pin pp=4 contradicts pp=2"):
        requested(pins={"pp": "4"}, pipeline_stages=2)


def test_an_unknown_option() -> None:
    with pytest.raises(ContextError, match="no option 'global_bach'; did you mean 'global_batch'"):
        requested(options={"global_bach": 4})


SAID = {
    "device_num": "devices",
    "global_rank": "checked",
    "parallel_mode": "mode",
    "search_mode": "mode",
    "auto_parallel_search_mode": "mode",
    "strategy_ckpt_load_file": "file",
    "strategy_ckpt_save_file": "file",
    "enable_alltoall": "checked",
}
PINNING = {"pipeline_stages", "grad_accumulation_step", "comm_fusion", "enable_parallel_optimizer"}


def test_every_key_has_an_effect_or_a_refusal() -> None:
    from planner.context.unsupported import _RULES

    assert set(SAID) | PINNING | {"parallel_optimizer_config", "mirror_mean"} | set(_RULES) == set(KEYS)
