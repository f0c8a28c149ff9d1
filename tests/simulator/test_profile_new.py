"""Profiles based on shipped ones: what is set is set, the rest is assumed, and nothing is written that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from planner.cli.app import app
from simulator.errors import ProfileError
from simulator.profile_file import check_content
from simulator.profiles import load_profile
from simulator.shipped_profiles import new_profile, quantity

BASES = st.sampled_from(["dgx-h100", "a100-pcie", "gb200-nvl72", "ascend910b-atlas800t-a2"])


@settings(max_examples=6, deadline=None)
@given(base=BASES, memory=st.integers(8, 300), network=st.integers(10, 800))
def test_what_is_set_is_set_and_the_rest_is_the_bases(base: str, memory: int, network: int) -> None:
    given_numbers = [f"device.memory={memory}GiB", f"nodes.network={network}Gb"]
    _, found = check_content(new_profile("mine", base, given_numbers), "mine.yaml")
    known = load_profile(base)
    rows, other = ({row.field: row for row in one.rows} for one in (found, known))
    assert float(rows["device.memory_bytes"].value) == pytest.approx(memory * 2**30, rel=1e-5)
    assert rows["device.memory_bytes"].source == f"assumed: set by hand, device.memory={memory}GiB"
    assert known.node is not None
    ports = known.node.nics / known.devices_per_node
    assert found.levels[-1].bandwidth_bytes_per_s == pytest.approx(0.95 * network * 1e9 / 8 * ports)
    assert found.levels[:-1] == known.levels[:-1]
    assert found.kernels == known.kernels
    assert found.uncertainty.label == "extrapolated"
    field = "kernels.matmul.overhead_s"
    assert rows[field].source == f"assumed: as for {base}; there {other[field].source}"


@settings(max_examples=4, deadline=None)
@given(devices=st.integers(1, 16))
def test_nodes_of_other_sizes_are_whole(devices: int) -> None:
    _, found = check_content(new_profile("mine", "dgx-h100", [f"nodes.devices={devices}"]), "mine.yaml")
    assert found.devices_per_node == found.levels[0].size == devices
    assert found.node_device_counts == tuple(range(1, devices + 1))
    assert found.max_devices == found.levels[-1].size == 2048 * devices


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (["nodes.network"], "write KEY=VALUE"),
        (["nodes.network=100 furlongs"], "no number with a unit"),
        (["nodes.nics=2", "nodes.nics=4"], "each key once"),
        (["device.colour=3"], "no number 'device.colour'"),
        (["topology.levels.7.latency_s=1us"], "no number 'topology.levels.7.latency_s'"),
        (["nodes.nics=1.5"], "whole number"),
        (["nodes.nics=3"], "does not divide"),
        (["device.memory=1GB"], "reserved_memory_bytes must be smaller"),
        (["nodes.devices=0"], "at least one device"),
    ],
)
def test_what_is_wrong_is_named(numbers: list[str], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        check_content(new_profile("mine", "dgx-h100", numbers), "mine.yaml")


@given(st.floats(0.1, 900))
def test_bits_are_an_eighth_of_bytes(number: float) -> None:
    assert quantity(f"{number}Gb") == pytest.approx(quantity(f"{number} GB/s") / 8)
    assert quantity(f"{number}Gbps") == quantity(f"{number}Gb/s")


def test_the_command_writes_a_file_that_is_planned_on(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    arguments = ["profiles", "new", "mine", "--from", "dgx-h100", "--out", str(path)]
    done = CliRunner().invoke(app, [*arguments, "--set", "nodes.network=100Gb", "--json", "--quiet"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["valid"]
    assert load_profile(str(path)).levels[-1].bandwidth_bytes_per_s == pytest.approx(0.95 * 12.5e9)
    before = path.read_text()
    failed = CliRunner().invoke(app, [*arguments, "--set", "nodes.nics=3"])
    assert failed.exit_code == 2
    assert path.read_text() == before
    taken = CliRunner().invoke(app, ["profiles", "new", "dgx-a100", "--from", "dgx-h100", "--out", str(path)])
    assert taken.exit_code == 2


def test_a_base_must_be_shipped(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"'local.yaml' is a file; name a shipped profile, or copy the file"):
        new_profile("mine", "local.yaml", [])
    path = tmp_path / "mine.yaml"
    path.write_text("format: meshwright-profile\nversion: 1\nname: mine\nbased_on: dgx-h10\n")
    with pytest.raises(ProfileError, match="did you mean dgx-h100"):
        load_profile(str(path))
    path.write_text("format: meshwright-profile\nversion: 1\nname: mine\nbased_on: 3\n")
    with pytest.raises(ProfileError, match="based_on is 3; name a shipped profile"):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("ascend910c", "cloudmatrix384"),
        ("ascend950dt", "atlas950"),
        ("r100", "hgx-rubin"),
        ("h200", "dgx-h200"),
        ("dgx-h10", "dgx-h100"),
    ],
)
def test_unknown_names_suggest_the_profile_of_the_device(asked: str, found: str) -> None:
    with pytest.raises(ProfileError, match=f"did you mean .*{found}"):
        load_profile(asked)
