"""What PyTorch's caching allocator holds over the live tensors of a convolutional network in training.

    python -m benchmarks.caching_allocator [--samples N] [--element-bytes 2|4]

The tensors of a step of ResNet-50 are allocated and freed in the order of its forward and backward pass, by the rules
of ``CUDACachingAllocator.cpp``: sizes are multiples of 512 bytes; the smallest free block that fits is taken, and split
where more than 1 MiB is left; blocks that lie side by side are merged when they are freed; segments are 20 MiB for
blocks below 10 MiB, multiples of 2 MiB for others, and are kept. Blocks below 1 MiB, which have segments of their own,
are left out, and so are workspaces of convolutions, which cuDNN chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field

MEBI = 2**20
_ROUND, _SMALL, _SEGMENT, _LARGE, _MULTIPLE = 512, MEBI, 20 * MEBI, 10 * MEBI, 2 * MEBI
_BLOCKS = ((3, 64), (4, 128), (6, 256), (3, 512))
_PIXELS = 112 * 112
_WEIGHTS = 25_557_032


@dataclass(eq=False, slots=True)
class Block:
    """Bytes of a segment, free or in use, between its neighbours there."""

    size: int
    free: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass(slots=True)
class Allocator:
    """Segments of a device, cut into blocks."""

    blocks: list[Block] = field(default_factory=list)
    reserved: int = 0
    allocated: int = 0
    peak: int = 0

    def take(self, size: float) -> Block:
        """A block of at least `size` bytes."""
        needed = max(-int(-size // _ROUND) * _ROUND, _SMALL)
        free = [block for block in self.blocks if block.free and block.size >= needed]
        block = min(free, key=lambda block: block.size) if free else self._segment(needed)
        if block.size - needed > _SMALL:
            rest = Block(size=block.size - needed, before=block, after=block.after)
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, needed
            self.blocks.append(rest)
        block.free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def give(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        self.allocated -= block.size
        block.free = True
        for first, second in ((block, block.after), (block.before, block)):
            if first and second and first.free and second.free:
                first.size += second.size
                first.after = second.after
                if second.after:
                    second.after.before = first
                self.blocks.remove(second)

    def _segment(self, needed: int) -> Block:
        size = _SEGMENT if needed < _LARGE else -(-needed // _MULTIPLE) * _MULTIPLE
        self.reserved += size
        self.blocks.append(Block(size=size))
        return self.blocks[-1]


def resnet50(samples: int, element: int, steps: int = 2) -> Allocator:
    """The allocator after `steps` steps of ResNet-50 with `samples` images, `element` bytes a number."""
    pool = Allocator()
    pool.take(3 * 4 * _WEIGHTS)
    for _ in range(steps):
        _step(pool, samples * element, samples)
    return pool


def _bottlenecks() -> Iterator[tuple[int, int, int, int, bool]]:
    """Numbers of a sample that go into a block, that its three convolutions put out, and whether its sum has one."""
    side, taken = 56, 64 * 56 * 56
    for stage, (count, width) in enumerate(_BLOCKS):
        for index in range(count):
            stride = 2 if stage and not index else 1
            first, side = width * side**2, side // stride
            second, third = width * side**2, 4 * width * side**2
            yield taken, first, second, third, not index
            taken = third


def _step(pool: Allocator, scale: int, samples: int) -> None:
    stem = 64 * _PIXELS * scale
    image = pool.take(3 * 4 * _PIXELS * scale)
    # Inputs of the norm and of pooling, which rectifies in place, and the positions of its maxima as 64-bit numbers.
    kept = [image, pool.take(stem), pool.take(stem), pool.take(stem / 4), pool.take(16 * _PIXELS * 8 * samples)]
    blocks = [(sizes, _forward(pool, scale, sizes)) for sizes in _bottlenecks()]
    gradient = pool.take(512 * 4 * 49 * scale)
    for sizes, tensors in reversed(blocks):
        gradient = _backward(pool, scale, sizes, tensors, gradient)
    for block in reversed(kept[1:3]):
        following = pool.take(stem)
        pool.give(gradient)
        pool.give(block)
        gradient = following
    for block in (gradient, kept[0], *kept[3:]):
        pool.give(block)


def _forward(pool: Allocator, scale: int, sizes: tuple[int, int, int, int, bool]) -> list[Block]:
    """What a block keeps: of each convolution its output and, rectified, that of the norm; that of its sum's."""
    *_, third, projected = sizes
    tensors = [pool.take(size * scale) for size in sizes[1:4] for _ in range(2)]
    if projected:
        tensors.append(pool.take(third * scale))
        pool.give(pool.take(third * scale))
    return tensors


def _backward(
    pool: Allocator, scale: int, sizes: tuple[int, int, int, int, bool], tensors: list[Block], gradient: Block
) -> Block:
    """Free what a block kept, gradient by gradient; that of its input is the result."""
    taken, *inner, projected = sizes
    through = pool.take(inner[2] * scale)
    pool.give(gradient)
    pool.give(tensors[5])
    gradient = through
    for index in (2, 1, 0):
        normed = pool.take(inner[index] * scale)
        if index < 2:
            pool.give(gradient)
        pool.give(tensors[2 * index])
        gradient = pool.take((inner[index - 1] if index else taken) * scale)
        pool.give(normed)
        if index:
            rectified = pool.take(inner[index - 1] * scale)
            pool.give(gradient)
            pool.give(tensors[2 * index - 1])
            gradient = rectified
    if projected:
        normed = pool.take(inner[2] * scale)
        pool.give(tensors[6])
        pool.give(pool.take(taken * scale))
        pool.give(normed)
    pool.give(through)
    return gradient


def main() -> None:
    """Print what is held over what lives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--element-bytes", type=int, default=4, choices=(2, 4))
    arguments = parser.parse_args()
    pool = resnet50(arguments.samples, arguments.element_bytes)
    print(
        f"live at most {pool.peak / 2**30:.2f} GiB, held {pool.reserved / 2**30:.2f} GiB, "
        f"{pool.reserved / pool.peak - 1:+.1%}"
    )


if __name__ == "__main__":
    main()
