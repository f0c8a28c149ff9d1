"""Images and sounds among tokens, put in the same places in every sample so that their number does not depend on data.

Models of transformers write the features of an image over the tokens that stand for it, wherever these are
(``masked_scatter``), after counting them. A captured step has fixed shapes: here the features of a sample come first,
and its other tokens behind them. What a step costs is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from simulator.errors import InputError

_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"


@contextmanager
def features_first() -> Iterator[None]:
    """While a model runs, let features stand at the beginning of each sample, those of one kind behind another's."""
    before = os.environ.get(_CHECKS)
    os.environ[_CHECKS] = "1"  # transformers compares the number of features with that of their tokens
    try:
        with _FeaturesFirst():
            yield
    finally:
        if before is None:
            del os.environ[_CHECKS]
        else:
            os.environ[_CHECKS] = before


class _FeaturesFirst(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or put features first in place of `Tensor.masked_scatter`."""
        if func is Tensor.masked_scatter and len(args) == 3 and args[0].dim() == 3:
            found = self._placed(args[0], args[2])
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))

    def _placed(self, embedded: Tensor, features: Tensor) -> Tensor | None:
        batch, length, width = embedded.shape
        if features.numel() % (batch * width):
            return None
        rows = features.reshape(batch, -1, width).to(embedded.dtype)
        first, behind = self.taken, self.taken + rows.shape[1]
        if behind > length:
            raise InputError(
                f"the images and sounds of a sample take {behind} of its tokens, more than the sequence length "
                f"{length}; use --seq-len {behind + 1} or more"
            )
        self.taken = behind
        return torch.cat([embedded[:, :first], rows, embedded[:, behind:]], dim=1)
