"""Options that several commands share, and the reading of their values."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from planner.cli.terminal import DEBUG_KEY, Terminal
from planner.plans.pins import PIN_NAMES, read_pins
from planner.plans.request import OptimizerName, ParallelMode, Precision, Request, SearchMode
from simulator.errors import InputError

MAX_DEVICES = 2**20
MAX_COUNTS = 100
MAX_PLANS = 100
ELLIPSES = ("…", "...")


def option(name: str, text: str, metavar: str | None = None, parser: Callable[[str], object] | None = None) -> Any:
    """An option by its name, its help, what its value is called there, and how it is read."""
    return typer.Option(name, parser=parser, metavar=metavar, help=text)


def _remember_debug(context: typer.Context, wanted: bool) -> bool:
    context.meta[DEBUG_KEY] = wanted
    return wanted


def natural(value: str | int) -> int:
    """Read a whole number of at least one.

    >>> natural("8")
    8
    """
    return _whole(str(value), 1)


def natural_or_zero(value: str | int) -> int:
    """Read a whole number of at least zero."""
    return _whole(str(value), 0)


def how_many(value: str | int) -> int:
    """Read how many plans are wanted."""
    return _whole(str(value), 1, MAX_PLANS)


def rate(value: str | float) -> float:
    """Read a finite number above zero.

    >>> rate("0.001")
    0.001
    """
    return _number(
        str(value), sys.float_info.min, sys.float_info.max, "a finite number above 0; write for example 0.001"
    )


def seconds(value: str | float) -> float:
    """Read a time in seconds."""
    return _number(str(value), 0.1, 1e6, "a number of seconds from 0.1 to 1000000; write for example 60")


def _number(text: str, least: float, most: float, rule: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise typer.BadParameter(f"{text!r} is not {rule}")
    return number


def _whole(text: str, least: int, most: int | None = None) -> int:
    known = text.isascii() and text.isdecimal() and len(text) <= 15
    if not known or int(text) < least or (most is not None and int(text) > most):
        rule = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise typer.BadParameter(f"{text!r} is not a whole number {rule}; write for example 8")
    return int(text)


def _trust(context: typer.Context, given: bool) -> bool:
    """Let this command, and the processes that it starts, load saved programs."""
    if given:
        from planner.networks.trust import trust_files

        trust_files(True)
        context.call_on_close(lambda: trust_files(False))
    return given


JsonFlag = Annotated[bool, option("--json", "Print one JSON document on stdout and nothing else there.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what a script needs.")]
DebugFlag = Annotated[
    bool, typer.Option("--debug", callback=_remember_debug, is_eager=True, help="Show where an error comes from.")
]
TrustFile = Annotated[
    bool,
    typer.Option(
        "--trust-file", callback=_trust, is_eager=True, help="Load pt2:FILE, although that may run code in it."
    ),
]
Given = TypeVar("Given")
_FLAGS = {"as_json": JsonFlag, "quiet": QuietFlag, "debug": DebugFlag}


def tells(run: Callable[..., None]) -> Callable[..., None]:
    """Make a function that tells its `terminal` something a command, with the options that say how it does."""
    types = get_type_hints(run, include_extras=True)
    own = [one for name, one in signature(run).parameters.items() if name != "terminal"]
    return _command(run, [one.replace(annotation=types[one.name]) for one in own], run)


def takes(arguments: type[Given]) -> Callable[[Callable[[Given, Terminal], None]], Callable[..., None]]:
    """Make a function of one dataclass a command: each field is an argument or option, its own before inherited ones.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Greeting:
    ...     name: str
    ...     times: int = 1
    >>> @takes(Greeting)
    ... def greet(given: Greeting, terminal: Terminal) -> None:
    ...     print(f"hello {given.name}" * given.times)
    >>> list(signature(greet).parameters)
    ['name', 'times', 'as_json', 'quiet', 'debug']
    >>> greet(name="there")
    hello there
    """
    types = get_type_hints(arguments, include_extras=True)
    known = [field for field in fields(arguments) if field.init]  # type: ignore[arg-type]
    known.sort(key=lambda field: field.name not in arguments.__annotations__)
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=types[field.name],
        )
        for field in known
    ]

    def decorate(run: Callable[[Given, Terminal], None]) -> Callable[..., None]:
        return _command(run, parameters, lambda terminal, **values: run(arguments(**values), terminal))

    return decorate


def _command(
    run: Callable[..., None], parameters: Sequence[Parameter], call: Callable[..., None]
) -> Callable[..., None]:
    """The function `call` as a command of these parameters and of those that say how it tells what it finds."""
    flags = (Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind) for name, kind in _FLAGS.items())
    every = [*(one.replace(kind=Parameter.KEYWORD_ONLY) for one in parameters), *flags]

    @wraps(run)
    def command(*, as_json: bool = False, quiet: bool = False, debug: bool = False, **values: Any) -> None:
        call(terminal=Terminal.open(as_json=as_json, quiet=quiet, debug=debug), **values)

    command.__annotations__ = {one.name: one.annotation for one in every} | {"return": None}
    command.__signature__ = Signature(every, return_annotation=None)  # type: ignore[attr-defined]
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of commands that plan, None where not given."""

    global_batch: Annotated[int | None, option("--global-batch", "Samples of one step.", "N", natural)] = None
    sequence_length: Annotated[int | None, option("--seq-len", "Tokens of one sample.", "N", natural)] = None
    precision: Annotated[Precision | None, option("--precision", "Default: the profile's.")] = None
    optimizer: Annotated[OptimizerName | None, option("--optimizer", "Default: the network's.")] = None
    search_mode: Annotated[SearchMode | None, option("--search-mode", "Default: dynamic_programming.")] = None
    parallel_mode: Annotated[ParallelMode | None, option("--parallel-mode", "Default: auto_parallel.")] = None
    pins: Annotated[
        list[str] | None,
        option(
            "--pin",
            f"Fix a dimension, such as tp=8; may be given several times. Keys: {', '.join(PIN_NAMES)}.",
            "KEY=VALUE",
        ),
    ] = None
    software: Annotated[
        str | None,
        option(
            "--software",
            "The software it will run on, such as megatron_core; by default what is usual (meshwright software).",
            "NAME",
        ),
    ] = None
    attention: Annotated[
        str | None,
        option(
            "--attention",
            "How attention runs: flash, flash2 or vendor (fused), fused_softmax or unfused (scores in memory).",
            "KIND",
        ),
    ] = None
    norms: Annotated[
        str | None,
        option(
            "--norms",
            "How RMSNorm runs: fused (one kernel) or unfused (single operators); by default as the software has it.",
            "KIND",
        ),
    ] = None
    expert_imbalance: Annotated[
        float | None,
        option("--expert-imbalance", "Tokens of the busiest rank of experts over an even share [1].", "RATIO"),
    ] = None
    memory_headroom: Annotated[
        float | None,
        option(
            "--memory-headroom",
            "The part of a device's usable memory that a plan leaves free, such as 0.1.",
            "FRACTION",
        ),
    ] = None
    trust_file: TrustFile = False

    def asked(self) -> dict[str, Any]:
        """Return the options that were given, under the names of the fields of `planner.plans.request.Request`."""
        given = {one.name: getattr(self, one.name) for one in fields(Request) if hasattr(self, one.name)}
        given["pins"] = read_pins(self.pins or ())
        return {name: value for name, value in given.items() if value is not None}


Stragglers = Annotated[
    int | None, option("--stragglers", "Also the step with K slow ranks, drawn.", "K", natural_or_zero)
]
Slowdown = Annotated[float | None, option("--slowdown", "How much longer a slow rank computes [1.5].", "FACTOR", rate)]
SlowLinks = Annotated[
    list[str] | None, option("--slow-link", "One link of a level at a share of its bandwidth.", "LEVEL=SHARE")
]


def check_out(option: str, out: str | Path, read: Iterable[str | Path | None] = ()) -> None:
    """Say before the work begins that `out` cannot be written, or is among the files that the command reads."""
    from simulator.whole_file import check_writable

    target = Path(out).resolve()
    if target.exists() and any(path is not None and Path(path).resolve() == target for path in read):
        raise InputError(f"{option} {str(out)!r} is a file that this command reads; choose another name")
    check_writable(out)


def read_shares(texts: Iterable[str]) -> dict[str, float]:
    """Read ``NAME=SHARE`` texts, shares above 0 and at most 1.

    >>> read_shares(["InfiniBand=0.5"])
    {'InfiniBand': 0.5}
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.rpartition("="))
        try:
            share = float(value)
        except ValueError:
            share = math.nan
        if not name or not 0 < share <= 1:
            raise InputError(
                f"{text!r} is not LEVEL=SHARE with a share above 0, at most 1; write for example InfiniBand=0.5"
            )
        if name in found:
            raise InputError(f"{text!r}: {name} is named twice; name it once")
        found[name] = share
    return found


def read_settings(texts: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Read ``KEY=V1,V2,…`` texts.

    >>> read_settings(["network=400Gb,800Gb", "tp=1,2"])
    (('network', ('400Gb', '800Gb')), ('tp', ('1', '2')))
    """
    found = []
    for text in texts:
        key, _, values = (part.strip() for part in text.partition("="))
        given = tuple(value.strip() for value in values.split(","))
        if not key or not all(given) or len(set(given)) < len(given) or key in ("hw", "devices"):
            rule = "is an option of its own" if key in ("hw", "devices") else "is not KEY=V1,V2,… with each value once"
            raise InputError(f"--set {text!r} {rule}; write for example --set network=400Gb,800Gb")
        found.append((key, given))
    return tuple(found)


def read_profiles(text: str) -> tuple[str, ...]:
    """Read names of profiles, none empty or named twice."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise InputError(f"--hw {text!r}: a profile is empty or named twice; write for example dgx-a100,dgx-h100")
    return names


def read_device_counts(text: str) -> tuple[int, ...]:
    """Read device counts; an ellipsis continues the counts before it up to the one after it.

    The counts before the ellipsis are continued by their common ratio if that meets the count after
    it, else by their common difference.

    >>> read_device_counts("8,16,…,128")
    (8, 16, 32, 64, 128)
    >>> read_device_counts("8,16,...,40")
    (8, 16, 24, 32, 40)
    >>> read_device_counts("8, 24, 100")
    (8, 24, 100)
    """
    counts: list[int] = []
    continuing = False
    for item in (part.strip() for part in text.split(",")):
        if item in ELLIPSES:
            if continuing or len(counts) < 2:
                raise InputError(
                    f"--devices {text!r}: an ellipsis needs two counts before it and one after; "
                    "write for example 8,16,…,4096"
                )
            continuing = True
            continue
        count = _count(text, item)
        if counts and count <= counts[-1]:
            raise InputError(f"--devices {text!r}: {count} does not follow {counts[-1]}; write counts in rising order")
        counts.extend(_continued(text, counts, count) if continuing else [count])
        continuing = False
        if len(counts) > MAX_COUNTS:
            raise InputError(f"--devices {text!r}: more than {MAX_COUNTS} counts; name fewer")
    if continuing:
        raise InputError(f"--devices {text!r}: an ellipsis needs a count after it; write for example 8,16,…,4096")
    return tuple(counts)


def _count(text: str, item: str) -> int:
    if not item.isascii() or not item.isdecimal() or len(item) > 8 or not 1 <= int(item) <= MAX_DEVICES:
        raise InputError(
            f"--devices {text!r}: {item!r} is not a whole number from 1 to {MAX_DEVICES}; write for example 8,16,32"
        )
    return int(item)


def _continued(text: str, before: list[int], last: int) -> list[int]:
    first, second = before[0], before[1]
    pairs = list(itertools.pairwise(before))
    if second % first == 0 and all(b * first == a * second for a, b in pairs):
        found, at = [], before[-1]
        while at < last:
            at *= second // first
            found.append(at)
        if at == last:
            return found
    step = second - first
    if all(b - a == step for a, b in pairs) and (last - before[-1]) % step == 0:
        if (last - before[-1]) // step > MAX_COUNTS:
            raise InputError(f"--devices {text!r}: more than {MAX_COUNTS} counts; name fewer")
        return list(range(before[-1] + step, last + 1, step))
    shown = ", ".join(str(count) for count in before)
    raise InputError(
        f"--devices {text!r}: {shown} continued by ratio or by difference does not meet {last}; correct it or list all"
    )
