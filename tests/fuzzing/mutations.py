"""Inputs made from good ones: values of other types and extreme sizes, parts that are gone, and damaged bytes."""

from __future__ import annotations

import copy
import json
import re
from random import Random
from typing import Any

EXTREME: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 1000, 65536, 99_999, 10**6, 10**9),
    *(2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**39, 10**400),
    *(0.0, -0.0, 0.5, 1e-7, 5e-324, 1e-308, 1e15, 1e30, 1e308, -1.5, float("nan"), float("inf"), -float("inf")),
    *("", " ", "x", "0", "-1", "1e400", "nan", "a\0b", "\ud800", "×", "\u202e", "../..", "/dev/zero", "~nobody/x"),
    *("x" * 300, "x" * 5000, "1" * 5000, "%s%n", "{}", "*", "[", "S(0)", "S(-1)", "S(99999999999)", "R", "P"),
    *([], {}, [[]], [None], [0, 0], {"": None}, {"value": 1}, [1] * 300, [["x"] * 3] * 3),
)  # fmt: skip
TOKENS = (
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b",", b'"', b"'", b":", b"- ", b"&a ", b"*a", b"<<: ", b"? "),
    *(b"!!int ", b"!!float ''", b"!!bool x", b"!!timestamp x", b"!!set ", b"!!binary ", b"!!python/name:os.system "),
    *(b"{", b"}", b"[", b"]", b"[" * 60, b"---\n", b"...", b"|", b"%", b"NaN", b"1e999", b"-1", b"9" * 20, b"(5,)"),
    *("\u0661\u0662".encode(), "\u2028".encode(), "\u00b2".encode(), b"\\ud800", b"\\u0000", b"\x1b[31m", b"'descr'"),
    *(b"0x" + b"f" * 80, b"$((", b"${a:-", b"A=$A$A\n", b"\\\n", b"=[", b"(t|)*9999", b"{[]: 1}"),
)
NUMBERS = (0, 1, 3, 7, 1000, 65536, 99_999, 10**6, 10**9, 2**31, 10**12, 10**20, 10**400)
LONG = 1 << 18
"""Bytes of an input that repeats one piece: what is read in quadratic time shows there."""


def mutated(random: Random, seeds: list[bytes]) -> bytes:
    """One input: of a seed that is JSON often with other values, else with other bytes; a few are long."""
    seed = random.choice(seeds)
    if random.random() < 0.002:
        start = random.randrange(len(seed) + 1)
        piece = random.choice((*TOKENS, b"a", b"1", b" ", b"(", b"a ", b"a=b ", b"1,", seed[start : start + 8] or b"b"))
        return seed * random.choice((0, 1)) + piece * (LONG // len(piece))
    data = _data(seed)
    if data is not None and random.random() < 0.7:
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            data = _other(random, data)
        try:
            return json.dumps(data).encode()
        except ValueError:  # a number with too many digits
            return seed
    return _damaged(random, seed, seeds)


def _data(seed: bytes) -> Any:
    try:
        return json.loads(seed)
    except ValueError:
        return None


def _other(random: Random, data: Any) -> Any:
    """The data with one value, key or item changed, at a depth of its own."""
    if not isinstance(data, dict | list) or not data or random.random() < 0.1:
        return copy.deepcopy(random.choice(EXTREME))
    found = copy.copy(data)
    key = random.choice(list(found)) if isinstance(found, dict) else random.randrange(len(found))
    what = random.random()
    if what < 0.75:
        found[key] = _other(random, found[key])
    elif what < 0.85:
        del found[key]
    elif isinstance(found, dict):
        name = random.choice((*found, *(v for v in EXTREME if isinstance(v, str))))
        found[name] = random.choice((found[key], *EXTREME))
    else:
        found.insert(key, random.choice((found[key], *EXTREME)))
    return found


def _damaged(random: Random, seed: bytes, seeds: list[bytes]) -> bytes:
    content = bytearray(seed)
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        place = random.randrange(len(content) + 1)
        what = random.randrange(7)
        if what == 0:
            content[place:place] = random.choice(TOKENS)
        elif what == 1:
            content[place : place + random.choice((1, 2, 8, 40))] = b""
        elif what == 2:
            content[place : place + 1] = bytes([random.randrange(256)])
        elif what == 3:
            content[place : place + random.choice((1, 3, 9))] = random.choice(TOKENS)
        elif what == 4:
            other = random.choice(seeds)
            start = random.randrange(len(other) + 1)
            content[place:] = other[start:] if random.random() < 0.3 else content[place:]
        elif what == 5:
            numbers = list(re.finditer(rb"[0-9]+", content))
            if numbers:
                first, end = random.choice(numbers).span()
                content[first:end] = b"%d" % random.choice(NUMBERS)
        else:
            start = random.randrange(len(content) + 1)
            content[place:place] = content[start : start + random.choice((4, 30, 200))]
    return bytes(content[: 1 << 16])
