"""Double recursion through MindSpore's interface: a pipeline, recomputation and sharded optimizer states.

From this folder: ``python double_recursive.py``

The network of the reference's tutorial: 784-512-512-1 on images of digits, two stages, four micro-batches in 1F1B,
recomputed ReLUs. It is planned for eight Ascend 910 and trained on eight local processes, whose losses must be those of
one process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import planner

BATCH, STEPS = 32, 4
STAGES = {"layer1": 0, "relu1": 0, "layer2": 1, "relu2": 1, "layer3": 1}


def mean_absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean of the absolute differences."""
    return (output - target).abs().sum() / target.numel()


class Network(nn.Module):
    """Three layers on flattened images."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(28 * 28, 512)
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Linear(512, 512)
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Linear(512, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Map images ``(batch, 1, 28, 28)`` to numbers ``(batch, 1)``."""
        x = self.relu1(self.layer1(self.flatten(image)))
        return self.layer3(self.relu2(self.layer2(x)))  # type: ignore[no-any-return]


def network() -> tuple[nn.Module, tuple[Tensor, ...], object]:
    """The network with recomputed ReLUs, a batch of example inputs, and the loss."""
    module = Network()
    planner.recompute(module.relu1)
    planner.recompute(module.relu2)
    return module, (torch.rand(BATCH, 1, 28, 28), torch.rand(BATCH, 1)), mean_absolute_error


def parallel() -> planner.AutoParallel:
    """How the network is to be parallel."""
    pipelined = planner.Pipeline(network, 4, stage_config={f"_backbone.{name}": s for name, s in STAGES.items()})
    found = planner.AutoParallel(pipelined, parallel_mode="recursive_programming", device_num=8)
    found.hsdp()
    found.full_batch = True
    found.pipeline(stages=2, scheduler="1f1b")
    return found


def main() -> None:
    """Plan, then train a few steps, whose losses must be those of one process."""
    found = planner.plan(parallel(), "ascend910-atlas800", global_batch=BATCH, precision="fp32", optimizer="sgd")
    plan, step = found.plan, found.prediction.step_time_s
    print(f"data {plan.degree('data')} × tensor {plan.degree('tensor')} × {plan.pipeline} stages, {step * 1e3:.3g} ms")

    def say(step: int, loss: float) -> None:
        print(f"step: {step + 1} of {STEPS}, loss: {loss:.6g}")

    report = planner.execute(found, steps=STEPS, precision="fp64", verify=True, monitor=say)
    print(f"largest difference from the losses of one process: {report.max_loss_difference:.3g}")


if __name__ == "__main__":
    main()
