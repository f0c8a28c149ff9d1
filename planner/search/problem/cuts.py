"""Cuts: in how many parts each dim of an operator's tensors is cut, whatever mesh axes do it."""

from __future__ import annotations

from dataclasses import dataclass

Parts = tuple[int, ...]
"""One number a dim: in how many parts it is cut, 1 where it is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCuts:
    """Cuts of an operator's inputs and outputs; empty says nothing."""

    inputs: tuple[Parts, ...]
    outputs: tuple[Parts, ...] = ()
