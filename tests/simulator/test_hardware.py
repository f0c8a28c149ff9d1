"""Profiles: what is shipped, what is refused, how files are written."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import InputError, ProfileError
from simulator.hardware import describe, format_number
from simulator.profiles import check_profile, load_profile, profile_names, write_profile
from simulator.program import Kernel
from simulator.shipped_profiles import with_base
from simulator.timing import host_time

NAMES = [
    "a100-pcie",
    "a100-pcie-40g",
    "a100x8-omnipath",
    "ascend910-atlas800",
    "ascend910b-atlas800t-a2",
    "atlas950",
    "cloudmatrix384",
    "dgx-a100",
    "dgx-a100-40g",
    "dgx-a800",
    "dgx-b200",
    "dgx-b300",
    "dgx-h100",
    "dgx-h100-96g",
    "dgx-h200",
    "dgx-h800",
    "dgx1-v100",
    "dgx1-v100-16g",
    "dgx2-v100",
    "gb200-nvl72",
    "gb300-nvl72",
    "gh200x4",
    "h100-pcie",
    "hgx-h20",
    "hgx-rubin",
    "l40s",
    "mi300x",
    "mi325x",
    "mi355x",
    "rtx-a6000",
    "rtx-pro-6000",
    "rtx3090",
    "rtx4090",
    "tpu-v5p",
    "tpu-v6e",
    "v100x4-omnipath",
]
KINDS = ("datasheet: ", "measured: ", "fitted: ", "assumed: ")


def content(name: str = "dgx-a100") -> dict[str, Any]:
    text = (resources.files("hw_profiles") / f"{name}.yaml").read_text()
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def test_the_shipped_profiles_are_listed() -> None:
    assert profile_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_keeps_the_contract(name: str) -> None:
    hardware = load_profile(name)
    assert hardware.name == name
    assert len(hardware.hash) == 64
    assert hardware.device_memory_bytes > 0
    assert hardware.default_precision in hardware.peak_flops
    assert set(hardware.kernels) == set(Kernel)
    assert hardware.levels[-1].size == hardware.max_devices
    assert host_time(hardware, 1e9) > 0, "states and activations may go to the host"
    assert hardware.max_devices >= 4096
    for devices in (1, hardware.devices_per_node, 2 * hardware.devices_per_node, 8, 64, 4096):
        hardware.check_devices(devices)
    assert 0 <= hardware.uncertainty.low < 1
    assert hardware.uncertainty.label in {"calibrated", "interpolated", "extrapolated"}
    assert pickle.loads(pickle.dumps(hardware)) == hardware


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_shipped_profile_has_a_source(name: str) -> None:
    rows = {row.field: row for row in describe(load_profile(name))}
    for row in rows.values():
        assert row.source.startswith(KINDS)
        assert row.value
    assert set(numbers(with_base(content(name), name))) == set(rows)


def numbers(value: Any, place: str = "") -> list[str]:
    """Paths of the innermost mappings that hold a number, found without the schema."""
    if isinstance(value, list):
        return [path for item in value for path in numbers(item, f"{place}.{item['name']}")]
    if isinstance(value, dict) and "source" in value:
        return [place]
    if isinstance(value, dict):
        return [path for key, item in value.items() for path in numbers(item, f"{place}.{key}".strip("."))]
    assert isinstance(value, str) or place == "version", f"{place} is a number without a source"
    return []


def test_the_profiles_of_the_issue_have_their_datasheet_numbers() -> None:
    atlas = load_profile("ascend910-atlas800")
    assert [level.size for level in atlas.levels[:2]] == [4, 8]
    assert atlas.peak("float16") == 256e12
    assert load_profile("dgx-a100").peak("bfloat16") == 312e12
    assert load_profile("dgx1-v100").default_precision == "float16"
    assert load_profile("gb200-nvl72").levels[0].size == 72


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ProfileError, match="no hardware profile is named 'dgx-a10'.*dgx-a100"):
        load_profile("dgx-a10")
    with pytest.raises(ProfileError, match="known profiles: a100-pcie, a100-pcie-40g"):
        load_profile("zzz")


@pytest.mark.parametrize("path", ["missing.yaml", "./missing.yml", "/dev/zero/x.yaml"])
def test_a_missing_file_is_an_error(path: str) -> None:
    with pytest.raises(ProfileError, match="does not exist|cannot be read"):
        load_profile(path)


def test_only_regular_files_of_moderate_size_are_read(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="not a regular file"):
        check_profile("/dev/zero")
    with pytest.raises(ProfileError, match="not a regular file"):
        check_profile(str(tmp_path))
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ProfileError, match="at most 1048576 are read"):
        load_profile(str(large))


Breaker = Callable[[dict[str, Any]], None]


def put(path: str, value: Any) -> Breaker:
    def change(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = data
        for key in parents:
            target = target[int(key) if key.isdigit() else key]
        if value is ...:
            del target[last]
        else:
            target[last] = value

    return change


BROKEN: list[tuple[Breaker, str]] = [
    (put("surprise", 1), "surprise: Extra inputs"),
    (put("device.colour", "red"), r"device\.colour: Extra inputs"),
    (put("name", ...), "name: Field required"),
    (put("name", "two words"), "name: .*pattern"),
    (put("format", "other"), "format: "),
    (put("version", 2), "version: "),
    (put("version", True), "version: "),
    (put("default_precision.value", "int8"), r"default_precision\.value: "),
    (put("default_precision.value", "float8_e5m2"), "default_precision"),
    (put("device.memory_bytes", 80e9), r"device\.memory_bytes: "),
    (put("device.memory_bytes.value", -1), r"device\.memory_bytes\.value: .*greater than 0 \(got -1\)"),
    (put("kernels.matmul.compute_efficiency.value", 5e-324), "a positive number of a profile is at least 1e-30"),
    (put("device.memory_bandwidth_bytes_per_s.value", 1e-300), "a positive number of a profile is at least 1e-30"),
    (put("operators.matmul.bfloat16.log10_flops", [0.0, 400.0]), "less than or equal to 40"),
    (put("device.memory_bytes.value", 1.5), r"device\.memory_bytes\.value: .*integer"),
    (put("device.memory_bytes.source", ...), r"device\.memory_bytes\.source: Field required"),
    (put("device.memory_bytes.source", "somewhere"), r"device\.memory_bytes\.source: a source reads"),
    (put("device.memory_bytes.source", "measured: on a good day"), "names command, machine and date"),
    (put("device.memory_bytes.source", "fitted: on some data"), "names the rows"),
    (put("device.reserved_memory_bytes.value", 2**40), "device: reserved_memory_bytes must be smaller"),
    (put("device.memory_bandwidth_bytes_per_s.value", math.nan), r"device\.memory_bandwidth_bytes_per_s\.value: "),
    (put("device.memory_bandwidth_bytes_per_s.value", math.inf), r"device\.memory_bandwidth_bytes_per_s\.value: "),
    (put("device.memory_bandwidth_bytes_per_s.value", "fast"), r"device\.memory_bandwidth_bytes_per_s\.value: "),
    (put("device.peak_flops", {}), r"device\.peak_flops: "),
    (put("device.peak_flops.float7", {"value": 1.0, "source": "datasheet: nowhere at all"}), r"peak_flops\.float7"),
    (put("kernels.matmul", ...), "kernels lacks matmul"),
    (put("kernels.tensordot", {}), r"kernels\.tensordot"),
    (put("kernels.matmul.compute_efficiency.value", 1.5), r"kernels\.matmul\.compute_efficiency\.value: .*1\.5"),
    (put("kernels.matmul.overhead_s.value", -1e-6), r"kernels\.matmul\.overhead_s\.value: "),
    (put("topology.levels", []), r"topology\.levels: "),
    (put("topology.levels.0.size.value", 99999), "topology: level sizes must grow"),
    (
        put("topology.levels.0.size.value", 3),
        r"levels\.0\.size 3 does not divide levels\.1\.size 16384.*16386",
    ),
    (put("topology.devices_per_node.value", 16), "topology: devices_per_node 16 is not the size of a level .8, 16384"),
    (put("topology.levels.0.latency_s.value", -1.0), r"topology\.levels\.0\.latency_s\.value: "),
    (put("topology.levels.1.name", "NVSwitch"), "level names must differ"),
    (put("topology.max_devices.value", 8000), "the outermost level holds 16384 devices, max_devices says 8000"),
    (put("topology.devices_per_node.value", 0), r"topology\.devices_per_node\.value: "),
    (put("topology.node_device_counts.value", [1, 9]), "node_device_counts must ascend and not exceed"),
    (put("topology.collective_algorithms.value", ["magic"]), r"topology\.collective_algorithms\.value\.0: "),
    (put("overlaps_communication.value", "yes"), r"overlaps_communication\.value: "),
    (put("uncertainty.low", 1.0), r"uncertainty\.low: "),
    (put("uncertainty.label", "sure"), r"uncertainty\.label: "),
    (put("collectives", [{"collective": "all_reduce"}]), r"collectives\.0\.group_size: Field required"),
    (put("compute_slowdown", {"processes": [2], "factor": [1.0], "source": "assumed: no reason"}), "ascend from 1"),
]


@pytest.mark.parametrize(("breaker", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_profile_names_file_and_field(breaker: Breaker, message: str, tmp_path: Path) -> None:
    data = content()
    breaker(data)
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ProfileError, match=f"broken.yaml: .*{message}"):
        load_profile(str(path))


HOSTILE = {
    "empty": ("", "empty or no mapping"),
    "list": ("- 1\n- 2\n", "empty or no mapping"),
    "aliases": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "aliases"),
    "object": ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
    "deep": ("[" * 5000, "not valid YAML"),
    "twice": ("name: a\nname: b\n", "key 'name' stands there twice"),
    "merge": ("<<: {name: a}\n", "Extra inputs|Field required"),
    "complex key": ("? [1, 2]\n: 3\n", "keys must be plain names"),
    "tabs": ("name:\n\t- x\n", "not valid YAML"),
    "binary": ("\x00\x01", "not valid YAML"),
    "two documents": ("name: a\n---\nname: b\n", "not valid YAML"),
    "huge number": (f"version: {'9' * 5000}\n", "not valid YAML|version"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(case: str, tmp_path: Path) -> None:
    text, message = HOSTILE[case]
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        load_profile(str(path))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\xfa\x80name")
    with pytest.raises(ProfileError, match=r"bytes\.yaml"):
        load_profile(str(path))


@given(st.floats(min_value=0.02, max_value=0.98))
def test_a_truncated_profile_is_refused(share: float) -> None:
    from simulator.profile_file import parse_profile

    whole = (resources.files("hw_profiles") / "dgx-a100.yaml").read_bytes()
    # What comes behind may be left out.
    whole = whole[: whole.index(b"\nreliability:")]
    with pytest.raises(ProfileError, match=r"cut\.yaml"):
        parse_profile(whole[: int(len(whole) * share)], "cut.yaml")


def test_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    text = (resources.files("hw_profiles") / "dgx-a100.yaml").read_text()
    path = tmp_path / "points.yaml"
    path.write_text(text.replace("312.0e+12", "312e12"))
    assert load_profile(str(path)).hash == load_profile("dgx-a100").hash


def test_the_hash_follows_numbers_not_words(tmp_path: Path) -> None:
    data = content()
    data["description"] = "another text"
    data["device"]["memory_bytes"]["source"] = "assumed: for the sake of the test"
    assert write_profile(data, tmp_path / "words.yaml").hash == load_profile("dgx-a100").hash
    data["device"]["memory_bytes"]["value"] += 1
    assert write_profile(data, tmp_path / "numbers.yaml").hash != load_profile("dgx-a100").hash


def test_a_profile_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    data = calibrated()
    written = write_profile(data, path)
    assert load_profile(str(path)) == written
    before = path.read_bytes()
    data["device"]["memory_bytes"]["value"] = -1
    with pytest.raises(ProfileError, match=r"machine\.yaml: device\.memory_bytes\.value"):
        write_profile(data, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["machine.yaml"]


def test_a_profile_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "missing"):
        with pytest.raises(InputError, match="cannot write '.*machine.yaml'"):
            write_profile(content(), tmp_path / folder / "machine.yaml")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_level_sizes_and_nodes_make_whole_units(tmp_path: Path) -> None:
    data = content("ascend910-atlas800")
    for sizes, node, message in (
        ([3, 8, 4096], 8, r"levels\.0\.size 3 does not divide levels\.1\.size 8; .*multiple of 3, for example 9"),
        ([4, 12, 4096], 4, r"levels\.1\.size 12 does not divide levels\.2\.size 4096"),
        ([4, 16, 4096], 8, "devices_per_node 8 is not the size of a level .4, 16, 4096.*divisor of 4"),
        ([16, 32, 4096], 8, ""),
        ([4, 8, 4096], 8, ""),
    ):
        for level, size in zip(data["topology"]["levels"], sizes, strict=True):
            level["size"]["value"] = size
        data["topology"]["devices_per_node"]["value"] = node
        data["topology"]["node_device_counts"]["value"] = [1, 2, 4]
        if message:
            with pytest.raises(ProfileError, match=f"machine.yaml: topology: {message}"):
                write_profile(data, tmp_path / "machine.yaml")
        else:
            assert write_profile(data, tmp_path / "machine.yaml").devices_per_node == node


def calibrated() -> dict[str, Any]:
    """A profile with the measured parts that calibration adds; one object occurs twice in it."""
    data = copy.deepcopy(content())
    source = "measured: meshwright calibrate, test machine, 2026-01-31"
    sizes = [1024.0, 1048576.0]
    data["collectives"] = [
        {
            "collective": "all_reduce",
            "group_size": n,
            "payload_bytes": sizes,
            "seconds": [n * 1e-4, n * 1e-3],
            "source": source,
        }
        for n in (2, 4)
    ]
    data["compute_slowdown"] = {"processes": [1, 2, 8], "factor": [1.0, 1.25, 5.0], "source": source}
    return data


def test_processes_that_share_cores_slow_each_other(tmp_path: Path) -> None:
    hardware = write_profile(calibrated(), tmp_path / "machine.yaml")
    assert [hardware.compute_slowdown(n) for n in (1, 2, 8)] == [1.0, 1.25, 5.0]
    assert hardware.compute_slowdown(5) == pytest.approx(3.125)
    assert hardware.compute_slowdown(16) == pytest.approx(10.0)
    assert load_profile("dgx-a100").compute_slowdown(8) == 1.0
    assert [hardware.waiting(n) for n in (1, 2, 16)] == [1.0, 1.0, 1.0]
    data = calibrated()
    data["compute_slowdown"]["waiting"] = [1.0, 1.1, 1.3]
    waiting = write_profile(data, tmp_path / "waiting.yaml")
    assert [waiting.waiting(n) for n in (1, 2, 5, 8, 16)] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.3])
    assert waiting.hash == hardware.hash  # a part of what the factors have already
    assert waiting.compute_slowdown(16) == pytest.approx(10.0)
    assert "collectives" in {row.field.split(".")[0] for row in describe(hardware)}


@pytest.mark.parametrize(
    ("name", "devices", "near"),
    [
        ("dgx-a100", 0, "use 1"),
        ("dgx-a100", -3, "use 1"),
        ("dgx-a100", 12, "use 8 or 16"),
        ("dgx-a100", 10**9, "use 16384"),
        ("ascend910-atlas800", 3, "use 2 or 4"),
        ("ascend910-atlas800", 4100, "use 4096"),
        ("gb200-nvl72", 6, "use 4 or 8"),
    ],
)
def test_a_device_count_must_fill_the_topology(name: str, devices: int, near: str) -> None:
    with pytest.raises(ProfileError, match=f"^{devices} devices do not fit profile {name}.*{near}$"):
        load_profile(name).check_devices(devices)


def test_narrow_floats_run_as_wider_ones() -> None:
    a100, v100, atlas = load_profile("dgx-a100"), load_profile("dgx1-v100"), load_profile("ascend910-atlas800")
    assert a100.peak("float8_e4m3fn") == a100.peak("bfloat16")
    assert v100.peak("bfloat16") == v100.peak("float32")
    assert [v100.peak_dtype(dtype) for dtype in ("bfloat16", "float16", "int64")] == ["float32", "float16", "float32"]
    assert a100.peak("int64") == a100.peak("complex64") == a100.peak("float32")
    assert a100.peak("float32", Kernel.CONVOLUTION) == 156e12
    with pytest.raises(ProfileError, match="no peak FLOP/s for float64.*float16, float32"):
        atlas.peak("float64")


def test_changed_hardware_differs() -> None:
    hardware = load_profile("dgx-a100")
    assert replace(hardware, collective_overhead_s=1.0) != hardware
    assert len({hardware, load_profile("dgx-a100")}) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(8, "8"), (True, "True"), (312e12, "312e12"), (5.2e-6, "5.2e-6"), (0.75, "0.75"), (0.0, "0"), (999_999, "999999")],
)
def test_numbers_are_shown_short(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize("value", [5e-324, 1e-310, 1e-299, 1e307, 10**40])
def test_any_number_is_written(value: float) -> None:
    assert float(format_number(value)) == pytest.approx(float(value), rel=1e-5)
