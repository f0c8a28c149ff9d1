"""Which published rows speak for which shipped profile."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.errors import InputError

NVIDIA_TILES = (
    ((256, 128), (128, 256), (128, 128)),
    ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64)),
)
ASCEND_TILES = (((256, 128), (128, 256), (128, 128)),)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which published rows speak for one profile: what their columns accelerator and inter_node_link hold.

    ``like`` are the profiles, nearest first, whose numbers count where this one's device has no rows.
    ``training_attention`` is the accelerator of the rows of attention kernels forward and backward and of grouped
    products, ``attention`` that of inference kernels; ``sustained`` says that the former are of this device under
    lasting load. ``node_link`` and ``link`` are the datasheet rates of a device inside a node and of its network
    port (no ``fabric``: multi-node rows stand for another network), ``peak_flops`` is the 16-bit peak and
    ``measured_multiprocessors`` the cores of the measured device where that is another one than the profile's.
    """

    profile: str
    multiprocessors: int
    multiprocessors_source: str
    like: tuple[str, ...] = ()
    gemm: str = ""
    attention: str = ""
    training_attention: str = ""
    stream: tuple[str, ...] = ()
    layers: str = ""
    node: tuple[str, ...] = ()
    node_sizes: tuple[int, ...] = (2, 4, 8)
    node_link: float = 1e13
    fabric: str = ""
    fabric_links: str = ""
    link: float = 0.0
    fixed_link: bool = False
    peak_flops: float = 0.0
    measured_multiprocessors: int = 0
    images: str = ""
    sustained: bool = False
    tiles: tuple[tuple[tuple[int, int], ...], ...] = NVIDIA_TILES


ROWS = (
    Rows(
        profile="dgx1-v100",
        like=("dgx-a100",),
        multiprocessors=80,
        multiprocessors_source="datasheet: NVIDIA V100 architecture whitepaper, 80 SMs",
        gemm="V100",
        stream=("V100",),
        node=("V100",),
        node_sizes=(8,),
        images=r"V100(?!.*PCIe)",
    ),
    Rows(
        profile="dgx-a100",
        multiprocessors=108,
        multiprocessors_source="datasheet: NVIDIA A100 architecture whitepaper, 108 SMs",
        gemm="NVIDIA A100-SXM4-80GB",
        attention="NVIDIA A100-SXM4-80GB",
        training_attention="A100 PCIe 80GB",
        stream=("A100 80GB", "A100-SXM4-80GB"),
        layers="A100 80GB",
        node=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        fabric="A100-SXM4-40GB",
        fabric_links="HDR InfiniBand|OCI",
        link=25e9,
        images=r"^A100$|A100 80GB SXM4",
    ),
    Rows(
        profile="dgx-a100-40g",
        like=("dgx-a100",),
        multiprocessors=108,
        multiprocessors_source="datasheet: NVIDIA A100 architecture whitepaper, 108 SMs",
        stream=("A100 40GB",),
    ),
    Rows(
        profile="dgx-h100",
        like=("dgx-h200", "dgx-a100"),
        multiprocessors=132,
        multiprocessors_source="datasheet: NVIDIA H100 architecture whitepaper, SXM5, 132 SMs",
        gemm="NVIDIA H100 80GB HBM3",
        attention="NVIDIA H100 80GB HBM3",
        stream=("H100 80GB HBM3",),
        layers="H100 80GB",
        node=("NVIDIA H100 80GB HBM3", "H100 80GB", "H100 80GB HBM3"),
        fabric="H100 80GB",
        fabric_links="RoCEv2|dgx-06|NDR",
        link=50e9,
        fixed_link=True,
        images="H100 80GB SXM5",
    ),
    Rows(
        profile="dgx-h200",
        like=("dgx-h100", "dgx-a100"),
        multiprocessors=132,
        multiprocessors_source="datasheet: NVIDIA H100 architecture whitepaper, SXM5, 132 SMs; H200 is the same chip",
        gemm="NVIDIA H200",
        attention="NVIDIA H200",
        stream=("H200", "H200 141GB"),
        node=("NVIDIA H200", "H200 141GB"),
    ),
    Rows(
        profile="dgx-b200",
        like=("gb200-nvl72", "dgx-h100"),
        multiprocessors=148,
        multiprocessors_source="assumed: 148 SMs, as the CUDA runtime reports for B200; no datasheet says",
        gemm="NVIDIA B200",
        attention="NVIDIA B200",
        training_attention="B200",
        sustained=True,
        node=("NVIDIA B200", "B200"),
        fabric="B200",
        fabric_links=r"8x ConnectX-7|8x400G RDMA(?!.*DraNet)",
        link=50e9,
    ),
    Rows(
        profile="gb200-nvl72",
        like=("dgx-b200", "dgx-h100"),
        multiprocessors=152,
        multiprocessors_source="assumed: 152 SMs, as the CUDA runtime reports for GB200; no datasheet says",
        gemm="NVIDIA GB200",
        attention="NVIDIA GB200",
        node=("NVIDIA GB200", "GB200"),
        node_sizes=(2, 4, 8, 72),
    ),
    Rows(
        profile="ascend910b-atlas800t-a2",
        like=("ascend910-atlas800", "dgx-a100"),
        multiprocessors=20,
        multiprocessors_source=(
            "assumed: 20 cube cores: 313 TFLOP/s at 4096 multiply-adds a cycle and core is 1.91 GHz; 24 cores of the "
            "A3 die at 1.8 GHz give its 353.9"
        ),
        gemm="Ascend",
        attention="Ascend",
        layers="Ascend",
        node=("Ascend",),
        node_sizes=(8, 16),
        node_link=196e9,
        peak_flops=353.9e12,
        measured_multiprocessors=24,
        tiles=ASCEND_TILES,
    ),
    Rows(
        profile="ascend910-atlas800",
        like=("ascend910b-atlas800t-a2", "dgx-a100"),
        multiprocessors=32,
        multiprocessors_source="datasheet: Hot Chips 31 (2019), Ascend 910, 32 DaVinci cores",
        images="^Ascend 910$",
        tiles=ASCEND_TILES,
    ),
    Rows(
        profile="a100-pcie",
        like=("dgx-a100",),
        multiprocessors=108,
        multiprocessors_source="datasheet: NVIDIA A100 architecture whitepaper, 108 SMs",
        gemm="NVIDIA A100-SXM4-80GB",
        attention="NVIDIA A100-SXM4-80GB",
        training_attention="A100 PCIe 80GB",
        sustained=True,
    ),
    Rows(
        profile="a100-pcie-40g",
        like=("dgx-a100",),
        multiprocessors=108,
        multiprocessors_source="datasheet: NVIDIA A100 architecture whitepaper, 108 SMs",
        gemm="NVIDIA A100-SXM4-80GB",
        attention="NVIDIA A100-SXM4-80GB",
        training_attention="A100 PCIe 80GB",
        sustained=True,
    ),
    Rows(
        profile="a100x8-omnipath",
        like=("dgx-a100",),
        multiprocessors=108,
        multiprocessors_source="datasheet: NVIDIA A100 architecture whitepaper, 108 SMs",
    ),
    Rows(
        profile="dgx-a800",
        like=("dgx-a100",),
        multiprocessors=108,
        multiprocessors_source="datasheet: NVIDIA A100 architecture whitepaper, 108 SMs",
    ),
    Rows(
        profile="dgx1-v100-16g",
        like=("dgx1-v100", "dgx-a100"),
        multiprocessors=80,
        multiprocessors_source="datasheet: NVIDIA V100 architecture whitepaper, 80 SMs",
    ),
    Rows(
        profile="dgx2-v100",
        like=("dgx1-v100", "dgx-a100"),
        multiprocessors=80,
        multiprocessors_source="datasheet: NVIDIA V100 architecture whitepaper, 80 SMs",
    ),
    Rows(
        profile="v100x4-omnipath",
        like=("dgx1-v100", "dgx-a100"),
        multiprocessors=80,
        multiprocessors_source="datasheet: NVIDIA V100 architecture whitepaper, 80 SMs",
    ),
    Rows(
        profile="dgx-h800",
        like=("dgx-h100", "dgx-a100"),
        multiprocessors=132,
        multiprocessors_source="datasheet: NVIDIA H100 architecture whitepaper, SXM5, 132 SMs",
    ),
    Rows(
        profile="dgx-h100-96g",
        like=("dgx-h100", "dgx-a100"),
        multiprocessors=132,
        multiprocessors_source="datasheet: NVIDIA H100 architecture whitepaper, SXM5, 132 SMs",
    ),
    Rows(
        profile="gh200x4",
        like=("dgx-h100", "dgx-a100"),
        multiprocessors=132,
        multiprocessors_source="datasheet: NVIDIA H100 architecture whitepaper, SXM5, 132 SMs",
    ),
    Rows(
        profile="h100-pcie",
        like=("dgx-h100", "dgx-a100"),
        multiprocessors=114,
        multiprocessors_source="datasheet: NVIDIA H100 architecture whitepaper, PCIe, 114 SMs",
    ),
    Rows(
        profile="dgx-b300",
        like=("dgx-b200", "dgx-h100"),
        multiprocessors=148,
        multiprocessors_source="assumed: 148 SMs, as the CUDA runtime reports for B300; no datasheet says",
        gemm="NVIDIA B300 SXM6 AC",
    ),
    Rows(
        profile="gb300-nvl72",
        like=("dgx-b300", "gb200-nvl72", "dgx-b200", "dgx-h100"),
        multiprocessors=152,
        multiprocessors_source="assumed: 152 SMs, as the CUDA runtime reports for GB200; no datasheet says",
    ),
    Rows(
        profile="l40s",
        like=("dgx-a100",),
        multiprocessors=142,
        multiprocessors_source="datasheet: NVIDIA Ada GPU architecture whitepaper, L40S, 142 SMs",
        gemm="NVIDIA L40S",
    ),
    Rows(
        profile="rtx4090",
        like=("l40s", "dgx-a100"),
        multiprocessors=128,
        multiprocessors_source="datasheet: NVIDIA Ada GPU architecture whitepaper, RTX 4090, 128 SMs",
    ),
    Rows(
        profile="rtx3090",
        like=("dgx-a100",),
        multiprocessors=82,
        multiprocessors_source="datasheet: NVIDIA GA102 architecture whitepaper, RTX 3090, 82 SMs",
    ),
    Rows(
        profile="rtx-a6000",
        like=("dgx-a100",),
        multiprocessors=84,
        multiprocessors_source="datasheet: NVIDIA RTX A6000 datasheet, 10,752 CUDA cores in 84 SMs",
    ),
    Rows(
        profile="cloudmatrix384",
        like=("ascend910b-atlas800t-a2", "ascend910-atlas800", "dgx-a100"),
        multiprocessors=24,
        multiprocessors_source="assumed: 24 cube cores a die: 376 TFLOP/s at 4096 multiply-adds a cycle is 1.9 GHz",
    ),
)


def rows_of(profile: str) -> Rows:
    """Rows for a shipped profile; InputError for one that no rows speak for."""
    for rows in ROWS:
        if rows.profile == profile:
            return rows
    known = ", ".join(rows.profile for rows in ROWS)
    raise InputError(f"no published measurements are known for profile {profile!r}; choose among {known}")
