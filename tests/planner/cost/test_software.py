"""Plans for software and attention that are named: what they change, what files say of it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.software import (
    NetworkFamily,
    as_run,
    as_run_by,
    check_software,
    exchange_of,
    machine_of,
    norms_of,
    software_named,
    uncertainty_of,
    usual_software,
    with_settings,
)
from planner.cost.software_file import shipped_software, shipped_stacks
from planner.cost.stacks import factors_of
from planner.execution.launch.starting import check_options
from planner.execution.options import ExecuteOptions
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.checked import checked_graph
from planner.lowering.instructions import Slice
from planner.lowering.pipeline import lower_pipeline
from planner.planning.planning import (
    Candidate,
    PlanRequest,
    SearchResult,
    capture_for,
    plan_network,
    software_note,
    with_usual_software,
)
from planner.planning.prediction import predict_plan, simulate_plan
from planner.planning.rescoring import differing_term
from planner.planning.shared_tables import SharedTables
from planner.plans.exchange import Exchange
from planner.plans.file import plan_from_text, plan_to_text
from planner.plans.pins import Pins
from planner.plans.plan import stored_parameters
from simulator.corrections import kernel_factor, sharded_factor
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.kernels import COPIES, SINGLE_COPIES
from simulator.launches import (
    DISPATCH_S,
    GRAPHED,
    LAUNCH,
    fixed_time,
    known_software,
    message_launches,
    send_stall,
)
from simulator.profiles import load_profile
from simulator.program import Collective, Kernel
from simulator.topology import group_shape
from tests.planner.execution.small import place
from tests.planner.lowering.steps import lowered_of, steps, tasks_of
from tests.planner.search.problems import captured

DGX = load_profile("dgx-a100")
PINNED = {"tp": "2", "dp": "2", "pp": "1", "micro_batch": "4", "recompute": "none", "optimizer_sharding": "none"}
SMALL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8,
    "intermediate_size": 2816, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip


REFUSED = {"expert_messages": "expert_messages=tokens", "expert_overlap": "expert_overlap=false"}


@cache
def planned(software: str = "", attention: str = "", **pins: str) -> SearchResult:
    request = PlanRequest(
        network="zoo:gpt2-tiny", hardware="dgx-a100", devices=4, global_batch=16, top=1, sensitivity=False,
        pins=Pins.read(pins), software=software, attention=attention,
    )  # fmt: skip
    shared = None if attention or software else SharedTables(captured("gpt2-tiny"))
    return plan_network(request, shared=shared)


ROUTED = PlanRequest(
    network=place("mixtral"), hardware="dgx-a100", devices=4, global_batch=16, top=1, sensitivity=False,
    software="megatron_core",
)  # fmt: skip


@cache
def routes() -> OperatorGraph:
    return capture_for(ROUTED)


@cache
def routed(**pins: str) -> Candidate:
    """A plan of a network with four experts, two of which a token goes to, on four ranks of an expert axis."""
    given = {"tp": "1", "dp": "4", "ep": "4", "pp": "1", "micro_batch": "2", "optimizer_sharding": "none"}
    return plan_network(replace(ROUTED, pins=Pins.read(given | pins)), shared=SharedTables(routes())).candidates[0]


def test_the_busiest_rank_of_experts_decides() -> None:
    """Time grows, the work of the network stays, and files and simulations agree."""
    even, busy, busier = (
        plan_network(
            replace(
                ROUTED, expert_imbalance=ratio,
                pins=Pins.read({"tp": 1, "dp": 4, "ep": 4, "pp": 1, "micro_batch": 2, "optimizer_sharding": "none"}),
            )
        ).candidates[0]
        for ratio in (1.0, 1.25, 2.0)
    )  # fmt: skip
    times = [one.prediction.step_time_s for one in (even, busy, busier)]
    assert times[0] < times[1] < times[2] < 2 * times[0]
    done = [one.prediction.mfu * one.prediction.step_time_s for one in (even, busy, busier)]
    assert done[1:] == pytest.approx(done[:1] * 2, rel=1e-9)
    assert "expert_imbalance" not in plan_to_text(even.plan)
    again = plan_from_text(plan_to_text(busier.plan)).plan
    assert again == busier.plan
    simulated = simulate_plan(again, checked_graph(again), machine_of(again)).prediction
    assert simulated.step_time_s == pytest.approx(times[2], rel=1e-9)


def test_no_rank_is_busiest_where_all_have_all_experts() -> None:
    shared = SharedTables(routes())
    pins = Pins.read({"tp": 1, "dp": 4, "ep": 1, "pp": 1, "micro_batch": 2, "optimizer_sharding": "none"})
    even, busy = (
        plan_network(replace(ROUTED, expert_imbalance=ratio, pins=pins), shared=shared).candidates[0].prediction
        for ratio in (1.0, 2.0)
    )
    assert busy == even


def test_what_the_busiest_rank_does_is_planned_with_the_tables_of_an_even_share() -> None:
    """Sweeps over imbalances share what is made of the network."""
    shared = SharedTables(routes())
    pins = Pins.read({"tp": 1, "dp": 4, "ep": 4, "pp": 1, "micro_batch": 2, "optimizer_sharding": "none"})
    for ratio in (1.0, 2.0, 1.0, 1.5):
        request = replace(ROUTED, expert_imbalance=ratio, pins=pins)
        again, alone = (plan_network(request, shared=one).candidates[0] for one in (shared, None))
        assert (again.plan, again.prediction) == (alone.plan, alone.prediction)


@pytest.mark.parametrize("ratio", [1.0, 1.5, 4.0])
def test_searches_weigh_the_busiest_rank_against_having_all_experts(ratio: float) -> None:
    shared = SharedTables(routes())
    given = {"tp": 1, "pp": 1, "dp": 4, "micro_batch": 2, "optimizer_sharding": "none"}
    request = replace(ROUTED, expert_imbalance=ratio)
    times = [
        plan_network(replace(request, pins=Pins.read(given | {"ep": ep})), shared=shared)
        .candidates[0].prediction.step_time_s
        for ep in (1, 2, 4)
    ]  # fmt: skip
    free = plan_network(replace(request, pins=Pins.read(given)), shared=shared).candidates[0].prediction.step_time_s
    assert free == pytest.approx(min(times), rel=1e-9)


def test_the_busiest_experts_take_no_less_memory_than_uneven_routing_as_it_is() -> None:
    pins = Pins.read({"tp": 1, "dp": 4, "ep": 4, "pp": 1, "micro_batch": 2, "optimizer_sharding": "none"})
    request = replace(ROUTED, network="zoo:mixtral-8x7b", sequence_length=512, hardware="dgx-h100", pins=pins)
    found = [
        plan_network(replace(request, expert_imbalance=ratio)).candidates[0].prediction.peak_memory_bytes
        for ratio in (1.0, 1.05, 1.5, 2.0)
    ]
    assert found[0] <= found[1] < found[2] < found[3]


def test_without_a_name_nothing_changes() -> None:
    assert as_run(DGX, "", "") is DGX
    best = planned().candidates[0].plan
    assert (best.software, best.attention) == ("", "")
    assert send_stall(DGX) == 0.0
    assert "software" not in plan_to_text(best)
    assert 'attention"' not in plan_to_text(best)
    assert exchange_of("", Exchange()) == Exchange()


def test_graphs_spare_the_host_its_launches_and_whole_steps_its_dispatch_of_tokens() -> None:
    """A graph of layers leaves the experts' tokens to the host."""
    plain, layers, step = (
        as_run_by(DGX, name)
        for name in ("megatron_core", "megatron_core:captured_graphs=true", "megatron_core:captured_step=true")
    )
    groups = {axis: group_shape(DGX, 8, 1) for axis in ("expert", "tensor")}

    def host_s(hardware: Hardware, axis: str) -> float:
        calls = message_launches(hardware, groups[axis], Collective.ALL_TO_ALL, axis)
        return calls * hardware.training[LAUNCH]

    assert host_s(plain, "tensor") == pytest.approx(GRAPHED * host_s(layers, "tensor"))
    for hardware in (plain, layers):
        dispatch_s = host_s(hardware, "expert") - host_s(hardware, "tensor")
        assert dispatch_s == pytest.approx(DISPATCH_S * DGX.training["launch"])
    assert host_s(step, "expert") == pytest.approx(host_s(step, "tensor"))


@pytest.mark.parametrize("name", shipped_stacks().software)
def test_every_software_has_what_its_stack_was_fitted_to(name: str) -> None:
    stacks = shipped_software().coefficients.stacks
    found, known = as_run_by(DGX, name), shipped_stacks().software[name]
    own = stacks[
        "mindspore_gpu"
        if name in ("mindspore", "mindformers")
        else f"{known.stack}{'_deterministic' * known.deterministic}"
    ]
    each = own["launch_s"] * DGX.training["launch"]
    assert found.training[LAUNCH] == pytest.approx(each / GRAPHED if known.memory.captured_step else each)
    assert known_software(found)
    assert fixed_time(found, 3) == pytest.approx(own["step_overhead_s"] + 3 * own["micro_batch_overhead_s"])
    assert found.overlaps_communication == known.overlaps
    assert send_stall(found) == (own["pipeline_exposed"] if known.overlaps else 0.0)
    assert found.hash != DGX.hash
    for kernels, factor in factors_of(own).items():
        times = DGX.training.get(kernels, 1.0) * factor
        assert found.training[f"planned_{kernels}"] == pytest.approx(times)


def test_whole_graphs_on_ascend_have_no_launches_of_a_host() -> None:
    ascend = load_profile("ascend910b-atlas800t-a2")
    assert not known_software(as_run_by(ascend, "mindspore"))
    assert known_software(as_run_by(ascend, "mindspeed"))


def test_unknown_names_say_what_is_meant() -> None:
    with pytest.raises(InputError, match=r"'megatron_deepsped' is not one of .*did you mean 'megatron_deepspeed'"):
        as_run_by(DGX, "megatron_deepsped")
    with pytest.raises(InputError, match="attention 'flash3' is not one of"):
        as_run(DGX, "", "flash3")


@pytest.mark.parametrize("attention", ["", "fused_softmax", "unfused", "vendor"])
@pytest.mark.parametrize("pins", [{"pp": "1"}, {"pp": "2", "dp": "1", "micro_batch": "4"}], ids=["one stage", "stages"])
def test_a_plan_says_in_its_file_what_it_is_for(attention: str, pins: dict[str, str]) -> None:
    found = planned("megatron_deepspeed", attention, **pins).candidates[0]
    read = plan_from_text(plan_to_text(found.plan)).plan
    assert (read.software, read.attention, read.norms) == ("megatron_deepspeed", attention, "")
    again = predict_plan(read, checked_graph(read), machine_of(read))
    assert again.step_time_s == pytest.approx(found.prediction.step_time_s, rel=1e-9)
    assert again.peak_memory_bytes == found.prediction.peak_memory_bytes
    differing = differing_term(found.prediction.analytic, found.prediction)
    if found.plan.mesh.strides is None and differing:  # the objective of single operators knows no pace of the host
        assert differing == "compute_s"
    elif found.prediction.analytic:
        closed, step = sum(found.prediction.analytic.values()), found.prediction.step_time_s
        assert closed == pytest.approx(step, rel=0.05)
        for part, seconds in found.prediction.breakdown.items():
            assert seconds == pytest.approx(found.prediction.analytic[part], abs=0.05 * step), part
    certificate = found.plan.certificate
    assert certificate.lower_bound_s <= certificate.objective_s * (1 + 1e-9)


def test_fused_norms_are_planned_and_take_less_time(tmp_path: Path) -> None:
    times, network = {}, f"hf:{tmp_path / 'config.json'}"
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    for norms in ("unfused", "fused"):
        request = PlanRequest(
            network=network, hardware="dgx-a100", devices=4, global_batch=16, top=1, sensitivity=False,
            pins=Pins.read(PINNED), norms=norms,
        )  # fmt: skip
        found = plan_network(request).candidates[0]
        assert plan_from_text(plan_to_text(found.plan)).plan.norms == norms
        assert any(name.endswith("rms_norm") for name in found.plan.rules) == (norms == "fused")
        again = predict_plan(found.plan, checked_graph(found.plan), machine_of(found.plan))
        assert again.step_time_s == pytest.approx(found.prediction.step_time_s, rel=1e-9)
        times[norms] = found.prediction.step_time_s
    assert times["fused"] < times["unfused"]


def test_norms_are_as_the_software_has_them_unless_asked_for() -> None:
    assert norms_of("", "") == norms_of("megatron_lm", "") == norms_of("aleph_alpha_scaling", "") == ""
    assert norms_of("nemo", "") == norms_of("mindformers", "") == norms_of("aleph_alpha_scaling", "fused") == "fused"
    assert norms_of("nemo", "unfused") == "unfused"


def test_scores_take_time_and_memory() -> None:
    times, peaks = [], []
    for attention in ("", "fused_softmax", "unfused"):
        one = planned("", attention, pp="1", dp="4", tp="1", micro_batch="4").candidates[0]
        times.append(one.prediction.step_time_s)
        peaks.append(one.prediction.peak_memory_bytes)
    assert times == sorted(times)
    assert peaks[0] < peaks[1]


def test_software_that_sums_in_float32_sends_twice_as_much() -> None:
    pins = {"pp": "1", "dp": "4", "tp": "1", "micro_batch": "4"}
    apart, wide = (planned(name, **pins).candidates[0] for name in ("megatron_deepspeed", "aleph_alpha_scaling"))
    assert (apart.plan.exchange.gradient_dtype, wide.plan.exchange.gradient_dtype) == ("", "float32")
    assert (apart.plan.exchange.whole_sums, wide.plan.exchange.whole_sums) == (False, True)
    assert wide.plan.certificate.objective_s > apart.plan.certificate.objective_s
    assert wide.prediction.step_time_s > apart.prediction.step_time_s


def test_gradients_that_are_summed_whole_are_cut_behind_the_sum() -> None:
    pins = {"pp": "1", "dp": "4", "tp": "1", "micro_batch": "4", "optimizer_sharding": "zero1"}
    found = planned("aleph_alpha_scaling", **pins).candidates[0]
    scattering = replace(found.plan, exchange=replace(found.plan.exchange, whole_sums=False))
    sent = []
    for plan in (scattering, found.plan):
        tasks = tasks_of(lowered_of(plan, captured("gpt2-tiny")))
        sums = (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
        sent.append(
            [sum(t.payload_bytes for t in tasks if t.collective is kind and t.payload_bytes > 64) for kind in sums]
        )
    (scattered, _), (nothing, whole) = sent
    assert nothing == 0 < scattered <= whole


def test_gradients_on_a_context_axis_are_cut_in_equal_pieces_as_their_parameters_lie() -> None:
    """No dim of a gradient lies along the sequence, not even one that is as long."""
    pins = {"pp": "1", "dp": "2", "cp": "2", "tp": "1", "micro_batch": "4", "optimizer_sharding": "zero1"}
    found = planned("aleph_alpha_scaling", **pins).candidates[0].plan
    cuts = [one for _, one in steps(lowered_of(found, captured("gpt2-tiny"))) if isinstance(one, Slice)]
    of_gradients = [one for one in cuts if ".gradient" in one.source]
    assert of_gradients
    assert all(one.cut is None for one in of_gradients)


def test_messages_that_hide_travel_a_unit_at_once() -> None:
    apart = as_run_by(DGX, "megatron_deepspeed")
    assert sharded_factor(apart) == shipped_software().coefficients.stacks["deepspeed"]["shard_apart"]
    assert sharded_factor(replace(apart, overlaps_communication=True)) == 1.0
    assert [name for name in shipped_stacks().software if sharded_factor(as_run_by(DGX, name)) != 1.0] == [
        "megatron_deepspeed"
    ]


def test_messages_of_tensor_ranks_beside_products_leave_a_part_to_wait_for(tmp_path: Path) -> None:
    """In the search, the simulation and the file; kernels and the messages of other ranks stay as they are."""
    pins = {"pp": "1", "dp": "2", "tp": "2", "micro_batch": "4", "sequence_parallel": "true"}
    behind, beside = (
        planned("megatron_core", **pins, tensor_overlap=overlap).candidates[0] for overlap in ("false", "true")
    )
    left = shipped_software().coefficients.stacks["transformer_engine"]["tensor_exposed"]
    read = plan_from_text(plan_to_text(beside.plan)).plan
    assert (read.tensor_overlap, plan_from_text(plan_to_text(behind.plan)).plan.tensor_overlap) == (True, False)
    assert (
        beside.prediction.breakdown["exposed_communication_s"] < behind.prediction.breakdown["exposed_communication_s"]
    )
    assert beside.plan.certificate.objective_s < behind.plan.certificate.objective_s
    hardware = replace(machine_of(read), training={**machine_of(read).training, LAUNCH: 0.0})
    whole = replace(machine_of(behind.plan), training={**machine_of(behind.plan).training, LAUNCH: 0.0})
    left_work, work = (lower_pipeline(read, checked_graph(read), one).work for one in (hardware, whole))
    fewer, times, tasks = left_work.seconds, work.seconds, work.tasks
    sent = [t.axis == "tensor" and t.collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) for t in tasks]
    assert any(sent)
    assert fewer == pytest.approx(times * np.where(sent, left, 1.0))
    with pytest.raises(InputError, match="--pin tensor_overlap=false"):
        check_options(read, ExecuteOptions(strategy=tmp_path / "strategy.json"), None)


@pytest.mark.parametrize("fewer", [{"expert_messages": "once_a_node"}, {"expert_overlap": "true"}])
def test_tokens_travel_once_to_a_node_or_beside_another_micro_batch(fewer: dict[str, str], tmp_path: Path) -> None:
    """In the search, the simulation and the file; kernels and other messages stay as they are."""
    usual = {"expert_messages": "tokens", "expert_overlap": "false"}
    sent, all_sent = (routed(**{**usual, **pins}) for pins in (fewer, {}))
    read = plan_from_text(plan_to_text(sent.plan)).plan
    assert (read.sent_once, read.expert_overlap) == ((2, False) if "expert_messages" in fewer else (0, True))
    assert "sent_once" not in plan_to_text(all_sent.plan)
    assert sent.prediction.step_time_s < all_sent.prediction.step_time_s
    assert sent.plan.certificate.objective_s < all_sent.plan.certificate.objective_s
    for one in (sent, all_sent):
        simulated_s = one.prediction.step_time_s - one.prediction.breakdown["host_s"]
        assert one.plan.certificate.objective_s == pytest.approx(simulated_s, rel=0.03)
    graph = checked_graph(read, routes())
    hardware = replace(machine_of(read), training={**machine_of(read).training, LAUNCH: 0.0})
    before = replace(machine_of(all_sent.plan), training={**machine_of(all_sent.plan).training, LAUNCH: 0.0})
    work, usual_work = (lower_pipeline(read, graph, one).work for one in (hardware, before))
    found, whole, tasks = work.seconds, usual_work.seconds, work.tasks
    changed = np.array([task.axis == "expert" and task.collective is Collective.ALL_TO_ALL for task in tasks])
    assert changed.any()
    assert found[~changed] == pytest.approx(whole[~changed])
    assert (found[changed] < whole[changed]).all()
    (name,) = fewer
    with pytest.raises(InputError, match=f"--pin {REFUSED[name]}"):
        check_options(read, ExecuteOptions(strategy=tmp_path / "strategy.json"), None)


def test_execution_refuses_a_fused_kernel_that_it_cannot_choose(tmp_path: Path) -> None:
    plan = planned("", "vendor", pp="1").candidates[0].plan
    with pytest.raises(InputError, match="torch takes the fused kernel of its choice"):
        check_options(plan, ExecuteOptions(strategy=tmp_path / "strategy.json"), None)
    check_options(replace(plan, attention="unfused"), ExecuteOptions(strategy=tmp_path / "strategy.json"), None)


def test_software_copies_around_convolutions() -> None:
    """The factor on convolutions is of runs without copies, and is not to shorten these.

    PyTorch leaves 16-bit images in planes, all software those of float32, which V100 does not multiply on tensor units.
    """
    copies = {name: as_run_by(DGX, name).training[COPIES] for name in shipped_stacks().software}
    assert min(copies["eager"], copies["pytorch"]) > 10 * max(copies[name] for name in ("channels_last", "mxnet"))
    hardware, older = as_run_by(DGX, "eager"), as_run_by(load_profile("dgx1-v100"), "eager")
    stated = shipped_software().coefficients.stacks["eager"]
    factor = kernel_factor(hardware, Kernel.CONVOLUTION, "float16", 1)
    assert hardware.training[COPIES] * factor == pytest.approx(stated["copies"])
    assert hardware.training[SINGLE_COPIES] * factor == pytest.approx(stated["single_copies"])
    assert SINGLE_COPIES not in older.training


def test_networks_without_a_sequence_have_a_factor_on_memory_of_their_own() -> None:
    words, images = as_run(DGX, "eager", ""), as_run(DGX, "eager", "", language=False)
    stack, device = shipped_software().coefficients.stacks["eager"], DGX.training["image"]
    assert kernel_factor(images, Kernel.BATCH_NORMALIZATION, "float16", 1) == pytest.approx(device * stack["image"])
    assert kernel_factor(words, Kernel.NORMALIZATION, "float16", 1) > kernel_factor(
        images, Kernel.NORMALIZATION, "float16", 1
    )
    assert images.hash != words.hash


def test_the_host_prepares_samples_where_the_software_says_so() -> None:
    """Steps are as long as that takes where it takes longer, and the strategy file says what the host does."""
    request = PlanRequest(
        network="zoo:resnet50", hardware="dgx-a100", devices=1, global_batch=256, software="eager", pins=Pins(dp=1)
    )
    named = replace(request, software="eager:samples=noisy_augmented_image,sample_area=2")
    (plain,), (slow,) = plan_network(request).candidates[:1], plan_network(named).candidates[:1]
    host_s = 256 * 2 * shipped_software().layered.stacks["eager"]["host_noisy_augmented_image_s"]
    assert plain.prediction.step_time_s < host_s < slow.prediction.step_time_s < 1.1 * host_s
    read = plan_from_text(plan_to_text(slow.plan)).plan
    again = predict_plan(read, checked_graph(read), machine_of(read))
    assert again.step_time_s == pytest.approx(slow.prediction.step_time_s)
    with pytest.raises(InputError, match="samples"):
        as_run_by(DGX, "eager:samples=films")


def test_mindspore_has_a_kernel_for_momentum() -> None:
    ascend = load_profile("ascend910-atlas800")
    factors = [
        kernel_factor(as_run(ascend, "mindspore", "", optimizer=name), Kernel.OPTIMIZER, "float16", 1)
        for name in ("adamw", "momentum")
    ]
    assert factors[0] > 5 * factors[1]
    assert factors[1] == 1.0


@pytest.mark.parametrize(
    ("profile", "family", "sharded", "usual"),
    [
        ("dgx-h100", "language", False, "megatron_core"),
        ("gb200-nvl72", "language", True, "torchtitan"),
        ("dgx-a100", "language", False, "megatron"),
        ("dgx-a100", "image", False, "torchtitan"),
        ("ascend910b-atlas800t-a2", "language", False, "mindspeed"),
    ],
)
def test_each_family_of_devices_has_its_usual_software(
    profile: str, family: NetworkFamily, sharded: bool, usual: str
) -> None:
    hardware = load_profile(profile)
    assert usual_software(hardware, family, sharded=sharded) == usual
    calibrated = replace(hardware, uncertainty=replace(hardware.uncertainty, label="calibrated"))
    assert usual_software(calibrated, family, sharded=sharded) == ""
    assert usual_software(replace(hardware, device_name="a CPU"), family, sharded=sharded) == ""


def test_a_request_that_names_no_software_is_for_the_usual_one() -> None:
    request = PlanRequest(network="zoo:gpt2-tiny", hardware="dgx-h100", devices=8)
    assert with_usual_software(request).software == "megatron_core"
    sharded = {"tp": "1", "pp": "1", "optimizer_sharding": "zero3"}
    assert with_usual_software(replace(request, pins=Pins.read(sharded))).software == "torchtitan"
    assert with_usual_software(replace(request, software="usual")).software == ""
    assert with_usual_software(replace(request, software="nemo")).software == "nemo"
    assert "Megatron-Core with Transformer Engine (megatron_core)" in software_note("megatron_core")


def test_attention_takes_the_kernel_of_the_software_on_the_device() -> None:
    """cuDNN's on Hopper with Transformer Engine, unless another is asked for; the factor is device's times kernel's."""
    h100, factors = load_profile("dgx-h100"), shipped_software().coefficients.attention
    for software, attention, kernel in (
        ("megatron_core", "", "vendor"), ("megatron_core", "flash2", "flash2"), ("torchtitan", "", "flash2"),
    ):  # fmt: skip
        found = as_run(h100, software, attention)
        assert found.attention == kernel
        assert found.training["planned_attention"] == pytest.approx(h100.training["attention"] * factors[kernel])


def test_settings_stand_behind_the_name_and_change_the_step() -> None:
    """They are part of the software's name, from the request to the file."""
    pins = {"pp": "1", "tp": "1", "dp": "4", "micro_batch": "1", "optimizer_sharding": "none"}
    usual, waiting = (planned(name, **pins) for name in ("megatron_core", "megatron_core:overlaps=false"))
    read = plan_from_text(plan_to_text(waiting.candidates[0].plan)).plan
    assert read.software == "megatron_core:overlaps=false"
    assert not machine_of(read).overlaps_communication
    assert waiting.candidates[0].prediction.step_time_s > usual.candidates[0].prediction.step_time_s
    less = planned("megatron_core:optimizer_states=adamw8bit", **pins).candidates[0].prediction
    assert less.peak_memory_bytes < usual.candidates[0].prediction.peak_memory_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("megatron_cor:overlaps=true", "did you mean 'megatron_core'"),
        ("megatron_core:overlap=true", "did you mean 'overlaps'"),
        ("megatron_core:overlaps", "write NAME=VALUE"),
        ("megatron_core:overlaps=maybe", "valid boolean"),
        ("megatron_core:loss_chunks=0", "greater than or equal to 1"),
        ("megatron_core:gradient_bytes=3", "gradient_bytes"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_right(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_software(text)


@given(st.booleans(), st.booleans(), st.sampled_from([0, 2, 4, 6]), st.integers(1, 9))
def test_settings_are_read_as_they_are_written(overlaps: bool, fused: bool, size: int, chunks: int) -> None:
    wanted = {"overlaps": overlaps, "fused_loss": fused, "gradient_bytes": size, "loss_chunks": chunks}
    read = software_named(with_settings("nemo", wanted))
    assert (read.overlaps, read.memory.fused_loss) == (overlaps, fused)
    assert (read.memory.gradient_bytes, read.memory.loss_chunks) == (size, chunks)
    assert with_settings("nemo", {"overlaps": software_named("nemo").overlaps}) == "nemo"


def test_tensor_ranks_of_named_software_have_part_of_every_matrix() -> None:
    """Products of a small network are faster whole on each rank; no software can be told that."""
    pins = {"pp": "1", "dp": "1", "tp": "4", "micro_batch": "1"}
    free, cut = (planned("megatron", **pins, tensor_cut=cut).candidates[0] for cut in ("any", "width"))
    assert free.prediction.step_time_s <= cut.prediction.step_time_s * (1 + 1e-9)

    def whole(candidate: Candidate) -> int:
        stored = stored_parameters(captured("gpt2-tiny"), candidate.plan.rules, candidate.plan.layers)
        return sum(elements for elements, placed in stored if placed[-1] < 0)

    assert whole(cut) < whole(free)
    asked = planned("megatron", **pins).candidates[0]
    assert whole(asked) == whole(cut)


def test_the_interval_of_named_software_is_that_of_its_published_runs() -> None:
    pins = {"pp": "1", "tp": "1", "dp": "4", "micro_batch": "1", "optimizer_sharding": "none"}
    known, label = shipped_software().interval("transformer", "ampere", "megatron")
    found = planned("megatron", **pins).candidates[0].prediction
    step = found.step_time_s
    assert found.interval_s == pytest.approx((min(1.0, known.low) * step, max(1.0, known.high) * step))
    assert found.label == label
    usual = planned("", **pins).candidates[0].prediction
    assert usual.label == DGX.uncertainty.label
    guessed = replace(DGX, uncertainty=replace(DGX.uncertainty, label="extrapolated", low=0.9, high=9.0))
    assert uncertainty_of(guessed, "megatron", language=True) == guessed.uncertainty
    rare, own = uncertainty_of(DGX, "megatron", language=True, experts=True), DGX.uncertainty
    assert (rare.low, rare.label) == (max(own.low, 1 - known.low), own.label)
    assert rare.high == max(own.high, known.high - 1)
