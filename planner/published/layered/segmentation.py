"""Networks that label every pixel or voxel: U-Net, V-Net, DeepLab."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.training_run import LayeredNetwork
from planner.published.layered.builder import NetworkBuilder
from planner.published.layered.residual import DEPTHS, ResidualForm, bottleneck, stem

UNET_WIDTHS = (64, 128, 256, 512, 1024)


def unet(name: str, side: int, *, example: bool = False) -> LayeredNetwork:
    """U-Net (arXiv:1505.04597): two unpadded convolutions a level.

    In NVIDIA's ``example`` the transposed convolutions have windows of 3 x 3 and a ReLU, and the lowest level drops
    out (``TensorFlow*/Segmentation/UNet_Medical/model/layers.py``).
    """
    net = NetworkBuilder(1, side, side)
    for level, channels in enumerate(UNET_WIDTHS):
        if level:
            net.pool(2, 2, 0)
        _two_convolutions(net, channels, 0)
    if example:
        net.dropout()
    for channels in reversed(UNET_WIDTHS[:-1]):
        net.transposed(channels, 3 if example else 2)
        if example:
            net.relu()
        net.concatenate(2 * channels)
        _two_convolutions(net, channels, 0)
    net.convolution(2, 1, bias=True)
    return net.finish(name, "small image")


def _two_convolutions(net: NetworkBuilder, channels: int, padding: int | None) -> None:
    for _ in range(2):
        net.convolution(channels, 3, bias=True, padding=padding).relu()


def industrial_unet(name: str, side: int) -> LayeredNetwork:
    """The U-Net of 1.8 million weights of NVIDIA's examples, which enlarges by copying and a convolution of 2 x 2.

    (``tinyUNet`` of ``TensorFlow/Segmentation/UNet_Industrial/model/unet.py``.)
    """
    net = NetworkBuilder(1, side, side)
    skipped = (32, 32, 64, 128)
    for channels in skipped:
        _two_convolutions(net, channels, None)
        net.pool(2, 2, 0)
    _two_convolutions(net, 256, None)
    _enlarged(net, 128)
    for channels, skip in zip((128, 64, 32), reversed(skipped), strict=False):
        net.concatenate(net.channels + skip)
        net.convolution(channels, 3, bias=True).relu().convolution(channels // 2, 3, bias=True).relu()
        _enlarged(net, channels // 2)
    net.concatenate(net.channels + skipped[0])
    _two_convolutions(net, 32, None)
    net.convolution(1, 1, bias=True)
    return net.finish(name, "small image")


def _enlarged(net: NetworkBuilder, channels: int) -> None:
    """The tensor copied to twice its side, then a convolution of 2 x 2 that keeps it."""
    size = net.upsample().size
    net.convolution(channels, 2, bias=True).become(channels, *size).relu()


def volume_unet(name: str, side: int, widths: Sequence[int], classes: int = 4, inputs: int = 4) -> LayeredNetwork:
    """U-Net for volumes (nnU-Net, arXiv:1809.10486): strided convolutions down, instance norms.

    The last convolution has windows of three voxels each way, as in
    ``TensorFlow/Segmentation/UNet_3D_Medical/model/layers.py`` of NVIDIA's examples.
    """
    net = NetworkBuilder(inputs, side, side, side)
    for level, channels in enumerate(widths):
        net.unit(channels, 3, 2 if level else 1).unit(channels)
    for channels in reversed(widths[:-1]):
        net.transposed(channels).concatenate(2 * channels)
        net.unit(channels).unit(channels)
    net.convolution(classes, 3, bias=True).softmax()
    return net.finish(name, "volume")


def vnet(name: str, side: int, widths: Sequence[int] = (16, 32, 64, 128), classes: int = 3) -> LayeredNetwork:
    """V-Net (arXiv:1606.04797) with 3x3x3 kernels: residual levels joined by strided convolutions.

    On the way up a level keeps the width of what it concatenates, and the last has one convolution, as in
    ``TensorFlow/Segmentation/VNet/model/layers.py`` of NVIDIA's examples.
    """
    net = NetworkBuilder(1, side, side, side).unit(widths[0]).add()
    for channels in widths[1:]:
        net.unit(channels, 2, 2, padding=0)
        _residual_level(net, channels)
    for channels in reversed(widths[1:-1]):
        net.transposed(channels).norm().relu().concatenate(2 * channels)
        _residual_level(net, 2 * channels)
    net.transposed(widths[0]).norm().relu().convolution(classes, 3, bias=True)
    return net.finish(name, "small volume")


def _residual_level(net: NetworkBuilder, channels: int) -> None:
    for _ in range(3):
        net.unit(channels)
    net.add()


def deeplab(name: str, side: int, *, decoder: bool) -> LayeredNetwork:
    """DeepLab v3 (arXiv:1706.05587) on ResNet-101 at a sixteenth of the side, or v3+ with its decoder."""
    net = NetworkBuilder(3, side, side)
    form = ResidualForm()
    stem(net, form)
    low = net.size
    for stage, blocks in enumerate(DEPTHS[101]):
        for index in range(blocks):
            bottleneck(net, 64 * 2**stage, 2 if stage in (1, 2) and not index else 1, form)
    for kernel, dilation in ((1, 1), (3, 6), (3, 12), (3, 18)):
        with net.branch():
            net.unit(256, kernel, dilation=dilation)
    with net.branch():
        net.become(net.channels, 1, 1).unit(256, 1)
    net.become(5 * 256).concatenate(5 * 256).unit(256, 1)
    if decoder:
        with net.branch():
            net.become(256, *low).unit(48, 1)
        net.upsample(4).concatenate(304).unit(256).unit(256)
    net.convolution(21, 1, bias=True).upsample(4 if decoder else 16)
    return net.finish(name, "annotated image")
