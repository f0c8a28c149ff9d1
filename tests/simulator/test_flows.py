"""Max-min fair rates by their definition, and messages as fluids by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import max_min_rates
from simulator.errors import ProfileError
from simulator.topology import NodeSpec, Topology, node_topology
from simulator.topology.sharing import Message
from tests.simulator.collective_rounds import simulate_rounds


def rates(caps: list[float], uses: list[dict[int, float]], capacities: list[float]) -> list[float]:
    offsets = np.cumsum([0, *map(len, uses)])
    links = np.array([link for use in uses for link in use], dtype=np.int64)
    weights = np.array([weight for use in uses for weight in use.values()], dtype=np.float64)
    return max_min_rates(np.array(caps), offsets, links, weights, np.array(capacities)).tolist()


@pytest.mark.parametrize(
    ("caps", "uses", "capacities", "expected"),
    [
        ([math.inf] * 3, [{0: 1.0}] * 3, [30.0], [10.0] * 3),
        ([4.0, math.inf, math.inf], [{0: 1.0}] * 3, [30.0], [4.0, 13.0, 13.0]),
        # The textbook line: a long flow over two links and a short one on each.
        ([math.inf] * 3, [{0: 1.0, 1: 1.0}, {0: 1.0}, {1: 1.0}], [10.0, 30.0], [5.0, 5.0, 25.0]),
        # Weights say how many bytes a byte of work puts on the link.
        ([math.inf] * 2, [{0: 3.0}, {0: 1.0}], [20.0], [5.0, 5.0]),
        ([7.0], [{}], [], [7.0]),
        ([5.0, math.inf], [{0: 1.0}, {0: 1.0, 1: 1.0}], [100.0, 0.0], [5.0, 0.0]),
        ([], [], [1.0], []),
    ],
)
def test_rates_by_hand(
    caps: list[float], uses: list[dict[int, float]], capacities: list[float], expected: list[float]
) -> None:
    assert rates(caps, uses, capacities) == pytest.approx(expected)


def test_a_flow_that_nothing_limits_is_refused() -> None:
    with pytest.raises(ProfileError, match="flow 1 has no cap and crosses no link"):
        rates([1.0, math.inf], [{0: 1.0}, {}], [2.0])


FLOW = st.tuples(
    st.floats(0.1, 10) | st.just(math.inf),
    st.dictionaries(st.integers(0, 3), st.floats(0.1, 4), min_size=1),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(FLOW, min_size=1, max_size=8), st.lists(st.floats(0.5, 20), min_size=4, max_size=4))
def test_no_rate_can_grow_without_taking_from_a_smaller_one(
    flows: list[tuple[float, dict[int, float]]], capacities: list[float]
) -> None:
    caps, uses = [cap for cap, _ in flows], [use for _, use in flows]
    found = rates(caps, uses, capacities)
    load = [sum(rate * use.get(link, 0.0) for rate, use in zip(found, uses, strict=True)) for link in range(4)]
    assert all(carried <= capacity * (1 + 1e-9) for carried, capacity in zip(load, capacities, strict=True))
    for rate, cap, use in zip(found, caps, uses, strict=True):
        full = [link for link in use if load[link] >= capacities[link] * (1 - 1e-9)]
        largest = any(
            all(rate >= other * (1 - 1e-9) for other, others in zip(found, uses, strict=True) if link in others)
            for link in full
        )
        assert rate <= cap
        assert rate == pytest.approx(cap) or largest


@pytest.fixture
def switch() -> Topology:
    """Four devices on a switch: 10 bytes/s each way, 1 s from device to device."""
    return node_topology(NodeSpec(kind="nvswitch", devices=4, bandwidth_bytes_per_s=10.0, latency_s=1.0))


def test_rounds_by_hand(switch: Topology) -> None:
    assert simulate_rounds(switch, [[Message(0, 1, 100.0)]]) == pytest.approx(11.0)
    assert simulate_rounds(switch, [[Message(0, 1, 100.0), Message(1, 0, 100.0)]] * 2) == pytest.approx(22.0)
    # Both enter device 2 at 5 bytes/s until the smaller has arrived.
    assert simulate_rounds(switch, [[Message(0, 2, 50.0), Message(1, 2, 100.0)]]) == pytest.approx(16.0)
    assert simulate_rounds(switch, [[Message(0, 1, 0.0)], [], [Message(3, 3, 9.0)]]) == pytest.approx(1.0)


def test_messages_that_start_later_join_the_sharing() -> None:
    """In a ring of four the far device is two hops away: its bytes start later and then share the last link."""
    ring = node_topology(NodeSpec(kind="ring", devices=4, bandwidth_bytes_per_s=20.0, latency_s=1.0))
    route = ring.route(0, 2)
    middle = route[1]
    assert isinstance(middle, int)
    # 10 bytes/s alone from second 1 to 2, 5 each afterwards: 20 - 10 left take 2 s, then 10 bytes/s for the rest.
    messages = [Message(middle, 2, 20.0), Message(0, 2, 20.0)]
    assert simulate_rounds(ring, [messages]) == pytest.approx(5.0)


def test_a_device_that_is_not_there_is_refused(switch: Topology) -> None:
    with pytest.raises(ProfileError, match="has 4 devices, 0 to 3, and is too small for 7; use fewer"):
        simulate_rounds(switch, [[Message(0, 7, 1.0)]])
