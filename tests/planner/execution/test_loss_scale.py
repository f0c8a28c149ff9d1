"""In float16 the loss is scaled, so that small gradients keep their digits and large ones do not overflow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from planner.execution import optimizers
from planner.execution.checkpoints.checkpoint import read_record
from planner.execution.interpreter import Interpreter, Neighbours
from planner.execution.machine import Held, RankContext
from planner.execution.optimizers import LARGEST_SCALE, LossScale, first_scale
from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.execution.verification import TOLERANCES
from planner.lowering.instructions import CheckGradients, Communicate, SettleScale, Update
from planner.networks import load_network
from planner.planning.loading import lower_to_run
from simulator.errors import ExecutionError
from tests.planner.execution.made import make_plan
from tests.planner.execution.small import LENGTH, VOCABULARY, place

Run = Callable[[], object]
SMALL = "blocks.0.attention.key.weight"
"""Its gradient is below 1e-4: as numbers of float16 have fewer digits."""


def narrow_interpreter(precision: str, scale: LossScale, update: Callable[[str, Tensor, Tensor], None]) -> Run:
    """One process that trains a network of two layers; returns what runs a step."""
    plan = make_plan(place("gpt"), 1, batch=4)
    lowered = lower_to_run(plan, "plan.json", precision=precision)
    module = load_network(plan.network).build(0)
    dtype = getattr(torch, lowered.graph.nodes[lowered.graph.parameters[0].node].outputs[0].dtype)
    whole = {key: value.detach().to(dtype) for key, value in module.named_parameters(remove_duplicate=False)}
    names = [entry.name for entry in lowered.ranks[0].parameters]
    held = Held(
        parameters={key: whole[key].clone() for key in names}, optimizers={key: partial(update, key) for key in names}
    )
    rank = RankContext(coordinates=(), groups=(), device=torch.device("cpu"), scale=scale)
    tokens = torch.arange(plan.micro_batch * LENGTH).view(-1, LENGTH) * 7 % VOCABULARY
    interpreter = Interpreter(lowered, rank, Neighbours(rank=0, rank_of=(0,), groups={}), held)
    return lambda: interpreter.run_step(lambda micro_batch: [tokens, tokens.roll(micro_batch + 1, 1)])


def gradient_of(name: str, precision: str, scale: float) -> Tensor:
    """A parameter's gradient as its update is given it, on one process."""
    found: dict[str, Tensor] = {}

    def keep(key: str, parameter: Tensor, gradient: Tensor) -> None:
        found[key] = gradient.double()

    narrow_interpreter(precision, LossScale(value=scale), keep)()
    return found[name]


@pytest.mark.slow
def test_small_gradients_keep_their_digits() -> None:
    exact = gradient_of(SMALL, "fp64", 1.0)
    scaled, plain = (gradient_of(SMALL, "fp16", scale) for scale in (4096.0, 1.0))
    errors = [float((one - exact).norm() / exact.norm()) for one in (scaled, plain)]
    assert exact.abs().max() < 1e-4
    assert errors[0] < errors[1] / 2
    assert errors[0] < 2.0**-7


@pytest.mark.slow
def test_a_step_that_overflows_changes_nothing() -> None:
    scale, updated = LossScale(value=LARGEST_SCALE * 2**6), []
    run = narrow_interpreter("fp16", scale, lambda key, *_: updated.append(key))
    overflows = 0
    while scale.good_steps == 0:
        assert not updated
        before = scale.value
        run()
        overflows += scale.skips
        assert scale.value == (before / 2 if scale.skips else before)
    assert overflows
    assert updated


def test_the_scale_follows_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "GROWTH_INTERVAL", 3)
    scale = LossScale(value=1024.0)
    seen = []
    for overflowed in (False, False, True, False, False, False, False):
        scale.settle(overflowed)
        seen.append((scale.applied, scale.value, scale.skips))
    assert [one[1] for one in seen] == [1024, 1024, 512, 512, 512, 1024, 1024]
    assert seen[2] == (1024, 512, True), "gradients are of the scale before"
    assert seen[5] == (512, 1024, False)
    scale = LossScale(value=LARGEST_SCALE, good_steps=2)
    scale.settle(False)
    assert scale.value == LARGEST_SCALE
    assert float(torch.tensor(LARGEST_SCALE).half()) == LARGEST_SCALE
    with pytest.raises(ExecutionError, match="even where the loss is not scaled; use --precision bf16"):
        LossScale(value=1.0).settle(True)


def test_other_precisions_are_not_scaled() -> None:
    assert {first_scale(dtype, 64.0).value for dtype in (torch.bfloat16, torch.float32, torch.float64)} == {1.0}
    lowered = lower_to_run(make_plan("zoo:mlp", 2, batch=16, dp=2), "plan.json", precision="bf16")
    assert not any(isinstance(one, CheckGradients) for one in lowered.ranks[0].update)


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}])
def test_ranks_agree_before_any_update(pins: dict[str, int]) -> None:
    plan = make_plan(place("gpt"), 4, batch=8, micro_batch=2, precision="fp16", **pins)
    lowered = lower_to_run(plan, "plan.json", precision="fp16")
    for given in [one.update for one in lowered.ranks]:
        kinds = [type(one) for one in given]
        if SettleScale not in kinds:
            continue
        check, settle, update = (kinds.index(one) for one in (CheckGradients, SettleScale, Update))
        assert check < settle < update
        axes = {one.axis for one in given[check:settle] if isinstance(one, Communicate)}
        several = {number for number, axis in enumerate(lowered.mesh.axes) if axis.size > 1}
        assert axes - {len(lowered.mesh.axes), len(lowered.mesh.axes) + 1} == several
        assert len(axes) == len(several) + (plan.pipeline > 1), "and all stages"
        checked = given[check]
        assert isinstance(checked, CheckGradients)
        updated = {one.gradient for one in given if isinstance(one, Update)}
        assert updated == set(checked.gradients)


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"dp": 2, "optimizer_sharding": "zero1"}, {"pp": 2}])
def test_steps_are_left_out_as_in_one_process(
    pins: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "FIRST_SCALE", 2.0**18)
    plan = make_plan(place("llama"), 2, batch=8, micro_batch=2, precision="fp16", **pins)
    options = {"precision": "fp16", "device": "cpu", "data": "synthetic", "learning_rate": 0.01}
    found = execute_plan(plan, ExecuteOptions(strategy="", **options, steps=6, verify=True, save=tmp_path / "a"))
    assert found.max_loss_difference is not None
    assert found.max_loss_difference < TOLERANCES["fp16"] / 2
    first = read_record(tmp_path / "a" / "step-00000006")
    assert first.loss_scale is not None
    assert first.loss_scale < 2.0**18
    assert 0 < first.good_steps < 6, "some steps were left out, the last was not"
    resumed = ExecuteOptions(strategy="", **options, steps=7, resume=tmp_path / "a", save=tmp_path / "b")
    execute_plan(plan, resumed)
    second = read_record(tmp_path / "b" / "step-00000007")
    assert (second.loss_scale, second.good_steps) == (first.loss_scale, first.good_steps + 1)
