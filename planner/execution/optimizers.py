"""Optimizers as functions of a stored shard, so that they work on any piece of a parameter, and the scale of the loss.

All but LAMB are element-wise. LAMB needs the norms of whole tensors: each rank squares its own piece, the ranks add
that up, and with the sums each updates its piece.

In float16 gradients are taken of the loss times a scale, so that small ones keep their digits, and divided by it in
float32 before the update. A step whose gradients overflow is left out, and the scale halved; after many steps without
an overflow it is doubled. Micikevicius et al., *Mixed precision training* (arXiv:1710.03740), section 3.2; intervals
and factors are those of torch's ``GradScaler``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from planner.execution.memory import MappedStates
from simulator.errors import ExecutionError, InputError

FIRST_SCALE = 4096.0
LARGEST_SCALE = 32768.0
"""The largest power of two that float16 holds, in which the gradient of the loss begins."""
GROWTH_INTERVAL = 2000
"""Steps in a row without an overflow after which the scale is doubled."""
SCALED = frozenset({torch.float16})


@dataclass(slots=True, kw_only=True)
class LossScale:
    """The scale of one rank; powers of two round nothing.

    ``value`` is that of the next backward pass, ``applied`` that of the gradients of this step once it is settled,
    whose updates are left out if it ``skips``. ``good_steps`` counts the steps since the scale last changed.
    """

    value: float = 1.0
    good_steps: int = 0
    applied: float = 1.0
    skips: bool = False

    def settle(self, overflowed: bool) -> None:
        """Take note of whether the gradients of a step have overflowed anywhere.

        Raises
        ------
        ExecutionError
            They have without a scale.
        """
        self.skips, self.applied = overflowed, self.value
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            if self.value <= 1.0:
                raise ExecutionError(
                    "gradients are beyond float16 even where the loss is not scaled; use --precision bf16, or lower "
                    "--learning-rate if losses have grown"
                )
            self.value /= 2
        elif self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = min(2 * self.value, LARGEST_SCALE), 0


def first_scale(dtype: torch.dtype, wanted: float) -> LossScale:
    """The scale that training of parameters of a dtype begins with: that which is wanted, where it has one.

    >>> first_scale(torch.float16, 64.0).value, first_scale(torch.bfloat16, 64.0).value
    (64.0, 1.0)
    """
    return LossScale(value=wanted if dtype in SCALED else 1.0)


def unscaled(gradient: Tensor, divisor: float, scale: LossScale) -> Tensor:
    """A gradient as updates take it; in float32 where it came scaled."""
    if gradient.dtype in SCALED:
        return gradient.float() / (divisor * scale.applied)
    return gradient if divisor == 1 else gradient / divisor


def overflow(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """1 where a gradient holds what is no number, else 0, on a device; nothing waits for it."""
    finite = [torch.isfinite(gradient).all().to(device, non_blocking=True) for gradient in gradients]
    return torch.stack(finite).all().logical_not().float() if finite else torch.zeros((), device=device)


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
    "lamb": Hyperparameters(learning_rate=2e-3, epsilon=1e-6, weight_decay=1e-2),
}

FUSED_DEVICES = ("cpu", "cuda")
"""Devices on which torch has Adam in one kernel."""

State = dict[str, Tensor]
"""What an optimizer keeps of one piece from step to step, by name: tensors of the piece's shape, or scalars."""

MASTER = "master"
COUNT = "count"

StepFunction = Callable[[Tensor, Tensor], None]
"""Changes a parameter in place, given its gradient; keeps its own state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementStep:
    """An update that needs no more of a parameter than the piece: ``change`` is given piece, gradient and state."""

    change: Callable[[Tensor, Tensor, State], None]
    state: State = field(default_factory=dict)

    def __call__(self, parameter: Tensor, gradient: Tensor) -> None:
        """Update a piece in place."""
        self.change(parameter, gradient, self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedStep:
    """An update in two parts: what it needs of the whole tensor, then the change of this piece.

    ``begin`` gives what ranks with other pieces add up, given parameter and gradient; ``finish`` changes the parameter
    in place, given the sums.
    """

    begin: Callable[[Tensor, Tensor], Tensor]
    finish: StepFunction
    state: State

    def __call__(self, parameter: Tensor, gradient: Tensor) -> None:
        """Update a parameter that is whole."""
        self.finish(parameter, self.begin(parameter, gradient))


def hyperparameters(
    optimizer: str, learning_rate: float | None = None, global_batch: int | None = None
) -> Hyperparameters:
    """Look up an optimizer's constants, with another learning rate if given.

    With a batch given, momentum's default rate is in proportion to it, 0.1 for 256 samples: Goyal et al.,
    *Accurate, large minibatch SGD*, 2017.
    """
    if optimizer not in DEFAULTS:
        raise InputError(f"optimizer {optimizer!r} is not one of {', '.join(DEFAULTS)}; choose one of them")
    found = DEFAULTS[optimizer]
    if learning_rate is None:
        scaled = optimizer == "momentum" and global_batch is not None
        return replace(found, learning_rate=0.1 * global_batch / 256) if scaled and global_batch else found
    if not 0 < learning_rate < float("inf"):
        raise InputError(f"learning rate {learning_rate} is not a positive number; give one, such as 0.001")
    return replace(found, learning_rate=learning_rate)


def make_step(
    optimizer: str, constants: Hyperparameters, *, offload: bool = False, to: str = "host"
) -> ElementStep | SummedStep:
    """Make the update of one parameter; its state begins at zero with the first gradient.

    The formulas and their order of rounding are those of `torch.optim`, so that both agree to the last bits. With
    `offload` states lie in the memory of the host, or with `to` ``"disk"`` in files that it maps, and the host also
    updates: gradients go there, parameters come back.
    """
    settle = MappedStates().settle if to == "disk" else _to_host
    if optimizer == "lamb":
        found = _lamb(constants)
        return _summed_on_host(found, settle) if offload else found
    makers = {"sgd": _sgd, "momentum": _momentum, "adam": _adam, "adamw": _adamw}
    change = _in_single_precision(makers[optimizer](constants))
    return ElementStep(change=_on_host(change, settle) if offload else change)


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a parameter of this dtype is updated through a float32 copy."""
    return dtype.itemsize < torch.float32.itemsize


Change = Callable[[Tensor, Tensor, State], None]


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.is_cpu


class _HostCopy:
    """A parameter's piece as the host has it."""

    def __init__(self) -> None:
        self.piece: Tensor | None = None

    def of(self, parameter: Tensor) -> Tensor:
        """The copy, made of the parameter the first time; the parameter itself where it is on the host."""
        if _is_on_host(parameter):
            return parameter
        if self.piece is None:
            # Memory is pinned for whichever accelerator there is; a CPU has none to pin it for.
            self.piece = torch.empty_like(parameter, device="cpu", pin_memory=parameter.device.type != "cpu")
            self.piece.copy_(parameter)
        return self.piece


Settle = Callable[[State], None]
"""Puts states where they belong."""


def _to_host(state: State) -> None:
    state.update((name, value.cpu()) for name, value in state.items() if not value.is_cpu)


def _on_host(change: Change, settle: Settle) -> Change:
    """Change a copy on the host, with states that lie there, and copy the result back."""
    copy = _HostCopy()

    def host_change(parameter: Tensor, gradient: Tensor, state: State) -> None:
        settle(state)
        piece = copy.of(parameter)
        change(piece, gradient.cpu(), state)
        settle(state)
        if piece is not parameter:
            parameter.copy_(piece)

    return host_change


def _summed_on_host(step: SummedStep, settle: Settle) -> SummedStep:
    """Do the same where an update needs sums over whole parameters."""
    copy, state = _HostCopy(), step.state

    def begin(parameter: Tensor, gradient: Tensor) -> Tensor:
        settle(state)
        found = step.begin(copy.of(parameter), gradient.cpu()).to(parameter.device)
        settle(state)
        return found

    def finish(parameter: Tensor, sums: Tensor) -> None:
        piece = copy.of(parameter)
        step.finish(piece, sums.cpu())
        if piece is not parameter:
            parameter.copy_(piece)

    return SummedStep(begin=begin, finish=finish, state=state)


def _in_single_precision(change: Change) -> Change:
    """Keep a float32 copy of a parameter of low precision: small updates would round away in it."""

    def wide_change(parameter: Tensor, gradient: Tensor, state: State) -> None:
        if not is_narrow(parameter.dtype):
            change(parameter, gradient, state)
            return
        if MASTER not in state:
            state[MASTER] = parameter.float()
        change(state[MASTER], gradient.float(), state)
        parameter.copy_(state[MASTER])

    return wide_change


def _sgd(constants: Hyperparameters) -> Change:
    def change(parameter: Tensor, gradient: Tensor, state: State) -> None:
        parameter.add_(gradient, alpha=-constants.learning_rate)

    return change


def _momentum(constants: Hyperparameters) -> Change:
    """Update in one kernel, which reads and writes velocity and parameter once; op by op each is passed over twice."""

    def change(parameter: Tensor, gradient: Tensor, state: State) -> None:
        fused = parameter.device.type in FUSED_DEVICES
        if "velocity" not in state:
            state["velocity"] = torch.empty_like(parameter).copy_(gradient)
            parameter.add_(state["velocity"], alpha=-constants.learning_rate)
        elif not fused:
            state["velocity"].mul_(constants.momentum).add_(gradient)
            parameter.add_(state["velocity"], alpha=-constants.learning_rate)
        else:
            torch._fused_sgd_(
                [parameter],
                [_laid_out_as(parameter, gradient)],
                [state["velocity"]],
                weight_decay=0.0,
                momentum=constants.momentum,
                lr=constants.learning_rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )

    return change


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the parameter's order: fused kernels walk storage and would pair the wrong elements."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def _adam(constants: Hyperparameters) -> Change:
    """Adam: Kingma and Ba, *Adam: a method for stochastic optimization*, algorithm 1."""
    return _fused_adam(torch._fused_adam_, constants)


def _adamw(constants: Hyperparameters) -> Change:
    """Adam with decoupled decay: Loshchilov and Hutter, *Decoupled weight decay regularization*."""
    return _fused_adam(torch._fused_adamw_, constants)


def _begin_moments(state: State, like: Tensor, *, fused: bool = False) -> None:
    """Make Adam's moments with the first gradient, and count this one; only the fused kernel counts on its device."""
    if "first" not in state:
        state["first"], state["second"] = torch.zeros_like(like), torch.zeros_like(like)
        state[COUNT] = torch.zeros((), device=like.device if fused else "cpu")
    state[COUNT].add_(1)


def _fused_adam(kernel: Callable[..., None], constants: Hyperparameters) -> Change:
    """Update in one kernel; op by op, Adam reads and writes everything several times."""

    def change(parameter: Tensor, gradient: Tensor, state: State) -> None:
        fused = parameter.device.type in FUSED_DEVICES
        _begin_moments(state, parameter, fused=fused)
        if not fused:
            decay = constants.weight_decay if kernel is torch._fused_adamw_ else 0.0
            _plain_adam(parameter, gradient, state, decay, constants)
            return
        kernel(
            [parameter],
            [_laid_out_as(parameter, gradient)],
            [state["first"]],
            [state["second"]],
            [],
            [state[COUNT]],
            lr=constants.learning_rate,
            beta1=constants.beta1,
            beta2=constants.beta2,
            weight_decay=constants.weight_decay,
            eps=constants.epsilon,
            amsgrad=False,
            maximize=False,
        )

    return change


def _plain_adam(parameter: Tensor, gradient: Tensor, state: State, decay: float, constants: Hyperparameters) -> None:
    """Update op by op, for devices without the fused kernel."""
    first, second, count = state["first"], state["second"], int(state[COUNT])
    parameter.mul_(1 - constants.learning_rate * decay)
    first.lerp_(gradient, 1 - constants.beta1)
    second.mul_(constants.beta2).addcmul_(gradient, gradient, value=1 - constants.beta2)
    denominator = second.sqrt().div_((1 - constants.beta2**count) ** 0.5).add_(constants.epsilon)
    parameter.addcdiv_(first, denominator, value=-constants.learning_rate / (1 - constants.beta1**count))


def _lamb(constants: Hyperparameters) -> SummedStep:
    """LAMB: You et al., *Large batch optimization for deep learning* (arXiv:1904.00962), algorithm 2.

    With the direction ``u = m / (sqrt(v) + epsilon) + decay w`` of Adam's corrected moments, a parameter moves by
    ``rate ‖w‖ / ‖u‖ u``, and by ``rate u`` where a norm is zero. Parameters of low precision have a float32 copy.
    """
    state: State = {}
    begun: list[Tensor] = []

    def begin(parameter: Tensor, gradient: Tensor) -> Tensor:
        if is_narrow(parameter.dtype) and MASTER not in state:
            state[MASTER] = parameter.float()
        weight = state.get(MASTER, parameter)
        gradient = gradient.to(weight.dtype)
        _begin_moments(state, weight)
        count = int(state[COUNT])
        state["first"].lerp_(gradient, 1 - constants.beta1)
        state["second"].mul_(constants.beta2).addcmul_(gradient, gradient, value=1 - constants.beta2)
        denominator = (state["second"] / (1 - constants.beta2**count)).sqrt_().add_(constants.epsilon)
        direction = (state["first"] / (1 - constants.beta1**count)).div_(denominator)
        begun.append(direction.add_(weight, alpha=constants.weight_decay))
        return torch.stack([weight.square().sum(), direction.square().sum()])

    def finish(parameter: Tensor, sums: Tensor) -> None:
        weight, direction = sums.sqrt().unbind()
        ratio = torch.where((weight > 0) & (direction > 0), weight / direction, torch.ones_like(weight))
        changed = state.get(MASTER, parameter)
        changed.sub_(begun.pop().mul_(ratio * constants.learning_rate))
        if changed is not parameter:
            parameter.copy_(changed)

    return SummedStep(begin=begin, finish=finish, state=state)


class Lamb(torch.optim.Optimizer):
    """LAMB on whole parameters, formula by formula as published; `torch.optim` has none."""

    def __init__(self, parameters: list[torch.nn.Parameter], constants: Hyperparameters) -> None:
        super().__init__(parameters, {})
        self.constants = constants

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        c = self.constants
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            for name, beta, value in (("m", c.beta1, parameter.grad), ("v", c.beta2, parameter.grad**2)):
                state[name] = beta * state.get(name, torch.zeros_like(parameter)) + (1 - beta) * value
            m, v = state["m"] / (1 - c.beta1 ** state["step"]), state["v"] / (1 - c.beta2 ** state["step"])
            direction = m / (v.sqrt() + c.epsilon) + c.weight_decay * parameter
            sizes = float(parameter.norm()), float(direction.norm())
            ratio = sizes[0] / sizes[1] if min(sizes) > 0 else 1.0
            parameter.sub_(c.learning_rate * ratio * direction)


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
    if optimizer == "lamb":
        return Lamb(parameters, constants)
    return torch.optim.AdamW(
        parameters, lr=rate, betas=betas, eps=constants.epsilon, weight_decay=constants.weight_decay
    )
