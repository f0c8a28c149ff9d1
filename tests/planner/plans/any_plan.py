"""Any plan that a strategy file may hold, drawn at random."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from planner.graph.recompute import MODES
from planner.plans.plan import (
    Certificate,
    Chunk,
    LayerRules,
    NodeRules,
    OffloadRange,
    Plan,
    RecomputeRange,
    Status,
    Swap,
)
from planner.sharding.placement import Mesh, MeshAxis
from planner.sharding.rules import InnerMessage, Rule
from simulator.program import Collective

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
COUNTS = st.integers(1, 1000)
SECONDS = st.floats(0, 1e6, allow_nan=False)


@st.composite
def messages(draw: st.DrawFn) -> InnerMessage:
    """A collective inside an operator: of tensors, of numbers, or both."""
    tensors = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return InnerMessage(
        draw(st.sampled_from(Collective)),
        elements=draw(st.integers(0 if tensors else 1, 10**6)),
        tensors=tensors,
        divisor=draw(st.integers(1, 64)),
        circulating=draw(st.booleans()),
        overlapped=draw(st.booleans()),
        uncut=draw(st.booleans()),
    )


@st.composite
def node_rules(draw: st.DrawFn, axes: int) -> NodeRules:
    """One rule for each axis, all of the same number of tensors."""
    inputs, outputs = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    placement = st.integers(-2, 5)

    def rule() -> Rule:
        return Rule(
            tuple(draw(placement) for _ in range(inputs)),
            tuple(draw(placement) for _ in range(outputs)),
            splits_work=draw(st.booleans()),
            reduced_elements=draw(st.integers(0, 10**6)),
            messages=tuple(draw(st.lists(messages(), max_size=2))),
        )

    return tuple(rule() for _ in range(axes))


PIPELINES = [("none", 1, 1), ("gpipe", 2, 1), ("1f1b", 4, 1), ("interleaved_1f1b", 2, 3), ("zbv", 3, 2)]
"""Schedules with the ranks and the chunks a rank that they are tried with."""


@st.composite
def numbered(draw: st.DrawFn, names: list[str], sizes: list[int], pipeline: int) -> tuple[Mesh, int]:
    """A mesh and the stride of the pipeline: in its order without strides, or each axis anywhere."""
    axes = tuple(MeshAxis(name, size) for name, size in zip(names, sizes, strict=True))
    if draw(st.booleans()) or not axes:
        return Mesh(axes), prod(sizes) if pipeline > 1 else 0
    strides = [0] * (len(sizes) + 1)
    step = 1
    for place in draw(st.permutations(range(len(strides)))):
        strides[place] = step
        step *= [*sizes, pipeline][place]
    return Mesh(axes, tuple(strides[:-1])), strides[-1] if pipeline > 1 else 0


@st.composite
def layers(draw: st.DrawFn, rules: st.SearchStrategy[dict[str, NodeRules]]) -> tuple[LayerRules, ...]:
    """Rules of runs of layers that follow one another."""
    starts = sorted(draw(st.lists(st.integers(0, 90), unique=True, max_size=3)))
    ends = [*(start - 1 for start in starts[1:]), 95]
    return tuple(
        LayerRules(prefix="blocks", first=first, last=last, rules=draw(rules))
        for first, last in zip(starts, ends[: len(starts)], strict=True)
    )


@st.composite
def recomputed(draw: st.DrawFn) -> tuple[RecomputeRange, ...]:
    """Ranges of units that compute again."""
    modes = st.sampled_from(["selective", "full"])
    return tuple(
        RecomputeRange(first=draw(NAMES), last=draw(NAMES), mode=draw(modes), messages=draw(st.booleans()))
        for _ in range(draw(st.integers(0, 3)))
    )


@st.composite
def swapped(draw: st.DrawFn) -> OffloadRange:
    """A range of units whose activations go to the host."""
    operators = draw(st.lists(NAMES, max_size=2).map(tuple))
    return OffloadRange(
        first=draw(NAMES), last=draw(NAMES), swap=Swap(prefetch=draw(st.integers(0, 20)), operators=operators)
    )


@st.composite
def chunks(draw: st.DrawFn, pipeline: int) -> Chunk:
    """A chunk of one of the ranks of a pipeline."""
    return Chunk(rank=draw(st.integers(0, pipeline - 1)), first=draw(NAMES), last=draw(NAMES))


def certificates() -> st.SearchStrategy[Certificate]:
    """Whatever a search may have proved."""
    return st.builds(
        Certificate,
        status=st.sampled_from([Status.OPTIMAL, Status.BOUNDED, Status.HEURISTIC]),
        objective_s=SECONDS,
        lower_bound_s=SECONDS,
        **dict.fromkeys(("elimination_width", "operators", "distinct_blocks", "states", "states_left"), COUNTS),
        **dict.fromkeys(("largest_table", "configurations", "partitions"), COUNTS),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan a file may hold."""
    names = draw(st.lists(st.sampled_from(["data", "context", "expert", "tensor"]), max_size=4, unique=True))
    sizes = [draw(st.integers(2, 16)) for _ in names]
    schedule, pipeline, virtual = draw(st.sampled_from(PIPELINES))
    mesh, stride = draw(numbered(names, sizes, pipeline))
    shards = next((axis.size for axis in mesh.axes if axis.name == "data"), 1)
    samples = prod(axis.size for axis in mesh.axes if axis.name in ("data", "expert"))
    micro_batch, micro_batches = draw(COUNTS), draw(COUNTS)
    rules = st.dictionaries(NAMES, node_rules(len(sizes)), max_size=6)
    sharding = draw(st.sampled_from(["none", "zero1", "zero2", "zero3"]))
    ranges = draw(recomputed())
    cut = tuple(draw(chunks(pipeline)) for _ in range(pipeline * virtual))
    return Plan(
        network=draw(NAMES),
        fingerprint=draw(NAMES),
        sequence_length=draw(st.none() | COUNTS),
        hardware=draw(NAMES),
        hardware_hash=draw(NAMES),
        precision=draw(st.sampled_from(["fp64", "fp32", "bf16"])),
        optimizer="adamw",
        global_batch=micro_batch * micro_batches * samples,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        mesh=mesh,
        rules=draw(rules),
        layers=draw(layers(rules)),
        optimizer_sharding=sharding,
        bucket_bytes=draw(st.integers(0, 10**9)),
        recompute=max((part.mode for part in ranges), key=MODES.index, default="none"),
        recompute_ranges=ranges,
        offload_ranges=tuple(draw(st.lists(swapped(), max_size=2))),
        host_embeddings=draw(st.booleans()),
        schedule=schedule,
        pipeline=pipeline,
        pipeline_stride=stride,
        virtual=virtual,
        chunks=cut if len(cut) > 1 else (),
        shard_size=shards if sharding != "none" and draw(st.booleans()) else 0,
        sharding_threshold_bytes=draw(st.integers(0, 10**9)) if sharding != "none" else 0,
        offload_optimizer=(away := draw(st.booleans())),
        offload_to=draw(st.sampled_from(["host", "disk"])) if away else "host",
        offload_parameters=draw(st.booleans()) if away else False,
        sequence_parallel=draw(st.booleans()),
        tensor_overlap=draw(st.booleans()),
        expert_overlap=draw(st.booleans()),
        sent_once=draw(st.integers(0, 8)),
        whole_experts=draw(st.booleans()),
        context_algorithm=draw(st.sampled_from(["ring", "all_to_all"])) if "context" in names else "none",
        certificate=draw(certificates()),
    )
