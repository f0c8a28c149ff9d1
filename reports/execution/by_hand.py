"""Training as one writes it by hand in PyTorch, to hold an executed plan of the same parallelism against.

Data parallelism by ``DistributedDataParallel``, sharded states by ``fully_shard`` (FSDP2), and for a perceptron tensor
parallelism by columns and rows with two all-reduces a pair of layers (Shoeybi et al., *Megatron-LM*, 2019).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from planner.execution.data.samples import Batches, BatchInput, Shard, open_dataset
from planner.execution.job import Job
from planner.execution.optimizers import Hyperparameters
from planner.networks import load_network
from planner.networks.losses import mean_absolute_error
from planner.networks.zoo.mlp import MultilayerPerceptron
from simulator.errors import InputError


class HandSplit(StrEnum):
    """How the work is split."""

    DDP = "DDP"
    FSDP2 = "FSDP2"
    TENSOR = "tensor parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandWritten:
    """Training by hand: the same network, data, seed and optimizer as a plan's on as many processes."""

    way: HandSplit
    network: str
    sequence_length: int | None
    inputs: tuple[BatchInput, ...]
    data: str | None
    optimizer: str
    constants: Hyperparameters
    seed: int


def like(job: Job, way: HandSplit) -> HandWritten:
    """Work by hand that trains what a job trains."""
    return HandWritten(
        way=way,
        network=job.network,
        sequence_length=job.sequence_length,
        inputs=job.inputs,
        data=job.data,
        optimizer=job.optimizer,
        constants=job.constants,
        seed=job.seed,
    )


class HandTrainer:
    """What one rank trains by hand; the process group must be there.

    Raises
    ------
    InputError
        Tensor parallelism by hand is written for perceptrons of an even number of layers, and for some optimizers.
    """

    def __init__(self, work: HandWritten) -> None:
        whole = load_network(work.network, sequence_length=work.sequence_length).build(work.seed)
        self._module, parameters = _wrapped(work.way, whole)
        self._optimizer = _optimizer(work, parameters)
        split = work.way is not HandSplit.TENSOR
        self._shard = Shard(num_shards=dist.get_world_size(), shard_id=dist.get_rank()) if split else Shard()
        self._data = Batches(dataset=open_dataset(work.data, work.inputs, work.seed), seed=work.seed)
        self._inputs = work.inputs

    def batches(self, step: int) -> list[list[Tensor]]:
        """Load this rank's samples of a step, which is one micro-batch."""
        start = step * self._inputs[0].shape[0]
        return [[self._data.load(spec, start, self._shard).contiguous() for spec in self._inputs]]

    def run(self, batches: list[list[Tensor]]) -> tuple[float, float]:
        """Run one step; returns the loss of this rank's samples and the seconds."""
        begun = time.perf_counter()
        loss = self._module(*batches[0])
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - begun
        return float(loss.detach()), seconds


def _wrapped(way: HandSplit, module: nn.Module) -> tuple[Callable[..., Tensor], Sequence[nn.Parameter]]:
    if way is HandSplit.DDP:
        wrapped = DistributedDataParallel(module)
        return wrapped, list(wrapped.parameters())
    if way is HandSplit.FSDP2:
        for child in module.modules():
            if isinstance(child, nn.ModuleList):
                for block in child:
                    fully_shard(block)
        fully_shard(module)
        return module, list(module.parameters())
    if not isinstance(module, MultilayerPerceptron) or len(module.layers) % 2:
        raise InputError(f"{type(module).__name__} has no tensor parallelism by hand; take a perceptron of even depth")
    cut = TensorParallelPerceptron(module, dist.get_rank(), dist.get_world_size())
    return cut, list(cut.parameters())


class TensorParallelPerceptron(nn.Module):
    """A perceptron whose layers are cut by columns and by rows in turn."""

    def __init__(self, whole: MultilayerPerceptron, rank: int, size: int) -> None:
        super().__init__()
        weights, biases = [], []
        for number, layer in enumerate(whole.layers):
            assert isinstance(layer, nn.Linear)
            weight, bias = layer.weight.detach(), layer.bias.detach()
            by_rows = number % 2 == 1
            weights.append(nn.Parameter(weight.chunk(size, 1 if by_rows else 0)[rank].contiguous()))
            biases.append(nn.Parameter(bias.clone() if by_rows else bias.chunk(size)[rank].clone()))
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        """Loss of features ``(batch, in)`` against targets ``(batch, out)``, the same on all ranks."""
        hidden = features
        for number in range(0, len(self.weights), 2):
            entered = _Enter.apply(hidden)
            wide = nn.functional.linear(entered, self.weights[number], self.biases[number]).relu()
            summed = _Leave.apply(nn.functional.linear(wide, self.weights[number + 1]))
            hidden = summed + self.biases[number + 1]
            if number + 2 < len(self.weights):
                hidden = hidden.relu()
        return mean_absolute_error(hidden, target)


class _Enter(torch.autograd.Function):
    """Into a part that is cut: the gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


class _Leave(torch.autograd.Function):
    """Out of a part that is cut: the results of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _optimizer(work: HandWritten, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    constants = work.constants
    if work.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if work.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, lr=constants.learning_rate, betas=(constants.beta1, constants.beta2),
                    eps=constants.epsilon, weight_decay=constants.weight_decay, fused=True)  # fmt: skip
    if work.optimizer in ("sgd", "momentum"):
        momentum = constants.momentum if work.optimizer == "momentum" else 0.0
        return torch.optim.SGD(parameters, lr=constants.learning_rate, momentum=momentum)
    raise InputError(f"optimizer {work.optimizer!r} is not written by hand; take sgd, momentum, adam or adamw")
