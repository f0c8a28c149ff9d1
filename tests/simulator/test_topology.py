"""Where groups lie, what joins their devices, and who shares a link."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import ProfileError
from simulator.hardware import NodeGraph
from simulator.profiles import load_profile, profile_names, write_profile
from simulator.topology import (
    FabricSpec,
    NodeSpec,
    Topology,
    axis_groups,
    cluster_topology,
    group_shape,
    level_of_axis,
    link_use,
    node_shares,
    node_topology,
    payload_rate,
    ring_bandwidth,
    shared_links,
    topology_graph,
)
from simulator.topology.graph import Links
from simulator.topology.sharing import direct_send, pairwise_all_to_all, ring_gather
from tests.oracles.simulated import contended

profile = cache(load_profile)


@pytest.mark.parametrize(
    ("name", "size", "stride", "members", "level"),
    [
        ("ascend910-atlas800", 1, 1, (1, 1, 1), "HCCS"),
        ("ascend910-atlas800", 4, 1, (4, 1, 1), "HCCS"),
        ("ascend910-atlas800", 8, 1, (4, 2, 1), "PCIe"),
        ("ascend910-atlas800", 2, 4, (1, 2, 1), "PCIe"),
        ("ascend910-atlas800", 4, 2, (2, 2, 1), "PCIe"),
        ("ascend910-atlas800", 64, 1, (4, 2, 8), "RoCE"),
        ("ascend910-atlas800", 8, 8, (1, 1, 8), "RoCE"),
        ("dgx-a100", 8, 1, (8, 1), "NVSwitch"),
        ("dgx-a100", 6, 1, (6, 1), "NVSwitch"),
        ("dgx-a100", 16, 2, (4, 4), "InfiniBand"),
        ("gb200-nvl72", 72, 1, (72, 1), "NVSwitch"),
        ("gb200-nvl72", 128, 1, (64, 2), "InfiniBand"),
        ("gb200-nvl72", 16, 8, (8, 2), "InfiniBand"),
    ],
)
def test_a_mesh_axis_has_its_members_on_the_levels(
    name: str, size: int, stride: int, members: tuple[int, ...], level: str
) -> None:
    hardware = profile(name)
    assert group_shape(hardware, size, stride).members == members
    assert level_of_axis(hardware, size, stride) == level


@given(st.sampled_from(profile_names()), st.integers(1, 64), st.integers(1, 64))
def test_the_members_multiply_to_the_size_and_fit_their_units(name: str, size: int, stride: int) -> None:
    hardware = profile(name)
    shape = group_shape(hardware, size, stride)
    assert shape.size == size
    for index, level in enumerate(hardware.levels):
        inside = shape.within(index)
        assert size % inside == 0
        assert inside == 1 or inside * stride <= level.size or index == len(hardware.levels) - 1


def test_a_group_that_the_cluster_cannot_hold_is_refused() -> None:
    hardware = profile("ascend910-atlas800")
    with pytest.raises(ProfileError, match="group of 8 devices with stride 1024 does not fit the 4096 devices"):
        group_shape(hardware, 8, 1024)
    with pytest.raises(ProfileError, match="size 0 and stride 1"):
        group_shape(hardware, 0, 1)


def spec(kind: str, devices: int = 8, **more: Any) -> NodeSpec:
    """A node whose devices send 84 bytes/s each."""
    return NodeSpec(kind=kind, devices=devices, bandwidth_bytes_per_s=84.0, latency_s=1.0, **more)


NODE_SPECS = [
    spec("nvswitch"),
    spec("hybrid-cube-mesh"),
    spec("hybrid-cube-mesh", host_bandwidth_bytes_per_s=10.0, host_latency_s=3.0),
    spec("ring", 6),
    spec("ring", 2),
    spec("full-mesh"),
    spec("hccs-quads", host_bandwidth_bytes_per_s=10.0, host_latency_s=3.0),
    spec("pcie-tree", group=2, host_bandwidth_bytes_per_s=40.0),
    spec("pcie-tree", group=8),
    spec("supernode", 32, group=16, host_latency_s=0.5),
    spec("torus", 12, shape=(3, 4)),
    spec("torus", 8, shape=(2, 2, 2)),
]


@pytest.mark.parametrize("node", NODE_SPECS, ids=[f"{node.kind}-{node.devices}" for node in NODE_SPECS])
def test_every_node_joins_its_devices_and_no_device_sends_more_than_it_can(node: NodeSpec) -> None:
    topology = node_topology(node)
    assert topology.devices == tuple(range(node.devices))
    for source, destination in itertools.permutations(topology.devices, 2):
        route = topology.route(source, destination)
        assert (route[0], route[-1]) == (source, destination)
        assert topology.latency_of(route) > 0
        assert [topology.links[link] for link in topology.links_of(route)] == list(itertools.pairwise(route))
    for device in topology.devices:
        links = topology.graph.out_edges(device, data=True)
        own = sum(
            link["capacity_bytes_per_s"] for _, other, link in links if not str(other).endswith(("host0", "host1"))
        )
        assert own == pytest.approx(84.0)


def test_the_cube_mesh_has_six_bricks_a_device_two_neighbours_by_two() -> None:
    topology = node_topology(spec("hybrid-cube-mesh"))
    for device in range(8):
        bricks = sorted(link["capacity_bytes_per_s"] / 14 for *_, link in topology.graph.out_edges(device, data=True))
        assert bricks == pytest.approx([1, 1, 2, 2])
    assert topology.route(0, 3) == (0, 3)
    assert len(topology.route(0, 7)) == 3
    with_host = node_topology(spec("hybrid-cube-mesh", host_bandwidth_bytes_per_s=10.0, host_latency_s=3.0))
    assert with_host.route(0, 7) == (0, "node0/host0", "node0/host1", 7)


@pytest.mark.parametrize(
    ("group", "bricks"),
    [((0, 1), 1), ((0, 3), 2), ((0, 1, 2), 2), ((0, 1, 2, 3), 4), ((0, 2, 4, 6), 2), (tuple(range(8)), 6)],
)
def test_groups_of_a_cube_mesh_have_the_bricks_among_them(group: tuple[int, ...], bricks: int) -> None:
    assert ring_bandwidth(node_topology(spec("hybrid-cube-mesh")), group) == pytest.approx(14 * bricks)


def test_the_bound_of_a_mesh_is_reached_by_rings() -> None:
    """Three rings, each run through both ways, use every brick of a DGX-1 once."""
    topology = node_topology(spec("hybrid-cube-mesh"))
    rings = ((0, 3, 2, 1, 5, 6, 7, 4), (0, 4, 7, 6, 5, 1, 2, 3), (0, 1, 3, 7, 5, 4, 6, 2))
    both = [ring for order in rings for ring in (order, order[::-1])]
    use = link_use(topology, [range(8)], lambda _, size: [step for r in both for step in ring_gather([r], size / 6)])
    assert payload_rate(topology, use) == pytest.approx(84.0 * 8 / 7)
    assert ring_bandwidth(topology, range(8)) == pytest.approx(84.0)


def test_quads_meet_at_the_host() -> None:
    topology = node_topology(spec("hccs-quads", host_bandwidth_bytes_per_s=10.0, host_latency_s=3.0))
    assert topology.route(0, 3) == (0, 3)
    assert topology.route(1, 6) == (1, "node0/host0", "node0/host1", 6)
    assert topology.latency_of(topology.route(1, 6)) == pytest.approx(3.0)
    across = link_use(topology, axis_groups(8, 2, 4), direct_send)
    assert across.max() == 4
    assert payload_rate(topology, across) == 10.0
    assert ring_bandwidth(topology, range(8)) == pytest.approx(7 * 40 / 4)


def pair(kind: str, nics: int, **fabric: Any) -> Topology:
    node = spec("nvswitch", nics=nics, nic_bandwidth_bytes_per_s=20.0)
    return cluster_topology("four", [node] * 4, FabricSpec(kind=kind, latency_s=4.0, **fabric))


def test_same_rail_traffic_stays_on_its_switch() -> None:
    rails = pair("rail-optimised", 8)
    assert rails.route(1, 9) == (1, "node0/nic1", "leaf0/rail1", "node1/nic1", 9)
    assert rails.latency_of(rails.route(1, 9)) == pytest.approx(4.0)
    assert "spine" in rails.route(1, 10)
    alone = pair("rail-optimised", 8, oversubscription=math.inf)
    assert alone.route(1, 10) == (1, "node0/nvswitch", 2, "node0/nic2", "leaf0/rail2", "node1/nic2", 10)


@pytest.mark.parametrize(("nics", "sharing"), [(8, 1), (4, 2), (1, 8)])
def test_who_shares_a_nic_is_known(nics: int, sharing: int) -> None:
    topology = pair("fat-tree", nics)
    use = link_use(topology, axis_groups(32, 4, 8), direct_send)
    out = topology.links_of(("node0/nic0", "leaf0"))[0]
    assert use[out] == sharing
    assert payload_rate(topology, use) == pytest.approx(20.0 / sharing)


def test_an_oversubscribed_leaf_is_narrower_upwards() -> None:
    topology = pair("fat-tree", 8, nodes_per_leaf=2, oversubscription=4.0)
    assert topology.route(0, 8)[2:3] == ("leaf0",)
    assert topology.route(0, 16)[2:5] == ("leaf0", "spine", "leaf1")
    near, far = (link_use(topology, axis_groups(32, 2, stride), pairwise_all_to_all) for stride in (8, 16))
    assert payload_rate(topology, near) == pytest.approx(4 * payload_rate(topology, far))


def test_nodes_may_stand_in_a_torus() -> None:
    node = spec("nvswitch", 2, nics=1, nic_bandwidth_bytes_per_s=20.0)
    topology = cluster_topology("grid", [node] * 12, FabricSpec(kind="torus", latency_s=4.0, shape=(3, 4)))
    assert topology.route(0, 2)[2:4] == ("router0", "router1")
    assert len(topology.route(0, 13)) == 8


def test_axes_that_share_nics_slow_each_other() -> None:
    hardware = profile("dgx-a100")
    assert contended(hardware, 32, {"tp": (8, 1), "dp": (4, 8)}) == {"tp": 1.0, "dp": 1.0}
    both = contended(hardware, 32, {"cp": (2, 8), "dp": (2, 16)}, {"cp": direct_send, "dp": direct_send})
    assert both["cp"] == both["dp"] == pytest.approx(2.0)
    assert contended(hardware, 32, {}) == {}
    assert contended(hardware, 32, {"tp": (1, 1), "dp": (4, 8)}) == {"tp": 1.0, "dp": 1.0}


def test_links_that_carry_the_same_are_one() -> None:
    axes = {"tp": (8, 1), "cp": (2, 8), "dp": (2, 16)}
    few, many = (shared_links(profile("dgx-a100"), devices, axes) for devices in (32, 128))
    assert few.uses["tp"].tolist() == [0.0] * len(few.capacities)
    assert len(few.capacities) == len(many.capacities) > 0
    assert few.rates["tp"] == many.rates["tp"]


@pytest.mark.parametrize(("members", "bricks"), [(2, 1), (3, 2), (4, 4), (5, 2), (6, 2), (7, 4), (8, 6)])
def test_nccl_lays_whole_rings_of_bricks(members: int, bricks: int) -> None:
    """Six devices could gather at three bricks by trees, but only one ring of bricks closes, run through both ways."""
    assert node_shares(profile("dgx1-v100"), members, 1).ring == pytest.approx(bricks / 6)


def test_groups_of_a_node_have_shares_of_its_links() -> None:
    assert node_shares(profile("dgx-a100"), 2, 1) == (1.0, 1.0, 1.0)
    mesh = node_shares(profile("ascend910b-atlas800t-a2"), 2, 4)
    assert mesh == pytest.approx((1 / 7, 1 / 7, 1 / 7))
    assert node_shares(profile("ascend910-atlas800"), 2, 2) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    tree = replace(profile("dgx-a100"), node=NodeGraph(kind="pcie-tree", nics=8, group=4))
    assert node_shares(tree, 4, 1).ring == 1.0
    assert node_shares(tree, 2, 4).ring == pytest.approx(1 / 4)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_has_a_graph(name: str) -> None:
    hardware = profile(name)
    for devices in (1, hardware.devices_per_node, 4 * hardware.devices_per_node):
        topology = topology_graph(hardware, devices)
        assert topology.devices == tuple(range(devices))
        assert {topology.graph.nodes[device]["profile"] for device in topology.devices} == {name}
        topology.route(0, devices - 1)
    with pytest.raises(ProfileError):
        topology_graph(hardware, 0)


def test_a_profile_without_graphs_is_a_tree_of_its_levels() -> None:
    hardware = replace(profile("ascend910-atlas800"), node=None, fabric=None)
    topology = topology_graph(hardware, 16)
    assert nx.is_tree(topology.graph.to_undirected())
    assert topology.route(0, 7) == (0, "HCCS0", "PCIe0", "HCCS1", 7)
    with pytest.raises(ProfileError):
        topology_graph(hardware, 12)


def test_a_cycle_of_zero_latency_is_refused_by_its_links() -> None:
    still = replace(spec("full-mesh", 3), latency_s=0.0)
    with pytest.raises(ProfileError, match="the links . to ., . to ., . to . form a cycle of zero latency"):
        node_topology(still)
    assert node_topology(replace(spec("nvswitch"), latency_s=0.0)).latency_of((0, "node0/nvswitch", 1)) == 0


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (spec("magic"), "kind 'magic' is not known; use one of nvswitch"),
        (spec("nvswitch", 8, nics=3), "8 devices, groups of 4, 3 NICs"),
        (spec("hybrid-cube-mesh", 4), "a hybrid cube mesh has 8"),
        (spec("torus", 8, shape=(3, 3)), r"shape \(3, 3\) does not hold 8 devices"),
        (
            replace(spec("nvswitch"), bandwidth_bytes_per_s=-1.0),
            "capacity_bytes_per_s -1.0; it must be a number above 0",
        ),
        (replace(spec("nvswitch"), latency_s=math.nan), "latency_s nan; it must be a number at least 0"),
    ],
)
def test_a_broken_node_is_refused(broken: NodeSpec, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        node_topology(broken)


def test_a_broken_cluster_is_refused() -> None:
    node, fabric = spec("nvswitch", nics=8, nic_bandwidth_bytes_per_s=20.0), FabricSpec(latency_s=1.0)
    for nodes, joined, devices, message in (
        ([node, spec("nvswitch")], fabric, None, "a node has no NIC"),
        ([node] * 2, FabricSpec(kind="web", latency_s=1.0), None, "fabric 'web' is not known"),
        ([node] * 2, FabricSpec(latency_s=1.0, oversubscription=0.5), None, "oversubscription 0.5"),
        ([node] * 2, FabricSpec(kind="torus", latency_s=1.0, shape=(3,)), None, "does not hold 2 nodes"),
        ([node] * 2, fabric, 17, "has 16 devices and is too small for 17"),
    ):
        with pytest.raises(ProfileError, match=message):
            cluster_topology("broken", nodes, joined, devices)
    with pytest.raises(ProfileError, match="groups of 3 devices, 2 apart, do not divide 8 devices"):
        axis_groups(8, 3, 2)
    lonely = Links()
    lonely.device(0, rank=0)
    lonely.device(1, rank=1)
    with pytest.raises(ProfileError, match="no route from 0 to 1"):
        Topology("lonely", lonely).route(0, 1)
    with pytest.raises(ProfileError, match="is too small for 40; use fewer devices"):
        link_use(pair("fat-tree", 8), [[0, 40]], direct_send)


def test_an_oversubscribed_profile_has_a_leaf_level(tmp_path: Path) -> None:
    data = yaml.safe_load((resources.files("hw_profiles") / "dgx-a100.yaml").read_text())
    source = "assumed: for the sake of the test"
    data["topology"]["fabric"] |= {
        "nodes_per_leaf": {"value": 4, "source": source},
        "oversubscription": {"value": 2.0, "source": source},
    }
    hardware = write_profile(data, tmp_path / "narrow.yaml")
    assert [level.size for level in hardware.levels] == [8, 32, 16384]
    assert hardware.levels[1].bandwidth_bytes_per_s == 2 * hardware.levels[2].bandwidth_bytes_per_s
    topology = topology_graph(hardware, 64)
    assert "spine" in topology.route(0, 32)
    del data["topology"]["fabric"]["oversubscription"]
    with pytest.raises(ProfileError, match="belong together"):
        write_profile(data, tmp_path / "narrow.yaml")
    data["topology"]["fabric"]["oversubscription"] = {"value": 2.0, "source": source}
    data["topology"]["fabric"]["nodes_per_leaf"]["value"] = 3
    with pytest.raises(ProfileError, match="leaves of 24 devices"):
        write_profile(data, tmp_path / "narrow.yaml")
    data["topology"]["node"]["nics"]["value"] = 3
    with pytest.raises(ProfileError, match="node.nics 3 does not divide devices_per_node 8"):
        write_profile(data, tmp_path / "narrow.yaml")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "dgx1-v100",
            {"levels.0.latency_s": 0.0},
            "topology.node: .* form a cycle of zero latency, .*; give at least one",
        ),
        ("ascend910b-atlas800t-a2", {"levels.0.latency_s": 0.0}, "the links . to ., .* form a cycle of zero latency"),
        (
            "dgx-a100",
            {"levels.0.latency_s": 0.0, "levels.1.latency_s": 0.0},
            "node1/nic. to leaf0/rail., .* form a cycle of zero latency",
        ),
        ("dgx-a100", {"node.kind": "torus"}, "topology.node: .*torus shape .. does not hold 8 devices"),
        ("dgx-a100", {"node.kind": "hccs-quads", "levels.0.latency_s": -1.0}, r"levels\.0\.latency_s\.value: .*-1"),
    ],
)
def test_a_profile_with_a_bad_graph_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = yaml.safe_load((resources.files("hw_profiles") / f"{name}.yaml").read_text())
    for place, value in changes.items():
        target = data["topology"]
        for key in place.split("."):
            target = target[int(key) if key.isdigit() else key]
        target["value"] = value
    with pytest.raises(ProfileError, match=rf"broken\.yaml: .*{message}"):
        write_profile(data, tmp_path / "broken.yaml")
