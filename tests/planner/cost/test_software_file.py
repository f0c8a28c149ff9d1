"""The software file: what is written is read, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.cost import software_file
from planner.cost.software_file import ANY, parse_software, shipped_software, write_software
from planner.cost.stacks import Stack
from simulator.errors import ProfileError

FITTED = "fitted: 240 rows of published runs, median error 8 %"
CONTENT: dict[str, Any] = {
    "format": "meshwright-software",
    "version": 1,
    "stacks": {"megatron": {"matmul": {"value": 1.1, "source": FITTED}, "launch_s": {"value": 2e-5, "source": FITTED}}},
    "attention": {"flash2": {"value": 0.9, "source": FITTED}},
    "layered": {
        "source": FITTED, "devices": {"ampere": {"products": 0.5}}, "stacks": {"eager": {"host_mosaic_image_s": 0.01}},
    },
    "intervals": [
        {"family": ANY, "stack": ANY, "network": network, "low": 0.5, "high": 2.0, "rows": 30}
        for network in ("transformer", "layered")
    ],
    "intervals_source": FITTED,
}  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "software.yaml"
    written = write_software(CONTENT, path)
    read = parse_software(path.read_text(encoding="utf-8"), "software.yaml")
    assert asdict(read) == asdict(written)
    assert read.coefficients.stacks == {"megatron": {"matmul": 1.1, "launch_s": 2e-5}}
    assert read.coefficients.attention == {"flash2": 0.9}
    assert read.layered.devices == {"ampere": {"products": 0.5}}
    assert read.intervals["transformer", ANY, ANY].high == 2.0


def _put(value: object, *place: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in place[:-1]:
            content = content[key]
        content[place[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_put(2, "version"), "version"),
        (_put({}, "stacks", "megatorn"), "stacks.megatorn: no such name"),
        (_put({"value": 1.0, "source": FITTED}, "stacks", "megatron", "matmull"), "stacks.megatron.matmull"),
        (_put(-1.0, "stacks", "megatron", "matmul", "value"), "stacks.megatron.matmul.value"),
        (_put("guessed", "attention", "flash2", "source"), "attention.flash2.source"),
        (_put("many", "intervals", 0, "rows"), "intervals.0.rows"),
        (_put([], "intervals"), "intervals: there must be one"),
        (_put({"ampere": {"speed": 1.0}}, "layered", "devices"), "layered.devices.ampere.speed"),
        (_put({"eager": {"host_s": 1.0}}, "layered", "stacks"), "layered.stacks.eager.host_s"),
        (_put(1, "surplus"), "surplus"),
    ],
)
def test_a_wrong_field_is_named(change: Callable[[dict[str, Any]], None], told: str, tmp_path: Path) -> None:
    content = deepcopy(CONTENT)
    change(content)
    path = tmp_path / "wrong.yaml"
    with pytest.raises(ProfileError) as caught:
        write_software(content, path)
    assert "wrong.yaml" in str(caught.value)
    assert told in str(caught.value)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "a: 1\na: 2", "!!python/object:os.system {}"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ProfileError, match=r"software file '?bad\.yaml"):
        parse_software(text, "bad.yaml")


def test_a_package_without_the_file_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(software_file.resources, "files", lambda package: tmp_path / package)
    shipped_software.cache_clear()
    with pytest.raises(ProfileError, match=r"hw_profiles/software/training\.yaml is missing"):
        shipped_software()


def test_every_stack_may_stand_in_the_file() -> None:
    content = deepcopy(CONTENT)
    content["stacks"] = {str(stack): {"matmul": {"value": 1.0, "source": FITTED}} for stack in Stack}
    assert len(parse_software(yaml.safe_dump(content), "all.yaml").coefficients.stacks) == len(Stack)


def test_the_shipped_file_holds() -> None:
    shipped_software.cache_clear()
    assert shipped_software().intervals["transformer", ANY, ANY].low < 1


def test_no_stack_waits_for_more_than_all_of_its_messages() -> None:
    stacks = shipped_software().coefficients.stacks
    waits = {(stack, name): value for stack, own in stacks.items() for name, value in own.items() if "_exposed" in name}
    assert waits
    assert not {key: value for key, value in waits.items() if value > 1}
