"""How many layers of each pipeline stage, or of each of its chunks, a setting is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.checks import integer
from simulator.errors import ContextError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """So many of the first layers.

    Attributes
    ----------
    key : who says so, as it is written in the file
    rows : for each stage (one number stands for all) how many of its layers; with several rows one for each chunk of
        a stage. None stands for all layers.
    """

    key: str
    rows: tuple[tuple[int, ...], ...] | None

    def __bool__(self) -> bool:
        """Whether any layer is meant."""
        return self.rows is None or any(number for row in self.rows for number in row)

    def chosen(self, chunks: Sequence[int], stages: int) -> list[bool]:
        """Whether each layer is meant.

        Parameters
        ----------
        chunks
            Layers of every chunk, in the order of the network: chunk ``i`` is on stage ``i % stages``.

        Raises
        ------
        ContextError
            There is not one number for each stage, or not one row for each chunk of a stage.
        """
        if self.rows is None:
            return [True] * sum(chunks)
        if not self.rows:
            return [False] * sum(chunks)
        virtual = len(chunks) // stages
        said = shown(self.rows)
        if len(self.rows) not in (1, virtual):
            raise ContextError(
                f"{self.key}={said} has {len(self.rows)} rows for pp_interleave_num={virtual}; give one for each chunk "
                "of a stage, or one for all"
            )
        for row in self.rows:
            if len(row) not in (1, stages):
                raise ContextError(
                    f"{self.key}={said} has {len(row)} numbers for pipeline_stage={stages}; give one for each stage, "
                    "or one for all"
                )
        return [
            place < most for size, most in zip(chunks, self._most(chunks, stages), strict=True) for place in range(size)
        ]

    def _most(self, chunks: Sequence[int], stages: int) -> Iterator[int]:
        """Layers of every chunk that are meant; those of one row are taken from the first chunks of a stage on."""
        assert self.rows is not None
        rows = [row * stages if len(row) == 1 else row for row in self.rows]
        left = [*rows[0]]
        for number, size in enumerate(chunks):
            virtual, stage = divmod(number, stages)
            if len(rows) > 1:
                yield rows[virtual][stage]
            else:
                taken = min(left[stage], size)
                left[stage] -= taken
                yield taken


def read_counts(key: str, value: Any) -> LayerCounts:
    """Read True or False, a number, a list of numbers for stages, or one such list for each chunk of a stage.

    Raises
    ------
    ContextError
        It is none of these.
    """
    if isinstance(value, bool):
        return LayerCounts(key=key, rows=None if value else ())
    return LayerCounts(key=key, rows=read_rows(key, value, 0))


def read_rows(key: str, value: Any, least: int | None) -> tuple[tuple[int, ...], ...]:
    """Numbers for stages, in one row or in one for each chunk of a stage.

    >>> read_rows("offset", 1, None), read_rows("offset", [1, -1], None), read_rows("offset", [[1, 0], [0, -1]], None)
    (((1,),), ((1, -1),), ((1, 0), (0, -1)))
    """
    given = value if isinstance(value, list) else [value]
    rows = given if given and all(isinstance(row, list) for row in given) else [given]
    if not all(rows) or any(isinstance(n, bool) or not isinstance(n, int) for row in rows for n in row):
        raise ContextError(
            f"{key}={value!r} is no list of whole numbers; give one for each stage, such as [1, 0], or with "
            "pp_interleave_num such a list for each chunk of a stage, [[1, 0], [0, 0]]"
        )
    if least is not None:
        check = integer(least)
        return tuple(tuple(check(key, number) for number in row) for row in rows)
    return tuple(tuple(row) for row in rows)


def shown(rows: Sequence[Sequence[int]]) -> str:
    """Rows as they are written in a file."""
    return str([list(row) for row in rows]) if len(rows) > 1 else str([*rows[0]] if rows else [])
