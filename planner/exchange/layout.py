"""Megatron's pipeline layout: which layers lie in which piece, as one line of letters.

``E`` is the embedding, ``t`` a layer, ``m`` a layer that predicts further tokens, ``L`` the loss; ``|`` ends a piece.
Pieces are in model order, piece k on pipeline rank k mod ranks. ``x*3`` repeats a letter and ``(...)*3`` a group.
Grammar: megatron/core/transformer/pipeline_parallel_layer_layout.py of megatron-core 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from simulator.errors import InputError

MOST_LETTERS = 100_000
_GROUP = re.compile(r"\(([^()]*)\)\*0*([0-9]{1,9})")
_LETTER = re.compile(r"(.)\*0*([0-9]{1,9})")


def read_layout(text: str) -> tuple[tuple[int, ...], int]:
    """Layers of each piece, and layers that predict further tokens.

    Raises
    ------
    InputError
        The text is no layout.

    >>> read_layout("Et*2|(tt|)*2t,mL")
    ((2, 2, 2, 1), 1)
    """
    expanded = text.replace(",", "").replace(" ", "")
    for pattern in (_GROUP, _LETTER):
        size = sum(len(found[1]) * int(found[2]) for found in pattern.finditer(expanded))
        if size > MOST_LETTERS:
            raise InputError(f"pipeline layout {text!r:.60}: it has more than {MOST_LETTERS} letters; correct it")
        expanded = pattern.sub(lambda found: found[1] * int(found[2]), expanded)
    if not re.fullmatch(r"[EtmL|]+", expanded):
        raise InputError(f"pipeline layout {text!r:.60}: it holds more than E, t, m, L, | and repetitions; correct it")
    units = expanded.replace("|", "")
    if not re.fullmatch(r"Et*m*L", units):
        raise InputError(
            f"pipeline layout {text!r:.60}: units must be one E, then layers t, then m, then one L; correct it"
        )
    return tuple(piece.count("t") for piece in expanded.split("|")), units.count("m")


def write_layout(layers: Sequence[int], mtp_layers: int = 0) -> str:
    """The layout of pieces with so many layers.

    >>> write_layout((3, 2, 2, 2, 1), 1)
    'Et*3|(tt|)*3tmL'
    """
    last = len(layers) - 1
    pieces = [
        ("E" if place == 0 else "") + _repeated("t", count) + ("m" * mtp_layers + "L" if place == last else "|")
        for place, count in enumerate(layers)
    ]
    groups = [(piece, len(list(same))) for piece, same in groupby(pieces)]
    return "".join(piece * size if size == 1 else f"({piece})*{size}" for piece, size in groups)


def _repeated(letter: str, count: int) -> str:
    return letter * count if count < 3 else f"{letter}*{count}"
