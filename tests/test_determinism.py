"""The same request gives the same bytes: over hash seeds, on one core and on all, with and without a cache.

And on a processor with fewer instructions, whose powers and logarithms differ in the last digit: files have fewer.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

from simulator.calibration.process import own_cores

ROOT = Path(__file__).parents[1]
ONE_CORE = (
    "import os, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); os.execv(sys.argv[1], sys.argv[1:])"
)
REQUESTS = {
    "one stage": ("zoo:gpt2-tiny", "--devices", "4", "--pin", "pp=1"),
    "pipeline": ("zoo:gpt2-tiny", "--devices", "4", "--pin", "pp=2"),
    "captured": ("zoo:resnet50", "--devices", "4", "--pin", "pp=1", "--search-mode", "sharding_propagation"),
}


OLD_PROCESSOR = {
    "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name]),
    "ATEN_CPU_CAPABILITY": "default",
    **({"OPENBLAS_CORETYPE": "Nehalem"} if platform.machine() == "x86_64" else {}),
}
"""Variables that take newer instructions from NumPy, PyTorch and BLAS, which then compute as on an older machine."""


def planned(
    folder: Path,
    request: tuple[str, ...],
    *,
    seed: int,
    cache: Path,
    one_core: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """The bytes of the strategy file that a process of its own writes."""
    out = folder / "strategy.json"
    command = [sys.executable, "-m", "planner.cli", "plan", *request, "--hw", "dgx-a100", "--out", str(out), "--quiet"]
    if one_core:
        command = [sys.executable, "-c", ONE_CORE, *command]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "XDG_CACHE_HOME": str(cache), **variables}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=600)
    return out.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("request_name", list(REQUESTS))
def test_the_same_request_gives_the_same_bytes(request_name: str, tmp_path: Path) -> None:
    request, warm = REQUESTS[request_name], tmp_path / "warm"
    first = planned(tmp_path, request, seed=0, cache=warm)
    for seed in range(1, 5):
        assert planned(tmp_path, request, seed=seed, cache=warm) == first, f"hash seed {seed}"
    assert planned(tmp_path, request, seed=5, cache=tmp_path / "cold") == first, "an empty cache"
    if len(own_cores()) > 1 and hasattr(os, "sched_setaffinity"):
        assert planned(tmp_path, request, seed=6, cache=warm, one_core=True) == first, "one core"
    assert planned(tmp_path, request, seed=7, cache=tmp_path / "old", variables=OLD_PROCESSOR) == first, (
        "an older processor"
    )
