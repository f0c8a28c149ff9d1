"""From a request to plans: ranked, proven, repeatable; or a text that says what does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import yaml

from planner.cli.plan_tables import difference_text
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_precision
from planner.lowering.checked import checked_graph, precision_dtype
from planner.planning import one_stage, planning
from planner.planning.planning import PlanRequest, SearchResult, capture_for, plan_network
from planner.planning.prediction import Prediction, predict_plan, simulate_plan
from planner.planning.rescoring import differing_term
from planner.plans.file import plan_to_text, read_plan, write_plan
from planner.plans.pins import PIN_NAMES, Pins
from planner.plans.plan import Plan, Status, optimizer_sharding, stored_parameters
from planner.search.candidates import Found, Space
from planner.search.configurations.storage import Storage
from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.rules import Rule
from simulator.errors import InputError, StrategyError
from simulator.hardware import Hardware
from simulator.profiles import load_profile, write_profile
from tests.planner.lowering.steps import Rank, lowered_of, passes
from tests.planner.search.problems import captured

TINY = PlanRequest(network="zoo:gpt2-tiny", hardware="dgx-a100", devices=4, global_batch=16)


def planned(request: PlanRequest) -> SearchResult:
    return plan_network(request, graph=captured(request.network.removeprefix("zoo:")))


@pytest.fixture(scope="module")
def tiny() -> SearchResult:
    return planned(TINY)


def small_profile(folder: Path, memory_bytes: int, *, max_devices: int = 64) -> str:
    """A shipped profile whose devices are fewer and have less memory."""
    content = yaml.safe_load((resources.files("hw_profiles") / "dgx-a100.yaml").read_text(encoding="utf-8"))
    content["topology"]["max_devices"]["value"] = max_devices
    content["topology"]["levels"][-1]["size"]["value"] = max_devices
    content["name"] = "small"
    for key, value in (("memory_bytes", memory_bytes + 2**20), ("reserved_memory_bytes", 2**20)):
        content["device"][key] = {"value": value, "source": "assumed: less memory, for a test"}
    path = folder / "small.yaml"
    assert write_profile(content, path).device_memory_bytes == memory_bytes
    return str(path)


def test_candidates_are_ranked_by_simulated_time_and_say_why_they_lost(tiny: SearchResult) -> None:
    times = [c.prediction.step_time_s for c in tiny.candidates]
    assert times == sorted(times)
    assert len(times) > 1
    assert tiny.candidates[0].reason == ""
    assert all(c.reason for c in tiny.candidates[1:])
    assert tiny.infeasible == ""
    shapes = [
        replace(c.plan, rules={}, layers=(), chunks=(), certificate=tiny.candidates[0].plan.certificate)
        for c in tiny.candidates
    ]
    assert all(shapes.count(shape) == 1 for shape in shapes)


def test_a_plan_multiplies_out_and_carries_its_proof(tiny: SearchResult) -> None:
    graph = capture_for(TINY)
    for candidate in tiny.candidates:
        plan = candidate.plan
        assert plan.degree("data") * plan.degree("tensor") * plan.pipeline == TINY.devices == plan.devices
        assert plan.micro_batch * plan.micro_batches * plan.degree("data") == TINY.global_batch
        assert plan.certificate.lower_bound_s <= plan.certificate.objective_s
        assert (plan.certificate.status is Status.OPTIMAL) == (plan.certificate.gap <= 1e-6)
        assert plan.fingerprint == graph.fingerprint
        assert (plan.precision, plan.optimizer) == ("bf16", "adamw")
        assert candidate.prediction.peak_memory_bytes <= candidate.prediction.device_memory_bytes
    assert tiny.status is tiny.candidates[0].plan.certificate.status is Status.OPTIMAL


def test_the_prediction_is_that_of_the_simulated_step(tiny: SearchResult) -> None:
    hardware = load_profile("dgx-a100")
    candidate = next(c for c in tiny.candidates if c.plan.pipeline == 1)
    plan = candidate.plan
    found = simulate_plan(plan, at_precision(captured("gpt2-tiny"), precision_dtype(plan.precision)), hardware)
    prediction = found.prediction
    assert prediction == replace(candidate.prediction, analytic={})
    assert prediction.step_time_s == found.result.length_s
    assert sum(prediction.breakdown.values()) == pytest.approx(prediction.step_time_s)
    assert sum(prediction.memory_at_peak.values()) == prediction.peak_memory_bytes
    assert prediction.tokens_per_s == pytest.approx(prediction.samples_per_s * 64)
    assert prediction.interval_s[0] < prediction.step_time_s < prediction.interval_s[1]
    assert 0 < prediction.mfu < 1


@pytest.mark.parametrize(
    ("pins", "holds"),
    [
        ({"dp": "2"}, lambda p: p.degree("data") == 2 and p.devices == 4),
        ({"pp": "2", "schedule": "1f1b"}, lambda p: (p.pipeline, p.schedule, len(p.chunks)) == (2, "1f1b", 2)),
        ({"recompute": "full"}, lambda p: p.recompute == "full"),
        ({"optimizer_sharding": "zero3"}, lambda p: p.optimizer_sharding == "zero3"),
        ({"tp": "4"}, lambda p: (p.degree("data"), p.degree("tensor")) == (1, 4)),
        ({"dp": "4", "micro_batch": "1"}, lambda p: (p.micro_batch, p.micro_batches) == (1, 4)),
        ({"optimizer_sharding": "zero2", "dp": "4"}, lambda p: p.optimizer_sharding == "zero2"),
        ({"optimizer_sharding": "none"}, lambda p: p.optimizer_sharding == "none"),
    ],
)
def test_pins_hold_in_every_candidate(pins: Mapping[str, str], holds: Callable[[Plan], bool]) -> None:
    candidates = planned(replace(TINY, pins=Pins.read(pins))).candidates
    assert candidates
    assert all(holds(c.plan) for c in candidates)


def costs_of(pins: Mapping[str, str]) -> dict[str, float]:
    found = planned(replace(TINY, top=1, devices=2, pins=Pins.read(pins)))
    return {pin: seconds for pin, seconds, _ in found.pin_costs}


def test_the_first_chunk_may_have_the_embedding_alone_and_the_last_the_head() -> None:
    request = replace(TINY, top=1, devices=4, pins=Pins(tp=1, pp=4, stage_layers=(0, 2, 2, 0)), sensitivity=False)
    chunks = planned(request).candidates[0].plan.chunks
    assert [chunk.first for chunk in chunks] == ["token_embedding", "blocks.0", "blocks.2", "norm"]
    for wrong in ("2-0-2", "0-0", "a-2"):
        with pytest.raises(InputError, match="0 in the first and last alone"):
            planned(replace(request, pins=Pins.read({"stage_layers": wrong})))
    with pytest.raises(InputError, match="at least one layer"):
        planned(replace(request, network="zoo:mlp", devices=2, pins=Pins(tp=1, stage_layers=(0, 3))))


def test_of_every_pin_it_is_said_what_it_costs() -> None:
    ones = dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "copies", "bucket_mb", "sharding_threshold_kb"), "1")
    told_apart = (
        *("offload_parameters", "offload_activations", "host_embeddings"),
        *("sequence_parallel", "tensor_overlap", "expert_overlap"),
    )
    words = {
        "recompute": "none",
        "schedule": "none",
        "context_algorithm": "none",
        "expert_messages": "any",
        "expert_cut": "any",
        "tensor_cut": "any",
    }
    sizes = {"dp": "2", "micro_batch": "4", "micro_batches": "2", "shard_size": "2", "order": "pp-dp-tp"}
    states = {"optimizer_sharding": "zero1", "offload_optimizer": "true", "offload_to": "host"}
    pins = {**ones, **dict.fromkeys(told_apart, "false"), **words, **sizes, **states, "recompute_messages": "true"}
    by_layer = {"stage_layers", "recompute_layers"}  # nothing is searched that they leave out
    assert {*pins} | by_layer | {"recompute_modules"} == set(PIN_NAMES)
    costs = costs_of(pins)
    assert {pin.partition("=")[0] for pin in costs} == {*pins}
    assert all(seconds >= 0 for seconds in costs.values())
    assert costs["micro_batch=4"] == 0, "micro_batches=2 says the same"


def test_parts_of_layers_compute_again_where_they_are_pinned(tmp_path: Path) -> None:
    """Less stands from the forward to the backward pass, a step takes longer, and the file says what is meant."""
    pins = {"pp": "1", "dp": "4", "micro_batch": "4", "optimizer_sharding": "none"}
    kept, norms, both, again = (
        planned(replace(TINY, pins=Pins.read(pins | more), top=1, sensitivity=False)).candidates[0]
        for more in (
            {"recompute": "none"}, {"recompute_modules": "layernorm"}, {"recompute_modules": "mlp-layernorm"},
            {"recompute": "full"},
        )
    )  # fmt: skip
    for less, more in ((kept, norms), (norms, both), (both, again)):
        assert less.prediction.step_time_s < more.prediction.step_time_s
        assert less.prediction.memory_at_peak["activations"] > more.prediction.memory_at_peak["activations"]
    assert (both.plan.recompute, both.plan.recompute_modules) == ("selective", ("layernorm", "mlp"))
    path = write_plan(both.plan, tmp_path / "strategy.json")
    read = read_plan(path)
    assert read == both.plan
    simulated = simulate_plan(read, checked_graph(read), load_profile("dgx-a100")).prediction
    assert simulated.step_time_s == pytest.approx(both.prediction.step_time_s, rel=1e-9)
    Rank(lowered_of(read, captured("gpt2-tiny"))).step()


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"recompute_modules": "mpl"}, "'mpl' is no part of a layer .* did you mean 'mlp'"),
        ({"recompute_modules": "moe"}, "no layer of the network has moe; choose from layernorm, mlp"),
        ({"recompute_modules": "mlp", "recompute": "full"}, "chosen for selective recomputation alone"),
    ],
)
def test_parts_of_layers_that_cannot_compute_again_are_refused(pins: Mapping[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        planned(replace(TINY, pins=Pins.read(pins)))


@pytest.mark.parametrize("asked", [{"search_mode": "recursive_programming"}, {"parallel_mode": "data_parallel"}])
def test_pins_of_plans_of_one_stage_cost_what_planning_without_them_saves(asked: dict[str, str]) -> None:
    request = replace(TINY, top=1, pins=Pins(dp=4), **asked)  # type: ignore[arg-type]
    free = planned(replace(request, sensitivity=False))
    pinned = planned(replace(request, pins=Pins(dp=4, micro_batch=1, recompute="none")))
    costs = {pin: seconds for pin, seconds, _ in pinned.pin_costs}
    first, second = (found.candidates[0].plan.certificate.objective_s for found in (free, pinned))
    assert costs["micro_batch=1"] == pytest.approx(second - first, rel=1e-6)
    assert second > first
    assert costs["recompute=none"] == 0
    assert "pin micro_batch=1 costs" in " ".join(pinned.messages)


def test_a_pin_costs_what_it_brings_along_as_well() -> None:
    """States that are to lie somewhere on the host go there; copies are of plans of one stage."""
    states, host = costs_of({"offload_optimizer": "true"}), costs_of({"offload_to": "host"})
    assert host["offload_to=host"] == pytest.approx(states["offload_optimizer=true"])
    assert host["offload_to=host"] > 0
    alone, staged = costs_of({"copies": "2"}), costs_of({"copies": "2", "pp": "1"})
    assert "pp=1" not in alone
    assert alone["copies=2"] == pytest.approx(staged["copies=2"] + staged["pp=1"])


def test_a_precision_that_runs_as_a_wider_one_is_said() -> None:
    request = replace(TINY, hardware="dgx1-v100", precision="bf16", top=1, pins=Pins(dp=4))
    said = "V100.* has no bfloat16 peak: timed as float32; plan with --precision fp16"
    assert any(re.search(said, message) for message in planned(request).messages)
    assert not any("peak" in message for message in planned(replace(request, precision="fp16")).messages)


def test_one_device_needs_no_mesh() -> None:
    plan = planned(replace(TINY, devices=1, parallel_mode="stand_alone")).candidates[0].plan
    assert plan.mesh.axes == ()
    assert lowered_of(plan, captured("gpt2-tiny")).devices == 1


def test_top_limits_the_candidates_and_not_the_search(tiny: SearchResult) -> None:
    (one,) = planned(replace(TINY, top=1)).candidates
    assert one.plan == tiny.candidates[0].plan
    assert one.prediction == tiny.candidates[0].prediction


def test_data_parallel_splits_the_batch_even_where_that_does_not_pay() -> None:
    plan = planned(replace(TINY, global_batch=4, parallel_mode="data_parallel")).candidates[0].plan
    assert plan.degree("data") == TINY.devices
    lowered = lowered_of(plan, captured("gpt2-tiny"))
    (_, forward), (_, backward), *_ = passes(lowered)
    share = sum(task.flops for task in (*forward.tasks, *backward.tasks) if task.flops and "/" in task.name)
    assert share * TINY.devices == pytest.approx(lowered.graph.flops())


@pytest.mark.parametrize(
    "change",
    [
        {"pins": Pins(optimizer_sharding="zero2")},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"parallel_mode": "data_parallel"}, marks=pytest.mark.slow),
    ],
)
def test_the_same_request_twice_gives_the_same_bytes(change: Mapping[str, object], tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        result = planned(replace(TINY, **change))  # type: ignore[arg-type]
        texts.append([plan_to_text(c.plan) for c in result.candidates])
    assert texts[0] == texts[1]
    plan = planned(replace(TINY, **change)).candidates[0].plan  # type: ignore[arg-type]
    write_plan(plan, tmp_path / "strategy.json")
    assert read_plan(tmp_path / "strategy.json") == plan


def test_thresholds_and_messages_that_are_pinned_are_written(tmp_path: Path) -> None:
    pins = {"dp": "4", "pp": "1", "optimizer_sharding": "zero1", "sharding_threshold_kb": "64", "bucket_mb": "50"}
    result = planned(replace(TINY, pins=Pins.read(pins)))
    for candidate in result.candidates:
        assert (candidate.plan.sharding_threshold_bytes, candidate.plan.bucket_bytes) == (64 * 1024, 50 * 2**20)
    write_plan(result.candidates[0].plan, tmp_path / "strategy.json")
    lowered_of(read_plan(tmp_path / "strategy.json"), captured("gpt2-tiny"))
    assert {pin.partition("=")[0] for pin, _, _ in result.pin_costs} >= {"sharding_threshold_kb", "bucket_mb"}
    with pytest.raises(InputError, match=r"sharding_threshold_kb=9999: more than half .* use --pin .*=\d+ or less"):
        planned(replace(TINY, pins=Pins.read({**pins, "sharding_threshold_kb": "9999"})))


@pytest.mark.parametrize(("sharded", "name"), [(1, "none"), (3, "zero1")])
def test_the_name_of_the_storage_counts_every_range_of_layers(plan: Plan, sharded: int, name: str) -> None:
    graph = captured("gpt2-tiny")
    (layers,) = plan.layers

    def stored(placement: int) -> dict[str, tuple[Rule, ...]]:
        return {name: (Rule((), (placement,), splits_work=False),) for name in layers.rules}

    ranges = (
        replace(layers, last=sharded - 1, rules=stored(0)),
        replace(layers, first=sharded, rules=stored(REPLICATE)),
    )
    assert optimizer_sharding(plan.mesh, stored_parameters(graph, {}, ranges)) == name


# Memory


@pytest.fixture(scope="module")
def needs(tiny: SearchResult) -> int:
    return tiny.candidates[0].prediction.peak_memory_bytes


def test_a_tight_memory_is_kept_by_every_candidate(tmp_path: Path, needs: int) -> None:
    """No proof of an optimum is asked for: where memory binds, pipelines whose units have many ways try only some.

    (docs/search.md, Certificates.) What is said of the bound must hold, and the gap must stay small.
    """
    limit = int(0.6 * needs)
    result = planned(replace(TINY, hardware=small_profile(tmp_path, limit), sensitivity=False))
    assert result.candidates
    for candidate in result.candidates:
        assert candidate.prediction.device_memory_bytes == limit
        assert candidate.prediction.peak_memory_bytes <= limit
        certificate = candidate.plan.certificate
        assert certificate.lower_bound_s <= certificate.objective_s
        assert (certificate.status is Status.OPTIMAL) == (certificate.gap <= 1e-6)
        assert certificate.gap < 0.2


def test_less_memory_never_makes_the_best_plan_faster(tmp_path: Path, tiny: SearchResult, needs: int) -> None:
    result = planned(replace(TINY, hardware=small_profile(tmp_path, int(0.6 * needs)), pins=Pins(dp=4)))
    free = planned(replace(TINY, pins=Pins(dp=4)))
    assert min(c.plan.certificate.objective_s for c in free.candidates) <= min(
        c.plan.certificate.objective_s for c in result.candidates
    )


def test_what_does_not_fit_says_the_limit_the_excess_and_what_would_fit(tmp_path: Path) -> None:
    hardware = small_profile(tmp_path, 2 * 2**20)
    request = replace(TINY, hardware=hardware, devices=2, pins=Pins(micro_batch=1))
    result = planned(request)
    assert result.status is Status.INFEASIBLE
    assert result.candidates == ()
    assert "device memory binds" in result.infeasible
    assert "of 2.00 MiB" in result.infeasible
    assert "too much" in result.infeasible
    brief = plan_network(request, changes=False).infeasible
    assert result.infeasible.startswith(f"{brief}; it would fit")
    words = result.infeasible.split()
    enough = int(words[words.index("on", words.index("fit")) + 1])
    assert planned(replace(request, devices=enough)).candidates
    assert enough == 3, "no count lies between"


def test_where_no_number_of_devices_helps_another_remedy_is_named(tmp_path: Path) -> None:
    result = planned(replace(TINY, hardware=small_profile(tmp_path, 10_000, max_devices=16), devices=2))
    assert result.status is Status.INFEASIBLE
    assert "of 9.77 KiB" in result.infeasible
    assert "use devices with more memory" in result.infeasible


def test_where_the_closed_form_misses_the_memory_it_is_searched_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it holds devices to have four times what they have, and all plans that it puts first need too much."""
    pins = {"pp": "2", "tp": "1", "schedule": "1f1b", "recompute": "none", "offload_optimizer": "false"}
    room_bytes = Storage.room_bytes
    monkeypatch.setattr(Storage, "room_bytes", lambda self, c: 4 * room_bytes(self, c))
    monkeypatch.setattr(planning, "RESCORED", 1)
    result = planned(
        replace(TINY, hardware=small_profile(tmp_path, 8_000_000), pins=Pins.read(pins), sensitivity=False, top=1)
    )
    (best,) = result.candidates
    assert best.prediction.peak_memory_bytes <= 8_000_000
    assert "searched again as if it had" in result.messages[-1]
    # Faster plans that do not fit are not told apart from those that might: the gap is to them.
    assert result.status is Status.BOUNDED
    assert best.plan.certificate.gap > 0.01


# Plans edited by hand


def edited(plan: Plan, name: str, rules: tuple[Rule, ...]) -> Plan:
    return replace(plan, rules={**plan.rules, name: rules})


def refused(plan: Plan, *texts: str) -> None:
    with pytest.raises(StrategyError) as error:
        lowered_of(plan, captured("gpt2-tiny"))
    assert all(text in str(error.value) for text in texts), str(error.value)
    assert error.value.exit_code == 2


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(replace(TINY, pins=Pins(dp=4, optimizer_sharding="zero1"), top=1)).candidates[0].plan


def test_a_plan_of_another_network_is_refused(plan: Plan) -> None:
    refused(replace(plan, fingerprint="0" * 64), "000000000000…", "plan it again")


def test_an_operator_that_is_not_there_is_refused(plan: Plan) -> None:
    refused(edited(plan, "head/conv", plan.rules["head/mm"]), "'head/conv'", "plan it again")


def test_an_operator_without_a_strategy_is_refused(plan: Plan) -> None:
    refused(replace(plan, rules={n: r for n, r in plan.rules.items() if n != "head/mm"}), "'head/mm' has no strategy")


@pytest.mark.parametrize(
    "rules",
    [
        (Rule((0, 0), (0,), splits_work=True),),
        (Rule((0,), (0,), splits_work=True),),
        (),
        (Rule((REPLICATE, REPLICATE), (REPLICATE,), splits_work=False),) * 2,
    ],
)
def test_a_strategy_that_the_operator_cannot_take_is_refused(plan: Plan, rules: tuple[Rule, ...]) -> None:
    refused(edited(plan, "head/mm", rules), "'head/mm'", "aten.mm.default")


def test_a_strategy_that_does_not_divide_is_refused(plan: Plan) -> None:
    uneven = replace(plan, micro_batch=1, micro_batches=16, mesh=replace(plan.mesh, axes=(plan.mesh.axes[0],)))
    three, many = (
        replace(uneven, mesh=replace(uneven.mesh, axes=(uneven.mesh.axes[0]._replace(size=size),)))
        for size in (3, 5000)
    )
    refused(many, "does not divide")
    checked_graph(three, captured("gpt2-tiny"))  # parameters are stored in uneven shards, which are simulated alone
    with pytest.raises(StrategyError, match="uneven shards"):
        checked_graph(three, captured("gpt2-tiny"), even=True)


def test_layers_that_are_missing_are_refused(plan: Plan) -> None:
    (*_, last) = plan.layers
    refused(replace(plan, layers=()), "'blocks' cover 0 blocks", "blocks.0 to blocks.3")
    shorter = (*plan.layers[:-1], replace(last, last=last.last - 1))
    refused(replace(plan, layers=shorter), "cover 3 blocks")
    refused(replace(plan, layers=(*plan.layers, last)), "'blocks' cover")
    (first, *others) = plan.layers
    without = {name: rules for name, rules in first.rules.items() if not name.endswith("gelu")}
    assert len(without) < len(first.rules)
    refused(replace(plan, layers=(replace(first, rules=without), *others)), "has no strategy")
    unknown = {**first.rules, "blocks.*/gulp": next(iter(first.rules.values()))}
    refused(replace(plan, layers=(replace(first, rules=unknown), *others)), "'blocks.*/gulp'")


def test_strategies_of_neighbours_that_nothing_can_join_are_refused(plan: Plan) -> None:
    """A sum of gradients may add partial sums, but what arrives sharded can never become one."""
    name = next(n for n, rules in plan.layers[0].rules.items() if n.endswith("/gradient_sum") and rules[0].outputs)
    (first, *others) = plan.layers
    rules = {**first.rules, name: (Rule((PARTIAL, PARTIAL), (PARTIAL,), splits_work=False),)}
    changed = replace(plan, layers=(replace(first, rules=rules), *others))
    assert first.rules[name][0].inputs[0] >= 0, "the plan splits the batch"
    refused(changed, "partial", "plan the network again")


def test_pinned_optimizer_sharding_holds_for_every_plan() -> None:
    request = PlanRequest(
        network="zoo:gpt2-tiny", hardware="dgx-a100", devices=4, pins=Pins(optimizer_sharding="zero2"), top=5
    )
    found = plan_network(request).candidates
    assert found
    assert {candidate.plan.optimizer_sharding for candidate in found} == {"zero2"}


def test_a_plan_solved_again_keeps_the_bound_of_the_whole_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tighter limit than the device's proves nothing about plans between the two."""
    bounds: list[float] = []
    solved = one_stage._again

    def again(space: Space, item: Found, allowed: float) -> object:
        bounds.append(item.solution.lower_bound_s)
        found = solved(space, item, space.hardware.device_memory_bytes)
        assert found is not None
        slower = replace(found.solution, lower_bound_s=2 * found.solution.lower_bound_s)
        return replace(found, solution=replace(slower, objective_s=2 * slower.objective_s))

    simulated = predict_plan
    peaks = iter([2**60, 0])

    def predicted(plan: Plan, graph: OperatorGraph, hardware: Hardware) -> Prediction:
        return replace(simulated(plan, graph, hardware), peak_memory_bytes=next(peaks, 0))

    monkeypatch.setattr(planning, "_searches_configurations", lambda *_: False)
    monkeypatch.setattr(one_stage, "ROOMY", 0.0)
    monkeypatch.setattr(one_stage, "_RETRIES", 2)
    monkeypatch.setattr(one_stage, "predict_plan", predicted)
    monkeypatch.setattr(one_stage, "_again", again)
    request = PlanRequest(network="zoo:mlp", hardware="dgx-a100", devices=2, pins=Pins(dp=2))
    found = plan_network(request).candidates[0].plan.certificate
    assert found.lower_bound_s == pytest.approx(bounds[0], rel=1e-9)
    assert found.status is Status.BOUNDED


@pytest.mark.parametrize("pin", ["offload_parameters=true", "offload_to=disk"])
def test_nothing_is_called_optimal_whose_pins_the_closed_form_leaves_out(pin: str) -> None:
    """A plan of twice the speed was found by pinning more, while the certificate said that there is none."""
    name, value = pin.split("=")
    request = PlanRequest(
        network="zoo:mlp",
        hardware="dgx-a100",
        devices=2,
        global_batch=64,
        pins=Pins.read({name: value}),
        sensitivity=False,
    )
    result = plan_network(request)
    certificate, best = result.candidates[0].plan.certificate, result.candidates[0].prediction.step_time_s
    assert result.status is certificate.status is Status.BOUNDED
    assert certificate.lower_bound_s < certificate.objective_s <= best * (1 + 1e-9)
    assert any(f"does not count what {pin}" in message for message in result.messages)
    assert plan_network(replace(request, pins=Pins())).status is Status.OPTIMAL


def test_a_plan_of_operators_says_which_part_of_the_step_its_objective_leaves_out() -> None:
    """An MLP on 1,024 devices waits for its host, which no sum over operators knows."""
    first, second = (
        planned(PlanRequest(network=f"zoo:{name}", hardware="dgx-a100", devices=devices, global_batch=batch))
        for name, devices, batch in (("mlp", 1024, 65536), ("gpt2-tiny", 1, 16))
    )
    waits, alone = (
        next(c for c in one.candidates if c.plan.certificate and c.plan.certificate.elimination_width)
        for one in (first, second)
    )
    for found in (waits, alone):
        assert found.plan.certificate is not None
        objective_s = found.plan.certificate.objective_s
        assert sum(found.prediction.analytic.values()) == pytest.approx(objective_s, rel=1e-9)
    assert differing_term(waits.prediction.analytic, waits.prediction) == "compute_s"
    assert "compute" in difference_text(waits.prediction)
    assert alone.prediction.analytic["exposed_communication_s"] == pytest.approx(0, abs=1e-12)
    optimizer_s = alone.prediction.breakdown["optimizer_s"]
    assert alone.prediction.analytic["optimizer_s"] == pytest.approx(optimizer_s, rel=1e-6)


def test_a_pipeline_is_found_behind_a_plan_that_is_delayed() -> None:
    # The least closed form is that of one stage, whose messages delay one another by 43 % in the simulation.
    request = PlanRequest(network="zoo:mlp", hardware="dgx-a100", devices=1024, global_batch=4096, sensitivity=False)
    free, staged = (plan_network(replace(request, pins=Pins.read(pins))) for pins in ({}, {"pp": "2"}))
    assert free.candidates[0].prediction.step_time_s <= staged.candidates[0].prediction.step_time_s * (1 + 1e-9)
