"""Pins that go together leave a space in which they hold; others are refused with both numbers and what would do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plans.pins import AXES_BY_PIN, COUNT, PIN_NAMES, PIN_VALUES, Pins, read_order, read_pins
from planner.search.configurations.pin_checks import check_pins, uneven_heads
from planner.search.configurations.space import Extent, configurations
from planner.search.configurations.step_model import Configuration
from simulator.errors import InputError
from simulator.profiles import load_profile
from tests.planner.search.problems import captured

A100 = load_profile("dgx-a100")
GPT = Extent(hardware=A100, devices=8, global_batch=512, pins=Pins(), units=14, sequence=1024)
MIXTRAL = replace(GPT, devices=16, units=34, experts=8)
IMAGES = replace(GPT, sequence=0)

CONTRADICTIONS: list[tuple[Extent, dict[str, Any], tuple[str, ...]]] = [
    (GPT, {"dp": 3}, ("dp=3", "device count, 8", "dp=2")),
    (GPT, {"dp": 4, "tp": 4}, ("dp=4 tp=4", "16", "dp=2", "--devices 16")),
    (GPT, {"dp": 2, "tp": 2, "pp": 2, "cp": 2}, ("must be the device count, 8", "dp=1")),
    (replace(GPT, units=6), {"pp": 8}, ("pp=8", "6 units", "pp=4")),
    (GPT, {"pp": 8, "vpp": 4}, ("pp=8 vpp=4", "32 chunks", "14 units", "vpp=1")),
    (GPT, {"pp": 1, "vpp": 2}, ("pp=1 vpp=2", "vpp=1", "pp=2")),
    (GPT, {"ep": 2}, ("ep=2", "no experts", "ep=1")),
    (MIXTRAL, {"ep": 16}, ("ep=16", "8 experts", "ep=8")),
    (MIXTRAL, {"dp": 2, "tp": 1, "ep": 4}, ("dp=2 ep=4", "ep=2")),
    (MIXTRAL, {"dp": 2, "ep": 4, "expert_cut": "width"}, ("dp=2 ep=4", "ep=2")),
    (MIXTRAL, {"ep": 1, "expert_messages": "tokens"}, ("tokens", "no expert axis", "expert_messages=any")),
    (GPT, {"expert_messages": "tokens"}, ("tokens", "no experts", "expert_messages=any")),
    (GPT, {"expert_messages": "once_a_node"}, ("once_a_node", "no experts", "expert_messages=any")),
    (MIXTRAL, {"ep": 1, "expert_overlap": True}, ("expert_overlap=true", "no expert axis", "expert_overlap=false")),
    (GPT, {"expert_overlap": True}, ("expert_overlap=true", "no experts", "expert_overlap=false")),
    (
        MIXTRAL,
        {"expert_overlap": True, "expert_messages": "any"},
        ("expert_overlap=true expert_messages=any", "once_a_node"),
    ),
    (MIXTRAL, {"expert_overlap": True, "micro_batches": 1}, ("expert_overlap=true micro_batches=1", "micro_batches=2")),
    (MIXTRAL, {"expert_overlap": True, "copies": 2}, ("expert_overlap=true copies=2", "copies=1")),
    (MIXTRAL, {"tp": 1, "expert_cut": "whole"}, ("expert_cut=whole", "one tensor rank", "expert_cut=any")),
    (MIXTRAL, {"tp": 4, "ep": 4, "expert_cut": "whole"}, ("over 16 ranks", "divide 8", "expert_cut=width")),
    (GPT, {"expert_cut": "width"}, ("no experts", "expert_cut=any")),
    (MIXTRAL, {"tp": 8, "ep": 4}, ("ep=4", "2 are left of 16 devices", "ep=2")),
    (replace(GPT, sequence=36, devices=24), {"cp": 8}, ("cp=8", "36 tokens", "cp=6")),
    (IMAGES, {"cp": 2}, ("cp=2", "0 tokens", "cp=1")),
    (GPT, {"cp": 1, "context_algorithm": "ring"}, ("cp=1 context_algorithm=ring", "cp=2")),
    (GPT, {"cp": 2, "context_algorithm": "none"}, ("cp=2 context_algorithm=none", "cp=1")),
    (GPT, {"micro_batch": 3}, ("global batch 512", "micro_batch=3", "--global-batch 513", "micro_batch=2")),
    (GPT, {"micro_batches": 3}, ("global batch 512", "micro_batches=3", "--global-batch 513")),
    (GPT, {"dp": 8, "micro_batch": 128}, ("global batch 512", "dp=8 ×", "1024", "micro_batch=64", "--pin dp=4")),
    (GPT, {"shard_size": 3}, ("shard_size=3", "shard_size=2")),
    (GPT, {"dp": 8, "shard_size": 3}, ("dp=8 shard_size=3", "shard_size=2")),
    (GPT, {"shard_size": 2, "optimizer_sharding": "none"}, ("shard_size=2", "optimizer_sharding=zero1")),
    (GPT, {"dp": 1, "optimizer_sharding": "zero3"}, ("dp=1 optimizer_sharding=zero3", "dp=2")),
    (GPT, {"dp": 1, "shard_size": 2}, ("dp=1 shard_size=2", "dp=2")),
    (GPT, {"sharding_threshold_kb": 64, "optimizer_sharding": "none"}, ("sharding_threshold_kb=64", "zero1")),
    (GPT, {"schedule": "none", "pp": 2}, ("schedule=none pp=2", "schedule=1f1b", "pp=1")),
    (GPT, {"schedule": "1f1b", "pp": 1}, ("schedule=1f1b pp=1", "pp=2")),
    (GPT, {"schedule": "gpipe", "vpp": 2}, ("schedule=gpipe vpp=2", "vpp=1", "interleaved_1f1b")),
    (GPT, {"schedule": "zbv", "vpp": 3}, ("schedule=zbv vpp=3", "vpp=2")),
    (GPT, {"schedule": "interleaved_1f1b", "vpp": 1}, ("vpp=1", "vpp=2")),
    (GPT, {"schedule": "dualpipe", "pp": 2}, ("schedule=dualpipe", "two copies", "dualpipe_v")),
    (GPT, {"schedule": "dualpipe_v", "vpp": 3}, ("schedule=dualpipe_v vpp=3", "vpp=2")),
    (GPT, {"schedule": "dualpipe_v", "pp": 4, "micro_batch": 512}, ("2 × pp", "1 on pp=4", "micro_batch=64")),
    (GPT, {"schedule": "zb_h1", "pp": 8, "micro_batch": 512}, ("2 × pp", "1 on pp=8", "micro_batch=32")),
    (
        GPT,
        {"schedule": "interleaved_1f1b", "pp": 8, "micro_batch": 128},
        ("at least pp", "4 on pp=8", "--global-batch 1024", "pp=4"),
    ),
    (GPT, {"sequence_parallel": True, "tp": 1}, ("sequence_parallel=true tp=1", "tp=2")),
    (IMAGES, {"sequence_parallel": True}, ("sequence_parallel=true", "no token sequences")),
    (GPT, {"tensor_overlap": True, "tp": 1}, ("tensor_overlap=true tp=1", "tp=2")),
    (GPT, {"tensor_overlap": True, "sequence_parallel": False}, ("sums do not", "sequence_parallel=true")),
    (GPT, {"tp": 8, "shard_size": 2}, ("tp=8 shard_size=2", "tp=4")),
    (GPT, {"dp": 8, "micro_batches": 64, "copies": 2}, ("micro_batches=64 × copies=2", "--global-batch 1024")),
]


@pytest.mark.parametrize(("extent", "pins", "texts"), CONTRADICTIONS, ids=[str(pins) for _, pins, _ in CONTRADICTIONS])
def test_pins_that_contradict_each_other_name_the_nearest_values(
    extent: Extent, pins: Mapping[str, Any], texts: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as error:
        check_pins(replace(extent, pins=Pins(**pins)))
    assert error.value.exit_code == 2
    assert all(text in str(error.value) for text in texts), str(error.value)


@pytest.mark.parametrize(
    ("extent", "pins"), [(e, p) for e, p, _ in CONTRADICTIONS], ids=[str(pins) for _, pins, _ in CONTRADICTIONS]
)
def test_a_value_that_a_message_names_is_one_that_would_do(extent: Extent, pins: Mapping[str, Any]) -> None:
    """Of the pins that it names, the first that was given too is taken instead."""
    with pytest.raises(InputError) as error:
        check_pins(replace(extent, pins=Pins(**pins)))
    advice = str(error.value).rpartition("; use ")[2]
    named = [(name, value) for name, value in re.findall(r"(\w+)=(\w+)", advice) if name in pins]
    for name, text in named[:1]:
        check_pins(replace(extent, pins=Pins.read({**pins, name: text})))


def test_a_batch_smaller_than_what_wide_tensor_axes_leave_of_the_devices_is_planned() -> None:
    few = replace(GPT, devices=1024, global_batch=2, units=3)
    check_pins(few)
    assert {c.data_parallel for c in configurations(few)} == {1, 2}


@pytest.mark.parametrize(
    ("network", "tensor", "devices", "said"),
    [
        ("gpt2", 8, 8, "pin tp=8 does not divide the 12 heads .* use tp=4 "),
        ("gpt2", 8, 24, "pin tp=8 does not divide the 12 heads .* use tp=6 "),
        ("llama3-70b", 16, 64, "pin tp=16 does not divide the 8 key/value heads: .* 64 heads, .* use tp=8 "),
        ("llama3-70b", 8, 64, ""),
        ("mlp", 8, 8, ""),
    ],
)
def test_heads_that_a_pinned_tp_does_not_divide_are_named(network: str, tensor: int, devices: int, said: str) -> None:
    assert re.match(said or "$", " ".join(uneven_heads(captured(network), Pins(tp=tensor), devices)))


def test_every_pin_is_tried() -> None:
    tried = {name for _, pins, _ in CONTRADICTIONS for name in pins}
    assert tried | {
        "recompute",
        "bucket_mb",
        "offload_optimizer",
        "offload_to",
        "offload_parameters",
        "host_embeddings",
        "offload_activations",
        "recompute_messages",
        "recompute_modules",
        "order",
        "tensor_cut",
        "stage_layers",
        "recompute_layers",
    } == set(PIN_NAMES)


VALUES: Mapping[str, Any] = {
    **{name: st.sampled_from([1, 2, 3, 4, 8, 16]) for name, values in PIN_VALUES.items() if values is COUNT},
    **{name: st.sampled_from(values) for name, values in PIN_VALUES.items() if isinstance(values, tuple)},
    **{name: st.booleans() for name, values in PIN_VALUES.items() if values is bool},
    **{name: st.sampled_from([1, 64]) for name in ("bucket_mb", "sharding_threshold_kb")},
    "copies": st.sampled_from([1, 2]),
    "order": st.permutations(sorted(AXES_BY_PIN)).map(tuple),
    "stage_layers": st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
}


def holds(name: str, value: Any, c: Configuration) -> bool:
    """Whether a configuration has what is pinned; what a plan says only later is taken for granted."""
    found = {
        "dp": c.data_parallel, "tp": c.tensor, "pp": c.pipeline, "vpp": c.virtual, "cp": c.context, "ep": c.expert,
        "micro_batch": c.micro_batch, "micro_batches": c.micro_batches, "shard_size": c.shard_size or c.data,
        "optimizer_sharding": c.optimizer_sharding,
        "schedule": c.schedule, "context_algorithm": c.context_algorithm, "offload_optimizer": c.offload,
        "bucket_mb": c.bucket_bytes >> 20,
    }  # fmt: skip
    if name == "order":
        wide = [AXES_BY_PIN[axis] for axis in value if c.degrees[AXES_BY_PIN[axis]] > 1]
        return [axis for axis in c.order if axis in wide] == wide
    return bool(found.get(name, value) == value)


@settings(max_examples=25)
@given(
    extent=st.sampled_from([GPT, MIXTRAL, IMAGES]),
    names=st.sets(st.sampled_from(PIN_NAMES), max_size=3),
    data=st.data(),
)
def test_pins_hold_in_every_configuration_or_are_refused(extent: Extent, names: set[str], data: st.DataObject) -> None:
    pins = {name: data.draw(VALUES[name], label=name) for name in sorted(names)}
    pinned = replace(extent, global_batch=48, pins=Pins(**pins))
    left = list(configurations(pinned))
    try:
        check_pins(pinned)
    except InputError:
        return
    assert left
    assert all(holds(name, value, c) for c in left for name, value in pins.items())


@pytest.mark.parametrize("name", PIN_NAMES)
def test_values_of_the_wrong_kind_are_refused(name: str) -> None:
    for wrong in ("x y", "-1", "1.5", "", "∞"):
        with pytest.raises(InputError) as error:
            read_pins([f"{name}={wrong}"])
        assert error.value.exit_code == 2
        assert name in str(error.value)


@pytest.mark.parametrize("text", ["pp-dq", "pp-dp-pp", "pp--tp"])
def test_an_order_names_known_axes_once(text: str) -> None:
    for read in (lambda: read_pins([f"order={text}"]), lambda: read_order(text)):
        with pytest.raises(InputError, match="order.*for example --pin order=pp-dp-tp"):
            read()


def test_an_unknown_pin_is_told_the_nearest_by_spelling() -> None:
    with pytest.raises(InputError, match="did you mean 'micro_batch'"):
        read_pins(["Microbatch=2"])


def test_an_order_places_axes_and_one_stage_has_neighbours_in_its_tensor_axis() -> None:
    pinned = Pins(pp=2, dp=4, tp=2, micro_batch=1, order=("tp", "pp"))
    found = {c.order for c in configurations(replace(GPT, devices=16, pins=pinned))}
    assert found
    assert all(order.index("tensor") < order.index("pipeline") for order in found)
    assert Pins(order=("pp", "dp", "tp")).one_stage
    assert not Pins(order=("tp", "dp")).one_stage
