"""Which kernels calibration measures, at which sizes, with their work as the operator graph counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from simulator.calibration.convolutions import convolution, convolution_backward
from simulator.calibration.normalizations import (
    batch_norm,
    batch_norm_among,
    batch_norm_backward,
    batch_norm_backward_among,
)
from simulator.program import Kernel

aten = torch.ops.aten
Operator = Callable[..., object]
"""Called with the inputs, then with the case's other arguments."""
MEMORY_SIZES = (256, 4096, 65536, 524288, 4194304)
"""Elements of the tensors of memory-bound kernels: from the cost of a call to beyond the caches."""
LARGE_MEMORY_SIZES = (1 << 24, 1 << 26)
IMAGES = (
    (8, 64, 64, 16, 3),
    (4, 64, 256, 14, 1),
    (8, 128, 128, 8, 3),
    (4, 256, 64, 14, 1),
    (2, 512, 512, 7, 3),
    (8, 128, 128, 8, 3, 2),
)
"""Batch, channels in and out, side of image and window of convolutions, and stride where it is not 1."""
SMALL_IMAGES = (
    (32, 64, 64, 8, 3),
    (32, 128, 512, 4, 1),
    (16, 256, 256, 4, 3),
    (16, 1024, 256, 2, 1),
    (16, 256, 256, 2, 3),
    (16, 512, 1024, 1, 1),
    (16, 256, 256, 1, 3),
    (16, 128, 128, 8, 3, 2),
    (32, 256, 256, 4, 3, 2),
    (16, 512, 1024, 4, 1, 2),
    (16, 512, 1024, 2, 1, 2),
    (32, 512, 2048, 1, 1),
    (32, 2048, 512, 1, 1),
    (32, 1024, 2048, 2, 1, 2),
    (8, 64, 256, 8, 1),
    (8, 512, 128, 4, 1),
    (8, 256, 1024, 2, 1),
    (4, 1024, 256, 2, 1),
    (4, 2048, 512, 1, 1),
    (8, 256, 256, 2, 3),
    (4, 512, 512, 1, 3),
    (8, 256, 256, 4, 3, 2),
    (4, 512, 512, 2, 3, 2),
)
"""The same of convolutions whose weights outweigh their images; in single precision alone."""
POOLED = ((1, 16, 8), (8, 64, 8), (32, 64, 16))
"""Batch, channels and side of pooled images."""
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
WIDE_PRODUCTS = (
    (64, 1024, 4096),
    (64, 4096, 1024),
    (1024, 64, 4096),
    (256, 768, 3072),
    (3072, 256, 768),
    (256, 768, 8192),
)
"""The same at the sizes of layers and of the gradients of their weights; in single precision alone."""
COMPUTE_DTYPES = ("float32", "float64", "bfloat16")
ROW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
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
    arguments: tuple[object, ...] = ()
    index_shape: tuple[int, ...] = ()
    high: int = 0


def all_cases(*, accelerator: bool = False) -> list[KernelCase]:
    """List every case, in a fixed order; accelerators get larger ones as well."""
    dtypes = (*COMPUTE_DTYPES, "float16") if accelerator else COMPUTE_DTYPES
    cubes = (*CUBES, *LARGE_CUBES) if accelerator else CUBES
    sizes = (*MEMORY_SIZES, *LARGE_MEMORY_SIZES) if accelerator else MEMORY_SIZES
    attention = _attention if accelerator else aten._scaled_dot_product_flash_attention_for_cpu.default
    return [*_matmuls(dtypes, cubes), *_convolutions(), *_poolings(), *_attentions(attention), *_memory_bound(sizes)]


def _width(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _matmuls(dtypes: tuple[str, ...], cubes: tuple[int, ...]) -> Iterator[KernelCase]:
    products = [*((size, size, size) for size in cubes), *SKINNY_PRODUCTS]
    for dtype in dtypes:
        for rows, inner, columns in (*products, *(WIDE_PRODUCTS if dtype == "float32" else ())):
            shapes = ((rows, inner), (inner, columns))
            size = rows * inner + inner * columns + rows * columns
            yield KernelCase(
                kernel=Kernel.MATMUL,
                name=f"mm {rows}x{inner}x{columns}",
                dtype=dtype,
                shapes=shapes,
                operator=aten.mm.default,
                flops=2.0 * rows * inner * columns,
                bytes_moved=size * _width(dtype),
            )


def _convolutions() -> Iterator[KernelCase]:
    for dtype in ("float32", "float64"):
        for batch, inputs, outputs, size, width, *strides in (*IMAGES, *(SMALL_IMAGES if dtype == "float32" else ())):
            image, kernel = (batch, inputs, size, size), (outputs, inputs, width, width)
            stride = strides[0] if strides else 1
            side = size // stride
            geometry = ([stride] * 2, [width // 2] * 2, [1, 1], False, [0, 0], 1)
            result = batch * outputs * side * side
            work, moved = 2.0 * result * inputs * width * width, prod(image) + prod(kernel) + result
            name = f"conv {batch}x{inputs}x{size}x{size} to {outputs}, {width}x{width}"
            name += f" by {stride}" if strides else ""
            kind = Kernel.STRIDED_CONVOLUTION_BACKWARD if stride > 1 and width > 1 else Kernel.CONVOLUTION_BACKWARD
            yield KernelCase(
                kernel=Kernel.CONVOLUTION,
                name=name,
                dtype=dtype,
                shapes=(image, kernel),
                operator=convolution,
                arguments=(None, *geometry),
                flops=work,
                bytes_moved=moved * _width(dtype),
            )
            yield KernelCase(
                kernel=kind,
                name=f"backward of {name}",
                dtype=dtype,
                shapes=((batch, outputs, side, side), image, kernel),
                operator=convolution_backward,
                arguments=(None, *geometry, [True, True, False]),
                flops=2 * work,
                bytes_moved=(moved + prod(image) + prod(kernel)) * _width(dtype),
            )


def _poolings() -> Iterator[KernelCase]:
    for batch, channels, size in POOLED:
        given, made = batch * channels * size**2, batch * channels * (size // 2) ** 2
        windows = (("max", 3, aten.max_pool2d_with_indices.default, 12), ("mean", 2, aten.avg_pool2d.default, 4))
        for name, width, operator, result in windows[: 1 if size > 8 else 2]:
            yield KernelCase(
                kernel=Kernel.POOLING,
                name=f"{name} pooling of {batch}x{channels}x{size}x{size}",
                dtype="float32",
                shapes=((batch, channels, size, size),),
                operator=operator,
                arguments=([width] * 2, [2, 2], [width // 2] * 2 if width > 2 else [0, 0]),
                bytes_moved=4.0 * given + result * made,
            )


def _attentions(attention: Operator) -> Iterator[KernelCase]:
    for dtype in ("float32", "float64"):
        for batch, heads, length, width in (
            (8, 8, 32, 64),
            (2, 4, 64, 32),
            (4, 4, 128, 64),
            (2, 8, 256, 64),
            (1, 8, 512, 64),
        ):
            shape = (batch, heads, length, width)
            work, moved = 2.0 * prod(shape[:3]) * length * width, prod(shape) * _width(dtype)
            name = f"attention {batch}x{heads}x{length}x{width}"
            yield KernelCase(
                kernel=Kernel.ATTENTION,
                name=name,
                dtype=dtype,
                shapes=(shape,) * 3,
                operator=attention,
                arguments=(0.0, True),
                flops=work,
                bytes_moved=4.0 * moved,
            )
            if attention is aten._scaled_dot_product_flash_attention_for_cpu.default:
                yield KernelCase(
                    kernel=Kernel.ATTENTION,
                    name=f"backward of {name}",
                    dtype=dtype,
                    shapes=(*(shape,) * 5, shape[:3]),
                    operator=aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
                    arguments=(0.0, True),
                    flops=2.5 * work,
                    bytes_moved=8.0 * moved,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cases:
    kernel: Kernel
    name: str
    operator: Operator
    inputs: int = 1
    moved: float = 2.0
    """Times the tensor is read or written."""
    arguments: tuple[object, ...] = ()
    least: int = 0
    most: int = LARGE_MEMORY_SIZES[-1]
    """Elements of the smallest and of the largest tensor that it takes."""


def _attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool) -> object:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, None, dropout, causal)


def _gelu(values: Tensor) -> object:
    return aten.gelu.default(values, approximate="tanh")


def _gelu_backward(gradient: Tensor, values: Tensor) -> object:
    return aten.gelu_backward.default(gradient, values, approximate="tanh")


def _batch_norm(values: Tensor, channels: int, side: int) -> object:
    images = values.view(-1, channels, side, side)
    return batch_norm(images, None, None, 1e-5)


def _batch_norm_backward(gradient: Tensor, values: Tensor, channels: int, side: int) -> object:
    shape, mean = (-1, channels, side, side), values.view(-1)[:channels]
    gradient, values = gradient.view(shape), values.view(shape)
    return batch_norm_backward(gradient, values, None, None, None, mean, mean, True, 1e-5, [True, True, True])


def _summed_batch_norm(values: Tensor, channels: int, side: int) -> object:
    """Without the message, with what two ranks do besides."""
    images, weight = values.view(-1, channels, side, side), values.view(-1)[:channels]
    return batch_norm_among(images, weight, weight, 1e-5, torch.clone, 2)


def _summed_batch_norm_backward(gradient: Tensor, values: Tensor, channels: int, side: int) -> object:
    shape, of_channels = (-1, channels, side, side), values.view(-1)[:channels]
    given = (gradient.view(shape), values.view(shape), of_channels, of_channels, of_channels)
    return batch_norm_backward_among(*given, 1e-5, [True, True, True], torch.clone, 2)


def _layer_norm_backward(gradient: Tensor, values: Tensor) -> object:
    statistic = values[:, :1]
    return aten.native_layer_norm_backward.default(
        gradient, values, [ROW], statistic, statistic, values[0], values[0], [True, True, True]
    )


def _concatenate(first: Tensor, second: Tensor) -> object:
    return aten.cat.default([first, second])


def _sgd(parameter: Tensor, gradient: Tensor) -> object:
    return parameter.add_(gradient, alpha=-1e-9)


def _adam(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> object:
    """Update in one kernel, as the executor does."""
    step = torch.ones((), device=parameter.device)
    torch._fused_adam_(
        [parameter], [gradient], [first], [second], [], [step], lr=1e-9, beta1=0.9, beta2=0.999,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return parameter


BATCH_NORMS = ((16, 4), (64, 8), (256, 2), (512, 1))
"""Channels, and side of the images of each."""
FAMILIES = (
    _Cases(kernel=Kernel.ELEMENTWISE, name="add", operator=aten.add.Tensor, inputs=2, moved=3),
    _Cases(kernel=Kernel.ACCUMULATION, name="add in place", operator=aten.add_.Tensor, inputs=2, moved=3),
    _Cases(kernel=Kernel.ELEMENTWISE, name="scale", operator=aten.mul.Tensor, arguments=(0.5,)),
    _Cases(kernel=Kernel.ACTIVATION, name="relu", operator=aten.relu.default),
    _Cases(kernel=Kernel.TRANSCENDENTAL, name="gelu", operator=_gelu),
    _Cases(kernel=Kernel.TRANSCENDENTAL, name="silu", operator=aten.silu.default),
    _Cases(
        kernel=Kernel.ACTIVATION,
        name="relu backward",
        operator=aten.threshold_backward.default,
        inputs=2,
        moved=3,
        arguments=(0,),
    ),
    _Cases(kernel=Kernel.TRANSCENDENTAL, name="gelu backward", operator=_gelu_backward, inputs=2, moved=3),
    _Cases(kernel=Kernel.SOFTMAX, name="softmax", operator=aten._softmax.default, arguments=(-1, False)),
    _Cases(kernel=Kernel.SOFTMAX, name="log softmax", operator=aten._log_softmax.default, arguments=(-1, False)),
    _Cases(
        kernel=Kernel.NORMALIZATION,
        name="layer norm",
        operator=aten.native_layer_norm.default,
        arguments=([ROW], None, None, 1e-5),
    ),
    _Cases(kernel=Kernel.NORMALIZATION, name="layer norm backward", operator=_layer_norm_backward, inputs=2, moved=3),
    *(
        family
        for kernel, name, forward, backward, norms, most in (
            (
                Kernel.BATCH_NORMALIZATION,
                "batch norm",
                _batch_norm,
                _batch_norm_backward,
                BATCH_NORMS,
                LARGE_MEMORY_SIZES[-1],
            ),
            (
                Kernel.SYNCHRONIZED_BATCH_NORMALIZATION,
                "summed batch norm",
                _summed_batch_norm,
                _summed_batch_norm_backward,
                BATCH_NORMS[1:3],
                524288,
            ),
        )
        for channels, side in norms
        for family in (
            _Cases(
                kernel=kernel,
                name=f"{name} of {channels}",
                operator=forward,
                arguments=(channels, side),
                least=channels * side**2,
                most=most,
            ),
            _Cases(
                kernel=kernel,
                name=f"backward of {name} of {channels}",
                operator=backward,
                inputs=2,
                moved=3,
                arguments=(channels, side),
                least=channels * side**2,
                most=most,
            ),
        )
    ),
    _Cases(kernel=Kernel.REDUCTION, name="sum of rows", operator=aten.sum.dim_IntList, arguments=([0],), moved=1),
    _Cases(kernel=Kernel.REDUCTION, name="sum", operator=aten.sum.default, moved=1),
    _Cases(kernel=Kernel.COPY, name="clone", operator=aten.clone.default),
    _Cases(kernel=Kernel.COPY, name="concatenate", operator=_concatenate, inputs=2, moved=4),
    _Cases(kernel=Kernel.OPTIMIZER, name="adam", operator=_adam, inputs=4, moved=7),
    _Cases(kernel=Kernel.OPTIMIZER, name="sgd", operator=_sgd, inputs=2, moved=3),
)


def _memory_bound(sizes: tuple[int, ...]) -> Iterator[KernelCase]:
    for family in FAMILIES:
        for elements in (size for size in sizes if family.least <= size <= family.most):
            yield KernelCase(
                kernel=family.kernel,
                name=f"{family.name} {elements}",
                dtype="float32",
                shapes=((elements // ROW, ROW),) * family.inputs,
                operator=family.operator,
                arguments=family.arguments,
                bytes_moved=family.moved * elements * _width("float32"),
            )
    for rows in (1, 32, 512, 4096):
        yield KernelCase(
            kernel=Kernel.EMBEDDING,
            name=f"embedding {rows}",
            dtype="float32",
            shapes=((8192, ROW),),
            operator=aten.embedding.default,
            bytes_moved=2.0 * rows * ROW * 4 + rows * 8,
            index_shape=(rows,),
            high=8192,
        )
    for rows in (2, 64):
        yield KernelCase(
            kernel=Kernel.VIEW,
            name=f"view {rows}",
            dtype="float32",
            shapes=((rows, ROW),),
            operator=aten.t.default,
            bytes_moved=0.0,
        )
