"""The matrix that ``nvidia-smi topo -m`` prints: how each pair of GPUs of one machine is joined."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import networkx as nx

from simulator.errors import ProfileError
from simulator.hardware import Hardware, Level
from simulator.topology.nodes import HYBRID_CUBE_MESH

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"^GPU(\d+)$")
_NIC = re.compile(r"^(?:NIC\d+|mlx\d+_\d+|[a-z]+[a-z0-9_]*\d+)$")
_CODE = re.compile(r"^(?:X|SYS|SOC|NODE|PHB|PXB|PIX|NV\d+)$")
BELOW_ONE_SWITCH = ("PIX", "PXB")

# NVLinks of one GPU of each chip (datasheets), for the share of them that a machine uses.
_NVLINKS = {"V100": 6, "A100": 12, "A800": 8, "H100": 18, "H800": 8, "H200": 18, "B200": 18, "B300": 18, "GB300": 18}


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaMatrix:
    """Codes between the GPUs of one machine, ``(gpus, gpus)``, and from each GPU to each NIC, ``(gpus, nics)``."""

    between: tuple[tuple[str, ...], ...]
    to_nics: tuple[tuple[str, ...], ...]

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return len(self.between)

    def nvlinks(self, one: int, other: int) -> int:
        """NVLinks that join two GPUs."""
        code = self.between[one][other]
        return int(code[2:]) if code.startswith("NV") else 0


def is_matrix(content: bytes) -> bool:
    """Whether a file looks like the output of ``nvidia-smi topo -m``: a line that begins with the names of GPUs."""
    return (
        re.search(rb"^[ \t]*GPU0(?:[ \t]+(?:GPU1|NIC0|mlx5_0|CPU Affinity)|[ \t]+X)\b", content, re.MULTILINE)
        is not None
    )


def parse_nvidia_matrix(content: bytes, file: str) -> NvidiaMatrix:
    """Matrix from the text of `file`; ProfileError names the line that is wrong."""
    lines = [_ESCAPE.sub("", line).split() for line in content.decode(errors="replace").splitlines()]
    start = next((number for number, words in enumerate(lines) if words[:1] and _GPU.match(words[0])), None)
    if start is None:
        raise ProfileError(f"{file} has no line that begins with GPU0; give the output of nvidia-smi topo -m")
    header = [word for word in lines[start] if _GPU.match(word) or _NIC.match(word)]
    gpus = sum(1 for word in header if _GPU.match(word))
    if header[:gpus] != [f"GPU{number}" for number in range(gpus)]:
        raise ProfileError(f"{file}, line {start + 1}: columns are {', '.join(header)}; GPUs run from GPU0 on")
    rows = {words[0]: (number, words[1:]) for number, words in enumerate(lines[start + 1 :], start + 2) if words}
    between, to_nics = [], []
    for gpu in range(gpus):
        if f"GPU{gpu}" not in rows:
            raise ProfileError(f"{file} has a column GPU{gpu} and no line of that name; give the whole output")
        number, words = rows[f"GPU{gpu}"]
        codes = words[: len(header)]
        wrong = next((word for word in codes if not _CODE.match(word)), None)
        if wrong is not None or len(codes) < len(header):
            said = f"{wrong!r} is no connection" if wrong is not None else f"{len(codes)} of {len(header)} connections"
            raise ProfileError(f"{file}, line {number}: {said}; use X, NV#, PIX, PXB, PHB, NODE or SYS in every column")
        between.append(tuple(codes[:gpus]))
        to_nics.append(tuple(codes[gpus:]))
    matrix = NvidiaMatrix(between=tuple(between), to_nics=tuple(to_nics))
    for one, other in itertools.product(range(gpus), repeat=2):
        there, back = between[one][other], between[other][one]
        if (one == other) != (there == "X"):
            raise ProfileError(f"{file}: GPU{one} to GPU{other} is {there}; X stands on the diagonal")
        if there != back:
            raise ProfileError(
                f"{file}: GPU{one} to GPU{other} is {there}, back it is {back}; connections are the same both ways"
            )
    return matrix


def matrix_hardware(content: bytes, file: str, profile: str, load: Callable[[str], Hardware]) -> Hardware:
    """Hardware of machines that are joined inside as the matrix in `content` says.

    What joins the machines, and the device itself, are those of the profile. Links of a GPU inside the machine are as
    fast in all as the profile's, times the share of the chip's NVLinks that the matrix shows.

    Raises
    ------
    ProfileError
        the matrix is malformed, needs links that the profile's device lacks, or no graph of a node fits it.
    """
    if not profile:
        raise ProfileError(
            f"{file} does not say which GPU it shows; write the profile of the GPU before it: --hw dgx-a100@{file}"
        )
    hardware = load(profile)
    matrix = parse_nvidia_matrix(content, file)
    kind, share, group = _node(matrix, hardware, file)
    whole = hardware.devices_per_node
    if hardware.node is None or hardware.levels[0].size < whole:
        raise ProfileError(
            f"profile {hardware.name} does not describe nodes joined at one level; use a profile like dgx-a100"
        )
    nics = _nics(matrix) or math.gcd(matrix.gpus, hardware.node.nics)
    machines = max(1, hardware.max_devices // whole)
    digest = hashlib.sha256(f"{hardware.hash} {matrix.between} {nics}".encode()).hexdigest()
    counts = tuple(count for count in range(1, matrix.gpus + 1) if matrix.gpus % count == 0)
    return replace(
        hardware,
        name=f"{hardware.name}@{PurePath(file).stem}",
        hash=digest,
        devices_per_node=matrix.gpus,
        node_device_counts=counts,
        max_devices=matrix.gpus * machines,
        node=replace(hardware.node, kind=kind, nics=nics, group=group),
        levels=_levels(hardware, matrix.gpus, share, nics / matrix.gpus * whole / hardware.node.nics),
    )


def _levels(hardware: Hardware, gpus: int, share: float, ports: float) -> tuple[Level, ...]:
    """Levels of machines of `gpus` devices: bandwidth inside times `share`, beyond times `ports`."""
    inner = hardware.levels[0]
    first = replace(inner, size=gpus, bandwidth_bytes_per_s=inner.bandwidth_bytes_per_s * share)
    beyond = (
        replace(
            level,
            size=level.size // hardware.devices_per_node * gpus,
            bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * ports,
        )
        for level in hardware.levels[1:]
    )
    return (first, *beyond)


def _node(matrix: NvidiaMatrix, hardware: Hardware, file: str) -> tuple[str, float, int]:
    """Kind of the node, the share of a device's links that it uses, and devices below one PCIe switch."""
    pairs = list(itertools.combinations(range(matrix.gpus), 2))
    links = {pair: matrix.nvlinks(*pair) for pair in pairs}
    joined = [pair for pair in pairs if links[pair]]
    own, group = (hardware.node.kind, hardware.node.group) if hardware.node else ("", 1)
    if not joined:
        if own != "pcie-tree":
            raise ProfileError(
                f"{file} shows no NVLink, and profile {hardware.name} has the speed of NVLink only; use a profile of "
                f"PCIe cards, for example a100-pcie@{file}"
            )
        return "pcie-tree", 1.0, _switch_group(matrix, file)
    if own == "pcie-tree":
        raise ProfileError(
            f"{file} shows NVLink, and profile {hardware.name} has the speed of PCIe only; use a profile with NVLink, "
            f"for example dgx-a100@{file}"
        )
    total = _chip_links(hardware)
    of_gpu = [sum(links[pair] for pair in joined if gpu in pair) for gpu in range(matrix.gpus)]
    alike = len({links[pair] for pair in pairs}) == 1
    if alike and len(pairs) > 1 and of_gpu[0] <= total:
        return "full-mesh", of_gpu[0] / total, group
    if alike:
        return "nvswitch", links[pairs[0]] / total, group
    if links == {pair: HYBRID_CUBE_MESH.get(pair, 0) for pair in pairs}:
        return "hybrid-cube-mesh", 1.0, group
    ring = [(rank, rank + 1) for rank in range(matrix.gpus - 1)] + [(0, matrix.gpus - 1)]
    if sorted(joined) == sorted(ring) and len({links[pair] for pair in joined}) == 1:
        return "ring", of_gpu[0] / total, group
    raise ProfileError(
        f"{file}: NVLinks join {len(joined)} of {len(pairs)} pairs of GPUs in a way that is no switch, full mesh, ring "
        f"in order or DGX-1 cube mesh; describe the node in a profile of your own (docs/profiles.md)"
    )


def _chip_links(hardware: Hardware) -> int:
    names = [name for name in _NVLINKS if re.search(rf"\b{name}\b", hardware.device_name)]
    if not names:
        raise ProfileError(
            f"NVLinks of {hardware.device_name} are not known; use a profile of {', '.join(_NVLINKS)} devices"
        )
    return _NVLINKS[names[0]]


def _switch_group(matrix: NvidiaMatrix, file: str) -> int:
    """Devices below one PCIe switch: runs of GPUs that reach each other without a host bridge."""
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(matrix.gpus))
    graph.add_edges_from(
        (one, other)
        for one, other in itertools.combinations(range(matrix.gpus), 2)
        if matrix.between[one][other] in BELOW_ONE_SWITCH
    )
    groups = [sorted(group) for group in nx.connected_components(graph)]
    sizes: Sequence[int] = sorted({len(group) for group in groups})
    if len(sizes) > 1 or any(group != list(range(group[0], group[0] + len(group))) for group in groups):
        held = "; ".join(" ".join(map(str, group)) for group in groups)
        raise ProfileError(
            f"{file}: PCIe switches hold GPUs {held}; equal runs of neighbouring GPUs are simulated: describe the node "
            f"in a profile of your own (docs/profiles.md)"
        )
    return sizes[0]


def _nics(matrix: NvidiaMatrix) -> int:
    """NICs that serve GPUs: those below a PCIe switch with one, else all; as many as divide the GPUs evenly."""
    columns = range(len(matrix.to_nics[0]))
    near = sum(any(row[column] in BELOW_ONE_SWITCH for row in matrix.to_nics) for column in columns)
    found = min(near or len(columns), matrix.gpus)
    return next((count for count in range(found, 0, -1) if matrix.gpus % count == 0), 0)
