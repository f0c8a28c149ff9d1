"""What is fixed of single units: between which of them the network is cut into stages, and which compute again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from planner.networks.marks import Swap
from planner.search.stages.fragments import Fragments, IntArray
from planner.search.units.records import RECOMPUTE
from simulator.errors import InputError


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


_NUMBERED = re.compile(r"(.*)\.\d+$")
FREE = UnitPins()
"""Nothing is fixed."""


def layers_of(names: Sequence[str]) -> range:
    """Return where the layers lie among the units: the longest list of modules, or all units if there is no list.

    >>> layers_of(["embedding", "blocks.0", "blocks.1", "norm"])
    range(1, 3)
    """
    lists = Counter(found[1] for name in names if (found := _NUMBERED.match(name)))
    most = max(lists, key=lists.__getitem__, default="")
    members = [place for place, name in enumerate(names) if (found := _NUMBERED.match(name)) and found[1] == most]
    return range(members[0], members[-1] + 1) if members else range(len(names))


def of_layers(names: Sequence[str], stage_layers: Sequence[int] | None, again: int, virtual: int) -> UnitPins:
    """Stages of the given layers, and the layers that compute again.

    Layers are the units of the list of modules that has most of them; what lies before the given layers, such as an
    embedding, belongs to the first chunk, what lies behind them to the last. Each chunk of a rank computes as many of
    its layers again, the first ones (method ``block`` of Megatron-LM's ``--recompute-num-layers``).

    Parameters
    ----------
    names
        Of all units, in model order.
    stage_layers
        Layers of each chunk; None for one chunk of all.
    again
        Layers of a rank that compute again; 0: none is said.
    virtual
        Chunks of a rank.

    Raises
    ------
    InputError
        The chunks have more layers than the network.
    """
    found = layers_of(names)
    first, last = found.start, found.stop
    layers = tuple(stage_layers) if stage_layers is not None else (last - first,)
    front = last - sum(layers)
    if front < 0:
        raise InputError(
            f"pin stage_layers={'-'.join(map(str, layers))}: {sum(layers)} layers, but the network has {last}; give "
            "numbers that add up to its layers"
        )
    if (not layers[0] and not front) or (not layers[-1] and last == len(names)):
        raise InputError(
            f"pin stage_layers={'-'.join(map(str, layers))}: a chunk of 0 layers has the embedding or the head, and "
            "the network has none there; give every chunk at least one layer"
        )
    ends = [front + end for end in accumulate(layers)]
    modes = [0] * len(names) if again else []
    for begin, end in zip([front, *ends], ends, strict=False):
        recomputed = min(again // virtual, end - begin)
        modes[begin : begin + recomputed] = [RECOMPUTE.index("full")] * recomputed
    cuts = tuple(range(end, end + 1) for end in ends[:-1])
    return UnitPins(cuts=cuts, virtual=virtual, modes=tuple(modes))
