"""Layers that compute again and keep what messages have brought: fewer messages and less work, more memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from planner.graph.chain import chain
from planner.lowering.instructions import LoweredStages
from planner.lowering.pipeline import lower_pipeline
from planner.planning.prediction import predict_plan
from planner.plans.plan import Plan, RecomputeRange
from simulator.profiles import load_profile
from simulator.program import Phase
from tests.planner.lowering.plans import MEGATRON, one_stage, pipelined, recomputing
from tests.planner.lowering.steps import Rank, lowered_of, steps
from tests.planner.search.problems import captured

HARDWARE = load_profile("dgx-a100")
LAYERS = 3
GRAPH = captured("gpt2-tiny", LAYERS)


def recomputed(mode: str, *, messages: bool, data: int = 1) -> Plan:
    axes = (*([("data", data)] if data > 1 else []), ("tensor", 2))
    plan = recomputing(one_stage("gpt2-tiny", LAYERS, axes, micro_batches=2, hints=MEGATRON), GRAPH, mode)
    return replace(plan, recompute_ranges=tuple(replace(part, messages=messages) for part in plan.recompute_ranges))


def sent(lowered: LoweredStages) -> Counter[Phase]:
    """Messages of a step along the tensor axis, by the pass they are in."""
    return Counter(task.phase for task, _ in steps(lowered) if task.collective is not None and task.axis == "tensor")


@pytest.mark.parametrize(("mode", "data"), [("full", 2), ("selective", 1)])
def test_messages_are_sent_once_where_their_results_are_kept(mode: str, data: int) -> None:
    again, kept = (lowered_of(recomputed(mode, messages=messages, data=data), GRAPH) for messages in (True, False))
    plain = lowered_of(one_stage("gpt2-tiny", LAYERS, _axes(again), micro_batches=2, hints=MEGATRON), GRAPH)
    assert sent(kept) == sent(plain)
    assert sent(again)[Phase.BACKWARD] == sent(kept)[Phase.BACKWARD] + 2 * LAYERS
    work = [sum(task.flops for task, _ in steps(one)) for one in (plain, kept, again)]
    # What only the message reads is not computed again either.
    assert work == sorted(work)
    assert work[2] > work[1] if mode == "full" else work[2] == work[1]
    for lowered in (again, kept):
        Rank(lowered).step()


def _axes(lowered: LoweredStages) -> tuple[tuple[str, int], ...]:
    return tuple((axis.name, axis.size) for axis in lowered.mesh.axes)


def test_what_messages_have_brought_takes_memory() -> None:
    again, kept = (predict_plan(recomputed("full", messages=messages), GRAPH, HARDWARE) for messages in (True, False))
    # One all-reduced tensor of a layer waits, as large as the layer's input.
    assert kept.peak_memory_bytes > again.peak_memory_bytes
    assert kept.step_time_s < again.step_time_s


def test_stages_and_single_layers_keep_what_messages_have_brought() -> None:
    names = chain(GRAPH).names()
    plan = recomputed("full", messages=True, data=2)
    halves = (
        RecomputeRange(first=names[0], last=names[1], mode="full"),
        RecomputeRange(first=names[2], last=names[-1], mode="full", messages=False),
    )
    for staged in (plan, pipelined(plan, GRAPH, 2, "1f1b")):
        mixed = replace(staged, recompute_ranges=halves)
        none = replace(staged, recompute_ranges=tuple(replace(part, messages=False) for part in halves))
        seconds = [
            predict_plan(one, GRAPH, HARDWARE).breakdown["exposed_communication_s"] for one in (staged, mixed, none)
        ]
        assert seconds == sorted(seconds, reverse=True)
        assert len(set(seconds)) == 3
    messages, held = [], []
    for again in (True, False):
        found = lower_pipeline(pipelined(recomputed("full", messages=again), GRAPH, 2, "1f1b"), GRAPH, HARDWARE)
        times = found.work.counts(found.schedule)
        timed = zip(times, found.work.tasks, strict=True)
        messages.append(sum(n for n, task in timed if task.collective and task.axis == "tensor"))
        held.append(found.sizes.activations.sum())
    assert messages[0] == messages[1] + 2 * LAYERS
    assert held[0] < held[1]
