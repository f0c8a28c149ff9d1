"""The classes and functions that `export --to pytorch` writes into its files, as they stand here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode


class Whole(ParallelStyle):
    """Keeps a module whole on every tensor rank, with its parameters as DTensors like those of the other modules."""

    def __init__(self, *, use_local_output: bool = True) -> None:
        super().__init__()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Any, ...]:
        first, *rest = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, device_mesh, [Replicate()], run_check=False)
        return first, *rest

    def _leave(self, module: nn.Module, outputs: Any, device_mesh: DeviceMesh) -> Any:
        return outputs.to_local() if self.use_local_output else outputs


def split_sequence(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Give each tensor rank its part of the sequence, dim 1, where the first layer begins."""

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(1)]).to_local(), *inputs[1:]

    layer.register_forward_pre_hook(enter)


class Heads(TorchFunctionMode):
    """Checks that attention has the heads of one tensor rank: a module that counts all heads would mix them up."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        if func is F.scaled_dot_product_attention and args and args[0].shape[1] != self.heads:
            raise ValueError(
                f"attention has {args[0].shape[1]} heads, and a tensor rank has {self.heads}: take their number "
                "from the width, as in x.view(*x.shape[:-1], -1, head_size)"
            )
        return func(*args, **(kwargs or {}))


def with_heads(loss: Callable[..., Tensor], heads: int) -> Callable[..., Tensor]:
    """A loss whose first call checks the heads of attention."""
    checked: list[bool] = []

    def compute(module: nn.Module, *batch: Tensor) -> Tensor:
        if checked:
            return loss(module, *batch)
        checked.append(True)
        with Heads(heads):
            return loss(module, *batch)

    return compute


def tied_parameters(module: nn.Module) -> dict[str, str]:
    """Further names of parameters that several modules share, each with the first one."""
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(p), name)) for name, p in module.named_parameters(remove_duplicate=False)]
    return {name: other for name, other in named if name != other}


def tie(module: nn.Module, names: Mapping[str, str]) -> None:
    """Share parameters again: cutting a module makes new ones."""
    for name, first in names.items():
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, module.get_parameter(first))


class Before(nn.Module):
    """Stands for a module of an earlier stage.

    The last one passes on what the stage has received. The others give zeros of the shape of a whole sequence, of which
    the stage has received one of `parts`; nothing reads their values.
    """

    received: Tensor

    def __init__(self, parts: int, *, last: bool) -> None:
        super().__init__()
        self.parts, self.last = parts, last

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return what was received, or zeros."""
        x = self.received
        return x if self.last else x.new_zeros(1).expand(x.shape[0], self.parts * x.shape[1], *x.shape[2:])


class Behind(nn.Module):
    """Stands for a module of a later stage: the stage ends with what it is given."""

    class Reached(Exception):  # noqa: N818 it is no error
        """Carries the result of a stage."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """End the forward pass."""
        raise self.Reached(x)


class Stage(nn.Module):
    """The part of a module that one pipeline stage runs; the modules of other stages are replaced."""

    def __init__(
        self, module: nn.Module, stages: Sequence[Sequence[str]], index: int, loss: Callable[..., Tensor], parts: int
    ) -> None:
        super().__init__()
        self.module, self.loss = copy.deepcopy(module), loss
        self.before: list[Before] = []
        earlier = [name for names in stages[:index] for name in names]
        for name in earlier:
            self.before.append(Before(parts, last=name == earlier[-1]))
            self.module.set_submodule(name, self.before[-1])
        for name in (name for names in stages[index + 1 :] for name in names):
            self.module.set_submodule(name, Behind())

    def forward(self, received: Tensor | None = None, **batch: Tensor) -> Tensor:
        """Run the stage on what the one before has sent; the last one returns the loss, of shape (1,)."""
        for stub in self.before:
            stub.received = received  # type: ignore[assignment]  # the first stage has none of them
        try:
            return self.loss(self.module, *batch.values()).reshape(1)
        except Behind.Reached as reached:
            return reached.args[0]  # type: ignore[no-any-return]
        finally:
            for stub in self.before:
                del stub.received


class Pipeline:
    """Runs steps of a module that is cut into stages."""

    def __init__(
        self, parts: Sequence[Stage], stages: Sequence[PipelineStage], schedule: str, micro_batch: int
    ) -> None:
        self.parts, self.stages, self.micro_batch = parts, stages, micro_batch
        self.schedule_class = get_schedule_class(schedule)
        self.schedule: Any = None

    def parameters(self) -> Iterable[nn.Parameter]:
        """Parameters of this rank, for the optimizer."""
        return [parameter for part in self.parts for parameter in part.parameters()]

    def __call__(self, *batch: Tensor) -> Tensor | None:
        """Forward and backward pass of all micro-batches; the mean loss on the last stage, None on others.

        `batch` holds the samples of this data-parallel rank. Every rank of a pipeline gives the same.
        """
        if self.schedule is None:
            single = issubclass(self.schedule_class, PipelineScheduleSingle)
            stages: Any = self.stages[0] if single else list(self.stages)
            count = batch[0].shape[0] // self.micro_batch
            self.schedule = self.schedule_class(stages, count, loss_fn=lambda output, target: output.mean())
        last = any(stage.is_last for stage in self.stages)
        losses: list[Tensor] = []
        inputs = {f"input{number}": tensor for number, tensor in enumerate(batch)}
        self.schedule.step(target=batch[0] if last else None, losses=losses if last else None, **inputs)
        return torch.stack(losses).mean().detach() if losses else None


class Accumulation:
    """Runs steps of a module, whose gradients add up over micro-batches."""

    def __init__(
        self, module: FSDPModule, loss: Callable[..., Tensor], micro_batch: int, *, reduce_each: bool, reshard: bool
    ) -> None:
        self.module, self.loss, self.micro_batch = module, loss, micro_batch
        self.reduce_each, self.reshard = reduce_each, reshard

    def parameters(self) -> Iterable[nn.Parameter]:
        """Parameters of this rank, for the optimizer."""
        assert isinstance(self.module, nn.Module)
        return self.module.parameters()

    def __call__(self, *batch: Tensor) -> Tensor:
        """Forward and backward pass of all micro-batches; returns the mean loss of this rank's samples, `batch`."""
        total = torch.zeros((), device=batch[0].device)
        pieces = list(zip(*(torch.split(tensor, self.micro_batch) for tensor in batch), strict=True))
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            self.module.set_is_last_backward(last)
            self.module.set_requires_gradient_sync(last or self.reduce_each)
            self.module.set_reshard_after_backward(last or self.reshard)
            mean = self.loss(self.module, *piece) / len(pieces)
            mean.backward()  # type: ignore[no-untyped-call]
            total += mean.detach()
        return total
