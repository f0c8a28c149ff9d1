"""Ascend devices as torch sees them: through torch_npu, which needs CANN beside it."""

from __future__ import annotations

import importlib
import importlib.util

from simulator.errors import UnsupportedError


def load_npu() -> None:
    """Import torch_npu, which makes `torch.npu` and the backend hccl.

    Raises
    ------
    UnsupportedError
        It is not installed, or does not load, as without CANN's libraries.
    """
    if importlib.util.find_spec("torch_npu") is None:
        raise UnsupportedError("device 'npu' needs torch_npu, which is not installed; install it or use --device cpu")
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedError(
            f"device 'npu' needs torch_npu, which is installed but does not load ({reason[0]}); load CANN's variables "
            "(set_env.sh) and take a torch_npu that was built for this torch, or use --device cpu"
        ) from error
