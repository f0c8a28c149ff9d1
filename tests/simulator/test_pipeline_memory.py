"""Memory over a step of a pipeline: curves, peaks, and what stands at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.memory.parameters import WEIGHT_GRADIENT_SHARE, micro_batches_in_flight
from simulator.errors import InputError, ProgramError
from simulator.pipeline_memory import PipelineBytes, RankMemory, pipeline_memory
from simulator.program import BufferKind
from simulator.schedules import make_schedule
from tests.oracles.passes import PipelineCosts, simulate_pipeline


def memories(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None, **sizes: Any
) -> tuple[RankMemory, ...]:
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    times = simulate_pipeline(schedule, PipelineCosts(forward_s=1.0, backward_s=2.0, send_s=0.1))
    return pipeline_memory(schedule, times.starts_s, times.ends_s, PipelineBytes(**sizes))


@given(
    name=st.sampled_from(
        ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipe_v", "multi_copy"]
    ),
    ranks=st.sampled_from([2, 4, 8]),
    times=st.integers(2, 4),
)
@settings(deadline=None, max_examples=40)
def test_the_peak_is_the_formula_of_micro_batches_in_flight(name: str, ranks: int, times: int) -> None:
    """Simulated, every schedule holds at its peak what its paper says."""
    micro_batches, chunks = times * ranks, 3 if name == "interleaved_1f1b" else None
    stages = make_schedule(name, ranks, micro_batches, chunks).stages
    # The layers of a rank keep one byte for each micro-batch, its chunks an equal share of that.
    share = ranks / (ranks if name == "multi_copy" else stages)
    found = memories(
        name, ranks, micro_batches, chunks, activations=share, weight_activations=share * WEIGHT_GRADIENT_SHARE
    )
    expected = [micro_batches_in_flight(name, rank, ranks, chunks or 1, micro_batches) for rank in range(ranks)]
    assert [memory.peak_bytes for memory in found] == pytest.approx(expected)


def test_one_forward_one_backward_holds_fewer_on_later_ranks() -> None:
    peaks = [memory.peak_bytes for memory in memories("1f1b", 4, 8, activations=10.0)]
    assert peaks == [40, 30, 20, 10]
    assert [memory.peak_bytes for memory in memories("gpipe", 4, 8, activations=10.0)] == [80, 80, 80, 80]


def test_what_stands_at_the_peak() -> None:
    """On the last rank the loss stands with one micro-batch; resident bytes always stand."""
    last = np.array([0.0, 0.0, 0.0, 7.0])
    found = memories(
        "1f1b", 4, 8, activations=10.0, recomputed=4.0, loss=last,
        resident={BufferKind.PARAMETER: 100.0, BufferKind.OPTIMIZER_STATE: np.arange(4.0)},
    )  # fmt: skip
    assert found[0].at_peak == {BufferKind.PARAMETER: 100, BufferKind.ACTIVATION: 40, BufferKind.RECOMPUTED: 4}
    assert found[3].at_peak == {
        BufferKind.PARAMETER: 100, BufferKind.OPTIMIZER_STATE: 3, BufferKind.ACTIVATION: 10,
        BufferKind.RECOMPUTED: 4, BufferKind.LOSS: 7,
    }  # fmt: skip
    assert [memory.peak_bytes for memory in found] == [sum(memory.at_peak.values()) for memory in found]


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipe"]),
    ranks=st.sampled_from([2, 4]),
    weights=st.floats(0.0, 1.0),
)
@settings(deadline=None, max_examples=25)
def test_a_curve_begins_and_ends_with_what_is_resident(name: str, ranks: int, weights: float) -> None:
    chunks = 2 if name == "interleaved_1f1b" else None
    for memory in memories(
        name, ranks, 2 * ranks, chunks, activations=1.0, weight_activations=weights, recomputed=0.5, loss=0.25,
        resident={BufferKind.CONTEXT: 3.0},
    ):  # fmt: skip
        assert memory.total_bytes[0] == 3.0
        assert memory.total_bytes[-1] == pytest.approx(3.0)
        assert np.all(memory.total_bytes >= 3.0 - 1e-9)
        assert np.all(np.diff(memory.times_s) >= 0)
        assert memory.peak_bytes == memory.total_bytes.max()
        assert memory.peak_time_s == memory.times_s[int(np.argmax(memory.total_bytes))]


def test_actions_of_no_length_still_hold_their_activations() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    now = np.zeros(schedule.size)
    assert pipeline_memory(schedule, now, now, PipelineBytes(activations=1.0))[1].peak_bytes == 1.0


def test_wrong_times_and_unknown_schedules_are_refused() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    with pytest.raises(ProgramError, match="16 actions"):
        pipeline_memory(schedule, np.zeros(3), np.zeros(3), PipelineBytes(activations=1.0))
    with pytest.raises(InputError, match="choose one of gpipe"):
        micro_batches_in_flight("magic", 0, 2, 1, 4)
