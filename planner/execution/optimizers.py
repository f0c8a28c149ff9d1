"""Optimizers as element-wise functions of a stored shard, so that they work on any piece of a parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from simulator.errors import InputError, UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Constants of an optimizer; each optimizer reads those it knows."""

    learning_rate: float
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0


DEFAULTS = {
    "sgd": Hyperparameters(learning_rate=1e-2),
    "momentum": Hyperparameters(learning_rate=1e-2),
    "adam": Hyperparameters(learning_rate=1e-3),
    "adamw": Hyperparameters(learning_rate=3e-4, weight_decay=1e-2),
}

FUSED_DEVICES = ("cpu", "cuda")
"""Devices on which torch has Adam in one kernel."""

StepFunction = Callable[[Tensor, Tensor], None]
"""Changes a parameter in place, given its gradient; keeps its own state."""


def hyperparameters(
    optimizer: str, learning_rate: float | None = None, global_batch: int | None = None
) -> Hyperparameters:
    """Look up an optimizer's constants, with another learning rate if given.

    With a batch given, momentum's default rate is in proportion to it, 0.1 for 256 samples: Goyal et al.,
    *Accurate, large minibatch SGD*, 2017.
    """
    if optimizer == "lamb":
        raise UnsupportedError(
            "optimizer 'lamb' needs the norm of whole parameters, which execution does not gather yet; "
            "plan with --optimizer adamw"
        )
    if optimizer not in DEFAULTS:
        raise InputError(f"optimizer {optimizer!r} is not one of {', '.join(DEFAULTS)}; choose one of them")
    found = DEFAULTS[optimizer]
    if learning_rate is None:
        scaled = optimizer == "momentum" and global_batch is not None
        return replace(found, learning_rate=0.1 * global_batch / 256) if scaled and global_batch else found
    if not 0 < learning_rate < float("inf"):
        raise InputError(f"learning rate {learning_rate} is not a positive number; give one, such as 0.001")
    return replace(found, learning_rate=learning_rate)


def make_step(optimizer: str, constants: Hyperparameters) -> StepFunction:
    """Make the update of one parameter; its state begins at zero with the first gradient.

    The formulas and their order of rounding are those of `torch.optim`, so that both agree to the last bits.
    """
    makers = {"sgd": _sgd, "momentum": _momentum, "adam": _adam, "adamw": _adamw}
    return _in_single_precision(makers[optimizer](constants))


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a parameter of this dtype is updated through a float32 copy."""
    return dtype.itemsize < torch.float32.itemsize


def _in_single_precision(step: StepFunction) -> StepFunction:
    """Keep a float32 copy of a parameter of low precision: small updates would round away in it."""
    copies: list[Tensor] = []

    def wide_step(parameter: Tensor, gradient: Tensor) -> None:
        if not is_narrow(parameter.dtype):
            step(parameter, gradient)
            return
        if not copies:
            copies.append(parameter.float())
        step(copies[0], gradient.float())
        parameter.copy_(copies[0])

    return wide_step


def _sgd(constants: Hyperparameters) -> StepFunction:
    def step(parameter: Tensor, gradient: Tensor) -> None:
        parameter.add_(gradient, alpha=-constants.learning_rate)

    return step


def _momentum(constants: Hyperparameters) -> StepFunction:
    velocity: list[Tensor] = []

    def step(parameter: Tensor, gradient: Tensor) -> None:
        if velocity:
            velocity[0].mul_(constants.momentum).add_(gradient)
        else:
            velocity.append(gradient.clone())
        parameter.add_(velocity[0], alpha=-constants.learning_rate)

    return step


def _adam(constants: Hyperparameters) -> StepFunction:
    """Adam: Kingma and Ba, *Adam: a method for stochastic optimization*, algorithm 1."""
    return _fused_adam(torch._fused_adam_, constants)


def _adamw(constants: Hyperparameters) -> StepFunction:
    """Adam with decoupled decay: Loshchilov and Hutter, *Decoupled weight decay regularization*."""
    return _fused_adam(torch._fused_adamw_, constants)


def _fused_adam(kernel: Callable[..., None], constants: Hyperparameters) -> StepFunction:
    """Update in one kernel; op by op, Adam reads and writes everything several times."""
    first: list[Tensor] = []
    second: list[Tensor] = []
    count: list[Tensor] = []

    def step(parameter: Tensor, gradient: Tensor) -> None:
        if not first:
            first.append(torch.zeros_like(parameter))
            second.append(torch.zeros_like(parameter))
            count.append(torch.zeros((), device=parameter.device))
        count[0].add_(1)
        if parameter.device.type not in FUSED_DEVICES:
            decay = constants.weight_decay if kernel is torch._fused_adamw_ else 0.0
            _plain_adam(parameter, gradient, first[0], second[0], int(count[0]), decay, constants)
            return
        kernel(
            [parameter],
            # The kernel walks storage: a transposed gradient would be paired with the wrong elements.
            [gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)],
            first,
            second,
            [],
            count,
            lr=constants.learning_rate,
            beta1=constants.beta1,
            beta2=constants.beta2,
            weight_decay=constants.weight_decay,
            eps=constants.epsilon,
            amsgrad=False,
            maximize=False,
        )

    return step


def _plain_adam(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    count: int,
    decay: float,
    constants: Hyperparameters,
) -> None:
    """Update op by op, for devices without the fused kernel."""
    parameter.mul_(1 - constants.learning_rate * decay)
    first.lerp_(gradient, 1 - constants.beta1)
    second.mul_(constants.beta2).addcmul_(gradient, gradient, value=1 - constants.beta2)
    denominator = second.sqrt().div_((1 - constants.beta2**count) ** 0.5).add_(constants.epsilon)
    parameter.addcdiv_(first, denominator, value=-constants.learning_rate / (1 - constants.beta1**count))


def torch_optimizer(
    optimizer: str, constants: Hyperparameters, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make the `torch.optim` optimizer that `make_step` equals; the reference run uses it."""
    rate, betas = constants.learning_rate, (constants.beta1, constants.beta2)
    if optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate)
    if optimizer == "momentum":
        return torch.optim.SGD(parameters, lr=rate, momentum=constants.momentum)
    if optimizer == "adam":
        return torch.optim.Adam(parameters, lr=rate, betas=betas, eps=constants.epsilon)
    return torch.optim.AdamW(
        parameters, lr=rate, betas=betas, eps=constants.epsilon, weight_decay=constants.weight_decay
    )
