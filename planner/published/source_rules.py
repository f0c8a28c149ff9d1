"""What single sources state in their scripts and not in their tables: rules of a data file, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from planner.published.measurement_file import FileRow
from simulator.errors import InputError

CHOSEN_TO_FIT = "the suite chose its batches so that they fit"
"""Note on a run whose batch was taken from its suite: it did not run out of memory, whatever is predicted."""
SETTINGS: Mapping[str, str] = {
    "row": "numbers that the row should have had",
    "without": "numbers of the row that go with others",
    "name": "the network's name, in which {model} is the row's",
    "sample": "kind of sample that the host prepares",
    "batch": "samples a device: a number, or by precision and the device's memory in GB",
    "misread_batch": "the batch that the row states is none",
    "memory_gb": "memory of the device",
    "release": "when the software was released, as a year with its part",
    "channels_last": "images lie channels last in half precision",
    "plain_graph": "TensorFlow runs without XLA",
    "early_loss": "the host reads the loss between the passes",
    "untuned_convolutions": "cuDNN takes reproducible kernels and tries none out",
    "messages_through_host": "devices of a node send through its memory",
    "mixed_precision_ignored": "a run that asks for mixed precision does without",
    "single_precision": "the recipe keeps float32",
    "samples_of_a_pass": "samples of a pass over the data, by whose first steps a rate was printed",
    "copied_time": "the table repeats the time of another network",
    "optimizer_sharding": "how optimizer states are sharded",
    "attention": "kernel of attention",
    "adapters": "adapters alone are trained",
    "adapted": "products with adapters",
    "local_share": "share of the layers that learn locally",
    "packed_samples": "short samples fill a row of tokens, and attention keeps to each",
}
"""What rules can say."""
_READ = ("network", "sample")
"""Conditions on what was read of the row already."""
_FILE = "source_rules.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRule:
    """What follows where all conditions hold for a row, and where that is stated."""

    when: tuple[tuple[str, Callable[[str, float | None], bool]], ...]
    then: Mapping[str, Any]
    source: str

    def holds(self, row: FileRow, read: Mapping[str, str]) -> bool:
        """Whether the row is one of those that the rule speaks of; `read` has what was read of it already."""
        return all(holds(_text(row, column, read), row.number(column)) for column, holds in self.when)


def parse_rules(content: str, name: str) -> tuple[SourceRule, ...]:
    """Read rules from the text of a file `name`.

    Raises
    ------
    InputError
        A rule is none, or says what is not among `SETTINGS`.
    """
    rules = []
    for number, item in enumerate(yaml.safe_load(content), 1):
        place = f"{name}: rule {number}"
        if not isinstance(item, dict) or item.keys() != {"when", "then", "source"}:
            raise InputError(f"{place} has not the keys when, then and source; write these three")
        unknown = next((key for key in item["then"] if key not in SETTINGS), None)
        if unknown is not None:
            raise InputError(f"{place}: {unknown!r} is no setting; use one of {', '.join(SETTINGS)}")
        when = tuple((column, _condition(place, wanted)) for column, wanted in item["when"].items())
        rules.append(SourceRule(when=when, then=item["then"], source=item["source"]))
    return tuple(rules)


def _condition(place: str, wanted: object) -> Callable[[str, float | None], bool]:
    if isinstance(wanted, str):
        pattern = re.compile(wanted)
        return lambda text, _: pattern.search(text) is not None
    if isinstance(wanted, dict) and wanted.keys() == {"above"}:
        return lambda _, number: number is not None and number > wanted["above"]
    if isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
        return lambda _, number: number == wanted
    raise InputError(f"{place}: condition {wanted!r} is no text, number or {{above: number}}; correct it")


def _text(row: FileRow, column: str, read: Mapping[str, str]) -> str:
    if column in _READ:
        return read.get(column, "")
    return " ".join(row.text(part) for part in column.split("+")).lower()


@lru_cache(maxsize=1)
def _shipped() -> Mapping[str, tuple[SourceRule, ...]]:
    """The rules by what they say."""
    found: dict[str, tuple[SourceRule, ...]] = {}
    content = (resources.files("planner.published") / _FILE).read_text(encoding="utf-8")
    for rule in parse_rules(content, _FILE):
        for setting in rule.then:
            found[setting] = (*found.get(setting, ()), rule)
    return found


def stated(row: FileRow, setting: str, default: Any = None, **read: str) -> Any:
    """What the row's source states of a setting, else `default`; `read` are the network and its kind of sample."""
    rules = _shipped().get(setting, ())
    return next((rule.then[setting] for rule in rules if rule.holds(row, read)), default)


def suite_batch(row: FileRow, memory_bytes: float) -> int | None:
    """Samples a device by the suite's configuration for the nearest size of memory; None where none says."""
    found = stated(row, "batch")
    if not isinstance(found, dict):
        return found  # type: ignore[no-any-return]
    half = row.says(r"16|amp", "precision")
    by_memory = found["half" if half else "single"]
    return int(by_memory[min(by_memory, key=lambda size: abs(size * 1e9 - memory_bytes))])


def as_configured(row: FileRow) -> FileRow:
    """The row with the plan of its own device, where it has that of a configuration for another one."""
    numbers = stated(row, "row")
    if numbers is None:
        return row
    kept = {name: value for name, value in row.numbers.items() if name not in stated(row, "without", ())}
    texts = {name: f"{value:g}" for name, value in numbers.items()}
    stated_numbers = {name: float(value) for name, value in numbers.items()}
    return replace(row, numbers=kept | stated_numbers, texts={**row.texts, **texts})


def starting_up(row: FileRow, devices: int, batch: int) -> bool:
    """Whether a row tells how long the second or third step of a process took, before the steps are alike."""
    samples = stated(row, "samples_of_a_pass")
    return samples is not None and 2 * devices * batch > samples
