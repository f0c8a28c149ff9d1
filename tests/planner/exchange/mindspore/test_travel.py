"""What keys do to the messages, gradients and data of a plan: the same in the simulated and in the lowered program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.execution.measuring.recorded import timed_instructions
from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.graph.scaling import at_batch, at_precision
from planner.lowering.checked import checked_graph
from planner.lowering.instructions import BeginUpdate, Communicate, Instruction, Slice, Update
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.stages import lower_stages
from planner.planning.prediction import predict_plan
from planner.plans.exchange import Exchange
from planner.plans.file import plan_from_text, plan_to_text
from planner.plans.plan import Plan
from planner.sharding.redistribution import redistribution
from simulator.errors import InputError, StrategyError, UnsupportedError
from simulator.profiles import load_profile
from simulator.program import Collective, Task
from tests.planner.lowering.plans import one_stage, pipelined
from tests.planner.lowering.steps import lowered_of, steps
from tests.planner.search.problems import captured

HARDWARE = load_profile("dgx-a100")
GRADIENTS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
DATA = (("data", 2),)


def plan_of(network: str = "mlp", axes: Any = DATA, **fields: Any) -> Plan:
    exchange = Exchange(**fields.pop("exchange", {}))
    storage = "sharded" if fields.get("optimizer_sharding", "none") != "none" else "replicated"
    return replace(one_stage(network, axes=axes, storage=storage), precision="bf16", exchange=exchange, **fields)


def simulated(plan: Plan) -> list[Task]:
    """Tasks of a plan on one stage, once for each time they run."""
    graph = at_precision(captured(plan.network.removeprefix("zoo:")), "bfloat16")
    found = lower_pipeline(plan, graph, load_profile("dgx-a100"))
    counts = found.work.counts(found.schedule).astype(int).tolist()
    return [task for task, count in zip(found.work.tasks, counts, strict=True) for _ in range(count)]


def executed(plan: Plan) -> list[Instruction]:
    lowered = lower_stages(plan, checked_graph(plan, precision="bf16"))
    passes = [one for one, _, times in timed_instructions(lowered, 0) for _ in range(times)]
    return [*passes, *lowered.ranks[0].update]


def gradients(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if task.collective in GRADIENTS and task.name.endswith(" gradients")]


def messages(instructions: list[Instruction]) -> list[Communicate]:
    return [one for one in instructions if isinstance(one, Communicate) and one.sources]


def of_gradients(instructions: list[Instruction]) -> list[Communicate]:
    return [
        one for one in messages(instructions) if one.collective in GRADIENTS and "gradient@" in " ".join(one.targets)
    ]


# Gradients in float32


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
def test_gradients_travel_as_float32(sharding: str) -> None:
    plain, wide = (
        plan_of(optimizer_sharding=sharding, exchange=asked) for asked in ({}, {"gradient_dtype": "float32"})
    )
    before, after = gradients(simulated(plain)), gradients(simulated(wide))
    assert sum(task.payload_bytes for task in after) == 2 * sum(task.payload_bytes for task in before) > 0
    assert {task.dtype for task in before} == {"bfloat16"}
    assert {task.dtype for task in after} == {"float32"}
    assert {one.dtype for one in of_gradients(executed(plain))} == {""}
    sent = of_gradients(executed(wide))
    assert {one.dtype for one in sent} == {"float32"}
    assert len(sent) == len(after)
    casts = [task for task in simulated(wide) if task.name.startswith("cast")]
    assert len(casts) == 2 * len(after)
    assert all(task.bytes_moved > 0 for task in casts)


def test_gradients_in_float32_take_longer_and_room() -> None:
    graph = at_precision(captured("gpt2-tiny"), "bfloat16")
    plain, wide = (
        predict_plan(plan_of("gpt2-tiny", exchange=asked), graph, HARDWARE)
        for asked in ({}, {"gradient_dtype": "float32"})
    )
    assert wide.step_time_s > plain.step_time_s
    assert wide.peak_memory_bytes >= plain.peak_memory_bytes


def test_gradients_that_are_float32_travel_as_they_are() -> None:
    wide = replace(plan_of(exchange={"gradient_dtype": "float32"}), precision="fp32")
    assert {one.dtype for one in of_gradients([one for _, one in steps(lowered_of(wide))])} == {""}


def staged(exchange: dict[str, Any], network: str = "gpt2-tiny") -> Plan:
    return pipelined(plan_of(network, exchange=exchange), captured(network), 2, "1f1b")


def of_stages(plan: Plan) -> Iterator[Instruction]:
    graph = at_precision(at_batch(captured("gpt2-tiny"), plan.samples), "bfloat16")
    lowered = lower_stages(plan, graph)
    for stage in lowered.stages:
        for one in stage.passes.values():
            yield from one.instructions
    for rank in lowered.ranks:
        yield from rank.update


def test_stages_send_gradients_as_float32() -> None:
    graph = at_precision(captured("gpt2-tiny"), "bfloat16")
    plain, wide = staged({}), staged({"gradient_dtype": "float32"})
    sums = [of_gradients(list(of_stages(plan))) for plan in (plain, wide)]
    assert len(sums[0]) == len(sums[1]) > 0
    assert {one.dtype for one in sums[0]} == {""}
    assert {one.dtype for one in sums[1]} == {"float32"}
    tied = [one for one in messages(list(of_stages(wide))) if "and of others" in one.targets[0]]
    assert {one.dtype for one in tied} == {"float32"}, "the embedding that two stages share"
    payloads = [
        sum(task.payload_bytes for task in lower_pipeline(plan, graph, HARDWARE).work.tasks if "gradients" in task.name)
        for plan in (plain, wide)
    ]
    assert payloads[1] == 2 * payloads[0] > 0
    steps = [predict_plan(plan, graph, HARDWARE).step_time_s for plan in (plain, wide)]
    assert steps[1] > steps[0]


# All-to-alls


@given(st.integers(1, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_every_way_by_all_to_alls_has_one_without(axes: int, data: st.DataObject) -> None:
    draw = st.tuples(*[st.integers(-2, 2) for _ in range(axes)])
    source, target = data.draw(draw), data.draw(draw)
    steps, others = redistribution(source, target), redistribution(source, target, all_to_all=False)
    assert (steps is None) == (others is None)
    if steps is None or others is None:
        return
    assert all(step.operation is not Collective.ALL_TO_ALL for step in others)
    if all(step.operation is not Collective.ALL_TO_ALL for step in steps):
        assert steps == others
    state = source
    for step in others:
        assert step.before == state
        state = step.after
    assert state == target


def test_all_to_alls_become_gathers_and_slices() -> None:
    source, target = (0,), (1,)
    whole, cut = redistribution(source, target, all_to_all=False) or ()
    assert (whole.operation, whole.gather_dim) == (Collective.ALL_GATHER, 0)
    assert (cut.operation, cut.split_dim) == ("slice", 1)


# Messages


def test_messages_of_one_tensor_where_fusion_is_off() -> None:
    closed = plan_of(optimizer_sharding="zero1", exchange=dict.fromkeys(
        ("all_reduce_bytes", "all_gather_bytes", "reduce_scatter_bytes"), 0))  # fmt: skip
    fused = plan_of(optimizer_sharding="zero1")
    for plan, several in ((closed, False), (fused, True)):
        sent = messages(executed(plan))
        tasks = [task for task in simulated(plan) if task.collective]
        assert Counter(one.collective for one in sent) == Counter(task.collective for task in tasks)
        assert any(len(one.sources) > 1 for one in sent) == several


def test_kinds_of_messages_have_sizes_of_their_own() -> None:
    def counts(**exchange: Any) -> dict[Collective, int]:
        found = messages(executed(plan_of(optimizer_sharding="zero1", exchange=exchange)))
        tasks = [task.collective for task in simulated(plan_of(optimizer_sharding="zero1", exchange=exchange))]
        kinds = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        assert [tasks.count(kind) for kind in kinds] == [sum(o.collective is kind for o in found) for kind in kinds]
        return {kind: sum(one.collective is kind for one in found) for kind in kinds}

    usual = counts()
    gathers, scatters = counts(all_gather_bytes=0), counts(reduce_scatter_bytes=0)
    assert gathers[Collective.ALL_GATHER] > usual[Collective.ALL_GATHER]
    assert gathers[Collective.REDUCE_SCATTER] == usual[Collective.REDUCE_SCATTER]
    assert scatters[Collective.REDUCE_SCATTER] > usual[Collective.REDUCE_SCATTER]
    assert scatters[Collective.ALL_GATHER] == usual[Collective.ALL_GATHER]


@pytest.mark.parametrize(("network", "places"), [("mlp", (2, 5)), ("gpt2-tiny", (1, 20, 200))])
def test_all_reduces_are_fused_by_the_places_of_parameters(network: str, places: tuple[int, ...]) -> None:
    plan = plan_of(network, exchange={"fusion_places": places})
    graph = lowered_of(plan).graph
    order = [graph.nodes[p.node].name for p in graph.parameters if p.gradient is not None]
    sent = [{target.split(".gradient@")[0] for target in one.targets} for one in of_gradients(executed(plan))]
    bounds = [0, *(place for place in places if place < len(order)), len(order)]
    wanted = [set(order[first:last]) for first, last in pairwise(bounds)]
    assert sorted(map(sorted, sent)) == sorted(map(sorted, wanted))
    assert len(gradients(simulated(plan))) == len(wanted)


# Gradients: sums, means and own ones


def divisors(plan: Plan) -> dict[str, float]:
    return {one.parameter: one.divisor for one in executed(plan) if isinstance(one, Update | BeginUpdate)}


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
@pytest.mark.parametrize(
    ("exchange", "factor"),
    [({}, 1.0), ({"group_power": 1}, 4.0), ({"group_power": -1}, 0.25), ({"repeated_loss": True}, 1.0)],
)
def test_gradients_are_multiplied(exchange: dict[str, Any], factor: float, optimizer: str) -> None:
    plan = plan_of(axes=(("data", 4),), optimizer=optimizer, exchange=exchange)
    found = divisors(plan)
    assert found
    assert set(found.values()) == {plan.micro_batches / factor}


def test_ranks_that_repeat_the_loss_are_counted() -> None:
    """Data-parallel ranks have parts of the loss, tensor-parallel ones the same part."""
    axes = (("data", 2), ("tensor", 2))
    plain, repeated = (divisors(plan_of("gpt2-tiny", axes, exchange=e)) for e in ({}, {"repeated_loss": True}))
    assert {plain[name] / repeated[name] for name in plain} == {2.0}


def test_stages_multiply_gradients_too() -> None:
    plain, summed = (
        [one.divisor for one in of_stages(staged(e)) if isinstance(one, Update)] for e in ({}, {"group_power": 1})
    )
    assert plain == [2 * divisor for divisor in summed]
    assert plain


def test_own_parameters_are_not_added_up() -> None:
    own = ("layers.0.weight", "layers.0.bias")
    plan = plan_of(exchange={"layerwise": own})
    sent = {target.split(".gradient@")[0] for one in of_gradients(executed(plan)) for target in one.targets}
    assert sent == set(divisors(plan)) - set(own)
    assert all(divisors(plan)[name] == plan.micro_batches / 2 for name in own), "of a rank's own mean loss"
    fewer = sum(task.payload_bytes for task in gradients(simulated(plan)))
    assert 0 < fewer < sum(task.payload_bytes for task in gradients(simulated(plan_of())))


@pytest.mark.parametrize(
    ("exchange", "words"),
    [({"cross_batch": True}, "cross_batch=True"), ({"layerwise": ("layers.0.weight",)}, "1 layerwise_parallel")],
)
def test_what_one_process_cannot_train_is_not_verified(exchange: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"--verify .*{words}.* without --verify"):
        execute_plan(plan_of(exchange=exchange), ExecuteOptions(strategy="unused", verify=True))


# Samples and data


@pytest.mark.slow
def test_statistics_of_a_rank_alone_need_no_message() -> None:
    def inner(plan: Plan) -> int:
        return sum("inside" in task.name for task in simulated(plan))

    plain, alone = (plan_of("resnet50", micro_batches=1, exchange=e) for e in ({}, {"cross_batch": True}))
    assert inner(plain) > 0
    assert inner(alone) == 0
    rules = [one.rules for one in executed(alone) if hasattr(one, "rules")]
    assert not any(rule.reduced_elements for found in rules for rule in found)


@pytest.mark.parametrize(
    ("data", "placements"),
    [
        ("", [(0, -1), (0, -1)]),
        ("data_parallel", [(0, -1), (0, -1)]),
        ("full_batch", [(-1, -1), (-1, -1)]),
        (((2, 1), (2, 1)), [(0, -1), (0, -1)]),
        (((4, 1), (2, 1)), [(0, 0), (0, -1)]),
        (((2, 2), (1, 1)), [(0, 1), (-1, -1)]),
    ],
)
def test_ranks_load_what_the_data_set_strategy_says(data: Any, placements: list[tuple[int, ...]]) -> None:
    plan = plan_of("gpt2-tiny", (("data", 2), ("tensor", 2)), exchange={"data": data})
    lowered = lowered_of(plan, precision="bf16")
    assert [entry.placements for entry in lowered.inputs] == placements
    names = [entry.value for entry in lowered.inputs]
    sliced = [one for _, one in steps(lowered) if isinstance(one, Slice) and one.source in names]
    assert bool(sliced) == (data == "full_batch" or data == ((2, 2), (1, 1)))


@pytest.mark.parametrize("data", [((8, 1), (8, 1)), ((2, 1),), ((2,), (2,)), ((3, 1), (2, 1))])
def test_cuts_that_a_mesh_has_not_are_refused(data: Any) -> None:
    with pytest.raises(StrategyError, match="dataset_strategy="):
        lowered_of(plan_of("gpt2-tiny", (("data", 2), ("tensor", 2)), exchange={"data": data}))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (((8, 1),), ("1 tuples", "2 batch tensors")),
        (((8, 1, 1), (8, 1)), ("3 numbers", "2 dims")),
        (((1, 3), (1, 1)), ("dataset_strategy[0][1]=3 does not divide",)),
    ],
)
def test_cuts_are_held_against_the_network(data: Any, words: tuple[str, ...]) -> None:
    context = planner.AutoParallelContext(parallel_mode="auto_parallel", dataset_strategy=data)
    context.set(device_num=24)
    with pytest.raises((planner.ContextError, InputError)) as error:
        planner.plan("zoo:gpt2-tiny", "dgx-a100", context, global_batch=48)
    assert all(word in str(error.value) for word in words), str(error.value)


# Before the first step


def test_whole_parameters_are_broadcast_before_the_first_step() -> None:
    graph = at_precision(captured("mlp"), "bfloat16")
    plan = plan_of(optimizer_sharding="zero1", exchange={"broadcast": True})
    lowered = lowered_of(plan, precision="bf16")
    (rank,) = lowered.ranks
    sharded = {p.value for p in rank.parameters if max(p.placements) >= 0}
    sent = {name for one in rank.start if isinstance(one, Communicate) for name in one.sources}
    assert sharded
    assert sent == {p.value for p in rank.parameters} - sharded
    found, unasked = (
        predict_plan(plan, graph, HARDWARE),
        predict_plan(replace(plan, exchange=Exchange()), graph, HARDWARE),
    )
    assert found.start_s > 0 == unasked.start_s
    assert found.step_time_s == unasked.step_time_s


def test_own_parameters_are_not_broadcast_and_stages_send_theirs() -> None:
    own = ("layers.0.weight",)
    start = lowered_of(plan_of(exchange={"broadcast": True, "layerwise": own})).ranks[0].start
    assert "layers.0.weight" not in {n for one in start if isinstance(one, Communicate) for n in one.sources}
    plan = staged({"broadcast": True})
    graph = at_precision(at_batch(captured("gpt2-tiny"), plan.samples), "bfloat16")
    for rank in lower_stages(plan, graph).ranks:
        names = {n for one in rank.start if isinstance(one, Communicate) for n in one.sources}
        assert names == {parameter.value for parameter in rank.parameters}
    assert predict_plan(plan, graph, HARDWARE).start_s > 0


# Files


@pytest.mark.parametrize(
    "exchange",
    [
        {},
        {"gradient_dtype": "float32", "all_to_all": False, "all_reduce_bytes": 0, "fusion_places": (3, 5)},
        {"group_power": -1, "repeated_loss": True, "cross_batch": True, "broadcast": True, "layerwise": ("a", "b")},
        {"data": "full_batch"},
        {"data": ((8, 1), (8,))},
    ],
)
def test_what_a_plan_says_of_travel_is_written_and_read(exchange: dict[str, Any]) -> None:
    plan = plan_of(exchange=exchange)
    text = plan_to_text(plan)
    assert ('"exchange"' in text) == bool(exchange)
    assert plan_from_text(text).plan == plan
