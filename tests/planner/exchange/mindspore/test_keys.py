"""Every key: its default, what it takes, what it refuses and why, and the modes that read it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import AutoParallelContext, ContextError, IgnoredKeyWarning
from planner.exchange.mindspore.context import KEYS, OLDER_NAMES
from planner.plans.request import PARALLEL_MODES, SEARCH_MODES

DEFAULTS: dict[str, Any] = {
    "device_num": 1,
    "global_rank": 0,
    "parallel_mode": "stand_alone",
    "gradients_mean": False,
    "mirror_mean": False,
    "gradient_fp32_sync": True,
    "loss_repeated_mean": True,
    "cross_batch": False,
    "search_mode": "dynamic_programming",
    "auto_parallel_search_mode": "dynamic_programming",
    "parameter_broadcast": False,
    "strategy_ckpt_load_file": "",
    "strategy_ckpt_save_file": "",
    "full_batch": False,
    "dataset_strategy": "data_parallel",
    "enable_parallel_optimizer": False,
    "parallel_optimizer_config": {},
    "enable_alltoall": False,
    "all_reduce_fusion_config": [],
    "comm_fusion": {},
    "pipeline_stages": 1,
    "grad_accumulation_step": 1,
}
BOOLEANS = sorted(name for name, value in DEFAULTS.items() if isinstance(value, bool))
WHOLE = {
    "device_num": (1, 4096),
    "global_rank": (0, 4095),
    "pipeline_stages": (1, None),
    "grad_accumulation_step": (1, None),
}
FILES = ("strategy_ckpt_load_file", "strategy_ckpt_save_file")

TAKEN: list[tuple[str, Any, Any]] = [
    *((name, value, value) for name in BOOLEANS for value in (True, False)),
    *((name, least, least) for name, (least, _) in WHOLE.items()),
    ("device_num", 4096, 4096),
    ("global_rank", 4095, 4095),
    *(("parallel_mode", mode, mode) for mode in PARALLEL_MODES),
    *((name, mode, mode) for name in ("search_mode", "auto_parallel_search_mode") for mode in SEARCH_MODES),
    *((name, "a/b.json", "a/b.json") for name in FILES),
    ("dataset_strategy", "full_batch", "full_batch"),
    ("dataset_strategy", ((1, 8), (1, 8)), ((1, 8), (1, 8))),
    ("dataset_strategy", ((),), ((),)),
    ("all_reduce_fusion_config", [8, 160], [8, 160]),
    ("parallel_optimizer_config", {}, {}),
    ("parallel_optimizer_config", {"parallel_optimizer_threshold": 0}, {"parallel_optimizer_threshold": 0}),
    ("parallel_optimizer_config", {"optimizer_level": "level3"}, {"optimizer_level": "level3"}),
    ("parallel_optimizer_config", {"optimizer_weight_shard_size": 2}, {"optimizer_weight_shard_size": 2}),
    ("comm_fusion", {"openstate": True}, {"openstate": True}),
    ("comm_fusion", {"allreduce": {"mode": "auto"}}, {"allreduce": {"mode": "auto", "config": None}}),
    (
        "comm_fusion",
        {"allreduce": {"mode": "index", "config": [2, 5]}},
        {"allreduce": {"mode": "index", "config": (2, 5)}},
    ),
    (
        "comm_fusion",
        {"allgather": {"mode": "size", "config": 32}},
        {"allgather": {"mode": "size", "config": 32}},
    ),
]

REFUSED: list[tuple[str, Any, tuple[str, ...]]] = [
    *((name, value, ("True or False",)) for name in BOOLEANS for value in (1, "True", None)),
    *((name, value, ("whole number",)) for name in WHOLE for value in (True, "8", 1.0, None)),
    *((name, least - 1, ("out of range", f"nearest is {least}")) for name, (least, _) in WHOLE.items()),
    ("device_num", 4097, ("4097", "from 1 to 4096", "nearest is 4096")),
    ("global_rank", 4096, ("from 0 to 4095",)),
    ("parallel_mode", "auto_paralel", ("did you mean 'auto_parallel'",)),
    ("parallel_mode", 2, ("stand_alone",)),
    *((name, "dynamic", ("dynamic_programming",)) for name in ("search_mode", "auto_parallel_search_mode")),
    *((name, 3, ("a string",)) for name in FILES),
    ("dataset_strategy", "full", ("data_parallel, full_batch",)),
    ("dataset_strategy", [(1, 8)], ("of type list", "((2, 1), (1, 4))")),
    ("dataset_strategy", (), ("tuple",)),
    ("dataset_strategy", (8,), ("dataset_strategy[0]=8",)),
    ("dataset_strategy", ((1, 0),), ("dataset_strategy[0][1]=0", "1 where it is whole")),
    ("dataset_strategy", ((1, True),), ("dataset_strategy[0][1]=True",)),
    ("all_reduce_fusion_config", [], ("empty",)),
    ("all_reduce_fusion_config", 8, ("of type int",)),
    ("all_reduce_fusion_config", [8, 8], ("8 after 8", "sort them")),
    ("all_reduce_fusion_config", [20, 8], ("8 after 20",)),
    ("all_reduce_fusion_config", [0], ("at least 1",)),
    ("all_reduce_fusion_config", ["8"], ("'8'",)),
    ("parallel_optimizer_config", [], ("of type list", "optimizer_level")),
    (
        "parallel_optimizer_config",
        {"optimizer_threshold": 3},
        ("'optimizer_threshold'", "did you mean 'parallel_optimizer_threshold'"),
    ),
    ("parallel_optimizer_config", {"parallel_optimizer_threshold": -1}, ("-1", "at least 0")),
    ("parallel_optimizer_config", {"optimizer_weight_shard_size": 1}, ("at least 2",)),
    ("parallel_optimizer_config", {"optimizer_level": "level4"}, ("level1, level2, level3",)),
    ("parallel_optimizer_config", {"gradient_accumulation_shard": 1}, ("True or False",)),
    (
        "parallel_optimizer_config",
        {"optimizer_level": "level1", "gradient_accumulation_shard": True},
        ("contradict", "level1", "leave gradient_accumulation_shard out"),
    ),
    ("comm_fusion", {"alreduce": {"mode": "auto"}}, ("did you mean 'allreduce'",)),
    ("comm_fusion", {"openstate": 1}, ("comm_fusion.openstate", "True or False")),
    ("comm_fusion", {"allreduce": "auto"}, ("comm_fusion.allreduce", "of type str")),
    ("comm_fusion", {"allreduce": {"config": 3}}, ("no mode", "auto, size, index")),
    ("comm_fusion", {"allgather": {"mode": "index", "config": [1]}}, ("auto, size",)),
    ("comm_fusion", {"reducescatter": {"mode": "size", "config": 0}}, ("reducescatter.config", "from 1")),
    ("comm_fusion", {"allreduce": {"mode": "size"}}, ("allreduce.config=None",)),
    ("comm_fusion", {"allreduce": {"mode": "auto", "config": 3}}, ("auto has no configuration",)),
    ("comm_fusion", {"allreduce": {"mode": "index", "config": [3, 2]}}, ("2 after 3",)),
]

CONTRADICTING: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"device_num": 8, "global_rank": 8}, ("global_rank=8", "device_num=8", "0 to 7")),
    ({"device_num": 8, "pipeline_stages": 3}, ("pipeline_stages=3", "use 2 or 4")),
    ({"device_num": 2, "pipeline_stages": 4}, ("pipeline_stages=4", "use 2")),
    ({"parallel_mode": "stand_alone", "device_num": 8}, ("stand_alone", "device_num=8", "data_parallel")),
    ({"parallel_mode": "data_parallel", "full_batch": True}, ("full_batch=True", "data_parallel")),
    ({"parallel_mode": "hybrid_parallel", "full_batch": True}, ("hybrid_parallel",)),
    ({"full_batch": True, "dataset_strategy": "data_parallel"}, ("contradict", "dataset_strategy alone")),
    ({"full_batch": False, "dataset_strategy": ((8,),)}, ("contradict",)),
    ({"device_num": 8, "dataset_strategy": ((3, 1),)}, ("(3, 1)", "3 parts", "8 devices")),
    (
        {"device_num": 8, "pipeline_stages": 2, "dataset_strategy": ((8, 1),)},
        ("8 parts", "4 devices", "pipeline_stages=2"),
    ),
    (
        {"comm_fusion": {"allreduce": {"mode": "auto"}}, "all_reduce_fusion_config": [3]},
        ("all_reduce_fusion_config=[3]", "one of them"),
    ),
    (
        {"enable_parallel_optimizer": False, "parallel_optimizer_config": {"optimizer_level": "level1"}},
        ("enable_parallel_optimizer is False",),
    ),
    ({"search_mode": "sharding_propagation", "auto_parallel_search_mode": "dynamic_programming"}, ("one key",)),
    ({"gradients_mean": True, "mirror_mean": False}, ("mirror_mean", "gradients_mean alone")),
]


def quiet(**keys: Any) -> AutoParallelContext:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoParallelContext(**keys)


def one_by_one(keys: dict[str, Any]) -> None:
    context = AutoParallelContext()
    for name, value in keys.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context.set(**{name: value})


def test_every_key_has_its_default() -> None:
    assert AutoParallelContext().values() == DEFAULTS
    assert set(KEYS) == set(DEFAULTS)


@pytest.mark.parametrize(("key", "value", "kept"), TAKEN)
def test_values_are_taken(key: str, value: Any, kept: Any) -> None:
    context = quiet(**{key: value})
    assert context.get(key) == kept
    assert context.is_set(key)


def test_every_key_is_in_both_tables() -> None:
    assert {key for key, *_ in TAKEN} == set(KEYS) == {key for key, *_ in REFUSED}


@pytest.mark.parametrize(("key", "value", "words"), REFUSED)
def test_wrong_values_are_refused_and_change_nothing(key: str, value: Any, words: tuple[str, ...]) -> None:
    context = AutoParallelContext()
    with pytest.raises(ValueError) as error:  # noqa: PT011  a ContextError is a ValueError; the words are checked
        context.set(**{"global_rank": 0, key: value})
    assert isinstance(error.value, ContextError)
    assert key in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert context.values() == DEFAULTS
    assert not context.is_set("global_rank")


@pytest.mark.parametrize(("keys", "words"), CONTRADICTING)
@pytest.mark.parametrize("together", [True, False])
def test_contradictions_are_refused(keys: dict[str, Any], words: tuple[str, ...], together: bool) -> None:
    one_key = any(name in OLDER_NAMES for name in keys)
    with pytest.raises(ContextError) as error:
        quiet(**keys) if together or one_key else one_by_one(keys)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("name", ["device_nums", "paralel_mode", "foo"])
def test_unknown_keys(name: str) -> None:
    context = AutoParallelContext()
    for act in (lambda: context.set(**{name: 1}), lambda: context.get(name)):
        with pytest.raises(ContextError, match=f"no key '{name}'"):
            act()
    with pytest.raises(ContextError, match="did you mean 'device_num'"):
        context.set(device_nums=8)


@pytest.mark.parametrize(
    ("older", "value"), [("auto_parallel_search_mode", "recursive_programming"), ("mirror_mean", True)]
)
def test_older_names_warn_and_are_the_same_key(older: str, value: Any) -> None:
    context = AutoParallelContext()
    with pytest.warns(DeprecationWarning, match=OLDER_NAMES[older]) as found:
        context.set(**{older: value})
    assert found[0].filename == __file__
    assert context.get(OLDER_NAMES[older]) == context.get(older) == value
    assert context.is_set(OLDER_NAMES[older])


@pytest.mark.parametrize("mode", PARALLEL_MODES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gradients_mean", True),
        ("gradient_fp32_sync", False),
        ("loss_repeated_mean", False),
        ("cross_batch", True),
        ("search_mode", "sharding_propagation"),
        ("parameter_broadcast", True),
        ("strategy_ckpt_save_file", "a.json"),
        ("dataset_strategy", ((1, 1),)),
        ("enable_parallel_optimizer", True),
        ("enable_alltoall", True),
        ("comm_fusion", {"allreduce": {"mode": "auto"}}),
        ("pipeline_stages", 2),
        ("grad_accumulation_step", 4),
    ],
)
def test_a_key_warns_where_the_mode_does_not_read_it(mode: str, key: str, value: Any) -> None:
    context = AutoParallelContext(**{key: value})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        context.set(parallel_mode=mode)
    read = mode in KEYS[key].modes
    assert [warning.category for warning in found] == ([] if read else [IgnoredKeyWarning])
    assert all(key in str(warning.message) and mode in str(warning.message) for warning in found)
    assert context.counts(key) == read


@pytest.mark.parametrize(
    ("mode", "ignored"),
    [
        ("stand_alone", {"gradients_mean", "gradient_fp32_sync", "pipeline_stages", "enable_parallel_optimizer"}),
        ("data_parallel", {"gradient_fp32_sync", "pipeline_stages", "search_mode", "grad_accumulation_step"}),
        ("hybrid_parallel", {"gradient_fp32_sync", "full_batch"}),
        ("semi_auto_parallel", {"search_mode"}),
        ("auto_parallel", set()),
    ],
)
def test_modes_ignore_what_the_reference_says(mode: str, ignored: set[str]) -> None:
    assert ignored <= {name for name, key in KEYS.items() if mode not in key.modes}
    if mode == "auto_parallel":
        assert all(mode in key.modes for key in KEYS.values())


def test_a_value_from_outside_cannot_be_changed_afterwards() -> None:
    fusion = {"allreduce": {"mode": "size", "config": 32}}
    context = AutoParallelContext(comm_fusion=fusion)
    fusion["allreduce"]["config"] = 1
    context.get("comm_fusion")["allreduce"]["config"] = 2
    assert context.get("comm_fusion")["allreduce"]["config"] == 32


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_stages_are_taken_exactly_where_they_divide_the_devices(devices: int, stages: int) -> None:
    try:
        AutoParallelContext(device_num=devices, pipeline_stages=stages)
        taken = True
    except ContextError:
        taken = False
    assert taken == (devices % stages == 0)
