"""Which kernels calibration measures, at which sizes, with their work as the operator graph counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from simulator.program import Kernel

Operator = Callable[[list[Tensor]], object]
MEMORY_SIZES = (256, 4096, 65536, 524288, 4194304)
"""Elements of the tensors of memory-bound kernels: from the cost of a call to beyond the caches."""
LARGE_MEMORY_SIZES = (1 << 24, 1 << 26)
CUBES = (16, 64, 128, 256, 512)
LARGE_CUBES = (1024, 2048, 4096, 8192)
SKINNY_PRODUCTS = (
    (8, 512, 512),
    (32, 784, 512),
    (64, 512, 1),
    (32, 1024, 2048),
    (256, 128, 512),
    (128, 1024, 256),
)
"""Rows, inner size and columns of products whose matrices are far from square."""
COMPUTE_DTYPES = ("float32", "float64", "bfloat16")
ROW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one size: the shapes of its inputs, what to call, and its work.

    Integer inputs (``high`` above 0) are the last ones of ``shapes``; ``bytes_moved`` counts every
    input and output once.
    """

    kernel: Kernel
    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    operator: Operator
    flops: float = 0.0
    bytes_moved: float
    index_shape: tuple[int, ...] = ()
    high: int = 0


def all_cases(*, accelerator: bool = False) -> list[Case]:
    """List every case, in a fixed order; accelerators get larger ones as well."""
    dtypes = (*COMPUTE_DTYPES, "float16") if accelerator else COMPUTE_DTYPES
    cubes = (*CUBES, *LARGE_CUBES) if accelerator else CUBES
    sizes = (*MEMORY_SIZES, *LARGE_MEMORY_SIZES) if accelerator else MEMORY_SIZES
    return [*_matmuls(dtypes, cubes), *_convolutions(), *_attentions(), *_memory_bound(sizes)]


def _width(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _matmuls(dtypes: tuple[str, ...], cubes: tuple[int, ...]) -> Iterator[Case]:
    products = [*((size, size, size) for size in cubes), *SKINNY_PRODUCTS]
    for dtype in dtypes:
        for rows, inner, columns in products:
            shapes = ((rows, inner), (inner, columns))
            size = rows * inner + inner * columns + rows * columns
            yield Case(
                kernel=Kernel.MATMUL,
                name=f"mm {rows}x{inner}x{columns}",
                dtype=dtype,
                shapes=shapes,
                operator=lambda t: torch.mm(t[0], t[1]),
                flops=2.0 * rows * inner * columns,
                bytes_moved=size * _width(dtype),
            )


def _convolutions() -> Iterator[Case]:
    layers = [(8, 64, 64, 16, 3), (4, 64, 256, 14, 1), (8, 128, 128, 8, 3), (4, 256, 64, 14, 1), (2, 512, 512, 7, 3)]
    for dtype in ("float32", "float64"):
        for batch, inputs, outputs, size, width in layers:
            padding = width // 2
            image, kernel = (batch, inputs, size, size), (outputs, inputs, width, width)
            result = batch * outputs * size * size
            yield Case(
                kernel=Kernel.CONVOLUTION,
                name=f"conv {batch}x{inputs}x{size}x{size} to {outputs}, {width}x{width}",
                dtype=dtype,
                shapes=(image, kernel),
                operator=lambda t, padding=padding: torch.conv2d(t[0], t[1], padding=padding),  # type: ignore[misc]
                flops=2.0 * result * inputs * width * width,
                bytes_moved=(prod(image) + prod(kernel) + result) * _width(dtype),
            )


def _attentions() -> Iterator[Case]:
    for dtype in ("float32", "float64"):
        for batch, heads, length, width in ((2, 4, 64, 32), (4, 4, 128, 64), (2, 8, 256, 64), (1, 8, 512, 64)):
            shape = (batch, heads, length, width)
            yield Case(
                kernel=Kernel.ATTENTION,
                name=f"attention {batch}x{heads}x{length}x{width}",
                dtype=dtype,
                shapes=(shape,) * 3,
                operator=lambda t: torch.nn.functional.scaled_dot_product_attention(t[0], t[1], t[2], is_causal=True),
                flops=2.0 * prod(shape[:3]) * length * width,
                bytes_moved=4.0 * prod(shape) * _width(dtype),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    kernel: Kernel
    name: str
    operator: Operator
    inputs: int = 1
    moved: float = 2.0
    """Times the tensor is read or written."""


def _norm(t: list[Tensor]) -> object:
    return torch.native_layer_norm(t[0], [ROW], None, None, 1e-5)


def _in_batch(t: list[Tensor]) -> object:
    return torch.nn.functional.batch_norm(t[0].view(-1, 16, 4, 4), None, None, training=True)


def _adam(t: list[Tensor]) -> object:
    """Update in one kernel, as the executor does."""
    step = torch.ones((), device=t[0].device)
    torch._fused_adam_(
        [t[0]], [t[1]], [t[2]], [t[3]], [], [step], lr=1e-9, beta1=0.9, beta2=0.999,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return t[0]


FAMILIES = (
    _Family(kernel=Kernel.ELEMENTWISE, name="add", operator=lambda t: torch.add(t[0], t[1]), inputs=2, moved=3),
    _Family(kernel=Kernel.ELEMENTWISE, name="scale", operator=lambda t: torch.mul(t[0], 0.5)),
    _Family(kernel=Kernel.ACTIVATION, name="relu", operator=lambda t: torch.relu(t[0])),
    _Family(kernel=Kernel.ACTIVATION, name="gelu", operator=lambda t: torch.nn.functional.gelu(t[0])),
    _Family(
        kernel=Kernel.ACTIVATION,
        name="threshold backward",
        operator=lambda t: torch.ops.aten.threshold_backward(t[0], t[1], 0),
        inputs=2,
        moved=3,
    ),
    _Family(kernel=Kernel.SOFTMAX, name="softmax", operator=lambda t: torch.softmax(t[0], -1)),
    _Family(kernel=Kernel.SOFTMAX, name="log softmax", operator=lambda t: torch.log_softmax(t[0], -1)),
    _Family(kernel=Kernel.NORMALIZATION, name="layer norm", operator=_norm),
    _Family(kernel=Kernel.NORMALIZATION, name="batch norm", operator=_in_batch),
    _Family(kernel=Kernel.REDUCTION, name="sum of rows", operator=lambda t: torch.sum(t[0], 0), moved=1),
    _Family(kernel=Kernel.REDUCTION, name="sum", operator=lambda t: torch.sum(t[0]), moved=1),
    _Family(kernel=Kernel.COPY, name="clone", operator=lambda t: t[0].clone()),
    _Family(kernel=Kernel.COPY, name="concatenate", operator=lambda t: torch.cat([t[0], t[1]]), inputs=2, moved=4),
    _Family(kernel=Kernel.OPTIMIZER, name="adam", operator=_adam, inputs=4, moved=7),
    _Family(kernel=Kernel.OPTIMIZER, name="sgd", operator=lambda t: t[0].add_(t[1], alpha=-1e-9), inputs=2, moved=3),
)


def _memory_bound(sizes: tuple[int, ...]) -> Iterator[Case]:
    for family in FAMILIES:
        for elements in sizes:
            yield Case(
                kernel=family.kernel,
                name=f"{family.name} {elements}",
                dtype="float32",
                shapes=((elements // ROW, ROW),) * family.inputs,
                operator=family.operator,
                bytes_moved=family.moved * elements * _width("float32"),
            )
    for rows in (1, 32, 512, 4096):
        yield Case(
            kernel=Kernel.EMBEDDING,
            name=f"embedding {rows}",
            dtype="float32",
            shapes=((8192, ROW),),
            operator=lambda t: torch.embedding(t[0], t[1]),
            bytes_moved=2.0 * rows * ROW * 4 + rows * 8,
            index_shape=(rows,),
            high=8192,
        )
    for rows in (2, 64):
        yield Case(
            kernel=Kernel.VIEW,
            name=f"view {rows}",
            dtype="float32",
            shapes=((rows, ROW),),
            operator=lambda t: t[0].reshape(-1),
            bytes_moved=0.0,
        )
