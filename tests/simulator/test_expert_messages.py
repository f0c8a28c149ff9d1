"""Messages of tokens: how many nodes they reach, and what a plan's way of sending them makes of their time."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from simulator.corrections import EXPERT_EXPOSED, SENT_ONCE, message_time, places_reached, sent_share
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from simulator.program import Collective
from simulator.topology import group_shape

DGX = load_profile("dgx-h100")


def told(**keys: float) -> Hardware:
    return replace(DGX, training={**DGX.training, **keys})


ONCE = told(**{SENT_ONCE: 8.0})


@pytest.mark.parametrize(("places", "chosen"), [(1, 3), (2, 1), (2, 4), (4, 2), (4, 5), (5, 3)])
def test_as_many_nodes_are_reached_as_counting_finds(places: int, chosen: int) -> None:
    reached = [len(set(drawn)) for drawn in product(range(places), repeat=chosen)]
    assert places_reached(float(places), float(chosen)) == pytest.approx(np.mean(reached))


@pytest.mark.parametrize(("nodes", "experts", "chosen"), [(2, 8, 2), (4, 16, 4), (4, 24, 4), (2, 20, 6)])
def test_experts_that_differ_reach_hardly_more(nodes: int, experts: int, chosen: int) -> None:
    """Routers choose an expert but once, so that a token reaches a little more than independent choices do."""
    each = experts // nodes
    reached = [len({expert // each for expert in drawn}) for drawn in combinations(range(experts), chosen)]
    assert places_reached(float(nodes), float(chosen)) <= np.mean(reached) < 1.15 * places_reached(nodes, chosen)


@pytest.mark.parametrize(
    ("size", "stride", "places"),
    [(32, 1, 4), (16, 2, 4), (8, 4, 4), (16, 1, 2), (8, 1, 8), (4, 2, 4), (4, 8, 4), (16, 8, 16)],
)
def test_members_of_a_node_are_reached_together(size: int, stride: int, places: int) -> None:
    """Inside a node every rank is a place; a group that lies in several nodes has as many."""
    share = sent_share(ONCE, Collective.ALL_TO_ALL, "expert", group_shape(ONCE, size, stride))
    assert share == pytest.approx(places * (1 - (1 - 1 / places) ** 8) / 8)


def test_ranks_of_a_rack_joined_by_nvlink_are_reached_one_by_one() -> None:
    """A tray of NVL72 has four of them; eight in two trays are as far apart as eight of a DGX."""
    rack = load_profile("gb200-nvl72")
    rack = replace(rack, training={**rack.training, SENT_ONCE: 8.0})
    shares = [sent_share(hw, Collective.ALL_TO_ALL, "expert", group_shape(hw, 8, 1)) for hw in (ONCE, rack)]
    assert shares[0] == pytest.approx(shares[1])


def test_tokens_alone_travel_otherwise() -> None:
    hidden = told(**{EXPERT_EXPOSED: 0.25, SENT_ONCE: 8.0})
    group, payload = group_shape(DGX, 32, 1), np.array([1e6, 1e8])
    share = sent_share(ONCE, Collective.ALL_TO_ALL, "expert", group)
    assert 0 < share < 0.5

    def seconds(hardware: Hardware, axis: str, collective: Collective, sent: float = 1.0) -> np.ndarray:
        return message_time(hardware, collective, sent * payload, group, axis=axis)

    fewer = seconds(DGX, "expert", Collective.ALL_TO_ALL, share)
    assert seconds(ONCE, "expert", Collective.ALL_TO_ALL) == pytest.approx(fewer)
    assert seconds(hidden, "expert", Collective.ALL_TO_ALL) == pytest.approx(0.25 * fewer)
    for axis, collective in [("tensor", Collective.ALL_TO_ALL), ("expert", Collective.ALL_GATHER)]:
        assert (seconds(hidden, axis, collective) == seconds(DGX, axis, collective)).all()
    assert sent_share(told(**{SENT_ONCE: 1.0}), Collective.ALL_TO_ALL, "expert", group) == pytest.approx(1.0)
    assert sent_share(ONCE, Collective.ALL_TO_ALL, "expert", group_shape(DGX, 1, 1)) == 1.0
