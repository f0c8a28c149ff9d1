"""The matrix that ``nvidia-smi topo -m`` prints: how each pair of GPUs of one machine is joined."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath

import networkx as nx

from simulator.errors import ProfileError
from simulator.hardware import ORDER, Hardware, Level, ProfileRow
from simulator.topology.nodes import HYBRID_CUBE_MESH

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"^GPU([0-9]{1,4})$")
_NIC = re.compile(r"^(?:NIC\d+|mlx\d+_\d+|[a-z]+[a-z0-9_]*\d+)$")
_CODE = re.compile(r"^(?:X|SYS|SOC|NODE|PHB|PXB|PIX|NV[0-9]{1,3})$")
BELOW_ONE_SWITCH = ("PIX", "PXB")

NVLINKS = {
    **dict.fromkeys(("A100",), (12, 25e9)),
    **dict.fromkeys(("H100", "H200"), (18, 25e9)),
    **dict.fromkeys(("A800", "H800"), (8, 25e9)),
    **dict.fromkeys(("B200", "B300", "GB300"), (18, 50e9)),
    **dict.fromkeys(("RTX 3090", "RTX A6000"), (4, 14.0625e9)),
    "V100": (6, 25e9),
}
"""NVLinks of one GPU of each chip, and bytes/s of a link in one direction (datasheets; GA102 whitepaper, 2020)."""
REFERENCE = "dgx-a100"
"""Profile whose share of NVLink's rate, and latency, count where a profile of PCIe cards has no NVLink of its own."""
PCIE_PROFILES = {"A100": "a100-pcie", "H100": "h100-pcie"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaMatrix:
    """Codes between the GPUs of one machine, ``(gpus, gpus)``, and from each GPU to each NIC, ``(gpus, nics)``.

    ``numbers`` are those of the GPUs, as the file names them.
    """

    between: tuple[tuple[str, ...], ...]
    to_nics: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return len(self.between)

    def nvlinks(self, one: int, other: int) -> int:
        """NVLinks that join two GPUs."""
        code = self.between[one][other]
        return int(code[2:]) if code.startswith("NV") else 0

    @property
    def nvlink(self) -> nx.Graph[int]:
        """GPUs, and the pairs that NVLink joins."""
        return self.joined(lambda code: code.startswith("NV"))

    def joined(self, known: Callable[[str], bool]) -> nx.Graph[int]:
        """GPUs, and the pairs whose code is `known`."""
        graph: nx.Graph[int] = nx.Graph()
        graph.add_nodes_from(range(self.gpus))
        pairs = itertools.combinations(range(self.gpus), 2)
        graph.add_edges_from((one, other) for one, other in pairs if known(self.between[one][other]))
        return graph

    def named(self, gpus: Iterable[int]) -> str:
        """GPUs for a message."""
        return " ".join(f"GPU{self.numbers[gpu]}" for gpu in gpus)


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
    numbers = tuple(int(word[3:]) for word in header if _GPU.match(word))
    if list(numbers) != sorted(set(numbers)) or not all(_GPU.match(word) for word in header[:gpus]):
        raise ProfileError(f"{file}, line {start + 1}: columns are {', '.join(header)}; GPUs ascend, NICs follow")
    rows = {words[0]: (number, words[1:]) for number, words in enumerate(lines[start + 1 :], start + 2) if words}
    between, to_nics = [], []
    for gpu in numbers:
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
    matrix = NvidiaMatrix(between=tuple(between), to_nics=tuple(to_nics), numbers=numbers)
    for one, other in itertools.product(range(gpus), repeat=2):
        there, back = between[one][other], between[other][one]
        if (one == other) != (there == "X"):
            raise ProfileError(
                f"{file}: {matrix.named([one, other])}: {there}; X stands on the diagonal, and only there"
            )
        if there != back:
            raise ProfileError(
                f"{file}: {matrix.named([one])} to {matrix.named([other])} is {there}, back it is {back}; connections "
                "are the same both ways"
            )
    return matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """How the GPUs of a node are joined.

    Attributes
    ----------
    kind : of the node
    group : GPUs below one PCIe switch, or in an island of NVLink; the profile's elsewhere
    links : NVLinks of a GPU, 0 for none
    order : GPUs in the order in which ranks are to have them
    """

    kind: str
    group: int
    links: int
    order: tuple[int, ...]


def matrix_hardware(content: bytes, file: str, profile: str, load: Callable[[str], Hardware]) -> Hardware:
    """Hardware of machines that are joined inside as the matrix in `content` says.

    The device and the network between machines come from the profile. The NVLinks of a GPU have the profile's rate,
    times the share of the chip's NVLinks that the matrix shows. For a profile of PCIe cards they have the chip's rate,
    and reach the same part of it as on `REFERENCE`. Machines without a switch have no sums in it.

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
    whole = hardware.devices_per_node
    if hardware.node is None or hardware.levels[0].size < whole:
        raise ProfileError(
            f"profile {hardware.name} does not describe nodes joined at one level; use a profile like dgx-a100"
        )
    joined = _node(matrix, hardware, file)
    nics = _nics(matrix) or math.gcd(matrix.gpus, hardware.node.nics)
    digest = hashlib.sha256(f"{hardware.hash} {matrix.between} {nics}".encode()).hexdigest()
    every = hardware.node_device_counts == tuple(range(1, whole + 1))
    inside, share = _inside(joined, matrix.gpus, hardware, load)
    changed = joined.kind != hardware.node.kind or share != 1
    switched = joined.kind == "nvswitch"
    return replace(
        hardware,
        name=f"{hardware.name}@{PurePath(file).stem}",
        hash=digest,
        devices_per_node=matrix.gpus,
        node_device_counts=tuple(n for n in range(1, matrix.gpus + 1) if every or matrix.gpus % n == 0),
        max_devices=matrix.gpus * max(1, hardware.max_devices // whole),
        node=replace(hardware.node, kind=joined.kind, nics=nics, group=joined.group),
        levels=(*inside, *_beyond(hardware, matrix.gpus, nics / matrix.gpus * whole / hardware.node.nics)),
        collective_algorithms=tuple(name for name in hardware.collective_algorithms if switched or name != "switch"),
        collective_tables=() if changed else hardware.collective_tables,
        rows=(*hardware.rows, *_order(joined, matrix, file)),
    )


def _order(joined: _Joined, matrix: NvidiaMatrix, file: str) -> Iterator[ProfileRow]:
    """The order of GPUs, where ranks are not to have them as they are numbered."""
    if joined.order != tuple(range(matrix.gpus)):
        order = ",".join(str(matrix.numbers[gpu]) for gpu in joined.order)
        said = f"{file}: GPUs that are joined stand next to each other; start with CUDA_VISIBLE_DEVICES={order}"
        yield ProfileRow(field=ORDER, value=order, source=said)


def _inside(
    joined: _Joined, gpus: int, hardware: Hardware, load: Callable[[str], Hardware]
) -> tuple[tuple[Level, ...], float]:
    """Levels of a machine, and the share of the profile's bandwidth that its links have."""
    inner = hardware.levels[0]
    if not joined.links:
        return (replace(inner, size=gpus),), 1.0
    total, rate = _chip_links(hardware)
    assert hardware.node is not None
    if hardware.node.kind != "pcie-tree":
        share = joined.links / total
        sums = inner.reduction_bandwidth_bytes_per_s * share if joined.kind == "nvswitch" else 0.0
        bandwidth = inner.bandwidth_bytes_per_s * share
        level = replace(inner, size=gpus, bandwidth_bytes_per_s=bandwidth, reduction_bandwidth_bytes_per_s=sums)
        level = level if joined.kind == "nvswitch" else replace(level, name="NVLink")
        return (level,), share
    known = load(REFERENCE)
    links, full = _chip_links(known)
    reached = known.levels[0].bandwidth_bytes_per_s / (links * full)
    size = joined.group if joined.kind == "nvlink-islands" else gpus
    bridge = Level(
        name="NVLink",
        size=size,
        bandwidth_bytes_per_s=joined.links * rate * reached,
        latency_s=known.levels[0].latency_s,
    )
    return ((bridge,) if size == gpus else (bridge, replace(inner, size=gpus))), 1.0


def _beyond(hardware: Hardware, gpus: int, ports: float) -> Iterator[Level]:
    """Levels beyond machines of `gpus` devices, whose bandwidth is `ports` times the profile's."""
    for level in hardware.levels[1:]:
        bandwidth = level.bandwidth_bytes_per_s * ports
        yield replace(level, size=level.size // hardware.devices_per_node * gpus, bandwidth_bytes_per_s=bandwidth)


def _node(matrix: NvidiaMatrix, hardware: Hardware, file: str) -> _Joined:
    """How the matrix joins GPUs, as one of the nodes that are simulated."""
    graph, pcie = matrix.nvlink, hardware.node is not None and hardware.node.kind == "pcie-tree"
    if not graph.edges:
        if not pcie:
            raise ProfileError(
                f"{file} shows no NVLink, and profile {hardware.name} has the speed of NVLink only; "
                f"{_cards(hardware, file)}"
            )
        return _tree(matrix)
    alone = [gpu for gpu, links in graph.degree if not links]
    if alone:
        raise ProfileError(
            f"{file}: {matrix.named(alone)} {'has' if len(alone) == 1 else 'have'} no NVLink, and the other GPUs have; "
            "leave the line and the column out to plan without, as the job has to"
        )
    islands = sorted(sorted(island) for island in nx.connected_components(graph))
    if len(islands) == 1:
        return _direct(matrix, hardware, file)
    size = len(islands[0])
    links = {matrix.nvlinks(*pair) for island in islands for pair in itertools.combinations(island, 2)}
    held = "; ".join(map(matrix.named, islands))
    if len({len(island) for island in islands}) > 1 or len(links) > 1:
        raise ProfileError(
            f"{file}: NVLink joins {held}; groups of equal size, all joined alike, are simulated: leave the lines "
            "and columns of some GPUs out"
        )
    if not pcie:
        raise ProfileError(
            f"{file}: NVLink joins {held}, PCIe the rest, and profile {hardware.name} has the speed of NVLink only; "
            f"{_cards(hardware, file)}"
        )
    return _Joined(
        kind="nvlink-islands", group=size, links=links.pop() * (size - 1), order=tuple(itertools.chain(*islands))
    )


def _cards(hardware: Hardware, file: str) -> str:
    """Return the remedy for a missing PCIe speed."""
    chip = next((name for name in PCIE_PROFILES if re.search(rf"\b{name}\b", hardware.device_name)), None)
    if chip is None:
        return "write a profile of such a node with `meshwright profiles new`"
    return f"use a profile of PCIe cards: {PCIE_PROFILES[chip]}@{file}"


def _direct(matrix: NvidiaMatrix, hardware: Hardware, file: str) -> _Joined:
    """GPUs that NVLink joins all."""
    total, _ = _chip_links(hardware)
    group = hardware.node.group if hardware.node else matrix.gpus
    own = tuple(range(matrix.gpus))
    links = {pair: matrix.nvlinks(*pair) for pair in itertools.combinations(own, 2)}
    of_gpu = sum(links[0, other] for other in own[1:])
    least = min(links.values())
    if least and len(set(links.values())) == 1 and (of_gpu > total or (matrix.gpus == 2 and least == total)):
        return _Joined(kind="nvswitch", group=group, links=least, order=own)
    if least and least * (matrix.gpus - 1) <= total:
        # Where some pairs have more links, messages around a ring wait for the others.
        return _Joined(kind="full-mesh", group=group, links=least * (matrix.gpus - 1), order=own)
    if links == {pair: HYBRID_CUBE_MESH.get(pair, 0) for pair in links}:
        return _Joined(kind="hybrid-cube-mesh", group=group, links=total, order=own)
    pairs = sorted(pair for pair, count in links.items() if count)
    ring = sorted([(rank, rank + 1) for rank in own[:-1]] + [(0, matrix.gpus - 1)])
    if pairs == ring and len({links[pair] for pair in pairs}) == 1:
        return _Joined(kind="ring", group=group, links=of_gpu, order=own)
    raise ProfileError(
        f"{file}: NVLinks join {len(pairs)} of {len(links)} pairs of GPUs in a way that is no switch, full mesh, ring "
        f"in order or DGX-1 cube mesh; describe the node in a profile of your own (docs/profiles.md)"
    )


def _chip_links(hardware: Hardware) -> tuple[int, float]:
    """NVLinks of a GPU, and bytes/s of one in one direction."""
    names = [name for name in NVLINKS if re.search(rf"\b{name}\b", hardware.device_name)]
    if not names:
        raise ProfileError(
            f"NVLinks of {hardware.device_name} are not known; use a profile of {', '.join(NVLINKS)} devices"
        )
    return NVLINKS[names[0]]


def _tree(matrix: NvidiaMatrix) -> _Joined:
    """GPUs below PCIe switches: those that reach each other without a host bridge; one by one where these differ."""
    graph = matrix.joined(lambda code: code in BELOW_ONE_SWITCH)
    groups = sorted(sorted(group) for group in nx.connected_components(graph))
    alike = len({len(group) for group in groups}) == 1
    order = tuple(itertools.chain(*groups)) if alike else tuple(range(matrix.gpus))
    return _Joined(kind="pcie-tree", group=len(groups[0]) if alike else 1, links=0, order=order)


def _nics(matrix: NvidiaMatrix) -> int:
    """NICs that serve GPUs: those below a PCIe switch with one, else all; as many as divide the GPUs evenly."""
    columns = range(len(matrix.to_nics[0]))
    near = sum(any(row[column] in BELOW_ONE_SWITCH for row in matrix.to_nics) for column in columns)
    found = min(near or len(columns), matrix.gpus)
    return next((count for count in range(found, 0, -1) if matrix.gpus % count == 0), 0)
