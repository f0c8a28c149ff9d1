"""What is fixed of single units: between which of them the network is cut into stages, and which compute again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from planner.networks.marks import Swap
from planner.search.stages.fragments import Fragments, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPins:
    """Pins of single units of a network.

    Attributes
    ----------
    cuts : for each cut between chunks, in model order, the numbers of units that may lie before it; empty: free
    modes : code of the recompute mode of every unit; empty: free
    swaps : what every unit has on the host between its passes, None for nothing; empty: nothing of any
    keeps : whether every unit, where it computes again, keeps what messages bring; empty: none does
    virtual : chunks of a pipeline rank, where cuts are fixed
    """

    cuts: tuple[range, ...] = ()
    modes: tuple[int, ...] = ()
    keeps: tuple[bool, ...] = ()
    swaps: tuple[Swap | None, ...] = ()
    virtual: int = 1

    def __bool__(self) -> bool:
        return bool(self.cuts or self.modes)

    @property
    def pieces(self) -> int | None:
        """Chunks of the network; None where cuts are free."""
        return len(self.cuts) + 1 if self.cuts else None

    def apart(
        self,
        kinds: Sequence[Fragments],
        counts: Sequence[int],
        modes: Sequence[IntArray],
        on_host: Callable[[Fragments], Fragments],
    ) -> tuple[list[Fragments], list[int]]:
        """Kinds of unit in a row with the ways that the pinned modes leave, parted where what is pinned differs.

        Parameters
        ----------
        modes
            For each kind the mode of each of its ways.
        on_host
            The ways of a unit with all that it keeps on the host.
        """
        if not self.modes and not self.swaps:
            return [*kinds], [*counts]
        parted: list[Fragments] = []
        numbers: list[int] = []
        begin = 0
        for kind, count, of_ways in zip(kinds, counts, modes, strict=True):
            for (mode, away), members in groupby(self._pinned(begin, count)):
                ways = kind if mode is None else kind.take(np.flatnonzero(of_ways == mode))
                parted.append(on_host(ways) if away else ways)
                numbers.append(len(list(members)))
            begin += count
        return parted, numbers

    def _pinned(self, begin: int, count: int) -> Iterator[tuple[int | None, bool]]:
        """Mode of each of some units, None where it is free, and whether all that it keeps is on the host."""
        for number in range(begin, begin + count):
            swap = self.swaps[number] if self.swaps else None
            yield self.modes[number] if self.modes else None, swap is not None and not swap.operators


FREE = UnitPins()
"""Nothing is fixed."""
