"""What is fixed of single units: between which of them the network is cut into stages, and which compute again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from planner.search.stages.fragments import Fragments, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPins:
    """Pins of single units of a network.

    Attributes
    ----------
    cuts : for each cut between chunks, in model order, the numbers of units that may lie before it; empty: free
    modes : code of the recompute mode of every unit; empty: free
    keeps : whether every unit, where it computes again, keeps what messages bring; empty: none does
    virtual : chunks of a pipeline rank, where cuts are fixed
    """

    cuts: tuple[range, ...] = ()
    modes: tuple[int, ...] = ()
    keeps: tuple[bool, ...] = ()
    virtual: int = 1

    def __bool__(self) -> bool:
        return bool(self.cuts or self.modes)

    @property
    def pieces(self) -> int | None:
        """Chunks of the network; None where cuts are free."""
        return len(self.cuts) + 1 if self.cuts else None

    def in_modes(
        self, kinds: Sequence[Fragments], counts: Sequence[int], modes: Sequence[IntArray]
    ) -> tuple[list[Fragments], list[int]]:
        """Kinds of unit in a row with the ways that the pinned modes leave, parted where modes differ.

        Parameters
        ----------
        modes
            For each kind the mode of each of its ways.
        """
        if not self.modes:
            return [*kinds], [*counts]
        parted: list[Fragments] = []
        numbers: list[int] = []
        begin = 0
        for kind, count, of_ways in zip(kinds, counts, modes, strict=True):
            for mode, members in groupby(self.modes[begin : begin + count]):
                parted.append(kind.take(np.flatnonzero(of_ways == mode)))
                numbers.append(len(list(members)))
            begin += count
        return parted, numbers


FREE = UnitPins()
"""Nothing is fixed."""
