"""A configuration of another framework: is it legal, does it fit, how fast is it, and what would be better."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from planner.exchange.formats import CONFIGURATION, ExchangeFormat, ReadConfig, Violation
from planner.exchange.pinned import Pinned, pinned
from planner.exchange.registry import FORMATS
from planner.planning.one_stage import Candidate
from planner.planning.planning import capture_for, plan_network
from planner.planning.shared_tables import SharedTables
from planner.plans.request import PlanRequest
from simulator.errors import InputError, UnsupportedError

WORTH = 0.99
"""A plan is better where its step takes at most this part of the time."""
CHANGES: tuple[tuple[str, ...], ...] = (
    ("micro_batch",),
    ("recompute", "recompute_layers"),
    ("sequence_parallel", "tensor_overlap"),
    ("optimizer_sharding", "shard_size", "offload_optimizer", "offload_parameters"),
    ("schedule", "vpp", "stage_layers"),
    ("tp", "sequence_parallel", "tensor_overlap", "expert_cut"),
    ("pp", "schedule", "vpp", "stage_layers", "recompute_layers"),
    ("cp", "context_algorithm"),
    ("ep", "expert_messages", "expert_cut", "expert_overlap"),
)
"""Choices to change for plans near a configuration. The first name is the choice; the others depend on it."""
_PIN = re.compile(r"pins? (?:[\w]+=\S+ )*?(\w+)=([^\s:]+)[^:]*: (.*?)(?:; (.*))?$", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """A plan near a configuration: what was left free, and the plan."""

    changed: tuple[str, ...]
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of checking a configuration.

    Attributes
    ----------
    found : the plan as it is written, None where nothing predicts it (illegal, does not fit, no network or hardware)
    fits : whether it fits; None where that is not known
    infeasible : why it does not
    near : plans with one or two choices left free that are better, the best first
    best : the best plan of all that the framework can run
    """

    form: ExchangeFormat
    read: ReadConfig
    problems: tuple[Violation, ...]
    notes: tuple[str, ...] = ()
    found: Candidate | None = None
    fits: bool | None = None
    infeasible: str = ""
    near: tuple[Better, ...] = field(default=())
    best: Candidate | None = None

    @property
    def exit_code(self) -> int:
        """0 good, 2 illegal, 3 does not fit."""
        return 2 if self.problems else 3 if self.fits is False else 0


def read_file(path: Path, name: str | None) -> tuple[ExchangeFormat, ReadConfig]:
    """Read a configuration, of the format that is named or the one that recognises it.

    Raises
    ------
    InputError
        The file cannot be read, is of no known format, or breaks the format's grammar.
    """
    text = CONFIGURATION.text(path)
    if name is not None:
        form = FORMATS[name]
    else:
        found = next((one for one in FORMATS.values() if one.recognises(path.name, text)), None)
        if found is None:
            raise InputError(f"config {path}: of no known format ({', '.join(FORMATS)}); name it with --format")
        form = found
    return form, replace(form.read(text, str(path)), software=form.stated_software(text))


def check(
    path: Path, *, form: str | None = None, network: str | None = None, hardware: str | None = None,
    devices: int | None = None, better: bool = True,
) -> Checked:  # fmt: skip
    """Check a configuration.

    Parameters
    ----------
    form
        Name of its format; recognised where it is None.
    network, hardware, devices
        What it trains and where; without a network the sizes that the file states count.
    better
        Whether better plans are searched.

    Raises
    ------
    InputError
        The file cannot be read, or network or hardware are not known.
    """
    known, read = read_file(path, form)
    config = read.config if devices is None else replace(read.config, devices=devices)
    problems = tuple(dict.fromkeys([*read.violations, *known.violations(config)]))
    said = Checked(form=known, read=replace(read, config=config), problems=problems, notes=read.notes)
    if problems:
        return said
    missing = [
        option
        for option, value in (
            ("--network", network or "model_type" in read.sizes), ("--hw", hardware), ("--devices", config.devices)
        )
        if not value
    ]  # fmt: skip
    if missing:
        return replace(said, notes=(*said.notes, f"nothing is predicted without {' and '.join(missing)}"))
    with _network(network, read) as spec:
        base = PlanRequest(
            network=spec, hardware=str(hardware), devices=config.devices or 1, global_batch=config.global_batch,
            sequence_length=config.sequence_length, precision=config.precision, top=1, sensitivity=False,
            software=_software(known, read),
        )  # fmt: skip
        return _predicted(said, base, better=better)


def _software(form: ExchangeFormat, read: ReadConfig) -> str:
    """The software that runs a configuration: with habits of its own where nothing travels beside kernels."""
    if read.software:
        return read.software
    names = form.table.software
    waits = read.config.overlap_gradients is False and (read.config.dp or 1) > 1
    return "megatron_lm" if waits and "megatron_lm" in names else next(iter(names), form.timed_as)


@contextmanager
def _network(network: str | None, read: ReadConfig) -> Iterator[str]:
    """The network that is named, else one of the sizes that a file states."""
    if network is not None:
        yield network
        return
    sizes = dict(read.sizes)
    length = read.config.sequence_length or 0
    sizes["max_position_embeddings"] = max(length, int(sizes.get("max_position_embeddings", 0)), 1)
    with tempfile.TemporaryDirectory(prefix="meshwright-network-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(sizes))
        yield f"hf:{folder}"


def _predicted(said: Checked, base: PlanRequest, *, better: bool) -> Checked:
    shared = SharedTables(capture_for(base))
    try:
        asked = pinned(said.read.config, base, shared.graph)
        result = plan_network(asked.request, shared=shared)
    except UnsupportedError as error:
        return replace(said, notes=(*said.notes, f"not predicted: {error}"))
    except InputError as error:
        return replace(said, problems=(_violation(str(error), said.form.keys),))
    kept = ["layers of stages are kept as they are written"] if asked.request.pins.stage_layers else []
    said = replace(
        said, notes=(*said.notes, *asked.notes, *kept), fits=bool(result.candidates), infeasible=result.infeasible
    )
    if result.candidates:
        said = replace(said, found=result.candidates[0])
    return _compared(said, base, asked, shared) if better else said


def _violation(message: str, keys: Mapping[str, str]) -> Violation:
    """Turn an error about pins into a problem that names the framework's keys."""
    found = _PIN.search(" ".join(message.split()))
    if found is None:
        return Violation("", "", message, "")
    key, value, rule, remedy = found.groups()
    return Violation(keys.get(key, key), value, rule, remedy or "change it")


def _compared(said: Checked, base: PlanRequest, asked: Pinned, shared: SharedTables) -> Checked:
    """The same with better plans: one choice free, the best two of them free, everything free."""
    own = said.found.prediction.step_time_s if said.found is not None else float("inf")
    singles = [
        found
        for names in CHANGES
        if names[0] in asked.request.pins.said()
        and (found := _freed((names,), asked, shared)) is not None
        and found.candidate.prediction.step_time_s <= WORTH * own
    ]
    singles.sort(key=lambda one: one.candidate.prediction.step_time_s)
    near = singles
    if len(singles) > 1:
        names = [next(c for c in CHANGES if c[0] == one.changed[0]) for one in singles[:2]]
        both = _freed(tuple(names), asked, shared)
        if (
            both is not None
            and both.candidate.prediction.step_time_s <= WORTH * singles[0].candidate.prediction.step_time_s
        ):
            near = [both, *singles]
    best = next(iter(plan_network(base, shared=shared).candidates), None)
    return replace(said, near=tuple(near), best=best)


def _freed(changes: tuple[tuple[str, ...], ...], asked: Pinned, shared: SharedTables) -> Better | None:
    """Return the best plan when some choices are free, or None if no plan fits."""
    free = {name for names in changes for name in names}
    marks = asked.request.marks
    # Layers of stages and modes of layers go with the choice that they are part of.
    if marks is not None and free & {"pp", "schedule"}:
        marks = replace(marks, stages={}, virtual=1)
    if marks is not None and "recompute" in free:
        marks = replace(marks, recompute={})
    try:
        result = plan_network(replace(asked.request, pins=asked.request.pins.without(free), marks=marks), shared=shared)
    except InputError:
        return None
    changed = tuple(names[0] for names in changes)
    return Better(changed=changed, candidate=result.candidates[0]) if result.candidates else None
