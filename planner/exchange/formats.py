"""The contract of an exchange format: it writes a training configuration and reads back what it wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias, get_args

from planner.exchange.training_config import CHEAP_MODULES, TrainingConfig, even_layers
from planner.plans.capability import NAME_ENDS, Capability, Offload, Overlap, capabilities
from simulator.checks import near_divisors
from simulator.errors import InputError
from simulator.input_file import FileKind

CONFIGURATION = FileKind(name="config", remedy="give a configuration of the framework", max_bytes=1 << 20)


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a configuration breaks: the key, its value, the rule, and what to do."""

    key: str
    value: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.rule}; {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The text of a file, and the environment variables that its job needs."""

    text: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfig:
    """What a file says.

    Attributes
    ----------
    config : what it says of the plan
    sizes : sizes of the network by the keys of a Hugging Face configuration, as far as the file states them
    not_read : keys that say nothing of the plan, or are not known
    violations : rules of the framework that the file breaks
    notes : what of the file is read only nearly, or has no effect
    software : the framework's software that its plan was predicted for; "" where the file does not state it
    """

    config: TrainingConfig
    sizes: Mapping[str, int | str] = field(default_factory=dict)
    not_read: tuple[str, ...] = ()
    violations: tuple[Violation, ...] = ()
    notes: tuple[str, ...] = ()
    software: str = ""


Rules: TypeAlias = Callable[[TrainingConfig], Iterator[Violation]]
OUTSIDE = frozenset(
    {
        *("optimizer", "micro_batch", "global_batch", "sequence_length", "num_layers", "first_layers", "last_layers"),
        *("mtp_layers", "overlap_gradients", "overlap_parameters"),
    }
)
"""Fields that the user's own code or launch command says where a format has no key for them."""


@dataclass(frozen=True, kw_only=True)
class ExchangeFormat:
    """One format of one framework.

    Attributes
    ----------
    name : of the format, and of the framework's table in `planner.plans.capability`
    version : the versions of the framework that read it
    suffix : usual ending of the file's name
    keys : the framework's name for each field, for messages
    also_silent : fields of `TrainingConfig` that a file does not say, beside those of `OUTSIDE` without a key
    write, read : from a configuration that the framework can run to text, and back; a file that is none, or a value
        of a wrong type, is an InputError
    recognises : whether a file, by its name and text, is of this format
    rules : rules of the framework across fields, beside those of its table
    timed_as : software whose times `check` takes where the table names none; "" for what is usual on the hardware
    """

    name: str
    version: str
    suffix: str
    keys: Mapping[str, str]
    write: Callable[[TrainingConfig], Written]
    read: Callable[[str, str], ReadConfig]
    recognises: Callable[[str, str], bool]
    also_silent: frozenset[str] = frozenset()
    rules: Rules = field(default=lambda config: iter(()))
    timed_as: str = ""

    @property
    def silent(self) -> frozenset[str]:
        """Fields that a file does not say."""
        return (OUTSIDE - self.keys.keys()) | self.also_silent

    @property
    def table(self) -> Capability:
        """The capability table of the framework."""
        return capabilities()[self.name]

    def violations(self, config: TrainingConfig) -> list[Violation]:
        """Rules that a configuration breaks: what holds everywhere, the framework's table, and its own rules."""
        found = [*_everywhere(config, self.keys), *_table(config, self.table, self.keys), *self.rules(config)]
        return list(dict.fromkeys(found))

    def stating(self, written: Written, software: str) -> Written:
        """The same with a comment that states what its plan is predicted for, if that is the framework's software.

        Segments of the allocator that grow are a variable that the job needs.
        """
        if self.suffix == ".json" or software.partition(NAME_ENDS)[0] not in self.table.software:
            return written
        said = f"# Predicted for the software {software}\n"
        if "expandable_segments=true" in software:
            line = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
            said = (line if self.suffix == ".sh" else f"# It needs: {line}") + said
        return replace(written, text=written.text + said)

    def stated_software(self, text: str) -> str:
        """The software that such a comment states; "" without one."""
        found = re.search(r"^# Predicted for the software (\S{1,1000})$", text, re.MULTILINE)
        return found[1] if found and found[1].partition(NAME_ENDS)[0] in self.table.software else ""


def _everywhere(config: TrainingConfig, keys: Mapping[str, str]) -> Iterator[Violation]:
    """Rules of arithmetic."""
    inner = prod(value or 1 for value in (config.tp, config.pp, config.cp))
    if config.devices is not None and (config.devices < 1 or config.devices % inner):
        yield Violation(
            keys.get("devices", "devices"),
            str(config.devices),
            f"tensor × pipeline × context parallelism = {inner} must divide the devices",
            f"use {max(1, round(config.devices / inner)) * inner} devices or other degrees",
        )
        return
    dp, each, batch = config.dp, config.micro_batch, config.global_batch
    if each is not None and each < 1:
        yield Violation(
            keys.get("micro_batch", "micro_batch"), str(each), "a micro-batch has at least one sample", "use 1 or more"
        )
        return
    if dp and each and batch is not None and batch % (dp * each):
        yield Violation(
            keys.get("global_batch", "global_batch"),
            str(batch),
            f"micro-batch {each} × {dp} data-parallel ranks must divide it",
            f"use {max(1, round(batch / (dp * each))) * dp * each}, or another micro-batch",
        )
    ep, pp = config.ep or 1, config.pp or 1
    if config.devices is not None and ep > 1:
        ranks = config.devices // pp // (config.etp or config.tp or 1)
        yield from divides(keys.get("ep", "ep"), ep, ranks, "ranks of a stage that experts are dealt out over")
    if pp == 1 and (config.vpp or 1) > 1:
        rule, remedy = "several chunks a rank need a pipeline", "use one chunk, or a pipeline of two ranks or more"
        yield Violation(keys.get("vpp", "vpp"), str(config.vpp), rule, remedy)
    if config.layers and len(config.layers) != pp * (config.vpp or 1):
        yield Violation(
            keys.get("layers", "layers"),
            " ".join(map(str, config.layers)),
            f"it gives {len(config.layers)} chunks, and there are {pp} × {config.vpp or 1}",
            "give each chunk its layers",
        )


def divides(key: str, value: int, number: int, what: str) -> Iterator[Violation]:
    """The rule that a degree divides a number of something."""
    if value > 1 and (number % value or not number):
        near = near_divisors(value, number)
        yield Violation(key, str(value), f"it must divide the {number} {what}", f"use {near or 'more of them'}")


def devices_of(text: str, unit: str) -> int | None:
    """Devices that a comment of an exported file states; None where none does.

    >>> devices_of("# A plan of Meshwright on 16 GPUs: add these", "GPUs")
    16
    """
    found = re.search(rf"^#.* ([0-9]{{1,12}}) {unit}", text, re.MULTILINE)
    return int(found[1]) if found else None


def unnamed_stages(config: TrainingConfig, key: str) -> Iterator[Violation]:
    """The rule of formats that name the first layer of each stage: the network has numbered layers."""
    if (config.pp or 1) > 1 and config.layers is not None and not config.num_layers:
        yield Violation(
            key, "", "stages are named by their layers, and the network is no row of layers", "plan with --pin pp=1"
        )


def apart_on_host(config: TrainingConfig, key: str) -> Iterator[Violation]:
    """The rule of formats that move parameters and optimizer states to the host with one key."""
    if bool(config.offload_optimizer) != bool(config.offload_parameters):
        yield Violation(key, "", "parameters and optimizer states go to the host together", "offload both or none")


def empty_chunks(config: TrainingConfig, key: str) -> Iterator[Violation]:
    """The rule of formats in which every chunk of a pipeline has a layer."""
    if config.layers and not all(config.layers):
        counts = "-".join(map(str, config.layers))
        remedy = "plan with --pin stage_layers=, one or more for each"
        yield Violation(key, counts, "every chunk has a layer or more", remedy)


def _table(config: TrainingConfig, table: Capability, keys: Mapping[str, str]) -> Iterator[Violation]:
    """What the framework's table leaves out, one field at a time."""
    for rounding in roundings(config, table):
        for name, value in rounding.changed:
            with_what = f" with {config.micro_batches} micro-batches on {config.pp} pipeline ranks"
            rule = f"{table.framework} {table.version} cannot run it{with_what if value in table.schedules else ''}"
            yield Violation(keys.get(name, name), str(value).lower(), rule, f"use {rounding.to}")
            break


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What a framework cannot run, what it runs instead, and the configuration with this one change."""

    what: str
    to: str
    changed: tuple[tuple[str, object], ...]
    config: TrainingConfig


Step: TypeAlias = Callable[[TrainingConfig, Capability], Mapping[str, object]]


def roundings(config: TrainingConfig, table: Capability) -> list[Rounding]:
    """What a framework cannot run of a configuration, each with the nearest that it can.

    They are in the order in which they are applied; `config` of each is that with this change alone.
    """
    found: list[Rounding] = []
    now = config
    for step in _STEPS:
        changes = {name: value for name, value in step(now, table).items() if getattr(now, name) != value}
        if not changes:
            continue
        changed = tuple((name, getattr(now, name)) for name in changes)
        now = replace(now, **changes)  # type: ignore[arg-type]
        found.append(
            Rounding(
                what=_shown(dict(changed)),
                to=_shown(changes),
                changed=changed,
                config=replace(config, **changes),  # type: ignore[arg-type]
            )
        )
    return found


def rounded(config: TrainingConfig, table: Capability) -> TrainingConfig:
    """The nearest configuration that a framework can run.

    Raises
    ------
    InputError
        The batch does not divide over the data-parallel ranks that result.
    """
    for one in roundings(config, table):
        config = replace(config, **{name: getattr(one.config, name) for name, _ in one.changed})
    if config.dp and config.micro_batch and config.global_batch and config.micro_batches is None:
        raise InputError(
            f"{table.framework} {table.version} cannot run this plan, and the nearest that it can has {config.dp} "
            f"data-parallel ranks, which do not divide the global batch {config.global_batch}; plan again with "
            f"--software {next(iter(table.software), table.framework)}"
        )
    return config


def _shown(values: Mapping[str, object]) -> str:
    """Fields as pins are written.

    >>> _shown({"schedule": "zbv", "vpp": 2, "sequence_parallel": True, "layers": (3, 4)})
    'schedule=zbv vpp=2 sequence_parallel=true layers=3,4'
    """
    return " ".join(f"{name}={_text(value)}" for name, value in values.items())


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "even"
    return str(value).lower()


_NEAREST_SCHEDULE = {
    **dict.fromkeys(("gpipe", "zb_h1", "zb_h2", "dualpipe", "interleaved_1f1b"), "1f1b"),
    **dict.fromkeys(("zbv", "dualpipe_v"), "interleaved_1f1b"),
}


def _context(config: TrainingConfig, table: Capability) -> Mapping[str, object]:
    if (config.cp or 1) == 1 or config.context_algorithm in (None, *table.context):
        return {}
    return {"context_algorithm": table.context[0]} if table.context else {"cp": 1, "context_algorithm": "none"}


def _experts(config: TrainingConfig, table: Capability) -> Mapping[str, object]:
    if (config.ep or 1) == 1:
        return {}
    if not table.expert_cut:
        return {"ep": 1, "etp": config.tp}
    tensor, cut = config.tp or 1, config.etp or 1
    if tensor == 1 or (cut in (1, tensor) and ("whole" if cut == 1 else "width") in table.expert_cut):
        return {}
    # Ranks that cut experts along their width get whole ones of their own, or the other way round.
    expert = config.ep or 1
    if "whole" in table.expert_cut:
        return {"etp": 1, "ep": expert * cut}
    return {"etp": tensor, "ep": expert // tensor if cut == 1 and expert % tensor == 0 else expert}


def _schedule(config: TrainingConfig, table: Capability) -> Mapping[str, object]:
    name, virtual, pipeline = config.schedule, config.vpp or 1, config.pp or 1
    if name is None:
        return {}
    while name not in table.schedules:
        name = _NEAREST_SCHEDULE[name]
    if name == "interleaved_1f1b" and config.micro_batches and not table.interleaves(pipeline, config.micro_batches):
        name = "1f1b"
    if name == "1f1b" and not table.runs_1f1b(pipeline, config.micro_batches or 1):
        name = "gpipe"
    if name == config.schedule:
        return {}
    if name in ("1f1b", "gpipe") and virtual > 1:
        return {"schedule": name, "vpp": 1, "layers": _joined(config.layers or (), pipeline)}
    return {"schedule": name}


def _joined(layers: tuple[int, ...], pipeline: int) -> tuple[int, ...]:
    """Layers of one chunk a rank, of as many neighbouring chunks as each had."""
    size = len(layers) // pipeline
    found = tuple(sum(layers[start : start + size]) for start in range(0, len(layers), size)) if size else ()
    return () if len(set(found)) <= 1 else found


def _sharding(config: TrainingConfig, table: Capability) -> Mapping[str, object]:
    level, known = config.optimizer_sharding, table.shardings(config.pp or 1)
    if level is None or level in known:
        return {}
    order = ("none", "zero1", "zero2", "zero3")
    # The next level that takes less memory, else the next that takes more.
    place = order.index(level)
    nearest = next((name for name in (*order[place:], *reversed(order[:place])) if name in known), "none")
    return {"optimizer_sharding": nearest, **({"shard_size": 0} if nearest == "none" else {})}


def _recompute(config: TrainingConfig, table: Capability) -> Mapping[str, object]:
    mode, modes = config.recompute, config.recompute_layers or ()
    if mode is None or mode in table.recompute:
        return {}
    order = ("none", "selective", "full")
    if mode == "mixed" and table.recompute_by_layer:
        # What computes again more takes less memory: the plan still fits.
        known = tuple("full" if one not in table.recompute else one for one in modes)
        if len(set(known)) > 1:
            return {} if known == modes else {"recompute_layers": known}
        return {"recompute": known[0], "recompute_layers": ()}
    found = max((mode for mode in modes), key=order.index, default=mode)
    nearest = next((name for name in order[order.index(found) :] if name in table.recompute), "none")
    count = 0
    if nearest == "full" and mode == "mixed" and modes and set(modes) <= {"none", "full"} and table.recompute_count:
        count = _most_full(modes, config)
    return {
        "recompute": nearest,
        "recompute_layers": (),
        "recompute_modules": CHEAP_MODULES[:2] if nearest == "selective" else (),
        "recompute_count": count,
    }


def _most_full(modes: tuple[str, ...], config: TrainingConfig) -> int:
    """Layers that compute again in the chunk that has most of them."""
    chunks = (config.pp or 1) * (config.vpp or 1)
    sizes = config.layers or even_layers(len(modes), chunks)
    start, most = 0, 0
    for size in sizes:
        most = max(most, sum(mode == "full" for mode in modes[start : start + size]))
        start += size
    return most


_STEPS: tuple[Step, ...] = (
    lambda c, table: (
        {} if table.pipeline or (c.pp or 1) == 1 else {"pp": 1, "vpp": 1, "schedule": "none", "layers": ()}
    ),
    lambda c, table: {} if table.tensor or (c.tp or 1) == 1 else {"tp": 1, "etp": 1, "sequence_parallel": False},
    _context,
    _experts,
    _schedule,
    lambda c, table: {} if table.uneven_stages or not c.layers else {"layers": ()},
    _sharding,
    lambda c, table: {} if not c.shard_size or c.optimizer_sharding in table.shard_groups else {"shard_size": 0},
    _recompute,
    lambda c, table: (
        {} if c.precision in (None, *table.precision) else {"precision": "fp32" if c.precision == "fp64" else "bf16"}
    ),
    lambda c, table: (
        {}
        if c.sequence_parallel is None or (c.tp or 1) == 1 or table.sequence_parallel == "free"
        else {"sequence_parallel": table.sequence_parallel == "always"}
    ),
    lambda c, table: {name: False for name in get_args(Offload) if getattr(c, name) and name not in table.offload},
    lambda c, table: {name: False for name in get_args(Overlap) if getattr(c, name) and name not in table.overlaps},
)
"""Degrees first: what they leave decides the rest."""
