"""The strategy file comes back as it was written, or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plans.file import plan_from_text, plan_to_text, read_plan, read_strategy, write_plan
from planner.plans.plan import Certificate, Chunk, LayerRules, Plan, RecomputeRange, Status
from planner.sharding.placement import Mesh, MeshAxis
from planner.sharding.rules import Rule
from simulator.errors import InputError, StrategyError
from tests.planner.plans.any_plan import plans


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
    unsaid |= dict.fromkeys(("p_fits", "host_memory_bytes", "software", "memory_figures"))
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


def test_more_micro_batches_than_can_be_simulated_are_refused() -> None:
    def many(document: Any) -> None:
        batch, count = document["batch"], 30_000_000
        document["batch"] = {"global": batch["global"] // batch["micro_batches"] * count, "micro": batch["micro"],
                             "micro_batches": count}  # fmt: skip

    with pytest.raises(StrategyError, match=r"batch\.micro_batches: 30000000 is more than the 32768"):
        plan_from_text(broken(many))


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
        ("precision", "fp6", ["precision", "'fp6'", "'bf16'"]),
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
        ("", "not valid JSON: line 1"),
        ("[]", "not a strategy file"),
        ('{"format": "a", "format": "b"}', "'format' stands 2 times"),
        ('{"format": NaN}', "NaN"),
        ('{"format": -Infinity}', "Infinity"),
        ("[" * 100_000, "nested deeper than"),
        ("1" * 10_000, "more than 40 digits"),
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
    with pytest.raises(StrategyError, match="is a folder, not a regular file"):
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
