"""Matrices of ``nvidia-smi topo -m`` and the nodes they become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.cluster_files import parse_nvidia_matrix
from simulator.collectives import collective_time
from simulator.errors import ProfileError
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from simulator.program import Collective
from simulator.topology import group_shape, topology_graph
from simulator.topology.nodes import HYBRID_CUBE_MESH

Load = Callable[[str, str], Hardware]
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def matrix(gpus: int, code: Callable[[int, int], str], nics: Callable[[int], list[str]] = lambda _: []) -> str:
    """Output for GPUs joined as `code` says of each ordered pair, with the codes of each GPU to the NICs."""
    names = [f"GPU{gpu}" for gpu in range(gpus)] + [f"mlx5_{nic}" for nic in range(len(nics(0)))]
    lines = ["\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\x1b[0m"]
    for one in range(gpus):
        codes = [" X " if one == other else code(min(one, other), max(one, other)) for other in range(gpus)]
        lines.append("\t".join([f"GPU{one}", *codes, *nics(one), "0-63", "0"]))
    lines += ["\t".join([name, *["SYS"] * (len(names) - 1), " X "]) for name in names[gpus:]]
    return "\n".join(lines) + LEGEND


def pairs_of_nics(gpu: int) -> list[str]:
    """Eight NICs, two near each pair of GPUs, and two of the storage network far from all (as in a DGX A100)."""
    return ["PXB" if nic // 2 == gpu // 2 else "SYS" for nic in range(8)] + ["SYS", "SYS"]


@pytest.fixture
def hardware(tmp_path: Path) -> Load:
    def load(text: str, profile: str) -> Hardware:
        path = tmp_path / "machine.txt"
        path.write_text(text)
        return load_profile(f"{profile}@{path}" if profile else str(path))

    return load


def seconds(found: Hardware, size: int) -> float:
    return collective_time(found, Collective.ALL_REDUCE, 1e9, group_shape(found, size, 1))


def test_a_dgx_is_what_its_profile_says(hardware: Load) -> None:
    found, profile = hardware(matrix(8, lambda *_: "NV12", pairs_of_nics), "dgx-a100"), load_profile("dgx-a100")
    assert found.node == profile.node
    assert found.levels == profile.levels
    assert found.max_devices == profile.max_devices
    assert seconds(found, 16) == seconds(profile, 16)


def test_four_gpus_joined_directly_are_a_full_mesh(hardware: Load) -> None:
    found, profile = hardware(matrix(4, lambda *_: "NV4"), "dgx-a100"), load_profile("dgx-a100")
    assert found.node is not None
    assert (found.node.kind, found.devices_per_node) == ("full-mesh", 4)
    assert found.levels[0].bandwidth_bytes_per_s == profile.levels[0].bandwidth_bytes_per_s
    assert seconds(found, 2) > seconds(profile, 2)  # two of four have four links of twelve
    assert len(topology_graph(found, 8).devices) == 8


def test_half_the_links_of_a_switch_are_half_as_fast(hardware: Load) -> None:
    found, profile = hardware(matrix(8, lambda *_: "NV6"), "dgx-a100"), load_profile("dgx-a100")
    assert found.levels[0].bandwidth_bytes_per_s == pytest.approx(profile.levels[0].bandwidth_bytes_per_s / 2)


def test_a_dgx1_is_a_cube_mesh(hardware: Load) -> None:
    def code(one: int, other: int) -> str:
        return f"NV{HYBRID_CUBE_MESH[one, other]}" if (one, other) in HYBRID_CUBE_MESH else "SYS"

    found = hardware(matrix(8, code), "dgx1-v100")
    assert found.node is not None
    assert found.node.kind == "hybrid-cube-mesh"


def test_a_ring_is_a_ring(hardware: Load) -> None:
    found = hardware(matrix(4, lambda one, other: "NV6" if other - one in (1, 3) else "SYS"), "dgx-a100")
    assert found.node is not None
    assert found.node.kind == "ring"


def test_cards_below_switches_are_a_tree(hardware: Load) -> None:
    text = matrix(8, lambda one, other: "PIX" if one // 2 == other // 2 else "SYS")
    found = hardware(text, "a100-pcie")
    assert found.node is not None
    assert (found.node.kind, found.node.group) == ("pcie-tree", 2)


GOOD = matrix(2, lambda *_: "NV12")
PAIRS = matrix(4, lambda one, other: "NV4" if other == one + 2 else "PHB")


def test_a_mesh_without_a_switch_sums_as_slowly_as_the_same_wiring_of_another_profile(hardware: Load) -> None:
    found, alike = hardware(matrix(4, lambda *_: "NV6"), "dgx-h100"), load_profile("gh200x4")
    assert "switch" not in found.collective_algorithms
    assert found.levels[0].reduction_bandwidth_bytes_per_s == 0
    assert [seconds(found, size) for size in (2, 4)] == pytest.approx([seconds(alike, 2), seconds(alike, 4)])
    assert 1e9 / seconds(found, 2) < 6 * 26.5e9


def test_sums_in_a_switch_are_as_fast_as_the_links_that_lead_there(hardware: Load) -> None:
    found, profile = hardware(matrix(8, lambda *_: "NV9"), "dgx-h100"), load_profile("dgx-h100")
    assert seconds(found, 8) / seconds(profile, 8) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("profile", ["rtx3090", "a100-pcie"])
def test_pairs_with_bridges_are_two_levels_and_ranks_stand_beside_their_pair(hardware: Load, profile: str) -> None:
    found, plain = hardware(PAIRS, profile), hardware(matrix(4, lambda *_: "PHB"), profile)
    assert [(level.name, level.size) for level in found.levels[:2]] == [("NVLink", 2), ("PCIe", 4)]
    assert seconds(found, 2) < seconds(plain, 2) / 2
    assert seconds(found, 2) < seconds(found, 4) < seconds(plain, 4)
    order = {row.field: row for row in found.rows}["topology.node.order"]
    assert order.value == "0,2,1,3"
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in order.source
    assert len(topology_graph(found, 8).devices) == 8


@pytest.mark.parametrize("gpus", [3, 10])
def test_any_number_of_cards_may_take_part(hardware: Load, gpus: int) -> None:
    found = hardware(matrix(gpus, lambda one, other: "PIX" if (one, other) == (0, 1) else "PHB"), "rtx3090")
    assert found.node_device_counts == tuple(range(1, gpus + 1))
    assert found.node is not None
    assert found.node.group == 1  # switches of unlike size: every card by itself, as the slowest pair is
    assert seconds(found, gpus) >= seconds(found, 2)
    joined = hardware(matrix(gpus, lambda *_: "NV12"), "dgx-a100")
    assert joined.node_device_counts == tuple(range(1, gpus + 1))
    assert len(topology_graph(joined, gpus).devices) == gpus


def test_a_card_off_nvlink_may_be_left_out(hardware: Load) -> None:
    text = matrix(4, lambda one, other: "SYS" if 1 in (one, other) else "NV6")
    with pytest.raises(ProfileError, match="GPU1 has no NVLink"):
        hardware(text, "dgx-a100")
    rows = [line.split("\t") for line in text.split("\nLegend")[0].strip("\n").splitlines()]
    kept = ["\t".join([*row[:2], *row[3:]]) for row in rows if not row[0].startswith("GPU1")]
    found = hardware("\n".join(kept), "dgx-a100")
    assert found.devices_per_node == 3
    assert found.node is not None
    assert found.node.kind == "full-mesh"


@pytest.mark.parametrize(
    ("text", "profile", "message"),
    [
        (GOOD, "", "does not say which GPU.*--hw dgx-a100@"),
        (GOOD, "l40s", "NVLinks of NVIDIA L40S are not known"),
        (matrix(2, lambda *_: "SYS"), "dgx-a100", "speed of NVLink only; use a profile of PCIe cards: a100-pcie@"),
        (matrix(2, lambda *_: "SYS"), "dgx1-v100", "speed of NVLink only; write a profile.*profiles new"),
        (PAIRS, "dgx-a100", "joins GPU0 GPU2; GPU1 GPU3, PCIe the rest.*a100-pcie@"),
        (matrix(5, lambda one, other: "NV4" if one // 2 == other // 2 else "SYS"), "rtx3090", "GPU4 has no NVLink"),
        (matrix(5, lambda *pair: "NV4" if pair in ((0, 1), (2, 3), (3, 4)) else "SYS"), "rtx3090", "equal size"),
        ("hello", "dgx-a100", "no line that begins with GPU0"),
        (GOOD.replace("NV12", "NW12", 1), "dgx-a100", r"line 2: 'NW12' is no connection"),
        (GOOD.replace("NV12", "NV6", 1), "dgx-a100", "GPU0 to GPU1 is NV6, back it is NV12"),
        (GOOD.replace(" X ", "NV1"), "dgx-a100", "X stands on the diagonal"),
        ("\n".join(GOOD.splitlines()[:2]), "dgx-a100", "column GPU1 and no line"),
        ("\tGPU0\tGPU1\nGPU0\t X \nGPU1\tNV1\t X ", "dgx-a100", "line 2: 1 of 2 connections"),
    ],
)
def test_what_is_wrong_is_named(text: str, profile: str, message: str, hardware: Load) -> None:
    with pytest.raises(ProfileError, match=message):
        hardware(text, profile)


def test_columns_of_affinity_are_no_nics() -> None:
    read = parse_nvidia_matrix(matrix(2, lambda *_: "NV12").encode(), "machine.txt")
    assert read.to_nics == ((), ())
