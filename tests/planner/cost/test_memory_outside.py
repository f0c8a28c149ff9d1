"""What a device holds beside the tensors of a run, against what was measured of it alone."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.memory.device import training_memory
from planner.cost.memory.states import context_bytes, workspace_bytes
from planner.cost.memory_traits import traits_of
from planner.cost.stacks import AttentionKernel, Stack
from planner.cost.training_run import TrainingSetup
from simulator.profiles import load_profile
from tests.planner.cost.test_memory import llama, run

GIB, MIB = 2**30, 2**20


def context(profile: str, **setup: Any) -> float:
    return context_bytes(TrainingSetup(**setup), traits_of(Stack.EAGER), load_profile(profile))


def workspace(profile: str, **setup: Any) -> float:
    return workspace_bytes(traits_of(Stack.MEGATRON), TrainingSetup(devices=1, **setup), load_profile(profile))


@pytest.mark.parametrize(("profile", "mebibytes"), [("v100x4-omnipath", 1113), ("dgx-a100", 1687)])
def test_a_context_with_all_kernels_is_as_large_as_it_was_measured(profile: str, mebibytes: float) -> None:
    assert context(profile, devices=1, eager_kernels=True) / MIB == pytest.approx(mebibytes, rel=0.02)


def test_gh200_holds_as_much_outside_the_allocator_whatever_the_plan() -> None:
    plans = ({"devices": 4, "tp": 4}, {"devices": 64, "tp": 4, "dp": 16}, {"devices": 64, "tp": 4, "dp": 4, "pp": 4})
    held = {context("gh200x4", **plan) for plan in plans}
    assert len(held) == 1
    # Least and most that was measured of these three plans.
    assert 2922 * MIB <= next(iter(held)) <= 3883 * MIB
    assert load_profile("gh200x4").device_memory_bytes + held.pop() <= 96e9
    assert context("dgx-h100", devices=4, tp=4) < context("dgx-h100", devices=64, tp=4, dp=4, pp=4)


@pytest.mark.parametrize(
    ("profile", "fixed", "each"), [("dgx-h100", False, 32), ("dgx-a100", True, 32), ("dgx-a100", False, 8)]
)
def test_graphs_are_warmed_up_and_captured_with_workspaces_of_their_own(profile: str, fixed: bool, each: int) -> None:
    more = workspace(profile, captured_graphs=True, fixed_workspaces=fixed) - workspace(profile, fixed_workspaces=fixed)
    assert more == 2 * each * MIB


@pytest.mark.parametrize(
    ("profile", "stack", "mebibytes"),
    [
        ("dgx-h100", Stack.TRANSFORMER_ENGINE, 128),
        ("gb200-nvl72", Stack.TRANSFORMER_ENGINE, 128),
        ("dgx-a100", Stack.TRANSFORMER_ENGINE, 16),
        ("dgx-h100", Stack.MEGATRON, 0),
    ],
)
def test_a_group_of_products_has_a_workspace_for_each_of_its_streams(
    profile: str, stack: Stack, mebibytes: float
) -> None:
    one, grouped = (workspace(profile, stack=stack, grouped_products=grouped) for grouped in (False, True))
    assert grouped - one == mebibytes * MIB


@pytest.mark.parametrize(
    ("changes", "waits"),
    [({}, True), ({"loss_chunks": 8}, False), ({"fused_loss": True}, False), ({"stack": Stack.MEGATRON}, False)],
)
def test_the_block_of_dropped_logits_waits_for_their_gradient(changes: dict[str, Any], waits: bool) -> None:
    """The float32 tensors of the loss do not fit it, so that it is held beside them."""
    shape = llama(2, 4096, 32, 32, 11008, vocabulary=128256, sequence_length=16384)
    stage = training_memory(run(shape, **{"stack": Stack.COMPILED, **changes})).fullest
    logits = 2 * 16384 * 128256
    assert (stage.allocator_slack == pytest.approx(logits)) is waits


@pytest.mark.parametrize(
    ("changes", "buffer"),
    [({}, 2), ({"stack": Stack.TRANSFORMER_ENGINE}, 0), ({"attention": AttentionKernel.FLASH2}, 0)],
)
def test_unfused_attention_of_megatron_multiplies_into_a_buffer_that_stays(
    changes: dict[str, Any], buffer: int
) -> None:
    """Two bytes a score of a layer, beside the workspaces of libraries."""
    plan = {"stack": Stack.MEGATRON, "attention": AttentionKernel.FUSED_SOFTMAX, "tp": 2, "micro_batch": 4, **changes}
    shape = llama(2, 4096, 32, 32, 11008, sequence_length=1024)
    assert training_memory(run(shape, **plan)).fullest.workspace == 28 * MIB + buffer * 4 * 16 * 1024**2
