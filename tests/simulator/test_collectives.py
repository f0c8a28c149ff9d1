"""Collective times: formulas by hand, promises for all, and published measurements."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources
from math import sqrt
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simulator.collectives import ALGORITHMS, algorithm_costs, collective_time
from simulator.errors import ProfileError
from simulator.hardware import CollectiveTable, Hardware, Level
from simulator.profiles import load_profile, profile_names, write_profile
from simulator.program import Collective
from simulator.topology import GroupShape, group_shape
from tests.measurements import PUBLISHED, needs_published
from tests.oracles.simulated import collective_algorithm

profile = cache(load_profile)
A0, B0, A1, B1 = 1e-6, 100e9, 5e-6, 10e9


@pytest.fixture
def cluster() -> Hardware:
    """Nodes of 8 at 100 GB/s and 1 us, a fabric at 10 GB/s and 5 us a device, calls that cost 2 us."""
    levels = (
        Level(name="node", size=8, bandwidth_bytes_per_s=B0, latency_s=A0),
        Level(name="fabric", size=4096, bandwidth_bytes_per_s=B1, latency_s=A1),
    )
    algorithms = ("tree", "hierarchical", "switch")
    return replace(profile("dgx-a100"), levels=levels, collective_overhead_s=2e-6, collective_algorithms=algorithms)


def costs(hardware: Hardware, collective: Collective, size: int, stride: int = 1) -> dict[str, tuple[float, float]]:
    found = algorithm_costs(hardware, collective, group_shape(hardware, size, stride))
    return {name: (cost.latency_s, cost.seconds_per_byte) for name, cost in found.items()}


def test_all_reduce_in_a_node_by_hand(cluster: Hardware) -> None:
    found = costs(cluster, Collective.ALL_REDUCE, 8)
    assert found["ring"] == pytest.approx((14 * A0, 2 * 7 / 8 / B0))
    assert found["tree"] == pytest.approx((14 * A0, 2 * 7 / 8 / B0))
    assert found["hierarchical"] == pytest.approx((14 * A0, 2 * 7 / 8 / B0))
    assert "switch" not in found


def test_all_reduce_over_nodes_by_hand(cluster: Hardware) -> None:
    found = costs(cluster, Collective.ALL_REDUCE, 32)
    # 31 hops around the ring, 3 of them between nodes; 8 network ports beside each other.
    assert found["ring"] == pytest.approx((2 * (28 * A0 + 3 * A1), 2 * 31 / 32 / min(B0, 8 * B1)))
    # A chain of 7 inside the nodes, a tree of 4 nodes; the network's 2 * S/8 is the larger part.
    assert found["tree"] == pytest.approx((2 * (7 * A0 + 2 * A1), max(2 * 7 / 8 / B0, 2 / (8 * B1))))
    assert found["hierarchical"] == pytest.approx((2 * (7 * A0 + 3 * A1), 2 * 7 / 8 / B0 + 2 * 3 / 4 / (8 * B1)))


def test_an_axis_across_nodes_has_one_port_a_member(cluster: Hardware) -> None:
    assert costs(cluster, Collective.ALL_REDUCE, 4, 8)["ring"] == pytest.approx((6 * A1, 2 * 3 / 4 / B1))


def test_gather_and_scatter_are_half_an_all_reduce(cluster: Hardware) -> None:
    for size in (2, 8, 32, 256):
        both = costs(cluster, Collective.ALL_GATHER, size)
        assert both == costs(cluster, Collective.REDUCE_SCATTER, size)
        for name, (latency, per_byte) in both.items():
            assert costs(cluster, Collective.ALL_REDUCE, size)[name] == pytest.approx((2 * latency, 2 * per_byte))


def test_the_other_collectives_by_hand(cluster: Hardware) -> None:
    exchange = costs(cluster, Collective.ALL_TO_ALL, 32)["pairwise"]
    assert exchange == pytest.approx((A1, max(7 / 32 / B0, 24 / 32 / B1)))
    found = costs(cluster, Collective.BROADCAST, 32)
    assert found["ring"] == pytest.approx((28 * A0 + 3 * A1, 1 / (8 * B1)))
    assert found["tree"] == pytest.approx((7 * A0 + 2 * A1, 1 / (8 * B1)))
    assert costs(cluster, Collective.SEND, 2)["direct"] == (A0, 1 / B0)
    assert costs(cluster, Collective.SEND, 4, 8)["direct"] == (A1, 1 / B1)


def test_switches_that_add_take_the_tensor_once(cluster: Hardware) -> None:
    inner = replace(cluster.levels[0], reduction_bandwidth_bytes_per_s=90e9)
    adding = replace(cluster, levels=(inner, cluster.levels[1]))
    assert costs(adding, Collective.ALL_REDUCE, 8)["switch"] == pytest.approx((14 * A0, (1 + 1 / 8) / 90e9))
    group = group_shape(adding, 8, 1)
    assert collective_algorithm(adding, Collective.ALL_REDUCE, 1e9, group) == "switch"
    assert "switch" not in costs(adding, Collective.ALL_REDUCE, 4, 8)


def test_the_message_is_a_pipeline(cluster: Hardware) -> None:
    group = group_shape(cluster, 8, 1)
    latency, moving = 7 * A0, 7 / 8 * 1e8 / B0
    expected = 2e-6 + latency + moving + 2 * sqrt(latency * moving)
    assert collective_time(cluster, Collective.ALL_GATHER, 1e8, group) == pytest.approx(expected)
    assert collective_time(cluster, Collective.ALL_GATHER, 0.0, group) == pytest.approx(2e-6 + latency)


def test_the_fastest_algorithm_is_taken_and_named(cluster: Hardware) -> None:
    far = group_shape(cluster, 64, 8)
    assert collective_algorithm(cluster, Collective.ALL_REDUCE, 1e3, far) == "tree"
    assert collective_algorithm(replace(cluster, collective_algorithms=()), Collective.ALL_REDUCE, 1e3, far) == "ring"
    assert collective_algorithm(cluster, Collective.ALL_REDUCE, 1e3, group_shape(cluster, 1, 1)) == "none"


def test_an_algorithm_may_be_pinned(cluster: Hardware, tmp_path: Path) -> None:
    group = group_shape(cluster, 32, 1)
    times = {
        name: collective_time(
            replace(cluster, pinned_algorithms={Collective.ALL_REDUCE: name}), Collective.ALL_REDUCE, 1e6, group
        )
        for name in ("ring", "tree", "hierarchical", "halving-doubling", "mesh")
    }
    assert len(set(times.values())) == len(times)
    known = [times[name] for name in ("ring", "tree", "hierarchical")]
    assert collective_time(cluster, Collective.ALL_REDUCE, 1e6, group) == min(known)
    pinned = replace(cluster, pinned_algorithms={Collective.ALL_REDUCE: "halving-doubling"})
    assert collective_time(pinned, Collective.ALL_REDUCE, 1e6, group) == times["halving-doubling"]
    assert collective_algorithm(pinned, Collective.ALL_REDUCE, 1e6, group) == "halving-doubling"
    six = group_shape(cluster, 6, 1)
    assert collective_algorithm(pinned, Collective.ALL_REDUCE, 1e6, six) in {"ring", "tree", "hierarchical"}
    data = yaml.safe_load((resources.files("hw_profiles") / "dgx-a100.yaml").read_text())
    source = "assumed: for the sake of the test"
    data["topology"]["pinned_algorithms"] = {"value": {"all_reduce": "ring"}, "source": source}
    assert write_profile(data, tmp_path / "pinned.yaml").pinned_algorithms == {Collective.ALL_REDUCE: "ring"}
    data["topology"]["pinned_algorithms"]["value"] = {"all_reduce": "pairwise"}
    with pytest.raises(ProfileError, match="all_reduce has no algorithm 'pairwise'; use one of ring, tree"):
        write_profile(data, tmp_path / "pinned.yaml")


def test_a_group_of_one_costs_nothing(cluster: Hardware) -> None:
    alone = group_shape(cluster, 1, 4)
    for collective in Collective:
        assert collective_time(cluster, collective, 1e9, alone) == 0.0
        assert collective_time(cluster, collective, np.array([1.0, 2.0]), alone).tolist() == [0.0, 0.0]


SIZES = st.sampled_from([1, 2, 3, 4, 8, 16, 24, 64, 512])
BYTES = st.floats(min_value=0, max_value=1e13)


@given(
    st.sampled_from(profile_names()), st.sampled_from(list(Collective)), SIZES, st.sampled_from([1, 2, 8]), BYTES, BYTES
)
def test_every_profile_and_collective_keeps_the_promises(
    name: str, collective: Collective, size: int, stride: int, payload: float, more: float
) -> None:
    hardware = profile(name)
    group = group_shape(hardware, size, stride)
    less = collective_time(hardware, collective, payload, group)
    assert np.isfinite(less)
    assert 0 <= less <= collective_time(hardware, collective, payload + more, group) * (1 + 1e-12)
    both = collective_time(hardware, collective, np.array([payload, payload + more]), group)
    assert both.shape == (2,)
    assert both[0] == less
    assert collective_algorithm(hardware, collective, payload, group) in {"none", *ALGORITHMS[collective]}


def table(group_size: int, *seconds: float) -> CollectiveTable:
    sizes = (1e3, 1e5, 1e7)
    return CollectiveTable(
        collective=Collective.ALL_REDUCE, group_size=group_size, payload_bytes=sizes, seconds=seconds
    )


@pytest.fixture
def measured(cluster: Hardware) -> Hardware:
    return replace(cluster, collective_tables=(table(2, 1e-4, 1e-3, 1e-1), table(8, 4e-4, 1e-3, 4e-1)))


def test_measured_tables_come_first(measured: Hardware) -> None:
    two = group_shape(measured, 2, 1)
    assert collective_algorithm(measured, Collective.ALL_REDUCE, 1.0, two) == "measured"
    times = collective_time(measured, Collective.ALL_REDUCE, np.array([1e3, 1e4, 1e5, 1e6, 1e7]), two)
    assert times == pytest.approx([1e-4, 10**-3.5, 1e-3, 1e-2, 1e-1])
    assert collective_time(measured, Collective.ALL_REDUCE, 0.0, two) == pytest.approx(1e-4)
    assert collective_time(measured, Collective.ALL_REDUCE, 2e7, two) == pytest.approx(2e-1)
    assert collective_time(measured, Collective.ALL_REDUCE, 1e3, group_shape(measured, 4, 1)) == pytest.approx(2e-4)


def test_where_no_table_speaks_the_model_does(measured: Hardware, cluster: Hardware) -> None:
    for collective, size, stride in ((Collective.ALL_GATHER, 8, 1), (Collective.ALL_REDUCE, 16, 1)):
        group = group_shape(measured, size, stride)
        assert collective_time(measured, collective, 1e6, group) == collective_time(cluster, collective, 1e6, group)


@given(st.integers(2, 8), BYTES, BYTES)
def test_tables_are_monotone(size: int, payload: float, more: float) -> None:
    base = profile("dgx-a100")
    hardware = replace(base, collective_tables=(table(3, 1e-4, 1e-3, 1e-1), table(5, 4e-4, 1e-3, 4e-1)))
    group = GroupShape(members=(size, 1))
    less = collective_time(hardware, Collective.ALL_REDUCE, payload, group)
    assert 0 < less <= collective_time(hardware, Collective.ALL_REDUCE, payload + more, group) * (1 + 1e-12)


@needs_published
@pytest.mark.parametrize(
    ("name", "accelerator"),
    [
        ("dgx-a100", "NVIDIA A100-SXM4-80GB"),
        ("dgx-h100", "NVIDIA H100 80GB HBM3"),
        ("dgx-h200", "NVIDIA H200"),
        ("dgx-b200", "NVIDIA B200"),
        ("gb200-nvl72", "NVIDIA GB200"),
        ("dgx1-v100", "V100"),
    ],
)
def test_published_all_reduces_are_met(name: str, accelerator: str) -> None:
    """The median relative error of NCCL all-reduces of 512 bytes to 1 GB in a node stays under 15 %."""
    rows = pd.read_csv(PUBLISHED / "operators/F2_collectives_aiconfigurator_vidur.csv", low_memory=False)
    rows = rows[(rows.accelerator == accelerator) & (rows.collective == "all_reduce")]
    hardware = profile(name)
    predicted = [
        collective_time(hardware, Collective.ALL_REDUCE, float(size), group_shape(hardware, int(count), 1))
        for size, count in zip(rows.size_bytes, rows.n_accels, strict=True)
    ]
    errors = np.exp(np.abs(np.log(np.array(predicted) * 1e6 / rows.time_us.to_numpy()))) - 1
    assert len(errors) > 10
    assert np.median(errors) < 0.15
