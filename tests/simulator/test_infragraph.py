"""InfraGraphs: nodes that are written are read again, and files of others become hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulator.cluster_files import infragraph
from simulator.errors import ProfileError
from simulator.profiles import load_profile


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@pytest.mark.parametrize("name", ["dgx-h100", "gh200x4", "mi300x", "ascend910b-atlas800t-a2"])
def test_what_is_written_is_read_again(name: str, suffix: str, tmp_path: Path) -> None:
    profile, path = load_profile(name), tmp_path / f"cluster{suffix}"
    written = infragraph(profile, 4 * profile.devices_per_node)
    path.write_text(json.dumps(written) if suffix == ".json" else yaml.safe_dump(written))
    found = load_profile(f"{name}@{path}")
    assert found.node == profile.node
    assert found.max_devices == 4 * profile.devices_per_node == found.levels[-1].size
    rates = [[level.bandwidth_bytes_per_s for level in one.levels] for one in (found, profile)]
    assert rates[0] == pytest.approx(rates[1])
    assert found.levels[0].reduction_bandwidth_bytes_per_s == profile.levels[0].reduction_bandwidth_bytes_per_s


RATE = "giga_bits_per_second"


def cluster() -> dict[str, Any]:
    """Two hosts of four accelerators behind a switch, with two ports each."""
    return {
        "name": "small",
        "devices": [
            {
                "name": "server",
                "components": [
                    {"name": "gpu", "count": 4, "type": "xpu"},
                    {"name": "sw", "count": 1, "type": "switch"},
                    {"name": "nic", "count": 2, "type": "nic", "external": True},
                ],
                "links": [
                    {"name": "fast", "bandwidth": {"choice": "giga_bits_per_second", "giga_bits_per_second": 1600}}
                ],
                "connections": [f"gpu.{n}.fast.sw.0" for n in range(4)],
            },
            {"name": "leaf", "components": [{"name": "port", "count": 4, "type": "switch"}]},
        ],
        "instances": [
            {"name": "host", "device": "server", "count": 2},
            {"name": "su", "device": "leaf", "count": 1},
        ],
        "links": [{"name": "eth", "bandwidth": {"choice": "giga_bits_per_second", "giga_bits_per_second": 400}}],
        "connections": [f"host.{h}.nic.{n}.eth.su.0.port.{2 * h + n}" for h in range(2) for n in range(2)],
    }


def test_a_file_of_others_becomes_hardware(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(cluster()))
    found = load_profile(f"dgx-h100@{path}")
    assert (found.devices_per_node, found.max_devices) == (4, 8)
    assert found.node is not None
    assert (found.node.kind, found.node.nics) == ("nvswitch", 2)
    assert [level.bandwidth_bytes_per_s for level in found.levels] == pytest.approx([200e9, 25e9])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": []}, "0 devices have components of type xpu"),
        ({"instances": None}, "is no InfraGraph"),
        ({"connections": ["host.0.nic"]}, "is no InfraGraph"),
        ({"links": [{"name": "eth", "bandwidth": {"choice": "furlongs"}}]}, "bandwidth in furlongs"),
        ({"instances": [{"name": "host", "device": "server", "count": 0}]}, "host has count 0; give a whole number"),
        ({"instances": [{"name": "host", "device": "server", "count": 10**9}]}, "host has count 1000000000"),
        ({"links": [{"name": "eth", "bandwidth": {"choice": RATE, RATE: 0}}]}, "bandwidth 0; give a number above 0"),
        ({"links": [{"name": "eth", "bandwidth": {"choice": RATE, RATE: 1e400}}]}, "bandwidth inf"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(cluster() | change) + "# instances components\n")
    with pytest.raises(ProfileError, match=message):
        load_profile(f"dgx-h100@{path}")
