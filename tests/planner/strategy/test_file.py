"""The strategy file comes back as it was written, or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph.recompute import MODES
from planner.sharding.placement import Mesh, MeshAxis
from planner.sharding.rules import InnerMessage, Rule
from planner.strategy.file import plan_from_text, plan_to_text, read_plan, read_strategy, write_plan
from planner.strategy.plan import (
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
from simulator.errors import InputError, StrategyError
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
    starts = sorted(draw(st.lists(st.integers(0, 90), unique=True, max_size=3)))
    ends = [*(start - 1 for start in starts[1:]), 95]
    layers = tuple(
        LayerRules(prefix="blocks", first=first, last=last, rules=draw(rules))
        for first, last in zip(starts, ends[: len(starts)], strict=True)
    )
    sharding = draw(st.sampled_from(["none", "zero1", "zero2", "zero3"]))
    modes = st.sampled_from(["selective", "full"])
    ranges = tuple(
        RecomputeRange(first=draw(NAMES), last=draw(NAMES), mode=draw(modes), messages=draw(st.booleans()))
        for _ in range(draw(st.integers(0, 3)))
    )
    operators = st.lists(NAMES, max_size=2).map(tuple)
    swapped = tuple(
        OffloadRange(
            first=draw(NAMES),
            last=draw(NAMES),
            swap=Swap(prefetch=draw(st.integers(0, 20)), operators=draw(operators)),
        )
        for _ in range(draw(st.integers(0, 2)))
    )
    chunks = tuple(
        Chunk(rank=draw(st.integers(0, pipeline - 1)), first=draw(NAMES), last=draw(NAMES))
        for _ in range(pipeline * virtual)
    )
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
        layers=layers,
        optimizer_sharding=sharding,
        bucket_bytes=draw(st.integers(0, 10**9)),
        recompute=max((part.mode for part in ranges), key=MODES.index, default="none"),
        recompute_ranges=ranges,
        offload_ranges=swapped,
        host_embeddings=draw(st.booleans()),
        schedule=schedule,
        pipeline=pipeline,
        pipeline_stride=stride,
        virtual=virtual,
        chunks=chunks if len(chunks) > 1 else (),
        shard_size=shards if sharding != "none" and draw(st.booleans()) else 0,
        sharding_threshold_bytes=draw(st.integers(0, 10**9)) if sharding != "none" else 0,
        offload_optimizer=(away := draw(st.booleans())),
        offload_to=draw(st.sampled_from(["host", "disk"])) if away else "host",
        offload_parameters=draw(st.booleans()) if away else False,
        sequence_parallel=draw(st.booleans()),
        context_algorithm=draw(st.sampled_from(["ring", "all_to_all"])) if "context" in names else "none",
        certificate=Certificate(
            status=draw(st.sampled_from([Status.OPTIMAL, Status.BOUNDED, Status.HEURISTIC])),
            objective_s=draw(SECONDS),
            lower_bound_s=draw(SECONDS),
            elimination_width=draw(COUNTS),
            operators=draw(COUNTS),
            distinct_blocks=draw(COUNTS),
            states=draw(COUNTS),
            states_left=draw(COUNTS),
            largest_table=draw(COUNTS),
            configurations=draw(COUNTS),
            partitions=draw(COUNTS),
        ),
    )


def small_plan() -> Plan:
    """A hand-made plan of one linear layer on 2 × 4 devices."""
    stored = (Rule((), (-1,), splits_work=False), Rule((), (1,), splits_work=False))
    product = (Rule((0, -1), (0,), splits_work=True), Rule((-1, 1), (1,), splits_work=True))
    return Plan(
        network="zoo:mlp",
        fingerprint="f00d",
        sequence_length=None,
        hardware="dgx-a100",
        hardware_hash="beef",
        precision="bf16",
        optimizer="sgd",
        global_batch=64,
        micro_batch=16,
        micro_batches=2,
        mesh=Mesh((MeshAxis("data", 2), MeshAxis("tensor", 4))),
        rules={"weight": stored, "mm": product},
        layers=(LayerRules(prefix="blocks", first=0, last=11, rules={"blocks.*.mm": product}),),
        optimizer_sharding="none",
        bucket_bytes=25_000_000,
        certificate=Certificate(
            status=Status.OPTIMAL,
            objective_s=0.5,
            lower_bound_s=0.5,
            elimination_width=3,
            operators=2,
            distinct_blocks=1,
        ),
    )


PREDICTION = {
    "step_time_s": 0.5,
    "interval_s": [0.4, 0.6],
    "label": "calibrated",
    "samples_per_s": 128.0,
    "tokens_per_s": None,
    "mfu": 0.4,
    "peak_memory_bytes": 10**9,
    "device_memory_bytes": 8 * 10**10,
    "memory_at_peak": {"parameters": 10**9},
    "breakdown": {"compute_s": 0.5},
}


@given(plans())
def test_a_plan_comes_back_equal_and_its_bytes_are_stable(plan: Plan) -> None:
    text = plan_to_text(plan)
    back = plan_from_text(text).plan
    assert back == plan
    assert plan_to_text(back) == text


def test_files_are_written_and_read(tmp_path: Path) -> None:
    path = write_plan(small_plan(), tmp_path / "strategy.json", PREDICTION)
    assert read_plan(path) == small_plan()
    unsaid = {"objective_s": None, "analytic_breakdown": {}, "differing_term": None, "start_s": 0.0}
    assert read_strategy(path).prediction == {**PREDICTION, **unsaid}
    assert path.read_text().endswith("}\n")
    assert [p.name for p in path.parent.iterdir()] == ["strategy.json"], "nothing is left beside the file"


@pytest.mark.parametrize(
    ("profile", "stored"),
    [
        ("dgx-a100", "dgx-a100"),
        ("local.yaml", "../local.yaml"),
        ("./local", "../local"),
        ("deep/local.yaml", "local.yaml"),
        ("deep/local", "./local"),
        ("/far/local.yaml", "/far/local.yaml"),
        ("~/local.yaml", "~/local.yaml"),
    ],
)
def test_a_relative_profile_is_seen_from_the_file(
    profile: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path)
    path = write_plan(replace(small_plan(), hardware=profile), "deep/strategy.json")
    assert json.loads(path.read_text())["hardware"]["profile"] == stored
    assert os.path.normpath(read_plan(path).hardware) == os.path.normpath(profile)
    monkeypatch.chdir(tmp_path / "deep")
    seen = read_plan("strategy.json").hardware
    assert seen == profile or os.path.normpath(tmp_path / "deep" / seen) == os.path.normpath(tmp_path / profile)


def test_the_text_is_readable() -> None:
    text = plan_to_text(small_plan())
    assert '    "parameters_and_inputs": {\n      "weight": ["R", "S(1)"]\n    },' in text
    assert '"mm": ["S(0), R -> S(0)", "R, S(1) -> S(1)"]' in text


def broken(change: object) -> str:
    """The small plan's text with one thing changed by a function of the parsed document."""
    document = json.loads(plan_to_text(small_plan(), PREDICTION))
    change(document)  # type: ignore[operator]
    return json.dumps(document)


def assign(path: str, value: object) -> object:
    """A change that sets the field at a dotted path."""

    def change(document: dict[str, object]) -> None:
        *folders, last = path.split(".")
        at: object = document
        for key in folders:
            at = at[int(key)] if isinstance(at, list) else at[key]  # type: ignore[index]
        at[last] = value  # type: ignore[index]

    return change


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", "other", ["not a strategy file", "meshwright-strategy"]),
        ("version", 3, ["version 3", "meshwright plan"]),
        ("version", True, ["version True"]),
        ("precision", 7, ["precision", "7"]),
        ("surprise", 1, ["surprise", "remove"]),
        ("batch.global", 65, ["batch.global", "65", "size 2"]),
        ("batch.micro", -16, ["batch.micro", "-16"]),
        ("batch.micro_batches", "2", ["batch.micro_batches", "'2'"]),
        ("mesh.0.size", 0, ["mesh.0.size", "0"]),
        ("mesh.0.size", 2.0, ["mesh.0.size"]),
        ("mesh.1.axis", "data", ["mesh", "repeat"]),
        ("stages.0.devices", 4, ["stages", "8"]),
        ("data_sharding.data", "R", ["data_sharding"]),
        ("fusion.bucket_bytes", -1, ["fusion.bucket_bytes", "-1"]),
        ("recompute.mode", "full", ["recompute.mode", "'full'", "strongest of its ranges, 'none'"]),
        ("recompute.mode", "some", ["recompute.mode", "'some'", "'selective'"]),
        ("optimizer_sharding", "zero4", ["optimizer_sharding", "'zero4'", "'zero3'"]),
        ("schedule", "1f1b", ["schedule", "'1f1b'", "1 chunks"]),
        ("schedule", "2f2b", ["schedule", "'2f2b'", "'dualpipe_v'"]),
        ("sequence_parallel", 1, ["sequence_parallel", "1"]),
        ("pipeline.ranks", 2, ["schedule", "'none'", "2 chunks"]),
        ("pipeline.stride", 8, ["pipeline.stride", "8", "use 0"]),
        ("pipeline.virtual", 0, ["pipeline.virtual", "0"]),
        ("stages.0.rank", 1, ["stages.0.rank", "1", "0 to 0"]),
        ("stages.0.first", "blocks.0", ["stages.0", "all"]),
        ("mesh.0.stride", 4, ["mesh", "all or none"]),
        ("shard_size", 2, ["shard_size", "2", "'none'"]),
        ("sharding_threshold_bytes", 5, ["sharding_threshold_bytes", "5"]),
        ("offload_optimizer", 1, ["offload_optimizer", "1"]),
        ("offload_to", "disk", ["offload_to", "'disk'", "offload_optimizer true"]),
        ("offload_activations", True, ["offload_activations", "True"]),
        ("offload_activations", [{"first": "blocks.0"}], ["offload_activations.0.last"]),
        ("offload_activations", [{"first": "a", "last": "b", "prefetch": -1}], ["offload_activations.0.prefetch"]),
        ("offload_to", "tape", ["offload_to", "'tape'"]),
        ("offload_parameters", True, ["offload_parameters", "the host updates what it holds"]),
        ("context_algorithm", "ring", ["context_algorithm", "'ring'", "without"]),
        ("parallel_mode", "magic", ["parallel_mode", "'magic'", "'auto_parallel'"]),
        ("search_mode", "guess", ["search_mode", "'guess'", "'dynamic_programming'"]),
        ("precision", "fp4", ["precision", "'fp4'", "'bf16'"]),
        ("optimizer", "adamx", ["optimizer", "'adamx'", "'adamw'"]),
        ("mesh.1.axis", "pipeline", ["mesh.1.axis", "'pipeline'", "not supported yet"]),
        ("mesh.1.axis", "context", ["data_sharding"]),
        ("certificate.status", "infeasible", ["certificate.status", "infeasible"]),
        ("certificate.objective_s", None, ["certificate.objective_s"]),
        ("prediction.step_time_s", -0.5, ["prediction.step_time_s", "-0.5"]),
        ("prediction.interval_s", [1.0], ["prediction.interval_s"]),
        ("prediction.interval_s", [2.0, 1.0], ["prediction.interval_s", "[2.0, 1.0]"]),
        ("prediction.interval_s", [0.6, 0.7], ["prediction.interval_s", "step_time_s 0.5"]),
        ("placements.operators.mm", ["S(0), R -> S(0)"], ["'mm'", "1 rules", "2 axes"]),
        ("placements.operators.mm", ["S(0), Q -> S(0)", "R, R -> R"], ["'mm'", "'Q'"]),
        ("placements.operators.mm", ["gather", "R, R -> R"], ["'mm'", "gather"]),
        ("placements.operators.mm", ["R -> R", "R, R -> R"], ["'mm'", "agree"]),
        ("placements.operators.weight", ["() -> R", "() -> R"], ["'weight'", "both groups"]),
        ("layers.0.last", -1, ["layers.0.last"]),
        ("layers.0.first", 12, ["layers.0", "12 to 11"]),
    ],
)
def test_a_broken_file_names_its_field(path: str, value: object, words: list[str]) -> None:
    with pytest.raises(StrategyError) as caught:
        plan_from_text(broken(assign(path, value)), "my.json")
    for word in ["my.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("field", ["network", "mesh", "batch", "placements", "layers", "certificate", "prediction"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(StrategyError, match=f"{field} is missing"):
        plan_from_text(broken(lambda document: document.pop(field)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON at line 1"),
        ("[]", "not a strategy file"),
        ('{"format": "a", "format": "b"}', "'format' appears twice"),
        ('{"format": NaN}', "NaN"),
        ('{"format": -Infinity}', "Infinity"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 10_000, "number too long"),
    ],
)
def test_hostile_text(text: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        plan_from_text(text)


def test_a_number_too_large_for_a_float_is_refused() -> None:
    text = plan_to_text(small_plan()).replace('"objective_s": 0.5', '"objective_s": 1e999')
    with pytest.raises(StrategyError, match="certificate.objective_s"):
        plan_from_text(text)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="does not exist"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(StrategyError, match="not a file"):
        read_plan(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StrategyError, match="not UTF-8"):
        read_plan(tmp_path / "binary.json")


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_a_truncated_file_is_refused(cut: int) -> None:
    text = plan_to_text(small_plan(), PREDICTION)
    with pytest.raises(StrategyError):
        plan_from_text(text[: cut % (len(text) - 2)])


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.characters(codec="utf-8", exclude_categories=["Cs"]))
def test_a_changed_character_gives_an_error_or_a_valid_plan(position: int, character: str) -> None:
    text = plan_to_text(small_plan(), PREDICTION)
    at = position % len(text)
    changed = text[:at] + character + text[at + 1 :]
    try:
        plan = plan_from_text(changed).plan
    except StrategyError:
        return
    assert plan_from_text(plan_to_text(plan)).plan == plan


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths(value: object, here: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Every place of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here] * bool(here) + [path for key, item in items for path in paths(item, (*here, key))]


@settings(max_examples=200)
@given(st.data())
def test_a_changed_value_gives_an_error_or_a_valid_plan(data: st.DataObject) -> None:
    document = json.loads(plan_to_text(small_plan(), PREDICTION))
    *folders, last = data.draw(st.sampled_from(paths(document)))
    at = document
    for key in folders:
        at = at[key]
    at[last] = data.draw(JSON_VALUES)
    try:
        plan = plan_from_text(json.dumps(document)).plan
    except StrategyError:
        return
    assert plan_from_text(plan_to_text(plan)).plan == plan


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(InputError, match="cannot write"):
        write_plan(small_plan(), tmp_path / "file" / "strategy.json")


def test_a_file_of_version_1_is_read_and_its_sharding_called_by_its_name() -> None:
    document = json.loads(plan_to_text(small_plan(), PREDICTION))
    for key in ("pipeline", "shard_size", "sharding_threshold_bytes", "offload_optimizer", "context_algorithm"):
        del document[key]
    document |= {"version": 1, "optimizer_sharding": "zero2", "recompute": {"mode": "none", "operators": []}}
    document["stages"] = [{"stage": 0, "devices": 8, "layers": "all"}]
    plan = plan_from_text(json.dumps(document)).plan
    assert plan == replace(small_plan(), optimizer_sharding="zero1")


def pipelined() -> Plan:
    """The hand-made plan on two pipeline ranks between its mesh axes."""
    return replace(
        small_plan(),
        mesh=Mesh((MeshAxis("data", 2), MeshAxis("tensor", 4)), strides=(8, 1)),
        pipeline=2,
        pipeline_stride=4,
        schedule="1f1b",
        chunks=(Chunk(rank=0, first="embedding", last="blocks.5"), Chunk(rank=1, first="blocks.6", last="head")),
        recompute="full",
        recompute_ranges=(RecomputeRange(first="blocks.0", last="blocks.5", mode="full"),),
    )


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("pipeline.stride", 8, ["stride", "8 ranks apart"]),
        ("pipeline.virtual", 2, ["stages", "2 are listed"]),
        ("schedule", "zbv", ["pipeline.virtual", "zbv runs 2 chunks"]),
        ("stages.1.stage", 0, ["stages.1.stage", "0 is not 1"]),
        ("stages.1.rank", 2, ["stages.1.rank", "2", "0 to 1"]),
        ("stages.1.devices", 16, ["stages.1.devices", "16"]),
        ("stages.0.layers", "all", ["stages.0", "first and last unit"]),
        ("stages.0.first", None, ["stages.0", "first and last unit"]),
        ("mesh.1.stride", 2, ["mesh.1.stride", "2"]),
        ("recompute.ranges.0.mode", "none", ["recompute.ranges.0.mode", "'none'"]),
    ],
)
def test_contradictions_of_a_pipeline_name_their_field(path: str, value: object, words: list[str]) -> None:
    document = json.loads(plan_to_text(pipelined()))
    assert plan_from_text(json.dumps(document)).plan == pipelined()
    assign(path, value)(document)
    with pytest.raises(StrategyError) as caught:
        plan_from_text(json.dumps(document), "my.json")
    for word in ["my.json", *words]:
        assert word in str(caught.value)
