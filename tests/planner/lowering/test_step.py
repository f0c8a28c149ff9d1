"""A step whose equal layers are written once is the step of the whole network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.graph.chain import chain
from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.lowering import lower_graph, lowering_options, step
from planner.lowering.blueprint import Visit
from planner.lowering.copies import UnalikeError
from planner.lowering.representatives import representatives
from planner.lowering.segment import SegmentWriter
from planner.lowering.visits import Visits
from planner.planning.prediction import predict, predict_plan
from planner.plans.plan import LayerRules, Plan, RecomputeRange, expanded_rules
from simulator.columns import Changes, ProgramColumns, SegmentColumns, columns
from simulator.profiles import load_profile
from simulator.timing import task_times
from tests.planner.lowering.plans import one_stage, recomputing
from tests.planner.search.problems import captured, deepened

HARDWARE = load_profile("dgx-a100")
LAYERS = 7
GRAPH = captured("gpt2-tiny", LAYERS)
MODES = ("none", "selective", "full")


def whole(plan: Plan, graph: OperatorGraph) -> ProgramColumns:
    """The step with every layer written out."""
    deep = unfold(at_batch(graph, plan.samples))
    return columns(lower_graph(deep, expanded_rules(plan), lowering_options(plan, graph)).program)


def mixed(plan: Plan, other: Plan, choice: list[bool], modes: list[str]) -> Plan:
    """Layers that follow one plan or the other, each computing again in its own way."""
    (ours,), (theirs,) = plan.layers, other.layers
    layers = tuple(
        LayerRules(prefix=ours.prefix, first=n, last=n, rules=(theirs if chosen else ours).rules)
        for n, chosen in enumerate(choice)
    )
    names = chain(GRAPH).names()
    ranges = tuple(
        RecomputeRange(first=name, last=name, mode=mode)
        for name, mode in zip(names[1:-1], modes, strict=True)
        if mode != "none"
    )
    strongest = max(modes, key=MODES.index)
    return replace(plan, layers=layers, recompute=strongest, recompute_ranges=ranges)


def assert_same(one: ProgramColumns, other: ProgramColumns) -> None:
    """Whether tasks, what they wait for and their buffers are the same, but for the order of buffers of one task."""
    assert (one.devices, one.axes) == (other.devices, other.axes)
    assert buffers(one, one.resident) == buffers(other, other.resident)
    for a, b in zip(one.segments, other.segments, strict=True):
        assert (a.name, a.count) == (b.name, b.count)
        assert work(a) == work(b)
        assert np.array_equal(a.dependency_offsets, b.dependency_offsets)
        assert np.array_equal(a.dependencies, b.dependencies)
        assert buffers(one, a.changes) == buffers(other, b.changes)
    # The numbers of passes differ; what they make of the pace of the host does not.
    for ours, theirs in zip(task_times(one, HARDWARE), task_times(other, HARDWARE), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def work(segment: SegmentColumns) -> list[object]:
    """What every task does, without its name."""
    bare = [replace(task, name="", after=(), launched_with=-1, allocates=(), releases=()) for task in segment.tasks]
    return [bare[number] for number in segment.which.tolist()]


def buffers(program: ProgramColumns, changes: Changes) -> list[tuple[int, int, str, int, int]]:
    names = [program.buffers[number] for number in changes.buffer.tolist()]
    listed = (changes.row, changes.sign, changes.size_bytes, changes.kind)
    row, sign, size, kind = (values.tolist() for values in listed)
    return sorted(zip(row, sign, names, size, kind, strict=True))


CASES = st.tuples(
    st.sampled_from([(("data", 2),), (("data", 2), ("tensor", 2)), (("tensor", 4),)]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["zero1", "zero2", "zero3"]),
    st.sampled_from([2**14, 2**18, 2**25]),
    st.sampled_from([1, 2]),
)


@settings(deadline=None, max_examples=4)
@given(
    case=CASES,
    choice=st.lists(st.booleans(), min_size=LAYERS, max_size=LAYERS),
    modes=st.lists(st.sampled_from(MODES), min_size=LAYERS, max_size=LAYERS),
)
@example(
    case=((("data", 2), ("tensor", 2)), 2, "zero3", 2**25, 1),
    choice=[False, True] * 3 + [True],
    modes=["none", "full", "selective", "none", "full", "selective", "none"],
)
@example(
    case=((("data", 2), ("tensor", 2)), 2, "zero3", 2**18, 2),
    choice=[False, True] * 3 + [True],
    modes=["none", "full", "selective", "none", "full", "selective", "none"],
)
def test_layers_written_once_make_the_same_step(
    case: tuple[tuple[tuple[str, int], ...], int, str, int, int], choice: list[bool], modes: list[str]
) -> None:
    axes, micro_batches, level, bucket, copies = case
    storage = "sharded" if dict(axes).get("data") else "replicated"
    plan, other = (one_stage("gpt2-tiny", LAYERS, axes, storage=way) for way in (storage, "replicated"))
    plan = mixed(replace(plan, bucket_bytes=bucket, copies=copies), other, choice, modes)
    plan = replace(plan, micro_batches=micro_batches, global_batch=plan.global_batch // 4 * micro_batches)
    plan = replace(plan, optimizer_sharding=level) if storage == "sharded" else plan
    assert_same(step.lowered_step(plan, GRAPH), whole(plan, GRAPH))


def test_the_cost_is_that_of_the_kinds_of_layers() -> None:
    graph = captured("gpt2-tiny", 20)
    plan = one_stage("gpt2-tiny", 20, (("data", 2),), storage="sharded")
    found = representatives(recomputing(plan, graph, "full"), graph)
    assert len(found.names) == 22
    assert len(found.chain.units) == 5
    assert_same(step.lowered_step(plan, graph), whole(plan, graph))


@pytest.mark.parametrize(("bucket", "layers"), [(2**14, 48), (2**17, 16), (2**25, 48)])
def test_visits_of_equal_layers_are_repeated(bucket: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = one_stage("gpt2-tiny", LAYERS, (("data", 2), ("tensor", 2)), storage="sharded")
    (part,) = plan.layers
    graph, plan = deepened(GRAPH, layers), replace(plan, layers=(replace(part, last=layers - 1),), bucket_bytes=bucket)
    visits: list[int] = []
    write = SegmentWriter._visit

    def counted(writer: SegmentWriter, visit: Visit) -> None:
        visits.append(visit.unit)
        write(writer, visit)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentWriter, "_visit", counted)
        found = step.lowered_step(plan, graph)
    assert len(visits) < 24
    if layers == 16:
        assert_same(found, whole(plan, graph))


@pytest.mark.parametrize(("tensor", "bucket"), [(1, 2**17), (1, 2**25), (2, 2**14), (2, 2**18), (2, 2**25)])
def test_visits_that_come_again_are_added_at_once(tensor: int, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = (("data", 2), ("tensor", tensor))[:tensor]
    plan = one_stage("gpt2-tiny", LAYERS, axes, storage="sharded")
    (part,) = plan.layers
    graph, plan = deepened(GRAPH, 48), replace(plan, layers=(replace(part, last=47),), bucket_bytes=bucket)
    alone: list[int] = []
    add = Visits.add

    def counted(visits: Visits, visit: Visit, around: object) -> object:
        alone.append(visit.unit)
        return add(visits, visit, around)

    monkeypatch.setattr(Visits, "add", counted)
    found, few = step.lowered_step(plan, graph), len(alone)
    monkeypatch.setattr(Visits, "_times", lambda *_: 0)
    expected = step.lowered_step(plan, graph)
    assert len(alone) - few > few
    for ours, theirs in zip(found.segments, expected.segments, strict=True):
        assert [ours.tasks[number] for number in ours.which] == [theirs.tasks[number] for number in theirs.which]
        assert np.array_equal(ours.dependencies, theirs.dependencies)
        assert np.array_equal(ours.dependency_offsets, theirs.dependency_offsets)
        for column in ("row", "sign", "buffer", "size_bytes", "kind"):
            assert np.array_equal(getattr(ours.changes, column), getattr(theirs.changes, column))


def test_a_network_whose_layers_share_more_is_lowered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = one_stage("gpt2-tiny", LAYERS, (("data", 2),), storage="sharded")
    expected = predict_plan(plan, GRAPH, HARDWARE)

    def refuse(*_: object) -> None:
        raise UnalikeError("value 'x' is read by a unit that is not beside its own")

    monkeypatch.setattr(step, "lower_step", refuse)
    assert predict_plan(plan, GRAPH, HARDWARE) == expected
    deep = unfold(at_batch(GRAPH, plan.samples))
    lowered = lower_graph(deep, expanded_rules(plan), lowering_options(plan, GRAPH))
    assert predict(plan, lowered, HARDWARE)[0] == expected
