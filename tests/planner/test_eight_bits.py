"""Products of linear layers in 8 and 4 bits: faster by what the profile says of them, memory as in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.work import cast_bytes
from planner.graph.operator_graph import OperatorGraph
from planner.graph.rewriting import wide_nodes
from planner.graph.scaling import EIGHT_BITS, FOUR_BITS, at_batch, at_precision
from planner.lowering.pipeline import lower_pipeline
from planner.planning.planning import PlanRequest, plan_network
from planner.plans.pins import Pins
from simulator import launches
from simulator.corrections import kernel_factor
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.kernels import kernel_time, matmul_time
from simulator.profiles import load_profile
from simulator.program import COMPUTE_STREAM, Kernel, Phase
from tests.planner.search.problems import captured

TINY = PlanRequest(network="zoo:gpt2-tiny", hardware="dgx-h100", devices=4, global_batch=16, sensitivity=False, top=1)
H100 = load_profile("dgx-h100")
B200 = load_profile("dgx-b200")
UNHURRIED = replace(H100, training={k: v for k, v in H100.training.items() if k != launches.LAUNCH})
"""Small networks wait for their host, which launches casts as well."""


def narrow(graph: OperatorGraph) -> list[int]:
    return [index for index, node in enumerate(graph.nodes) if node.product_dtype]


@pytest.mark.parametrize(
    ("name", "forward", "wide"),
    [
        ("gpt2-tiny", {"query", "key", "value", "output", "expand", "contract"}, {"head"}),
        ("mixtral-8x7b", {"query", "key", "value", "output", "experts"}, {"router", "head"}),
        ("mlp", {"layers.0", "layers.1"}, {"layers.2"}),
    ],
)
def test_linear_layers_alone_multiply_in_eight_bits(name: str, forward: set[str], wide: set[str]) -> None:
    """With all of their backward products; weights with a side that 16 does not divide stay wide, and so do logits."""
    graph = at_precision(captured(name), EIGHT_BITS)
    wide_statistics = wide_nodes(captured(name))
    narrow_nodes = (node for index, node in enumerate(graph.nodes) if index not in wide_statistics)
    assert not {spec.dtype for node in narrow_nodes for spec in node.outputs} & {EIGHT_BITS, "float32"}
    found = {graph.nodes[i].forward or i for i in narrow(graph)}
    assert {graph.nodes[i].phase for i in found} == {Phase.FORWARD}
    names = [graph.nodes[i].module for i in found]
    assert all(any(part in module for module in names) for part in forward), names
    assert not any(module.endswith(part) for part in wide for module in names)
    for index, node in enumerate(graph.nodes):
        mates = {graph.nodes[i].product_dtype for i in found if node.forward == i and node.kernel is Kernel.MATMUL}
        assert not mates or node.product_dtype == EIGHT_BITS, index


def test_other_precisions_cast_nothing() -> None:
    assert not narrow(at_precision(captured("gpt2-tiny"), "bfloat16"))


@given(parts=st.tuples(*[st.sampled_from([1.0, 0.5, 0.125])] * 2))
def test_casting_reads_and_writes_the_local_factors(parts: tuple[float, float]) -> None:
    graph = at_batch(at_precision(captured("gpt2-tiny"), EIGHT_BITS), 4)
    node = graph.nodes[narrow(graph)[0]]
    elements = [graph.spec(ref).elements for ref in node.tensor_inputs[-2:]]
    shares = [*[1.0] * (len(node.tensor_inputs) - 2), *parts, 1.0]
    assert cast_bytes(graph, node, shares) == sum(3 * n * part for n, part in zip(elements, parts, strict=True))


def test_a_plan_is_faster_by_its_products_less_the_casts_and_takes_as_much_memory() -> None:
    """The whole step of one device: only tasks of linear layers change, each as the kernel models say."""
    request = replace(TINY, devices=1, global_batch=8, precision="bf16", pins=Pins(micro_batch=8))
    best = plan_network(request, graph=captured("gpt2-tiny")).candidates[0]
    plan = replace(best.plan, precision="bf16")
    wide, eight = (
        lower_pipeline(replace(plan, precision=p), at_precision(captured("gpt2-tiny"), dtype), UNHURRIED)
        for p, dtype in (("bf16", "bfloat16"), ("fp8", EIGHT_BITS))
    )
    before, after = (
        {task.name: float(s) for task, s in zip(x.work.tasks, x.work.seconds, strict=True)} for x in (wide, eight)
    )
    tasks = eight.work.tasks
    changed = {t.name: t for t in tasks if t.dtype == EIGHT_BITS}
    assert changed
    for name, seconds in before.items():
        if name not in changed:
            assert after[name] == seconds
    factor = kernel_factor(H100, Kernel.MATMUL, EIGHT_BITS, 1)
    for name, task in changed.items():
        assert task.shape is not None
        batch, m, n, k = task.shape
        assert after[name] == pytest.approx(factor * float(matmul_time(H100, EIGHT_BITS, m, n, k, batch)))
    casts = {name: s for name, s in after.items() if name not in before}
    moved = {t.name: t.bytes_moved for t in tasks if t.name in casts}
    assert len(casts) == len(changed)
    for name, seconds in casts.items():
        alone = kernel_time(H100, Kernel.ELEMENTWISE, "bfloat16", 0.0, moved[name])
        assert seconds == pytest.approx(kernel_factor(H100, Kernel.ELEMENTWISE, "bfloat16", 1) * alone)
    assert all(t.stream == COMPUTE_STREAM for t in tasks if t.name in casts)
    one, other = (
        plan_network(replace(request, precision=p), graph=captured("gpt2-tiny")).candidates[0].prediction
        for p in ("bf16", "fp8")
    )
    assert one.peak_memory_bytes == other.peak_memory_bytes


@pytest.mark.parametrize(
    "pins", [{"pp": "2", "schedule": "zb_h1", "micro_batch": "1"}, {"tp": "2", "pp": "1"}], ids=str
)
def test_closed_form_and_simulation_agree_as_in_bfloat16(pins: dict[str, str]) -> None:
    apart = []
    for precision in ("bf16", "fp8"):
        request = replace(TINY, precision=precision, pins=Pins.read({**pins, "recompute": "full"}))
        found = plan_network(request, graph=captured("gpt2-tiny")).candidates[0].prediction
        apart.append(sum(found.analytic.values()) / found.step_time_s - 1)
    assert apart[1] == pytest.approx(apart[0], abs=0.02)


@pytest.mark.parametrize(
    ("hardware", "narrower", "wider"), [(H100, EIGHT_BITS, "bfloat16"), (B200, FOUR_BITS, EIGHT_BITS)]
)
def test_products_of_large_matrices_gain_nearly_the_ratio_of_peaks(
    hardware: Hardware, narrower: str, wider: str
) -> None:
    fast, slow = (float(matmul_time(hardware, dtype, 65_536, 65_536, 65_536)) for dtype in (narrower, wider))
    ratio = hardware.peak(narrower) / hardware.peak(wider)
    assert ratio > 1.9
    assert 0.9 * ratio < slow / fast < 1.1 * ratio


def test_four_bits_take_the_same_products_if_32_divides_the_weights_and_cast_them_to_less() -> None:
    """The first layer of the perceptron has 784 columns, which 16 divides and 32 does not."""
    modules = {
        dtype: {graph.nodes[i].module for i in narrow(graph)}
        for dtype in (EIGHT_BITS, FOUR_BITS)
        for graph in [at_precision(captured("mlp"), dtype)]
    }
    assert modules[EIGHT_BITS] - modules[FOUR_BITS] == {name for name in modules[EIGHT_BITS] if "layers.0" in name}
    graph = at_precision(captured("gpt2-tiny"), EIGHT_BITS)
    assert narrow(at_precision(captured("gpt2-tiny"), FOUR_BITS)) == narrow(graph)
    node = graph.nodes[narrow(graph)[0]]
    elements = sum(graph.spec(ref).elements for ref in node.tensor_inputs[-2:])
    shares = [1.0] * (len(node.tensor_inputs) + 1)
    less = cast_bytes(graph, node, shares) - cast_bytes(graph, replace(node, product_dtype=FOUR_BITS), shares)
    assert less == elements * (1 - 0.5625)


def test_a_device_without_eight_bits_says_so_and_what_to_do() -> None:
    with pytest.raises(InputError) as error:
        plan_network(replace(TINY, hardware="dgx-a100", precision="fp8"), graph=captured("gpt2-tiny"))
    assert error.value.exit_code == 2
    assert all(text in str(error.value) for text in ("fp8", "dgx-a100", "float8", "--precision bf16", "dgx-h100"))
