"""In float16 the loss is scaled, so that small gradients keep their digits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from planner.execution import optimizers
from planner.execution.interpreter import Interpreter
from planner.execution.machine import Held, RankContext
from planner.execution.optimizers import hyperparameters, loss_scale, make_step
from planner.instructions import LoweredPlan
from planner.networks import load_network
from planner.strategy.loading import lower_to_run
from tests.planner.execution.made import make_plan
from tests.planner.execution.small import LENGTH, VOCABULARY, place

SMALL = "blocks.0.attention.key.weight"
"""Its gradient is below 1e-4: as numbers of float16 have fewer digits."""


def gradient_of(name: str, precision: str) -> Tensor:
    """A parameter's gradient as its update is given it, without the scale, on one process."""
    plan = make_plan(place("gpt"), 1, batch=4)
    lowered = lower_to_run(plan, "plan.json", precision=precision)
    assert isinstance(lowered, LoweredPlan)
    found: dict[str, Tensor] = {}

    def keep(key: str, parameter: Tensor, gradient: Tensor) -> None:
        found[key] = gradient.double() / loss_scale(parameter.dtype)

    module = load_network(plan.network).build(0)
    dtype = getattr(torch, lowered.graph.nodes[lowered.graph.parameters[0].node].outputs[0].dtype)
    whole = {key: value.detach().to(dtype) for key, value in module.named_parameters(remove_duplicate=False)}
    names = [entry.name for entry in lowered.parameters]
    held = Held(
        parameters={key: whole[key].clone() for key in names}, optimizers={key: partial(keep, key) for key in names}
    )
    rank = RankContext(coordinates=(), groups=(), device=torch.device("cpu"))
    tokens = torch.arange(plan.micro_batch * LENGTH).view(-1, LENGTH) * 7 % VOCABULARY
    Interpreter(lowered, rank, held).run_step(lambda micro_batch: [tokens, tokens.roll(micro_batch + 1, 1)])
    return found[name]


@pytest.mark.slow
def test_small_gradients_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gradient_of(SMALL, "fp64")
    scaled = gradient_of(SMALL, "fp16")
    monkeypatch.setattr(optimizers, "LOSS_SCALES", {})
    plain = gradient_of(SMALL, "fp16")
    errors = [float((one - exact).norm() / exact.norm()) for one in (scaled, plain)]
    assert exact.abs().max() < 1e-4
    assert errors[0] < errors[1] / 2
    assert errors[0] < 2.0**-7


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", sorted(optimizers.DEFAULTS))
def test_updates_are_those_without_a_scale(name: str, offload: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 5, generator=generator).half()
    narrow, wide = start.clone(), start.float()
    on_narrow = make_step(name, hyperparameters(name), offload=offload)
    on_wide = make_step(name, hyperparameters(name))
    for _ in range(3):
        gradient = torch.randn(6, 5, generator=generator) / 1024
        scaled = (gradient * loss_scale(torch.float16)).half()
        on_narrow(narrow, scaled)
        on_wide(wide, scaled.float() / 1024)
    assert torch.equal(on_narrow.state[optimizers.MASTER], wide)
    assert torch.equal(narrow, wide.half())
