"""QuartzNet 15x5 as NVIDIA's examples train it: separable convolutions over time, each behind a mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

BANDS, LETTERS = 64, 29
"""Mel bands, and outputs."""
OF_FRAMES = "frames_"
BLOCKS = ((256, 33), (256, 39), (512, 51), (512, 63), (512, 75))
"""Channels and width of the convolutions of blocks, of which there are three each."""


class _Masked(nn.Module):
    """A convolution of what is not behind the end of an utterance, and a norm behind it."""

    def __init__(self, convolution: nn.Conv1d, *, norm: bool) -> None:
        super().__init__()
        self.convolution = convolution
        self.norm = nn.BatchNorm1d(convolution.out_channels) if norm else nn.Identity()

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """Map ``(batch, channels, frames)`` to the same, or half the frames."""
        return self.norm(self.convolution(x * kept))  # type: ignore[no-any-return]


class _Separable(nn.Module):
    """Each channel over time, then all channels of each frame."""

    def __init__(self, channels: int, outputs: int, width: int, *, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        depthwise = nn.Conv1d(
            channels, channels, width, stride=stride, padding=dilation * (width - 1) // 2, dilation=dilation,
            groups=channels, bias=False,
        )  # fmt: skip
        self.by_channel = _Masked(depthwise, norm=False)
        self.by_frame = _Masked(nn.Conv1d(channels, outputs, 1, bias=False), norm=True)
        self.stride = stride

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """Map ``(batch, channels, frames)`` to as many outputs."""
        return self.by_frame(self.by_channel(x, kept), kept[:, :, :: self.stride])  # type: ignore[no-any-return]


class _QuartzBlock(nn.Module):
    """Five separable convolutions beside one of single frames."""

    def __init__(self, channels: int, outputs: int, width: int) -> None:
        super().__init__()
        self.beside = _Masked(nn.Conv1d(channels, outputs, 1, bias=False), norm=True)
        self.parts = nn.ModuleList(_Separable(outputs if i else channels, outputs, width) for i in range(5))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """Map ``(batch, channels, frames)`` to as many outputs."""
        y = x
        for part in self.parts[:-1]:
            y = torch.relu(part(y, kept))
        return torch.relu(self.parts[-1](y, kept) + self.beside(x, kept))


class QuartzNet(nn.Module):
    """Mean log probability of all letters: as long as the loss proper but for its sums over alignments (CTC)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _Separable(BANDS, 256, 33, stride=2)
        widths = [(channels, width) for channels, width in BLOCKS for _ in range(3)]
        inputs = [256, *(channels for channels, _ in widths)]
        self.blocks = nn.ModuleList(_QuartzBlock(n, *shape) for n, shape in zip(inputs, widths, strict=False))
        self.wide = _Separable(512, 512, 87, dilation=2)
        self.last = _Masked(nn.Conv1d(512, 1024, 1, bias=False), norm=True)
        self.letters = nn.Conv1d(1024, LETTERS, 1)

    def forward(self, bands: Tensor, kept: Tensor) -> Tensor:
        """Loss of ``(batch, bands, frames)``, of which ``kept`` ``(batch, 1, frames)`` is 0 behind the end."""
        x = torch.relu(self.first(bands, kept))
        kept = kept[:, :, ::2]
        for block in self.blocks:
            x = block(x, kept)
        x = torch.relu(self.wide(x, kept))
        x = torch.relu(self.last(x, kept))
        return -nn.functional.log_softmax(self.letters(x), dim=1).mean()


Factory = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


def __getattr__(name: str) -> Factory:
    """Factories by the frames of a padded batch, ``frames_1755`` (`planner.published.layered.sequence`)."""
    frames = name.removeprefix(OF_FRAMES)
    if frames == name or not frames.isdecimal():
        raise AttributeError(name)
    return partial(quartznet_15x5, int(frames))


def quartznet_15x5(frames: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network with a batch of two."""
    return QuartzNet(), (torch.zeros(2, BANDS, frames), torch.ones(2, 1, frames))
