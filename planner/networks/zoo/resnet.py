"""ResNets with bottleneck blocks, v1.5: the stride is in the 3 x 3 convolution.

He et al., arXiv:1512.03385; the variant is the one of Goyal et al., arXiv:1706.02677. Batch norm keeps
no running statistics: one training step neither reads nor needs them.
"""

from __future__ import annotations

from torch import Tensor, nn

from planner.networks.losses import mean_cross_entropy

EXPANSION = 4


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, track_running_stats=False)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = _norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = _norm(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = _norm(out)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), _norm(out))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, h, w)`` to ``(batch, 4 * width, h / stride, w / stride)``."""
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        y = self.bn3(self.conv3(y))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()  # type: ignore[no-any-return]


def _stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    rest = (Bottleneck(width * EXPANSION, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(Bottleneck(channels, width, stride), *rest)


class ResNet(nn.Module):
    """A ResNet of four stages; ``forward`` is the mean cross entropy."""

    def __init__(self, blocks: tuple[int, int, int, int], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = _norm(64)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, blocks[0], stride=1)
        self.layer2 = _stage(256, 128, blocks[1], stride=2)
        self.layer3 = _stage(512, 256, blocks[2], stride=2)
        self.layer4 = _stage(1024, 512, blocks[3], stride=2)
        self.fc = nn.Linear(512 * EXPANSION, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """Loss of images ``(batch, 3, h, w)`` against class numbers ``(batch,)``."""
        return mean_cross_entropy(self.logits(image), label)

    def logits(self, image: Tensor) -> Tensor:
        """Map images ``(batch, 3, h, w)`` to ``(batch, classes)``."""
        x = self.pool(self.bn1(self.conv1(image)).relu())
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]
