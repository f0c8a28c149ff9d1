"""Where groups lie."""

from __future__ import annotations

from functools import cache

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import ProfileError
from simulator.hardware import load_profile, profile_names
from simulator.topology import group_shape, level_of_axis, topology_graph

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


def test_the_graph_is_a_tree_of_the_levels() -> None:
    hardware = profile("ascend910-atlas800")
    graph = topology_graph(hardware, 16)
    assert nx.is_tree(graph)
    assert [node for node, degree in graph.degree if degree == 1] == list(range(16))
    names = [node[0] for node in nx.shortest_path(graph, 0, 7)[1:-1]]
    assert names == ["HCCS", "PCIe", "HCCS"]
    assert (
        graph.edges[("HCCS", 0), ("PCIe", 0)]["bandwidth_bytes_per_s"] == 4 * hardware.levels[1].bandwidth_bytes_per_s
    )
    with pytest.raises(ProfileError):
        topology_graph(hardware, 12)
