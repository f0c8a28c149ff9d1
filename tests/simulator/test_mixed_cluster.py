"""Clusters of several device types."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

import pytest

from simulator.collectives import collective_time
from simulator.errors import ProfileError
from simulator.hardware import Hardware
from simulator.mixed_cluster import MixedCluster, slowest_links
from simulator.profiles import check_profile, load_cluster, load_profile
from simulator.program import Collective
from simulator.topology import FabricSpec, GroupShape

profile = cache(load_profile)
TEXT = """
format: meshwright-cluster
version: 1
name: old-and-new
nodes:
  - {profile: dgx-a100, count: 2}
  - {profile: dgx1-v100, count: 1}
fabric: {kind: fat-tree}
"""


@pytest.fixture
def mixed(tmp_path: Path) -> MixedCluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT)
    return load_cluster(str(path))


def test_devices_carry_their_profile_and_numbers_run_through_the_nodes(mixed: MixedCluster) -> None:
    topology = mixed.topology()
    assert len(topology.devices) == mixed.devices == 24
    assert [topology.graph.nodes[device]["profile"] for device in (0, 15, 16)] == ["dgx-a100", "dgx-a100", "dgx1-v100"]
    assert topology.route(15, 23)[2] == "leaf0"
    assert topology.route(16, 19) == (16, 19)
    assert mixed.node_of(23) == 2
    with pytest.raises(ProfileError, match="24 devices and no device 24"):
        mixed.node_of(24)


@pytest.mark.parametrize("collective", list(Collective))
def test_a_group_of_both_types_goes_at_the_slower_ones_links(mixed: MixedCluster, collective: Collective) -> None:
    def seconds(hardware: Hardware) -> float:
        members = (8, *(1,) * (len(hardware.levels) - 2), 2)
        return collective_time(hardware, collective, 1e9, GroupShape(members=members))

    both = seconds(slowest_links(mixed, [1, 2]))
    for name in ("dgx-a100", "dgx1-v100"):
        alone = MixedCluster(name="alone", nodes=(profile(name),) * 2, fabric=mixed.fabric)
        assert both >= seconds(slowest_links(alone, [0, 1])) * (1 - 1e-9)


def test_a_cluster_stands_for_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT)
    hardware = load_profile(str(path))
    assert (hardware.name, hardware.max_devices, hardware.devices_per_node) == ("old-and-new", 24, 8)
    assert hardware.device_name == profile("dgx1-v100").device_name
    assert hardware.device_memory_bytes == profile("dgx1-v100").device_memory_bytes
    assert hardware.levels[-1].bandwidth_bytes_per_s == profile("dgx1-v100").levels[-1].bandwidth_bytes_per_s
    assert check_profile(str(path)) == hardware
    with pytest.raises(ProfileError, match="25 devices do not fit profile old-and-new.*up to 24 devices; use 24"):
        hardware.check_devices(25)
    (tmp_path / "own.yaml").write_text((resources.files("hw_profiles") / "dgx-a100.yaml").read_text())
    path.write_text(TEXT.replace("profile: dgx-a100", "profile: own.yaml"))
    assert load_profile(str(path)) == hardware
    path.write_text(TEXT.replace("profile: dgx-a100", "profile: cluster.yaml"))
    with pytest.raises(ProfileError, match=r"profile .*cluster.yaml: format: "):
        load_profile(str(path))


def test_nodes_below_different_leaves_share_the_links_to_the_spine(mixed: MixedCluster) -> None:
    fabric = FabricSpec(latency_s=1e-5, nodes_per_leaf=2, oversubscription=2.0)
    narrow = MixedCluster(name="narrow", nodes=mixed.nodes, fabric=fabric)
    full, half = (slowest_links(cluster, [1, 2]).levels[-1].bandwidth_bytes_per_s for cluster in (mixed, narrow))
    assert full == 2 * half
    assert slowest_links(narrow, [0, 1]).levels[-1].bandwidth_bytes_per_s > full


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1", "version: 2", "version: "),
        ("count: 2", "count: 0", r"nodes\.0\.count: "),
        ("dgx-a100", "dgx-a10", "no hardware profile is named 'dgx-a10'"),
        ("fat-tree", "web", r"fabric\.kind: "),
        ("kind: fat-tree", "latency_s: -1.0", r"fabric\.latency_s: "),
        ("kind: fat-tree", "kind: torus, shape: [2, 2]", "does not hold 3 nodes"),
        ("name: old-and-new", "name: {", "not valid YAML"),
        ("name: old-and-new\n", "", "name: "),
    ],
)
def test_a_broken_description_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(ProfileError, match=message):
        load_cluster(str(path))
