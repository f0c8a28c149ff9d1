"""The options of `meshwright plan` in a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from planner.cli.options import Optimizer, ParallelMode, Precision, SearchMode, nearest
from simulator.errors import InputError

MAX_BYTES = 1 << 20

Value = TypeVar("Value")
Natural = Annotated[int, Field(strict=True, ge=1)]


def _pin_texts(value: object) -> object:
    """Pins are a mapping in YAML; ``true`` and numbers become the words of the command line."""
    if isinstance(value, dict):
        return tuple(f"{key}={str(item).lower() if isinstance(item, bool) else item}" for key, item in value.items())
    return tuple(value) if isinstance(value, list) else value


class PlanSettings(BaseModel):
    """The options of ``plan``; None where not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    network: str | None = None
    hw: str | None = None
    devices: Natural | None = None
    global_batch: Natural | None = None
    seq_len: Natural | None = None
    precision: Precision | None = None
    optimizer: Optimizer | None = None
    search_mode: SearchMode | None = None
    parallel_mode: ParallelMode | None = None
    pin: Annotated[tuple[str, ...], BeforeValidator(_pin_texts)] = ()
    hints: str | None = None
    top: Annotated[int, Field(strict=True, ge=1, le=100)] | None = None
    out: str | None = None


def read_config(path: Path) -> PlanSettings:
    """Read the options in a file; keys are written with ``-`` or ``_``.

    Raises
    ------
    InputError
        The file cannot be read, is no YAML mapping, or holds an unknown key or a wrong value.
    """
    data = _load(path)
    if not isinstance(data, dict):
        raise InputError(f"config {path}: must be a mapping of option names to values; write for example 'devices: 8'")
    known = list(PlanSettings.model_fields)
    settings: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise InputError(f"config {path}: {str(key)!r} is no option of plan; {nearest(name, known)}")
        if name in settings:
            raise InputError(f"config {path}: {name} is given twice; keep one")
        settings[name] = value
    try:
        return PlanSettings.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(f"config {path}: {field}: {first['input']!r:.60} is wrong: {first['msg']}") from error


def merged(first: PlanSettings, second: PlanSettings) -> PlanSettings:
    """Options of `first`, and of `second` where `first` gives none; pins are merged key by key."""
    given = {name: value for name, value in first if value is not None and name != "pin"}
    own = {pin.partition("=")[0].strip() for pin in first.pin}
    others = tuple(pin for pin in second.pin if pin.partition("=")[0].strip() not in own)
    return second.model_copy(update={**given, "pin": (*others, *first.pin)})


def require(value: Value | None, name: str, example: str) -> Value:
    """The value of an option that must be given here or in the config file."""
    if value is None:
        raise InputError(f"{name} is missing; give it ({example}) or write it in a --config file")
    return value


def _load(path: Path) -> object:
    import yaml

    try:
        if not path.is_file():
            raise InputError(f"config {str(path)!r} does not exist or is not a file; give the path of a YAML file")
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"config {path}: larger than {MAX_BYTES} bytes; it is no config file")
        return yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise InputError(f"config {str(path)!r} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"config {path} is not valid YAML: {' '.join(str(error).split())}") from error
