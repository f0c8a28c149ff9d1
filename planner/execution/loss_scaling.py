"""The scale of the loss in float16: as large as gradients allow, and the same on all ranks.

Gradients are taken of the loss times the scale, so that small ones keep their digits, and divided by it in float32
before the update. A step whose gradients overflow is left out, and the scale halved; after many steps without an
overflow it is doubled. Micikevicius et al., *Mixed precision training* (arXiv:1710.03740), section 3.2; intervals and
factors are those of torch's ``GradScaler``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simulator.errors import ExecutionError

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
