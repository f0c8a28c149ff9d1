"""A cluster as plain numbers: what one device can do and how devices are joined.

Profiles are YAML files (`hw_profiles/`, or the user's own); `simulator.profile_file` reads and checks
them. What the rest of the program sees is the frozen `Hardware`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from simulator.crowding import Conditions, Crowding, at_count
from simulator.errors import InputError, ProfileError
from simulator.program import Collective, Kernel, described_class
from simulator.quantities import bytes_text

PROFILE_SUFFIX = ".yaml"
PROFILE_SUFFIXES = (PROFILE_SUFFIX, ".yml")
_SETTINGS = re.compile(r"([A-Za-z0-9][\w.-]*):([A-Za-z][\w.]*=[^=,]*(?:,[A-Za-z][\w.]*=[^=,]*)*)")
HOST_MEMORY_BANDWIDTH = 2 * 8 * 25.6e9
"""Bytes a second of a node whose profile does not say: two processors with eight channels of DDR4-3200 each."""
DISK_BANDWIDTH = 7e9
"""Bytes a second of the disks of a node whose profile does not say: one NVMe drive on four lanes of PCIe 4.0."""
_WIDER_DTYPE = {
    "float4_e2m1fn": "float8_e4m3fn",
    "float8_e4m3fn": "bfloat16",
    "float8_e5m2": "float8_e4m3fn",
    "bfloat16": "float32",
    "float16": "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """Speed of one class of kernels: ``overhead_s + max(compute time, memory time)``.

    Of the shorter of both, ``serial_share`` passes beside the longer: 1 where nothing overlaps.
    ``compute_efficiency`` and ``bandwidth_efficiency`` are fractions of the device's peaks.
    ``peak_flops`` replaces the device's peak for single dtypes (float32 convolutions that run as TF32).
    ``cached_bandwidth`` counts, in bytes/s, for what lies in the caches; 0 where it is no other than the memory's.
    """

    compute_efficiency: float
    bandwidth_efficiency: float
    overhead_s: float
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    serial_share: float = 0.0
    cached_bandwidth: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """Caches between a device and its memory: its own, and one that the devices of a node share, in bytes."""

    own_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulModel:
    """Speed of matrix products by shape, in one precision; `simulator.kernels.matmul_time` has the formula.

    ``tiles`` are (rows, columns) of outputs that one multiprocessor computes at a time, ``tile_loss`` the part
    of time that tiles of 128 by 128 lose to loading operands (small tiles more), ``fill_depth`` the depth (k) that
    beginning and ending a tile cost, ``wave_share`` how far a last, partly filled wave counts as a whole one,
    ``split_share`` how far tiles that fill less than one wave are split along k, ``utilisation`` points (log10 of
    FLOPs with the padding of tiles and waves, factor on the rate).
    """

    tiles: tuple[tuple[int, int], ...]
    compute_efficiency: float
    bandwidth_efficiency: float
    overhead_s: float
    fill_depth: float
    tile_loss: float
    wave_share: float
    split_share: float = 0.0
    utilisation: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionModel:
    """Speed of a fused attention kernel in one direction; `simulator.kernels.attention_time` has the formula."""

    compute_efficiency: float
    bandwidth_efficiency: float
    overhead_s: float
    tile_queries: int
    fill_keys: float
    fill_head_size: float
    wave_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPasses:
    """Models of one kind of fused attention, forward and backward."""

    forward: AttentionModel
    backward: AttentionModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the topology: units of ``size`` devices joined by links of one kind.

    ``size`` counts all devices of a unit, inner levels included. ``bandwidth_bytes_per_s`` is what
    one device can send (and at the same time receive) over this level while all devices do so.
    ``reduction_bandwidth_bytes_per_s`` above 0 says that the switch adds numbers itself, at this speed.
    """

    name: str
    size: int
    bandwidth_bytes_per_s: float
    latency_s: float
    reduction_bandwidth_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGraph:
    """How the devices of a node are joined; `simulator.topology.nodes.NodeSpec` says what the fields mean."""

    kind: str
    nics: int
    group: int = 4
    shape: tuple[int, ...] = ()
    host_bandwidth_bytes_per_s: float = 0.0
    host_latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricGraph:
    """How nodes are joined; `simulator.topology.cluster.FabricSpec` has the kinds."""

    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """Measured seconds of one collective in one group size, by ascending payload in bytes."""

    collective: Collective
    group_size: int
    payload_bytes: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertainty:
    """Interval of a predicted time ``t``: from ``t * (1 - low)`` to ``t * (1 + high)``."""

    low: float
    high: float
    label: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """How devices fail and what a restart and a checkpoint meet; 0 where the profile does not say.

    ``restart_s`` leaves out the time to load a checkpoint; the storage bandwidth is that of a node,
    ``snapshot_bandwidth_bytes_per_s`` from one device to its host; ``compute_spread`` is the standard
    deviation of the logarithm of a device's speed.
    """

    device_mtbf_s: float = 0.0
    restart_s: float = 0.0
    storage_bandwidth_bytes_per_s: float = 0.0
    snapshot_bandwidth_bytes_per_s: float = 0.0
    compute_spread: float = 0.0


ORDER = "topology.node.order"
"""Field of the row that says in which order ranks are to have the devices of a node, where it is not their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """One number of a profile with its origin, for display; ``field`` is the path in the file."""

    field: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A cluster type. Two profiles with the same numbers have the same ``hash``.

    ``device_memory_bytes`` is what a job can use; ``hash`` is the SHA-256 of every number of the
    profile, reliability excepted, not of its descriptions and sources. Models by shape are optional: without
    them the roofline of ``kernels`` counts. ``overlap_compute_speed`` and ``overlap_transfer_speed`` are the
    parts of their speed that kernels and messages keep while they run at the same time. ``training`` holds factors
    that whole training steps put on kernels and messages: `simulator.corrections` says which.
    ``board_power_w`` is the power of a device under full load in W, None where a profile does not say;
    ``host_memory_bytes`` are those of a node's host, infinite where a profile does not say;
    ``host_memory_bandwidth`` is that of a node's processors in bytes/s, ``disk_bandwidth`` that of its disks; its
    devices share both.
    ``kernel_slowdowns`` replace ``slowdown_table`` for single classes, and ``waiting_table`` is the part of both in
    which ranks wait for each other; ``message_workspace`` are bytes that a message takes beside its source and its
    result while it is on its way, for each byte of its payload. With ``copies_apart`` the times of messages leave out
    what packs tensors into them and cuts tensors out of them (`simulator.program.Task.copied_bytes`).
    ``cached_share`` is the part of what kernels move that lies in ``caches``, none where a profile states none:
    `simulator.timing` says it of a working set. ``conditions`` say how fast and how quiet the machine was when
    it was calibrated, None where that is not known. ``crowding`` is what messages of a group cost more where others
    share the cores, and ``processes`` how many do in the job at hand.
    ``attention`` is the kind of fused attention that runs, one of ``attention_models``. ``members`` are names and
    counts of the devices of a cluster of several types, in their order.

    Examples
    --------
    >>> import meshwright as mw
    >>> mw.profile("dgx-h100").devices_text(8)
    '8 × NVIDIA H100-SXM5-80GB'
    """

    name: str
    hash: str
    description: str
    device_name: str
    device_memory_bytes: int
    memory_bandwidth: float
    peak_flops: Mapping[str, float]
    default_precision: str
    kernels: Mapping[Kernel, KernelModel]
    levels: tuple[Level, ...]
    max_devices: int
    devices_per_node: int
    node_device_counts: tuple[int, ...]
    uncertainty: Uncertainty
    node: NodeGraph | None = None
    fabric: FabricGraph | None = None
    overlaps_communication: bool = True
    collective_overhead_s: float = 0.0
    host_memory_bandwidth: float = HOST_MEMORY_BANDWIDTH
    host_memory_bytes: float = math.inf
    board_power_w: float | None = None
    disk_bandwidth: float = DISK_BANDWIDTH
    collective_algorithms: tuple[str, ...] = ("tree", "hierarchical", "switch")
    pinned_algorithms: Mapping[Collective, str] = field(default_factory=dict)
    collective_tables: tuple[CollectiveTable, ...] = ()
    slowdown_table: tuple[tuple[int, float], ...] = ((1, 1.0),)
    kernel_slowdowns: Mapping[Kernel, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    waiting_table: tuple[tuple[int, float], ...] = ()
    message_workspace: Mapping[Collective, float] = field(default_factory=dict)
    copies_apart: bool = False
    caches: Caches | None = None
    cached_share: float = 0.0
    conditions: Conditions | None = None
    crowding: tuple[Crowding, ...] = ()
    processes: float = 1.0
    multiprocessors: int = 1
    matmul_models: Mapping[str, MatmulModel] = field(default_factory=dict)
    sustained_matmul_speed: float = 1.0
    grouped_matmul_rows: float = 0.0
    convolution_efficiency: float | None = None
    grouped_convolution_efficiency: float | None = None
    attention_models: Mapping[str, AttentionPasses] = field(default_factory=dict)
    overlap_compute_speed: float = 1.0
    overlap_transfer_speed: float = 1.0
    reliability: Reliability = Reliability()
    training: Mapping[str, float] = field(default_factory=dict)
    attention: str = "flash2"
    rows: tuple[ProfileRow, ...] = ()
    members: tuple[tuple[str, int], ...] = ()

    def __repr__(self) -> str:
        dtype = self.default_precision
        links = ", ".join(f"{one.name} {one.bandwidth_bytes_per_s / 1e9:.4g} GB/s" for one in self.levels)
        return (
            f"{self.name}: {self.description}\n"
            f"{self.devices_per_node} devices a node, {bytes_text(self.device_memory_bytes)} usable each, "
            f"{self.peak_flops[dtype] / 1e12:.4g} TFLOP/s {dtype}, {self.memory_bandwidth / 1e12:.3g} TB/s; {links}"
        )

    def devices_text(self, count: int) -> str:
        """The first `count` devices in words, such as ``8 × NVIDIA H100 + 8 × NVIDIA A100``."""
        named, left = [], count
        for name, size in self.members or ((self.device_name, count),):
            if left > 0:
                named.append(f"{min(left, size)} × {name}")
            left -= size
        return " + ".join(named)

    def __hash__(self) -> int:
        # What derives from one profile is told apart by these; to compare all fields takes far longer.
        return hash((self.hash, self.cached_share, self.processes))

    def peak(self, dtype: str, kernel: Kernel = Kernel.MATMUL) -> float:
        """Peak FLOP/s for `dtype`: that of `peak_dtype`."""
        return self._peaks(kernel)[self.peak_dtype(dtype, kernel)]

    def peak_dtype(self, dtype: str, kernel: Kernel = Kernel.MATMUL) -> str:
        """Dtype whose peak counts for `dtype`; a narrow float the device lacks runs as the next wider one it has.

        Integers and booleans count as float32, complex numbers as floats of half their width.
        """
        peaks = self._peaks(kernel)
        wanted: str | None = _as_float(dtype)
        while wanted is not None and wanted not in peaks:
            wanted = _WIDER_DTYPE.get(wanted)
        if wanted is None:
            known = ", ".join(sorted(self.peak_flops))
            raise ProfileError(
                f"profile {self.name}: no peak FLOP/s for {dtype}; the device computes in {known}: "
                f"choose one of these precisions or add device.peak_flops.{dtype} to the profile"
            )
        return wanted

    def _peaks(self, kernel: Kernel) -> Mapping[str, float]:
        return {**self.peak_flops, **self.kernels[kernel].peak_flops}

    @property
    def lost_to_messages(self) -> float:
        """Seconds of computation that a second of a message beside it costs; 0 where nothing runs beside another.

        With this share l, work of W seconds and m seconds of messages beside it take ``max(W + l m, m)``.
        """
        return 1.0 - self.overlap_compute_speed if self.overlaps_communication else 0.0

    def bandwidth(self, kernel: Kernel) -> float:
        """Bytes/s that kernels of a class move, from the caches as far as they lie there."""
        model = self.kernels[kernel]
        memory = self.memory_bandwidth * model.bandwidth_efficiency
        if not self.cached_share or not model.cached_bandwidth:
            return memory
        return 1.0 / (self.cached_share / model.cached_bandwidth + (1.0 - self.cached_share) / memory)

    def compute_slowdown(self, processes: float, kernel: Kernel | None = None) -> float:
        """Factor by which kernels, or those of a class, slow down when `processes` share this machine's cores.

        Between measured counts the factor is interpolated linearly; beyond the last it grows in
        proportion to the count, as time slicing does.
        """
        table = self.slowdown_table
        if kernel is not None and self.kernel_slowdowns:
            table = self.kernel_slowdowns.get(described_class(kernel, self.kernel_slowdowns), table)
        return at_count(table, processes, proportional=True)

    def waiting(self, processes: float) -> float:
        """The part of `compute_slowdown` in which ranks wait for the slowest of them: a factor, 1 where it is unknown.

        Between measured counts it is interpolated linearly; beyond the last it is as there.
        """
        return at_count(self.waiting_table or ((1, 1.0),), processes, proportional=False)

    def check_devices(self, devices: int) -> None:
        """Raise ProfileError unless a job of `devices` devices fills whole units of the topology."""
        if self.holds(devices):
            return
        below = next((n for n in range(min(devices, self.max_devices), 0, -1) if self.holds(n)), None)
        above = next((n for n in range(max(devices, 1), self.max_devices + 1) if self.holds(n)), None)
        near = " or ".join(str(n) for n in (below, above) if n is not None)
        inside = ", ".join(str(n) for n in self.node_device_counts)
        raise ProfileError(
            f"{devices} devices do not fit profile {self.name}: it takes {inside} devices inside a node, or whole "
            f"nodes of {self.devices_per_node}, up to {self.max_devices} devices; use {near}"
        )

    def with_headroom(self, fraction: float) -> Hardware:
        """The same devices, of whose usable memory a job leaves a fraction free.

        Raises
        ------
        InputError
            The fraction is not from 0 up to, but not including, 1.
        """
        if not 0 <= fraction < 1:
            raise InputError(
                f"memory headroom {fraction:g} is out of range; give a fraction of at least 0 and below 1, such as 0.1"
            )
        if fraction == 0:
            return self
        return replace(
            self,
            device_memory_bytes=int(self.device_memory_bytes * (1 - fraction)),
            hash=f"{self.hash} headroom={fraction:g}",
        )

    def holds(self, devices: int) -> bool:
        """Whether a job of `devices` devices fills whole units of the topology."""
        if not 1 <= devices <= self.max_devices:
            return False
        return devices in self.node_device_counts or (
            devices >= self.devices_per_node and devices % self.devices_per_node == 0
        )


def is_profile_path(text: str) -> bool:
    """Whether what names a profile is a path rather than a name in `hw_profiles`."""
    return (text.endswith(PROFILE_SUFFIXES) or "/" in text) and not split_settings(text)[1]


def split_settings(text: str) -> tuple[str, tuple[str, ...]]:
    """Split ``PROFILE:KEY=VALUE,…`` into the shipped profile and its settings, if any.

    >>> split_settings("dgx-h100:network=200Gb,device.memory=96GiB"), split_settings("dgx-h100")
    (('dgx-h100', ('network=200Gb', 'device.memory=96GiB')), ('dgx-h100', ()))
    """
    found = _SETTINGS.fullmatch(text)
    return (found[1], tuple(found[2].split(","))) if found else (text, ())


def describe(hardware: Hardware) -> tuple[ProfileRow, ...]:
    """Every number of the profile as text, with its source, in the order of the file."""
    return hardware.rows


def _as_float(dtype: str) -> str:
    if dtype.startswith("complex"):
        return "float64" if dtype == "complex128" else "float32"
    if dtype.startswith(("float", "bfloat")):
        return dtype
    return "float32"


def format_number(value: float) -> str:
    """Shortest usual text of a number: ``8``, ``312e12``, ``5.2e-06``."""
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < 10**6):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6 and 1e-300 < abs(value) < math.inf:  # beyond, powers of ten end
        exponent = 3 * math.floor(math.log10(abs(value)) / 3)
        return f"{value / 10.0**exponent:.6g}e{exponent}"
    return f"{value:.6g}"
