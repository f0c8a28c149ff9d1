"""Speed of pipelines: many small ones pass by pass, and single steps of large networks operator by operator.

Run with ``pytest benchmarks/test_pipeline_speed.py``; ``extra_info`` holds the tasks of a step and its simulated time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from simulator import fast_engine
from simulator.hardware import Hardware
from simulator.kernels import kernel_time, matmul_time
from simulator.pipeline_operators import OperatorCosts, Operators, operator_table
from simulator.pipeline_passes import simulate_operators
from simulator.profiles import load_profile
from simulator.program import Kernel
from simulator.schedules import SCHEDULES, ActionKind, Schedule, make_schedule
from tests.oracles.passes import PipelineCosts, simulate_pipeline

HARDWARE = load_profile("dgx-a100")
DTYPE = "bfloat16"
NODE_BANDWIDTH = 200e9  # bytes/s that an all-gather inside a node reaches
FABRIC_BANDWIDTH = 20e9  # bytes/s from device to device across nodes


@dataclass(frozen=True, kw_only=True)
class Case:
    """A transformer and its cut; devices beyond ``tp * pp`` are replicas that behave alike."""

    layers: int
    hidden: int
    heads: int
    devices: int
    pp: int
    vpp: int
    global_batch: int
    tp: int = 8
    sequence: int = 2048

    @property
    def micro_batches(self) -> int:
        return self.global_batch * self.tp * self.pp // self.devices


CASES = {
    "gpt3-175b-1024-pp16": Case(layers=96, hidden=12288, heads=96, devices=1024, pp=16, vpp=3, global_batch=1536),
    "gpt3-175b-1024-pp8": Case(layers=96, hidden=12288, heads=96, devices=1024, pp=8, vpp=6, global_batch=1536),
    "gpt-1t-16384": Case(layers=128, hidden=25600, heads=160, devices=16384, pp=64, vpp=2, global_batch=4096),
    "gpt3-175b-65536-pp16": Case(
        layers=96, hidden=12288, heads=96, devices=65536, pp=16, vpp=3, global_batch=1536 * 64
    ),
}


def layer_operators(case: Case, hardware: Hardware) -> dict[ActionKind, tuple[np.ndarray, np.ndarray]]:
    """Seconds and streams of the operators of one layer, forward 28 and backward 54, with sequence parallelism.

    Matrix products and the kernels between them; gathers before and scatters behind each block on the other stream.
    """
    tokens, wide, local = case.sequence, case.hidden, case.hidden // case.tp
    rows, scores = tokens // case.tp, case.heads // case.tp * tokens**2

    def product(n: float, k: float, batch: float = 1.0) -> tuple[float, int]:
        return float(matmul_time(hardware, DTYPE, tokens, n, k, batch)), 0

    def moved(elements: float, kernel: Kernel = Kernel.ELEMENTWISE) -> tuple[float, int]:
        return kernel_time(hardware, kernel, DTYPE, 0.0, 2.0 * elements), 0

    message = (2.0 * tokens * wide / NODE_BANDWIDTH + 1e-5, 1)
    norm, head = moved(2.0 * rows * wide, Kernel.NORMALIZATION), case.hidden // case.heads
    heads = case.heads // case.tp
    attention = [
        norm, message, product(3 * local, wide), moved(6 * tokens * local), moved(4 * tokens * local),
        moved(4 * tokens * local), product(tokens, head, heads), moved(2 * scores), moved(2 * scores, Kernel.SOFTMAX),
        moved(2 * scores), product(head, tokens, heads), moved(2 * tokens * local), product(wide, local), message,
        moved(2 * rows * wide), moved(2 * rows * wide), moved(2 * rows * wide),
    ]  # fmt: skip
    feed_forward = [
        norm, message, product(4 * local, wide), moved(8 * tokens * local), moved(8 * tokens * local),
        product(wide, 4 * local), message, moved(2 * rows * wide), moved(2 * rows * wide), moved(2 * rows * wide),
        moved(2 * rows * wide),
    ]  # fmt: skip
    forward = attention + feed_forward
    backward = [part for part in reversed(forward) for _ in range(2 - part[1])] + [moved(rows * wide)] * 2
    return {
        kind: (np.array([seconds for seconds, _ in parts]), np.array([stream for _, stream in parts], dtype=np.int64))
        for kind, parts in ((ActionKind.FORWARD, forward), (ActionKind.BACKWARD, backward))
    }


def operator_costs(case: Case) -> OperatorCosts:
    """Operators of every stage: layers in order, the same for all stages but the first and the last."""
    layers, stages = layer_operators(case, HARDWARE), case.pp * case.vpp
    passes = {}
    for kind, (seconds, stream) in layers.items():
        inner = Operators.chain(np.tile(seconds, case.layers // stages), np.tile(stream, case.layers // stages))
        head = Operators.chain(np.append(inner.seconds, [2e-3, 1e-3]), np.append(inner.communication, [0, 1]))
        passes[kind] = [head, *[inner] * (stages - 2), head]
    return OperatorCosts(
        passes=passes,
        send_s=2.0 * case.sequence * case.hidden / case.tp / FABRIC_BANDWIDTH,
        epilogue_s=0.1 * np.log2(case.devices),
    )


def schedule_of(case: Case) -> Schedule:
    """A fresh one: nothing kept from the round before."""
    make_schedule.cache_clear()
    return make_schedule("interleaved_1f1b", case.pp, case.micro_batches, case.vpp)


@pytest.mark.parametrize("name", list(CASES))
def test_step_by_passes(benchmark: Any, name: str) -> None:
    """Schedule, operators and simulation, nothing kept between rounds; every operator counts."""
    case = CASES[name]
    result = benchmark(lambda: simulate_operators(schedule_of(case), operator_costs(case)))
    benchmark.extra_info["step_time_s"] = result.step_time_s


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("part", ["build", "run", "both"])
def test_step_written_out(benchmark: Any, name: str, part: str) -> None:
    """Every operator as a task of its own, in the fast engine."""
    case = CASES[name]
    table = operator_table(schedule_of(case), operator_costs(case))
    if part == "build":
        benchmark.pedantic(lambda: operator_table(schedule_of(case), operator_costs(case)), rounds=3)
    elif part == "run":
        benchmark.pedantic(fast_engine.run, args=(table,), rounds=3, warmup_rounds=1)
    else:
        benchmark.pedantic(
            lambda: fast_engine.run(operator_table(schedule_of(case), operator_costs(case))), rounds=3, warmup_rounds=1
        )
    benchmark.extra_info["tasks"] = table.size
    if name == "gpt3-175b-1024-pp16" and part == "run":
        _, ends = fast_engine.run(table)
        passes = simulate_operators(schedule_of(case), operator_costs(case))
        assert passes.step_time_s == pytest.approx(ends.max(), rel=1e-9)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gradient_accumulation"])
def test_small_pipeline(benchmark: Any, name: str) -> None:
    """Eight ranks, 128 micro-batches, pass by pass: schedule, table and simulation."""
    costs = PipelineCosts(forward_s=1e-2, backward_s=2e-2, send_s=1e-3, activation_bytes=1e9)

    def simulate() -> float:
        make_schedule.cache_clear()
        schedule = make_schedule(name, 8, 128, 2 if name == "interleaved_1f1b" else None)
        return simulate_pipeline(schedule, costs).step_time_s

    assert benchmark(simulate) > 0


def test_generation(benchmark: Any) -> None:
    """64 ranks, 4 stages each, 1,024 micro-batches."""
    schedule = benchmark(SCHEDULES["interleaved_1f1b"], 64, 1024, 4)
    assert schedule.size == 2 * 64 * 4 * 1024
