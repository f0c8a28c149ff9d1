"""The options of `meshwright plan` in a YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError

from planner.cli.options import MAX_PLANS
from planner.plans.exchange import UNASKED, Exchange
from planner.plans.pins import FREE, Pins, read_pins
from planner.plans.request import OptimizerName, ParallelMode, Precision, SearchMode
from simulator.checks import nearest
from simulator.errors import InputError
from simulator.input_file import FileKind

if TYPE_CHECKING:
    from planner.exchange.mindspore.mindformers import Translated
    from planner.networks.marks import Marks

CONFIG = FileKind(name="config", remedy="give a YAML file whose keys are names of options")

Value = TypeVar("Value")
Natural = Annotated[int, Field(strict=True, ge=1)]


def _pins(value: object) -> object:
    """Pins are a mapping in YAML, or a list of texts as on the command line."""
    if isinstance(value, dict):
        return Pins.read(value)
    return read_pins(map(str, value)) if isinstance(value, list) else value


class PlanSettings(BaseModel):
    """The options of ``plan``; None where not given."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    network: str | None = None
    hardware: str | None = Field(default=None, alias="hw")
    devices: Natural | None = None
    global_batch: Natural | None = None
    sequence_length: Natural | None = Field(default=None, alias="seq_len")
    precision: Precision | None = None
    optimizer: OptimizerName | None = None
    search_mode: SearchMode | None = None
    parallel_mode: ParallelMode | None = None
    pins: Annotated[InstanceOf[Pins], BeforeValidator(_pins), Field(alias="pin")] = FREE
    hints: str | None = None
    software: str | None = None
    attention: str | None = None
    norms: str | None = None
    expert_imbalance: float | None = None
    memory_headroom: float | None = None
    top: Annotated[int, Field(strict=True, ge=1, le=MAX_PLANS)] | None = None
    out: str | None = None


def _settings(path: Path, data: Mapping[Any, Any]) -> PlanSettings:
    """The options in a file; keys are written with ``-`` or ``_``."""
    known = [one.alias or name for name, one in PlanSettings.model_fields.items()]
    settings: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise InputError(f"config {path}: {str(key)!r} is no option of plan; {nearest(name, known)}")
        if name in settings:
            raise InputError(f"config {path}: {name} is given twice; keep one")
        settings[name] = value
    try:
        with _naming(path):
            return PlanSettings.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(f"config {path}: {field}: {first['input']!r:.60} is wrong: {first['msg']}") from error


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """Options of the command line and a file together, and what to say of the file.

    ``marks`` are for single layers of the network, ``exchange`` says how tensors travel, and ``stored`` is the strategy
    file that the plan is read from, empty where it is searched.
    """

    settings: PlanSettings
    notes: tuple[str, ...] = ()
    marks: Marks | None = None
    exchange: Exchange = UNASKED
    stored: str = ""


def with_config(given: PlanSettings, path: Path) -> GivenOptions:
    """Options of the command line over those of a file, which has keys of options or is in MindFormers' style.

    Raises
    ------
    InputError
        The file cannot be read, is no YAML mapping, or holds an unknown key or a wrong value; or degrees of a file in
        MindFormers' style contradict the devices or the network.
    """
    from planner.exchange.mindspore.mindformers import is_mindformers, translate
    from planner.networks.mindformers_config import transformers_config

    data = CONFIG.yaml(CONFIG.read(path), path, strict=False)
    if not isinstance(data, dict):
        raise InputError(f"config {path}: must be a mapping of option names to values; write for example 'devices: 8'")
    if not is_mindformers(data):
        return GivenOptions(settings=merged(given, _settings(path, data)))
    with _naming(path):
        translated = translate(data)
        options = {**translated.options, "pin": {**translated.options.get("pin", {}), **translated.pins}}
        settings = merged(given, _with_modes(_settings(path, options), translated))
        if settings.network is None and transformers_config(data):
            settings = settings.model_copy(update={"network": f"hf:{path}"})
        settings, marks, notes = _checked(settings, translated)
        exchange = translated.exchange
    told = (*translated.notes, *notes)
    return GivenOptions(settings=settings, notes=told, marks=marks, exchange=exchange, stored=translated.stored)


def _with_modes(file: PlanSettings, translated: Translated) -> PlanSettings:
    found: dict[str, Any] = {"parallel_mode": translated.parallel_mode}
    if translated.search_mode is not None:
        found["search_mode"] = translated.search_mode
    if file.devices is None and translated.devices is not None:
        found["devices"] = translated.devices
    saved = translated.context.get("strategy_ckpt_save_file")
    if file.out is None and saved:
        found["out"] = saved
    return file.model_copy(update=found)


def _checked(settings: PlanSettings, translated: Translated) -> tuple[PlanSettings, Marks | None, list[str]]:
    """Hold what a file in MindFormers' style says against devices and network; what is slow is said."""
    from planner.cost.software import USUAL, norms_of
    from planner.exchange.mindspore.notes import (
        check_micro_batches,
        check_sizes,
        sizes_of,
        used_devices,
        vocabulary_marks,
    )
    from planner.networks import load_network
    from planner.networks.marks import Marks

    pins, notes = settings.pins, []
    used, idle = used_devices(pins, settings.devices)
    if translated.configured:
        settings = settings.model_copy(update={"devices": used})
        notes += [idle] if idle else []
    check_micro_batches(pins)
    cut = translated.vocabulary_cut
    sized = cut is not None or any((degree or 1) > 1 for degree in (pins.tp, pins.pp))
    marks = None
    if (sized or translated.layers) and settings.network is not None:
        graph = load_network(
            settings.network, sequence_length=settings.sequence_length, attention=settings.attention or "",
            norms=norms_of("" if settings.software == USUAL else settings.software or "", settings.norms or ""),
        ).capture()  # fmt: skip
        notes += check_sizes(pins, sizes_of(graph), vocabulary_cut=cut)
        marks = translated.layers.marks(graph, pins.pp or 1, pins.vpp or 1) if translated.layers else None
        if cut is not None and translated.parallel_mode == "auto_parallel":
            table, left = vocabulary_marks(pins, graph, cut=cut)
            marks = (marks or Marks()).over(table)
            notes += [left] if left else []
    return settings, marks, notes


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let errors about what a file says name it."""
    try:
        yield
    except InputError as error:
        if str(error).startswith("config "):
            raise
        raise type(error)(f"config {path}: {error}") from error


def merged(first: PlanSettings, second: PlanSettings) -> PlanSettings:
    """Options of `first`, and of `second` where `first` gives none; pins are merged key by key."""
    given = {name: value for name, value in first if value is not None}
    return second.model_copy(update={**given, "pins": first.pins.over(second.pins)})


def require(value: Value | None, name: str, example: str) -> Value:
    """The value of an option that must be given here or in the config file."""
    if value is None:
        raise InputError(f"{name} is missing; give it ({example}) or write it in a --config file")
    return value
