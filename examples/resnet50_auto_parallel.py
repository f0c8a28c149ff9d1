"""ResNet-50 with its loss written as small operators, planned for eight Ascend 910 and run on eight local processes.

From this folder: ``python resnet50_auto_parallel.py``

Every operator of the loss is one that the search may place, which is why the loss is written out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet50

import meshwright as mw

CLASSES = 10
BATCH, STEPS = 32, 2


class SoftmaxCrossEntropyExpand(nn.Module):
    """Mean softmax cross entropy of class numbers, in operators as small as they come."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of logits ``(batch, classes)`` against class numbers ``(batch,)``."""
        shifted = logits - logits.amax(-1, keepdim=True)
        exponential = shifted.exp()
        softmax = exponential / exponential.sum(-1, keepdim=True)
        wanted = F.one_hot(labels, CLASSES).to(logits.dtype)
        return -(softmax.log() * wanted).sum(-1).mean()


class Classifier(nn.Module):
    """ResNet-50 on images of 10 classes, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = resnet50(num_classes=CLASSES)
        self.loss = SoftmaxCrossEntropyExpand()

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """Mean loss of images ``(batch, 3, 32, 32)`` against class numbers ``(batch,)``."""
        return self.loss(self.backbone(image), label)  # type: ignore[no-any-return]


def network() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The classifier and a batch of example inputs, of the size of CIFAR-10."""
    return Classifier(), (torch.randn(BATCH, 3, 32, 32), torch.randint(CLASSES, (BATCH,)))


def main() -> None:
    """Plan, then train a few steps, whose losses must be those of one process."""
    result = mw.plan(
        network, hardware="ascend910-atlas800", devices=8, global_batch=BATCH, precision="fp32", optimizer="momentum"
    )
    best, step = result.best, result.prediction.step_time_s
    print(f"data {best.dp} × tensor {best.tp} × {best.pp} stages, {step * 1e3:.3g} ms")

    def say(step: int, loss: float) -> None:
        print(f"step: {step + 1} of {STEPS}, loss: {loss:.6g}")

    report = result.execute(steps=STEPS, precision="fp64", verify=True, monitor=say)
    print(f"largest difference from the losses of one process: {report.max_loss_difference:.3g}")


if __name__ == "__main__":
    main()
