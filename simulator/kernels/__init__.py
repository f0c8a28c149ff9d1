"""Time of kernels on one device: from their work, or from their shape where the profile describes it."""

from simulator.kernels.attention import attention_time
from simulator.kernels.convolution import convolution_time
from simulator.kernels.matmul import grouped_matmul_time, matmul_time
from simulator.kernels.roofline import kernel_time
from simulator.kernels.shaped import best_rate, has_shape_model, shaped_time

__all__ = [
    "attention_time",
    "best_rate",
    "convolution_time",
    "grouped_matmul_time",
    "has_shape_model",
    "kernel_time",
    "matmul_time",
    "shaped_time",
]
