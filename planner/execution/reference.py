"""The same training in one process, by plain PyTorch: nothing here comes from the plan."""

from __future__ import annotations

import torch

from planner.execution.data import Batches, open_dataset
from planner.execution.factors import gradient_factors
from planner.execution.job import Job
from planner.execution.optimizers import is_narrow, torch_optimizer
from planner.networks import load_network


def run_reference(job: Job, *, perturbation: float = 0.0) -> list[float]:
    """Train a module with autograd and `torch.optim` on the job's data, seed and micro-batches.

    Parameters
    ----------
    perturbation : float
        Relative change of every parameter before the first step, to see how the network amplifies rounding.

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
    if perturbation:
        _perturb(parameters, perturbation)
    masters = [torch.nn.Parameter(p.detach().float()) if is_narrow(p.dtype) else p for p in parameters]
    optimizer = torch_optimizer(job.optimizer, job.constants, masters)
    batches = Batches(dataset=open_dataset(job.data, specs, job.seed), seed=job.seed)
    factors = gradient_factors(job.lowered)
    by_name = {spec.name: spec for spec in specs}
    count, losses = job.lowered.micro_batches, []
    for step in range(job.steps):
        total = 0.0
        module.zero_grad()
        for micro_batch in range(count):
            start = (step * count + micro_batch) * graph.batch_size
            inputs = [batches.load(by_name[entry.name], start).to(device) for entry in graph.inputs]
            loss = module(*inputs)
            (loss / count).backward()
            total += float(loss.detach())
        _multiply(module, factors)
        _update(optimizer, parameters, masters)
        losses.append(total / count)
    return losses


@torch.no_grad()
def _perturb(parameters: list[torch.nn.Parameter], relative: float) -> None:
    generator = torch.Generator().manual_seed(0)
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
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], masters: list[torch.nn.Parameter]
) -> None:
    """Update the float32 copies of parameters of low precision, and the parameters from them."""
    for parameter, master in zip(parameters, masters, strict=True):
        if master is not parameter:
            master.grad = None if parameter.grad is None else parameter.grad.float()
    optimizer.step()
    for parameter, master in zip(parameters, masters, strict=True):
        if master is not parameter:
            parameter.copy_(master)
