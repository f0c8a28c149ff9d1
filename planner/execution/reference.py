"""The same training in one process, by plain PyTorch: nothing here comes from the plan.

Only the masks of dropout are drawn as the captured graph draws them, and experts give their places to the tokens of
each rank of a context axis apart, as its ranks do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from planner.execution.data.samples import Batches, open_dataset
from planner.execution.job import Job
from planner.execution.optimizers import SCALED, LossScale, first_scale, is_narrow, overflow, torch_optimizer, unscaled
from planner.graph.custom_operators import expert_places_operator
from planner.graph.operator_graph import DROPOUT
from planner.lowering.instructions import BeginUpdate, LoweredStages, Update
from planner.networks import load_network
from planner.plans.plan import Plan
from planner.sharding.local_call import Moment
from planner.sharding.local_context import places_on_ranks
from planner.sharding.local_operator import dropped, operator_number
from simulator.errors import UnsupportedError
from simulator.program import Phase


def run_reference(job: Job, *, nudge: float = 0.0, draw: int = 0) -> list[float]:
    """Train a module with autograd and `torch.optim` on the job's data, seed and micro-batches.

    Parameters
    ----------
    nudge : float
        Standard deviation of the relative change of every parameter before every step, to see how the network
        amplifies rounding.
    draw : int
        Seeds those changes.

    Returns
    -------
    list of float
        The loss of each step: the mean over its micro-batches.
    """
    graph, specs = job.lowered.graph, job.inputs
    device = torch.device(job.device_type)
    dtype = getattr(torch, graph.nodes[graph.parameters[0].node].outputs[0].dtype)
    module = load_network(job.network, sequence_length=job.sequence_length).build(job.seed).to(device, dtype)
    parameters = list(module.parameters())
    generator = torch.Generator().manual_seed(draw)
    masters = [torch.nn.Parameter(p.detach().float()) if is_narrow(p.dtype) else p for p in parameters]
    optimizer = torch_optimizer(job.optimizer, job.constants, masters)
    batches = Batches(dataset=open_dataset(job.data, specs, job.seed), seed=job.seed)
    factors = gradient_factors(job.lowered)
    by_name = {spec.name: spec for spec in specs}
    drawing = (node for node in graph.nodes if node.op == DROPOUT and node.phase is Phase.FORWARD)
    numbers = [operator_number(graph, node) for node in drawing]
    count, losses = job.lowered.micro_batches, []
    scale = first_scale(dtype, job.first_scale)
    divisor = 1 if dtype in SCALED else count
    for step in range(job.steps):
        total = 0.0
        if nudge:
            _nudge(parameters, nudge, generator)
        module.zero_grad()
        for micro_batch in range(count):
            start = (step * count + micro_batch) * graph.batch_size
            inputs = [batches.load(by_name[entry.name], start).to(device) for entry in graph.inputs]
            moment = Moment(seed=job.seed, step=step, micro_batch=micro_batch)
            with _SameMasks(numbers, moment), _SamePlaces(job.lowered):
                loss = module(*inputs)
            (loss / divisor).backward(torch.full_like(loss, scale.value))
            total += float(loss.detach())
        _multiply(module, factors)
        _update(optimizer, parameters, masters, count / divisor, scale)
        losses.append(total / count)
    return losses


class _SameMasks(TorchFunctionMode):
    """Lets torch's dropouts, in the order of their calls, draw what those of the graph do.

    Kinds of dropout that capture leaves out are left out here as well.
    """

    def __init__(self, numbers: Iterable[int], moment: Moment) -> None:
        super().__init__()
        self._numbers, self._moment = iter(numbers), moment

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if function in _ATTENTIONS:
            given = {**given, "dropout_p": 0.0} if len(args) < 5 else given
            return function(*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ()), **given)
        if function in _LEFT_OUT:
            return args[0]
        if function not in _DROPOUTS:
            return function(*args, **given)
        settings = inspect.signature(functional.dropout).bind(*args, **given)
        settings.apply_defaults()
        tensor, probability, training, *_ = settings.args
        if not training or not probability:
            return tensor
        places = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
        return dropped(tensor, probability, next(self._numbers), places, tensor.numel(), self._moment)


class _SamePlaces(TorchFunctionMode):
    """Gives tokens the places of experts as the ranks of the plan do."""

    def __init__(self, lowered: LoweredStages) -> None:
        super().__init__()
        self.cut = next((one.cut for one in lowered.inputs if one.cut is not None), None)
        self.size = 1 if self.cut is None else lowered.mesh.axes[self.cut.axis].size

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.cut is None or function is not expert_places_operator():
            return function(*args, **(kwargs or {}))
        index, chosen, experts, capacity = args
        return places_on_ranks(index, chosen, experts, capacity, self.cut, self.size)


_ATTENTIONS = (functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
"""Modules call functions of torch, exported programs its operators."""
_DROPOUTS = (functional.dropout, torch.dropout, torch.ops.aten.dropout.default)
_LEFT_OUT = (
    *(torch.ops.aten.feature_dropout.default, torch.ops.aten.alpha_dropout.default),
    *(functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, torch.feature_dropout, torch.alpha_dropout),
)


@torch.no_grad()
def _nudge(parameters: list[torch.nn.Parameter], relative: float, generator: torch.Generator) -> None:
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.mul_(1 + relative * noise.to(parameter.device, parameter.dtype))


def _multiply(module: torch.nn.Module, factors: dict[str, float]) -> None:
    """Multiply gradients where the context asks for sums or other means; tied parameters go by any of their names."""
    found = {parameter: factors[n] for n, parameter in module.named_parameters(remove_duplicate=False) if n in factors}
    for parameter, factor in found.items():
        if parameter.grad is not None and factor != 1.0:
            parameter.grad *= factor


@torch.no_grad()
def _update(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    masters: list[torch.nn.Parameter],
    divisor: float,
    scale: LossScale,
) -> None:
    """Update the float32 copies of parameters of low precision, and the parameters from them.

    Scaled gradients are sums over micro-batches, of which `divisor` is the number; those that overflow are left out.
    """
    given = [p.grad for p in parameters if p.grad is not None]
    if given[0].dtype in SCALED:
        scale.settle(bool(overflow(given, given[0].device)))
        if scale.skips:
            return
    for parameter, master in zip(parameters, masters, strict=True):
        if master is not parameter:
            gradient = parameter.grad
            master.grad = None if gradient is None else unscaled(gradient, divisor, scale).float()
    optimizer.step()
    for parameter, master in zip(parameters, masters, strict=True):
        if master is not parameter:
            parameter.copy_(master)


def gradient_factors(lowered: LoweredStages) -> dict[str, float]:
    """Factor of each trained parameter by its name; 1 for gradients of the mean loss of the whole batch."""
    stored = tuple(entry for rank in lowered.ranks for entry in rank.parameters)
    updates = tuple(one for rank in lowered.ranks for one in rank.update)
    names = {entry.value: entry.name for entry in stored}
    return {
        names[one.parameter]: lowered.micro_batches / one.divisor
        for one in updates
        if isinstance(one, Update | BeginUpdate)
    }


def check_comparable(plan: Plan) -> None:
    """Raise UnsupportedError where one process cannot train as the ranks of a plan do."""
    asked = plan.exchange
    if not asked.cross_batch and not asked.layerwise:
        return
    what = (
        "cross_batch=True: every rank's operators see its own samples alone"
        if asked.cross_batch
        else f"{len(asked.layerwise)} layerwise_parallel parameters, of which every rank has its own"
    )
    raise UnsupportedError(
        f"--verify compares with one process, and the plan has {what}; run it without --verify, or plan without them"
    )
