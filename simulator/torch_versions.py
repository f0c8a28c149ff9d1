"""The range of torch that Meshwright runs on, and what differs within it: each with its version and its reason.

All other code is written for every torch of the range. Networks are captured with
``aot_export_joint_with_descriptors``, which torch 2.9 has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, fx

OLDEST = (2, 9)
NEWEST_TRIED = (2, 15)
"""The newest torch that the test suite was run on."""


def torch_version() -> tuple[int, int]:
    """Major and minor version of the torch that is installed."""
    import torch

    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)


def written(version: tuple[int, int]) -> str:
    """A version as people write it.

    >>> written((2, 9))
    '2.9'
    """
    return ".".join(map(str, version))


def untried_torch() -> tuple[str, ...]:
    """A note for who captures a network or starts ranks with a torch newer than any tried; none with others."""
    version = torch_version()
    if version <= NEWEST_TRIED:
        return ()
    return (
        f"torch {written(version)} is newer than any that Meshwright was tried with (up to {written(NEWEST_TRIED)}); "
        f"if something fails, report it or use torch {written(NEWEST_TRIED)}",
    )


def has_own_memory(tensor: Tensor) -> bool:
    """Whether no other tensor shares the memory of one.

    Torch counts the owners of a memory. From 2.13 on the handle that asks is one of them, before it is not.
    """
    return _owners(tensor) == _owners_of_one()


def _owners(tensor: Tensor) -> int:
    import torch

    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@lru_cache(maxsize=1)
def _owners_of_one() -> int:
    import torch

    return _owners(torch.empty(1))


@contextmanager
def whole_silu_gradients() -> Iterator[None]:
    """Let a traced step hold the gradient of SiLU as one operator.

    Torch 2.9 traces it as the seven elementwise operators of its composite kernel, though every device has a kernel
    for the whole; torch 2.13 traces the whole.
    """
    import torch

    kernels = torch.ops.aten.silu_backward.default.py_kernels
    before = dict(kernels)
    kernels[torch._C.DispatchKey.CompositeImplicitAutograd] = lambda *_, **__: NotImplemented
    try:
        yield
    finally:
        kernels.clear()
        kernels.update(before)


@lru_cache(maxsize=1)
def shapes_of_weight_norm_gradients() -> object:
    """Let the gradients of a weight norm be traced; torch 2.9 cannot tell their shapes without computing them.

    Returns what torch needs to be kept for that; the cache keeps it.
    """
    import torch

    operator = "_weight_norm_interface_backward"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "Meta"):
        return None
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(operator, lambda _, v, g, *__: (torch.empty_like(v), torch.empty_like(g)), "Meta")  # type: ignore[no-untyped-call]
    return library


def zeros_beside_source(graph: fx.Graph) -> None:
    """Make the zeros that a gradient is scattered into those of the gradient's own kind.

    Backward of a selection (``topk``, ``max``), torch 2.9 calls ``zeros`` where torch 2.13 calls ``new_zeros``, which
    has rules that follow the gradient.
    """
    import torch

    aten = torch.ops.aten
    for node in graph.nodes:
        if node.target is aten.scatter.src and node.args[0].target is aten.zeros.default:
            zeros, source = node.args[0], node.args[3]
            if len(zeros.users) == 1 and source < zeros:
                zeros.target, zeros.args, zeros.kwargs = aten.new_zeros.default, (source, *zeros.args), {}
