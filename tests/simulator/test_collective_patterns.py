"""Every formula of a collective against the flow-level simulation of its own messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import sqrt

import pytest

from simulator.collectives import ALGORITHMS, CollectiveCost
from simulator.errors import ProfileError
from simulator.hardware import FabricGraph, Hardware, Level, NodeGraph
from simulator.profiles import load_profile
from simulator.program import Collective
from simulator.topology import Topology, group_shape, topology_graph
from simulator.topology.sharing import Message, direct_send, pairwise_all_to_all, ring_gather
from tests.oracles.simulated import pinned_cost
from tests.simulator import collective_rounds as patterns
from tests.simulator.collective_rounds import simulate_rounds

A0, B0, A1, B1 = 1e-6, 100e9, 5e-6, 10e9
HUGE = 1e15
Pattern = Callable[..., list[list[Message]]]


@cache
def cluster(kind: str = "nvswitch") -> Hardware:
    """Nodes of 8 at 100 GB/s and 1 us, a NIC a device at 10 GB/s and 5 us."""
    levels = (
        Level(name="node", size=8, bandwidth_bytes_per_s=B0, latency_s=A0, reduction_bandwidth_bytes_per_s=B0),
        Level(name="fabric", size=4096, bandwidth_bytes_per_s=B1, latency_s=A1, reduction_bandwidth_bytes_per_s=B1),
    )
    node, fabric = NodeGraph(kind=kind, nics=8), FabricGraph(kind="fat-tree")
    return replace(load_profile("dgx-a100"), levels=levels, node=node, fabric=fabric)


@cache
def topology(kind: str = "nvswitch") -> Topology:
    return topology_graph(cluster(kind), 64)


def formula(
    collective: Collective, algorithm: str, size: int, stride: int = 1, kind: str = "nvswitch"
) -> CollectiveCost:
    return pinned_cost(cluster(kind), collective, group_shape(cluster(kind), size, stride), algorithm)


def groups(size: int, stride: int) -> list[list[list[int]]]:
    """The groups of an axis in whole nodes, each in blocks by node."""
    block = size * stride
    whole = -(-block // 8) * 8
    return [
        patterns.blocks_of(range(base + start, base + block, stride), 8)
        for base in range(0, whole - block + 1, block)
        for start in range(stride)
    ]


def simulated(pattern: Pattern, payload: float, size: int, stride: int, kind: str = "nvswitch", **more: int) -> float:
    """Seconds when all groups of the axis run the pattern at once."""
    steps = zip(*(pattern(blocks, payload, **more) for blocks in groups(size, stride)), strict=True)
    return simulate_rounds(topology(kind), [[message for step in parts for message in step] for parts in steps])


AR, AG, RS, A2A = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL
INSIDE = [(8, 1), (4, 1), (2, 4), (4, 2), (2, 1)]
ACROSS = [(4, 8), (2, 8), (8, 8)]


@pytest.mark.parametrize(("size", "stride"), INSIDE + ACROSS)
@pytest.mark.parametrize(
    ("collective", "algorithm", "pattern"),
    [
        (AG, "ring", ring_gather),
        (RS, "ring", ring_gather),
        (AR, "ring", patterns.ring_all_reduce),
        (AG, "hierarchical", patterns.hierarchical_gather),
        (AR, "hierarchical", patterns.hierarchical_all_reduce),
        (RS, "halving-doubling", patterns.halving_doubling_scatter),
        (AG, "halving-doubling", patterns.halving_doubling_gather),
        (AR, "halving-doubling", patterns.halving_doubling_all_reduce),
        (RS, "mesh", patterns.mesh_scatter),
        (AR, "mesh", patterns.mesh_all_reduce),
        (A2A, "pairwise", pairwise_all_to_all),
        (Collective.SEND, "direct", direct_send),
    ],
)
def test_on_one_level_the_formula_is_the_simulation(
    collective: Collective, algorithm: str, pattern: Pattern, size: int, stride: int
) -> None:
    cost = formula(collective, algorithm, size, stride)
    for payload in (0.0, 1e6, 1e9):
        expected = cost.latency_s + payload * cost.seconds_per_byte
        assert simulated(pattern, payload, size, stride) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("size", "stride"), [(16, 1), (32, 1), (16, 4), (8, 2), (64, 1)])
@pytest.mark.parametrize(
    ("collective", "algorithm", "pattern"),
    [
        (RS, "hierarchical", patterns.hierarchical_scatter),
        (AG, "hierarchical", patterns.hierarchical_gather),
        (AR, "hierarchical", patterns.hierarchical_all_reduce),
        (AR, "halving-doubling", patterns.halving_doubling_all_reduce),
        (AG, "mesh", patterns.mesh_gather),
        (RS, "ring-halving", patterns.ring_halving_scatter),
        (AG, "ring-halving", patterns.ring_halving_gather),
        (AR, "mesh", patterns.mesh_all_reduce),
        (A2A, "hierarchical", patterns.hierarchical_all_to_all),
    ],
)
def test_level_after_level_the_formula_is_the_simulation(
    collective: Collective, algorithm: str, pattern: Pattern, size: int, stride: int
) -> None:
    cost = formula(collective, algorithm, size, stride)
    for payload in (0.0, 1e8):
        expected = cost.latency_s + payload * cost.seconds_per_byte
        assert simulated(pattern, payload, size, stride) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("size", "stride"), [(16, 1), (32, 1), (16, 4), (8, 2)])
def test_rings_over_nodes_move_bytes_as_the_formula_says(size: int, stride: int) -> None:
    """The network binds: exact. In latency, rounds wait for the slowest hop, so they take longer than the formula."""
    cost = formula(AG, "ring", size, stride)
    assert simulated(ring_gather, HUGE, size, stride) / HUGE == pytest.approx(cost.seconds_per_byte, rel=1e-3)
    assert simulated(ring_gather, 0.0, size, stride) == pytest.approx((size - 1) * A1)
    assert cost.latency_s < (size - 1) * A1


def test_an_exchange_over_nodes_moves_bytes_as_the_formula_says() -> None:
    for size in (16, 32, 64):
        cost = formula(A2A, "pairwise", size)
        assert simulated(pairwise_all_to_all, 1e12, size, 1) / 1e12 == pytest.approx(cost.seconds_per_byte, rel=1e-3)


@pytest.mark.parametrize(
    ("collective", "algorithm", "pattern", "size", "stride", "tolerance"),
    [
        # Rounds in which the pipeline fills and drains move less.
        (AR, "tree", patterns.tree_all_reduce, 8, 8, 0.05),
        (AR, "tree", patterns.tree_all_reduce, 4, 8, 0.05),
        (AR, "tree", patterns.tree_all_reduce, 2, 8, 0.05),
        (AR, "tree", patterns.tree_all_reduce, 3, 8, 0.05),
        (AR, "tree", patterns.tree_all_reduce, 32, 1, 0.15),
        (AR, "tree", patterns.tree_all_reduce, 8, 1, 0.15),
        (Collective.BROADCAST, "ring", patterns.ring_broadcast, 8, 1, 0.02),
        (Collective.BROADCAST, "ring", patterns.ring_broadcast, 8, 8, 0.02),
        (Collective.BROADCAST, "ring", patterns.ring_broadcast, 16, 1, 0.02),
        (Collective.BROADCAST, "tree", patterns.tree_broadcast, 8, 8, 0.05),
    ],
)
def test_pipelines_move_bytes_as_the_formula_says(
    collective: Collective, algorithm: str, pattern: Pattern, size: int, stride: int, tolerance: float
) -> None:
    """With many pieces the time per byte tends to the formula's."""
    cost = formula(collective, algorithm, size, stride)
    pieces = 100
    rounds = len(pattern(groups(size, stride)[0], 1.0, pieces=pieces))
    seconds = simulated(pattern, HUGE, size, stride, pieces=pieces) * pieces / rounds
    assert seconds / HUGE == pytest.approx(cost.seconds_per_byte, rel=tolerance)


@pytest.mark.parametrize("payload", [1e5, 1e6, 1e7])
def test_the_best_number_of_pieces_takes_the_time_of_the_pipeline(payload: float) -> None:
    """``(sqrt(L) + sqrt(S B))^2`` is the best over the number of pieces, one hop aside (Sanders et al., section 2)."""
    cost = formula(Collective.BROADCAST, "ring", 8)
    best = min(
        simulated(patterns.ring_broadcast, payload, 8, 1, pieces=pieces)
        for pieces in (*range(1, 20), *range(20, 150, 5))
    )
    expected = (sqrt(cost.latency_s - A0) + sqrt(payload * cost.seconds_per_byte)) ** 2
    assert best == pytest.approx(expected, rel=0.02)


def test_switches_that_add_load_every_link_once_and_a_bit() -> None:
    cost = formula(AR, "switch", 8)
    steps = patterns.switch_all_reduce(range(8), HUGE, "node0/nvswitch")
    assert simulate_rounds(topology(), steps) / HUGE == pytest.approx(cost.seconds_per_byte, rel=1e-9)
    # In the network: one member of each node, through the leaf switch.
    across = patterns.switch_all_reduce(range(3, 64, 8), HUGE, "leaf0")
    cost = formula(AR, "switch", 8, 8)
    assert simulate_rounds(topology(), across) / HUGE == pytest.approx(cost.seconds_per_byte, rel=1e-9)


def test_a_mesh_sends_to_all_at_once() -> None:
    """On eight devices joined directly, the direct algorithm uses every link; two of them have one link of seven."""
    for size, stride in ((8, 1), (4, 1), (4, 2), (2, 4)):
        cost = formula(AR, "mesh", size, stride, "full-mesh")
        expected = cost.latency_s + 1e9 * cost.seconds_per_byte
        assert simulated(patterns.mesh_all_reduce, 1e9, size, stride, "full-mesh") == pytest.approx(expected)
        assert cost.seconds_per_byte == pytest.approx(2 * 7 / size / B0)
        exchange = formula(A2A, "pairwise", size, stride, "full-mesh")
        expected = exchange.latency_s + 1e9 * exchange.seconds_per_byte
        assert simulated(pairwise_all_to_all, 1e9, size, stride, "full-mesh") == pytest.approx(expected)
        send = formula(Collective.SEND, "direct", size, stride, "full-mesh")
        assert send.seconds_per_byte == pytest.approx(7 / B0)


def test_every_member_gets_its_bytes() -> None:
    """All patterns of a gather bring ``(n - 1) / n S`` to every member."""
    for blocks in (groups(8, 1)[0], groups(32, 1)[0], groups(4, 8)[0]):
        members = [device for block in blocks for device in block]
        for pattern in (
            ring_gather,
            patterns.hierarchical_gather,
            patterns.halving_doubling_gather,
            patterns.mesh_gather,
            pairwise_all_to_all,
        ):
            got = dict.fromkeys(members, 0.0)
            for step in pattern(blocks, 1.0):
                for message in step:
                    got[int(message.destination)] += message.size_bytes
            expected = (len(members) - 1) / len(members)
            assert list(got.values()) == pytest.approx([expected] * len(members))


def test_an_algorithm_that_cannot_run_is_refused() -> None:
    with pytest.raises(ProfileError, match="all_reduce has no algorithm 'magic'; use one of ring, tree"):
        formula(AR, "magic", 8)
    with pytest.raises(ProfileError, match="halving needs powers of two"):
        formula(AR, "halving-doubling", 6)
    with pytest.raises(ProfileError, match="needs a power of two of members, got 6"):
        patterns.halving_doubling_scatter([range(6)], 1.0)
    assert "mesh" in ALGORITHMS[AR]
