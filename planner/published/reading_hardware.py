"""From a measurement row to the cluster that it ran on: a profile, changed where the row says otherwise."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from functools import lru_cache

from planner.published.measurement_file import FileRow
from planner.published.reading_network import MissingFactError
from planner.published.source_rules import stated
from simulator.hardware import Hardware
from simulator.profiles import load_profile, profile_names

_PROFILES: tuple[tuple[str, str], ...] = (
    (r"mixed|heterogeneous|competitor|unnamed|next-gen", ""),
    (r"gh200", "gh200x4"),
    (r"rubin|(?<!\w)r100", "hgx-rubin"),
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"\bb300", "dgx-b300"),
    (r"\bb200", "dgx-b200"),
    (r"h200", "dgx-h200"),
    (r"h100.*pcie|pcie.*h100", "h100-pcie"),
    (r"h800", "dgx-h800"),
    (r"h100.*(9[46]\s?gb|hbm2e)", "dgx-h100-96g"),
    (r"h100", "dgx-h100"),
    (r"a100.*pcie.*40\s?gb|a100.*40\s?gb.*pcie|pcie.*a100.*40\s?gb", "a100-pcie-40g"),
    (r"a100.*pcie|pcie.*a100", "a100-pcie"),
    (r"a800", "dgx-a800"),
    (r"a100.*omni-?path", "a100x8-omnipath"),
    (r"a100.*(?<!\d)40\s?gb", "dgx-a100-40g"),
    (r"a100", "dgx-a100"),
    (r"v100.*pcie|pcie.*v100", "v100-pcie"),
    (r"v100.*omni-?path", "v100x4-omnipath"),
    (r"v100.*(dgx-?2|per node: 16)|v100-sxm3", "dgx2-v100"),
    (r"v100.*(?<!\d)16\s?gb?", "dgx1-v100-16g"),
    (r"v100", "dgx1-v100"),
    (r"ascend.*(910\s?c|a3)|cloudmatrix", "cloudmatrix384"),
    (r"ascend.*950|atlas.*950", "atlas950"),
    (r"ascend.*(910\s?b|910\s?\*|a2)|800t", "ascend910b-atlas800t-a2"),
    (r"ascend\s?910", "ascend910-atlas800"),
    (r"rtx\s?a6000", "rtx-a6000"),
    (r"rtx\s?4090", "rtx4090"),
    (r"rtx\s?3090", "rtx3090"),
    (r"l40s", "l40s"),
)
"""Profiles by the words of a row: accelerator, its memory, nodes and network, in lower case."""
_LINK_SHARE = 0.95
"""Share of a network link's rate that collectives reach: what the fitted ``dgx-a100`` profile has."""
_RESERVED_BYTES = 2 * 2**30
"""What contexts and libraries keep of a device's memory, as in the profiles."""
_COUNT_TIMES_RATE = re.compile(r"(\d+)\s*x\s*(?:[a-z -]*?)(\d+(?:\.\d+)?)\s*(gb/s|gbps|gbit/s|g\b)", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb/s|gbps|gbit/s|g\b)", re.IGNORECASE)
_INSIDE_NODE = re.compile(
    r"(?:nvlink|nvswitch|hbm|pcie|hccs|infinity fabric)[^;,(]*?\d+(?:\.\d+)?\s*[gt]b/s", re.IGNORECASE
)
"""Rates of links inside a node, and of memory, where they stand beside that of the network."""
_BITS_PER_BYTE = 8
_OMNI_PATH_PORT = 100.0
_PCIE_BYTES_PER_S = ((r"V100", 15.75e9), (r"H[12]00|GH200|B[23]?00", 63.0e9), (r"", 31.5e9))
"""Of 16 lanes in one direction, by the name of the device: PCIe 3.0, 5.0, and else 4.0."""
_STAGED_SHARE = 0.32
"""Of that, what each device of a ring gets through the memory of the host, written by one and read by the next: eight
A100 of PCIe 4.0 averaged 8 GB/s so, and 21 from device to device (github.com/NVIDIA/nccl/issues/841), of which 26
are usual in long messages."""


def hardware_for(row: FileRow, notes: list[str]) -> Hardware:
    """The profile of the row's devices, with the memory, node size and network that the row states.

    The same facts give the same object. MissingFactError where no profile describes the device.
    """
    name = _profile_name(row, notes)
    base = _load(name)
    per_node = row.whole("accels_per_node") or base.devices_per_node
    memory = _memory_bytes(row, base)
    return _variant(
        name,
        memory_bytes=memory,
        bandwidth=_stated_bandwidth(row),
        per_node=_node_size(row, base, per_node),
        nominal=_outer_bandwidth(row, base, per_node, notes),
        staged=_staged_bandwidth(base) if stated(row, "messages_through_host") else 0.0,
    )


def _profile_name(row: FileRow, notes: list[str]) -> str:
    accelerator = row.text("accelerator")
    words = f"{accelerator} {row.text('hw')}".lower()
    if not words.strip():
        if "megatron-lm functional test" not in row.text("source").lower():
            raise MissingFactError("the accelerator is not stated")
        notes.append("accelerator not stated: A100, on which these tests ran before their results named one")
        return "dgx-a100"
    presumed = "?" in accelerator and "not stated" in row.text("hw").lower()
    if presumed and not row.says(r"atlas|910", "model"):
        raise MissingFactError(f"the accelerator is not stated, {accelerator.rstrip('?')!r} is presumed")
    network = f"{row.text('inter_node_link')} per node: {row.whole('accels_per_node') or ''}".lower()
    size = row.number("accel_mem_gb")
    if size is None and (size := stated(row, "memory_gb")) is not None:
        notes.append(f"memory of the accelerator not stated: {size:g} GB, as the suite says of its machines")
    memory = "" if size is None else f"{size:g}gb"
    name = _match(f"{accelerator.lower()} {memory} {row.text('hw').lower()} {network}") if accelerator else None
    name = name or _match(f"{words} {memory} {network}")
    if not name or name not in _available():
        raise MissingFactError(f"no hardware profile for {accelerator or row.text('hw')}")
    return name


def _match(words: str) -> str | None:
    return next((name for pattern, name in _PROFILES if re.search(pattern, words)), None)


@lru_cache(maxsize=1)
def _available() -> frozenset[str]:
    return frozenset(profile_names())


@lru_cache(maxsize=64)
def _load(name: str) -> Hardware:
    return load_profile(name)


def _memory_bytes(row: FileRow, base: Hardware) -> int:
    """Usable memory where the device is another variant of the profile's; 0: as in the profile."""
    stated = row.number("accel_mem_gb")
    if not stated:
        found = row.says(r"(?<![\d.])(16|24|32|40|64|80|94|96|141|144|180|192)\s?gb?\b", "accelerator")
        stated = float(found[1]) if found else None
    if not stated:
        return 0
    usable = int(stated * 2**30) - _RESERVED_BYTES
    return usable if abs(usable / base.device_memory_bytes - 1) > 0.1 else 0


def _stated_bandwidth(row: FileRow) -> float:
    """Bandwidth of the device's memory in bytes per second where the row states it; else 0."""
    found = row.says(r"hbm\w*,?\s*(\d+(?:\.\d+)?)\s*tb/s", "accelerator", "hw")
    return float(found[1]) * 1e12 if found else 0.0


def _node_size(row: FileRow, base: Hardware, per_node: int) -> int:
    """Devices of a node where the row has other nodes than the profile; else 0."""
    rack = bool(base.levels) and base.levels[0].size > base.devices_per_node
    single = (row.whole("n_accels") or 0) <= per_node and per_node <= base.devices_per_node
    return 0 if rack or single or per_node == base.devices_per_node else per_node


def _outer_bandwidth(row: FileRow, base: Hardware, per_node: int, notes: list[str]) -> float:
    """Bytes per second that one device can send between nodes where the row states the rate; else 0."""
    devices = row.whole("n_accels") or 1
    if devices <= per_node or len(base.levels) < 2:
        return 0.0
    text = row.text("inter_node_link") or (row.text("hw") if row.says(r"gb/?p?s", "hw") else "")
    rate = _node_rate(_INSIDE_NODE.sub("", text), per_node)
    if rate is None and re.search(r"omni-?path|\bopa\b", f"{text} {row.text('hw')}".lower()):
        rate = _OMNI_PATH_PORT * min(4, per_node)
        notes.append("rate of Omni-Path not stated: 4 ports of 100 Gb/s a node")
    if rate is None:
        if not text:
            notes.append(f"network between nodes not stated: that of {base.name}")
        return 0.0
    return rate * 1e9 / _BITS_PER_BYTE / per_node * _LINK_SHARE


def _staged_bandwidth(base: Hardware) -> float:
    """Bytes per second of each device of a ring whose messages wait in the memory of the host."""
    return next(rate for pattern, rate in _PCIE_BYTES_PER_S if re.search(pattern, base.device_name)) * _STAGED_SHARE


def _node_rate(text: str, per_node: int) -> float | None:
    """Gigabits per second of one node that the text of a link states.

    >>> _node_rate("8x200Gbps HDR InfiniBand per node", 8), _node_rate("RDMA 400Gb/s per GPU", 8)
    (1600.0, 3200.0)
    >>> _node_rate("InfiniBand 8x50 GB/s per node", 8), _node_rate("InfiniBand 100 Gb/s", 8)
    (3200.0, 100.0)
    >>> _node_rate("200Gb/s HDR InfiniBand (per paper)", 8) is None
    True
    """
    several = _COUNT_TIMES_RATE.search(text)
    if several:
        return float(several[1]) * _gigabits(several[2], several[3])
    bandwidth = re.search(r"inter_node_bandwidth=(\d+(?:\.\d+)?)", text)
    if bandwidth:
        return float(bandwidth[1])
    single = _RATE.search(text)
    if single is None:
        return None
    rate = _gigabits(single[1], single[2])
    if re.search(r"per (gpu|npu|device|accelerator|card)", text.lower()):
        return rate * per_node
    if re.search(r"hdr|ndr", text.lower()) and not re.search(r"per node|/node|hca", text.lower()):
        return None  # the rate of one of a node's ports, as many as the profile has
    return rate


def _gigabits(number: str, unit: str) -> float:
    return float(number) * (_BITS_PER_BYTE if unit[:2] == "GB" and unit.endswith("/s") else 1)


@lru_cache(maxsize=512)
def _variant(
    name: str, *, memory_bytes: int, bandwidth: float, per_node: int, nominal: float, staged: float
) -> Hardware:
    base = _load(name)
    if not (memory_bytes or bandwidth or per_node or nominal or staged):
        return base
    levels = base.levels
    if per_node:
        levels = (replace(levels[0], size=per_node), *levels[1:])
    if staged:
        inner = replace(levels[0], bandwidth_bytes_per_s=staged, reduction_bandwidth_bytes_per_s=0.0)
        levels = (inner, *levels[1:])
    if nominal and abs(nominal / levels[-1].bandwidth_bytes_per_s - 1) > 0.06:
        levels = (*levels[:-1], replace(levels[-1], bandwidth_bytes_per_s=nominal))
    if levels == base.levels and not (memory_bytes or bandwidth):
        return base
    changes = f"{base.hash} {memory_bytes} {bandwidth} {levels}"
    return replace(
        base,
        hash=hashlib.sha256(changes.encode()).hexdigest(),
        device_memory_bytes=memory_bytes or base.device_memory_bytes,
        memory_bandwidth=bandwidth or base.memory_bandwidth,
        devices_per_node=per_node or base.devices_per_node,
        node_device_counts=tuple(range(1, per_node + 1)) if per_node else base.node_device_counts,
        levels=levels,
        node=None if per_node or staged else base.node,
        collective_tables=() if staged else base.collective_tables,
    )
