"""Which parts of a layer compute again, as MindFormers' files name them, and the recomputation that this is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulator.checks import integer
from simulator.errors import ContextError, UnsupportedError
from simulator.program import Kernel, Phase

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """How many layers, from the first one on, a key counts.

    Attributes
    ----------
    key : the key, as the file has it
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


KEPT, SELECTIVE, WHOLE = "none", "selective", "full"
EVERYTHING = ""
"""In place of a pattern: all that is cheap in ``select_recompute``."""
FOREIGN = re.compile(r"((feed_forward|attention|attention_norm|ffn_norm)\b|\.\*).*\.(norm|mul|silu|reshape|cast|add)")
"""Parts of a layer of MindFormers' own decoders, once backslashes are out: they stand for all that is cheap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """Parts of some layers.

    ``pattern`` is a regular expression for the whole name of a module or operator inside a layer (``mlp.act.*``), or
    `EVERYTHING`; ``counts`` are the layers that it is for.
    """

    key: str
    pattern: str
    counts: LayerCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of a row of equal ones: the names by which each operator goes, of those that a mode computes again.

    ``inner`` are the rests of their names behind that of the layer.
    """

    network: str
    names: dict[int, tuple[str, ...]]
    inner: dict[int, str]
    whole: frozenset[int]
    selective: frozenset[int]

    @classmethod
    def of(cls, graph: OperatorGraph, run: Run) -> Layer:
        """A layer of a run; views, which nobody computes, are left out."""
        from planner.graph.chain import chain
        from planner.graph.recompute import recomputed

        inside = re.compile(rf"{re.escape(run.prefix)}\.[^.]+\.?(.*)")
        found: dict[str, set[int]] = {SELECTIVE: set(), WHOLE: set()}
        names: dict[int, tuple[str, ...]] = {}
        inner: dict[int, str] = {}
        second = set(run.second)
        for unit in chain(graph).units:
            if second.isdisjoint(unit.nodes):
                continue
            for mode, members in found.items():
                members.update(
                    i for i in recomputed(graph, unit.nodes, mode) if graph.nodes[i].kernel is not Kernel.VIEW
                )
        for index in second:
            node = graph.nodes[index]
            matched = inside.fullmatch(node.module)
            if matched is not None and node.phase is Phase.FORWARD and node.kernel is not Kernel.VIEW:
                inner[index] = re.sub(rf"^{re.escape(run.prefix)}\.[^./]+", "", node.name)
                names[index] = _names(matched[1], node.name.rpartition("/")[2])
        return cls(
            network=graph.network,
            names=names,
            inner=inner,
            whole=frozenset(found[WHOLE] & names.keys()),
            selective=frozenset(found[SELECTIVE] & names.keys()),
        )

    def matching(self, choice: LayerChoice) -> frozenset[int]:
        """Operators that a pattern names; ContextError where there are none."""
        if choice.pattern == EVERYTHING:
            return self.selective
        pattern = re.compile(choice.pattern)
        found: frozenset[int] = frozenset(
            i for i, names in self.names.items() if any(pattern.fullmatch(name) for name in names)
        )
        if not found and is_foreign(choice.pattern):
            return self.selective
        if not found:
            raise ContextError(
                f"{choice.key} has pattern {choice.pattern!r}, which names nothing in a layer of {self.network}; "
                f"there are {self.said(self.names)}"
            )
        return found

    def said(self, nodes: Iterable[int]) -> str:
        """Operators for a message."""
        found = [*dict.fromkeys(self.names[i][0] for i in sorted(nodes))]
        return ", ".join(found[:12]) + (f" and {len(found) - 12} more" if len(found) > 12 else "")


def is_foreign(pattern: str) -> bool:
    r"""Whether a pattern names a part of MindFormers' own decoders.

    >>> is_foreign(r"feed_forward\.w1\.activation\.silu"), is_foreign(r".*\.norm"), is_foreign("gelu")
    (True, True, False)
    """
    return FOREIGN.fullmatch(pattern.replace("\\", "")) is not None


def _names(module: str, operator: str) -> tuple[str, ...]:
    """Names of an operator inside a layer: its own, and of the modules around it.

    >>> _names("mlp.up", "addmm"), _names("", "add.1")
    (('mlp.up.addmm', 'mlp.up', 'mlp'), ('add', 'add.1'))
    """
    parts = module.split(".") if module else []
    outer = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    plain = re.sub(r"\.\d+$", "", operator)
    own = [".".join([*parts, name]) for name in dict.fromkeys((plain, operator))]
    return (*own, *outer)


def layer_mode(layer: Layer, whole: bool, chosen: Sequence[LayerChoice], left_out: Sequence[LayerChoice]) -> str:
    """The recomputation of a layer, whole or of the chosen parts, but for what is left out.

    Raises
    ------
    ContextError
        A pattern names nothing.
    UnsupportedError
        What is left is neither the whole layer nor all that is cheap in it.
    """
    asked = layer.whole if whole else frozenset[int]().union(*map(layer.matching, chosen))
    asked = (asked & layer.whole).difference(*map(layer.matching, left_out))
    if asked == layer.whole:
        return WHOLE
    if asked == layer.selective:
        return SELECTIVE
    if not asked:
        return KEPT
    more, less = layer.selective - asked, asked - layer.selective
    said = " and ".join(
        part
        for part in (
            f"leave out {layer.said(less)}" if less else "",
            f"name {layer.said(more)} as well" if more else "",
        )
        if part
    )
    key = (*chosen, *left_out)[0].key
    raise UnsupportedError(
        f"{key} is not supported yet for {layer.said(asked)} alone: layers of {layer.network} compute again whole, or "
        f"all but products with parameters, convolutions, lookups and attention; {said}, or use True"
    )


def read_choices(key: str, value: Any) -> tuple[LayerChoice, ...]:
    """Read True, counts of layers, a list of patterns, or patterns with what each is for.

    Raises
    ------
    ContextError
        It is none of these, or a pattern is no regular expression.
    """
    if value is None or value is False:
        return ()
    if isinstance(value, dict):
        given = {pattern_of(key, pattern): counts for pattern, counts in value.items()}
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        given = {pattern_of(key, pattern): True for pattern in value}
    else:
        given = {EVERYTHING: value}
    found = (
        LayerChoice(key=key, pattern=pattern, counts=read_counts(f"{key}[{pattern!r}]" if pattern else key, counts))
        for pattern, counts in given.items()
    )
    return tuple(choice for choice in found if choice.counts)


def pattern_of(key: str, pattern: Any) -> str:
    """A regular expression; ContextError where it is none."""
    try:
        if isinstance(pattern, str) and pattern:
            re.compile(pattern)
            return pattern
    except re.error as error:
        raise ContextError(f"{key} has {pattern!r}, which is no regular expression: {error}; correct it") from error
    raise ContextError(
        rf"{key} has {pattern!r} for a pattern; write the name of a part of a layer, such as 'feed_forward\.act'"
    )
