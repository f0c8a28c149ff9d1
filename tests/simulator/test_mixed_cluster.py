"""Clusters of several device types."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from simulator.collectives import collective_time
from simulator.errors import ProfileError
from simulator.mixed_cluster import MixedCluster, mixed_collective_time, mixed_task_times, slowest_links
from simulator.profiles import check_profile, load_cluster, load_profile
from simulator.program import Collective
from simulator.timing import task_times
from simulator.topology import FabricSpec, group_shape
from tests.simulator.programs import communication, program, segment, task

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
    both = mixed_collective_time(mixed, collective, 1e9, range(8, 24))
    for name in ("dgx-a100", "dgx1-v100"):
        alone = MixedCluster(name="alone", nodes=(profile(name),) * 2, fabric=mixed.fabric)
        assert both >= mixed_collective_time(alone, collective, 1e9, range(16)) * (1 - 1e-9)


def test_a_group_inside_a_node_is_that_of_its_profile(mixed: MixedCluster) -> None:
    new, old = profile("dgx-a100"), profile("dgx1-v100")
    inside = mixed_collective_time(mixed, Collective.ALL_REDUCE, 1e8, range(8))
    assert inside == collective_time(new, Collective.ALL_REDUCE, 1e8, group_shape(new, 8, 1))
    inside = mixed_collective_time(mixed, Collective.ALL_REDUCE, 1e8, range(16, 24))
    assert inside == collective_time(old, Collective.ALL_REDUCE, 1e8, group_shape(old, 8, 1))
    uneven = mixed_collective_time(mixed, Collective.ALL_REDUCE, 1e8, [0, 1, 2, 16])
    assert uneven > mixed_collective_time(mixed, Collective.ALL_REDUCE, 1e8, [0, 1, 16, 17]) > 0


def test_a_program_in_step_takes_the_slowest_types_kernels(mixed: MixedCluster) -> None:
    work = program(segment(task("matmul", flops=1e12, bytes_moved=1e9, dtype="float16"), communication("gradients")))
    new_only = MixedCluster(name="new", nodes=(profile("dgx-a100"),), fabric=mixed.fabric)
    old_first = MixedCluster(name="both", nodes=(profile("dgx1-v100"), profile("dgx-a100")), fabric=mixed.fabric)
    alone = mixed_task_times(work, new_only)
    assert np.array_equal(alone[0], task_times(work, profile("dgx-a100"))[0])
    slow = mixed_task_times(work, old_first)
    assert slow[0][0] > 2 * alone[0][0]
    with pytest.raises(ProfileError, match="needs 4 devices, cluster none has 0; add nodes"):
        mixed_task_times(work, MixedCluster(name="none", nodes=(), fabric=FabricSpec(latency_s=1e-6)))


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
