"""Networks whose layers branch and join: DenseNet, Inception, Xception, DPN, ResNeSt, HRNet."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.training_run import LayeredNetwork
from planner.published.layered.builder import NetworkBuilder
from planner.published.layered.residual import CLASSES, DEPTHS, ResidualForm, basic_block, bottleneck, stem

Kernels = int | tuple[int, int]
Branch = Sequence[tuple[int, Kernels] | tuple[int, Kernels, int]]
VALID = 0
DENSENET_BLOCKS = {121: (6, 12, 24, 16), 161: (6, 12, 36, 24), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}


def densenet(name: str, side: int, depth: int) -> LayeredNetwork:
    """DenseNet (arXiv:1608.06993): every layer reads the outputs of all before it in its block."""
    growth = 48 if depth == 161 else 32
    net = NetworkBuilder(3, side, side).unit(2 * growth, 7, 2).pool(3, 2)
    blocks = DENSENET_BLOCKS[depth]
    for stage, count in enumerate(blocks):
        for _ in range(count):
            channels = net.channels
            net.norm().relu().unit(4 * growth, 1).convolution(growth, 3).concatenate(channels + growth)
        net.norm().relu()
        if stage < len(blocks) - 1:
            net.convolution(net.channels // 2, 1).pool(2, 2, VALID)
    return net.global_pool().linear(CLASSES).finish(name)


def googlenet(name: str, side: int) -> LayeredNetwork:
    """GoogLeNet (arXiv:1409.4842) without norms and side classifiers."""
    net = NetworkBuilder(3, side, side)
    net.convolution(64, 7, 2, bias=True).relu().pool(3, 2)
    net.convolution(64, 1, bias=True).relu().convolution(192, 3, bias=True).relu().pool(3, 2)
    rows = (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        None,
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        None,
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    )
    for row in rows:
        if row is None:
            net.pool(3, 2)
            continue
        one, three_in, three, five_in, five, pooled = row
        for branch in (((one, 1),), ((three_in, 1), (three, 3)), ((five_in, 1), (five, 5)), ((pooled, 1),)):
            with net.branch():
                if branch == ((pooled, 1),):
                    net.pool(3, 1)
                for channels, kernel in branch:
                    net.convolution(channels, kernel, bias=True).relu()
        net.concatenate(one + three + five + pooled)
    return net.global_pool().linear(CLASSES).finish(name)


def mixed(net: NetworkBuilder, *branches: Branch, pooled: int = 0, stride: int = 1, padding: int | None = None) -> None:
    """An Inception module: `branches` of units, a pooling branch (with a 1x1 unit of `pooled` channels), joined.

    The last unit of a branch takes `stride`. A step of three entries is two units side by side of the second
    and third kernel (the split ends of Inception's last modules).
    """
    total, size = 0, net.size
    inputs = net.channels
    for branch in branches:
        with net.branch():
            for index, (channels, *kernels) in enumerate(branch):
                end = index == len(branch) - 1
                if len(kernels) == 2 and not isinstance(kernels[1], bool):
                    for kernel in kernels:
                        with net.branch():
                            net.unit(channels, kernel)
                    total += 2 * channels
                    continue
                net.unit(channels, kernels[0], stride if end else 1, padding=padding if end and stride > 1 else None)
                total += channels if end else 0
            size = net.size
    with net.branch():
        net.pool(3, stride, padding if stride > 1 else None)
        if pooled:
            net.unit(pooled, 1)
        total += pooled or (inputs if stride > 1 else 0)
    net.size = size
    net.concatenate(total)


def inception_v3(name: str, side: int) -> LayeredNetwork:
    """Inception v3 (arXiv:1512.00567) with its side classifier."""
    net = NetworkBuilder(3, side, side)
    net.unit(32, 3, 2, padding=VALID).unit(32, 3, padding=VALID).unit(64, 3).pool(3, 2, VALID)
    net.unit(80, 1).unit(192, 3, padding=VALID).pool(3, 2, VALID)
    for pooled in (32, 64, 64):
        mixed(net, ((64, 1),), ((48, 1), (64, 5)), ((64, 1), (96, 3), (96, 3)), pooled=pooled)
    mixed(net, ((384, 3),), ((64, 1), (96, 3), (96, 3)), stride=2, padding=VALID)
    row, column = (1, 7), (7, 1)
    for inner in (128, 160, 160, 192):
        long = ((inner, 1), (inner, column), (inner, row), (inner, column), (192, row))
        mixed(net, ((192, 1),), ((inner, 1), (inner, row), (192, column)), long, pooled=192)
    with net.branch():
        net.pool(5, 3, VALID).unit(128, 1).unit(768, 5, padding=VALID).global_pool().linear(CLASSES)
    mixed(net, ((192, 1), (320, 3)), ((192, 1), (192, row), (192, column), (192, 3)), stride=2, padding=VALID)
    for _ in range(2):
        split = (384, (1, 3), (3, 1))
        mixed(net, ((320, 1),), ((384, 1), split), ((448, 1), (384, 3), split), pooled=192)  # type: ignore[arg-type]
    return net.global_pool().linear(CLASSES).finish(name)


def inception_v4(name: str, side: int) -> LayeredNetwork:
    """Inception v4 (arXiv:1602.07261)."""
    net = NetworkBuilder(3, side, side)
    net.unit(32, 3, 2, padding=VALID).unit(32, 3, padding=VALID).unit(64, 3)
    mixed(net, ((96, 3),), stride=2, padding=VALID)
    row, column = (1, 7), (7, 1)
    with net.branch():
        net.unit(64, 1).unit(96, 3, padding=VALID)
    net.unit(64, 1).unit(64, row).unit(64, column).unit(96, 3, padding=VALID).concatenate(192)
    mixed(net, ((192, 3),), stride=2, padding=VALID)
    for _ in range(4):
        mixed(net, ((96, 1),), ((64, 1), (96, 3)), ((64, 1), (96, 3), (96, 3)), pooled=96)
    mixed(net, ((384, 3),), ((192, 1), (224, 3), (256, 3)), stride=2, padding=VALID)
    for _ in range(7):
        long = ((192, 1), (192, column), (224, row), (224, column), (256, row))
        mixed(net, ((384, 1),), ((192, 1), (224, row), (256, column)), long, pooled=128)
    mixed(net, ((192, 1), (192, 3)), ((256, 1), (256, row), (320, column), (320, 3)), stride=2, padding=VALID)
    for _ in range(3):
        split = (256, (1, 3), (3, 1))
        long = ((384, 1), (448, (3, 1)), (512, (1, 3)), split)  # type: ignore[assignment]
        mixed(net, ((256, 1),), ((384, 1), split), long, pooled=256)  # type: ignore[arg-type]
    return net.global_pool().linear(CLASSES).finish(name)


def xception(name: str, side: int) -> LayeredNetwork:
    """Xception (arXiv:1610.02357): separable convolutions, normalised once."""
    net = NetworkBuilder(3, side, side).unit(32, 3, 2, padding=VALID).unit(64, 3, padding=VALID)
    rows = [((128, 128), 2), ((256, 256), 2), ((728, 728), 2), *[((728, 728, 728), 1)] * 8, ((728, 1024), 2)]
    for channels, stride in rows:
        with net.branch():
            if stride > 1:
                net.unit(channels[-1], 1, stride, activation="")
        for wide in channels:
            net.relu().convolution(net.channels, 3, groups=net.channels).unit(wide, 1, activation="")
        if stride > 1:
            net.pool(3, 2)
        net.add()
    for wide in (1536, 2048):
        net.convolution(net.channels, 3, groups=net.channels).unit(wide, 1)
    return net.global_pool().linear(CLASSES).finish(name)


def dual_path(name: str, side: int) -> LayeredNetwork:
    """DPN-92 (arXiv:1707.01629): a residual path and a dense path side by side, norms before convolutions."""
    net = NetworkBuilder(3, side, side).unit(64, 7, 2).pool(3, 2)
    for stage, (count, increment) in enumerate(zip((3, 4, 20, 3), (16, 32, 24, 128), strict=True)):
        width, inner = 256 * 2**stage, 96 * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            before = net.channels
            if not index:
                with net.branch():
                    net.norm().relu().convolution(width + 2 * increment, 1, stride)
            net.norm().relu().convolution(inner, 1).norm().relu().convolution(inner, 3, stride, groups=32)
            net.norm().relu().convolution(width + increment, 1).become(width).add()
            net.concatenate(width + 3 * increment if not index else before + increment)
    return net.norm().relu().global_pool().linear(CLASSES).finish(name)


def resnest(name: str, side: int, depth: int) -> LayeredNetwork:
    """ResNeSt of radix 2 (arXiv:2004.08955): the middle convolution is two, weighted by channel."""
    net = NetworkBuilder(3, side, side)
    wide = 32 if depth == 50 else 64
    net.unit(wide, 3, 2).unit(wide).unit(2 * wide).pool(3, 2)
    for stage, count in enumerate(DEPTHS[depth]):
        channels = 64 * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            with net.branch():
                if not index:
                    if stride > 1:
                        net.pool(2, 2, VALID)
                    net.unit(4 * channels, 1, activation="")
            net.unit(channels, 1).unit(2 * channels, 3, groups=2)
            with net.branch():
                net.become(channels).global_pool().convolution(channels // 2, 1, bias=True).norm().relu()
                net.convolution(2 * channels, 1, bias=True)
            net.scale().become(channels).add()
            if stride > 1:
                net.pool(3, 2)
            net.unit(4 * channels, 1, activation="").add().relu()
    return net.global_pool().linear(CLASSES).finish(name, "augmented image")


def hrnet(name: str, side: int, width: int) -> LayeredNetwork:
    """HRNet for classification (arXiv:1908.07919): parallel branches that exchange features after every module."""
    plain = ResidualForm()
    net = NetworkBuilder(3, side, side).unit(64, 3, 2).unit(64, 3, 2)
    for _ in range(4):
        bottleneck(net, 64, 1, plain)
    sizes = [net.size[0] // 2**index for index in range(4)]
    widths = [width * 2**index for index in range(4)]
    inputs = [net.channels]
    for branches, modules in ((2, 1), (3, 4), (4, 3)):
        _transition(net, inputs, widths[:branches], sizes)
        for _ in range(modules):
            for channels, here in zip(widths[:branches], sizes, strict=False):
                net.become(channels, here, here)
                for _ in range(4):
                    basic_block(net, channels, 1, plain)
            _exchange(net, widths[:branches], sizes)
        inputs = widths[:branches]
    for index, channels in enumerate((32, 64, 128, 256)):
        net.become(widths[index], sizes[index], sizes[index])
        bottleneck(net, channels, 1, plain)
    for index, channels in enumerate((64, 128, 256)):
        net.become(channels * 2, sizes[index], sizes[index]).convolution(
            channels * 4, 3, 2, bias=True
        ).norm().relu().add()
    net.convolution(2048, 1, bias=True).norm().relu().global_pool().linear(CLASSES)
    return net.finish(name, "augmented image")


def _transition(net: NetworkBuilder, inputs: Sequence[int], widths: Sequence[int], sizes: Sequence[int]) -> None:
    for index, channels in enumerate(widths):
        new = index >= len(inputs)
        source = inputs[min(index, len(inputs) - 1)]
        if new or source != channels:
            here = sizes[index - 1] if new else sizes[index]
            net.become(source, here, here).unit(channels, 3, 2 if new else 1)


def _exchange(net: NetworkBuilder, widths: Sequence[int], sizes: Sequence[int]) -> None:
    for target, channels in enumerate(widths):
        for source, given in enumerate(widths):
            net.become(given, sizes[source], sizes[source])
            if source > target:
                net.unit(channels, 1, activation="").upsample(2 ** (source - target))
            for step in range(target - source):
                last = step == target - source - 1
                net.unit(channels if last else given, 3, 2, activation="" if last else "relu")
            if source:
                net.become(channels, sizes[target], sizes[target]).add()
        net.relu()


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
    return net.convolution(2, 1, bias=True).finish(name, "small image")


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
    return net.convolution(1, 1, bias=True).finish(name, "small image")


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
    return net.convolution(classes, 3, bias=True).softmax().finish(name, "volume")


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
    return net.transposed(widths[0]).norm().relu().convolution(classes, 3, bias=True).finish(name, "small volume")


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
    return net.convolution(21, 1, bias=True).upsample(4 if decoder else 16).finish(name, "annotated image")
