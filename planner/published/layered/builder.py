"""The notation in which networks are written: every call appends a layer and follows the sample's size through it.

A network is a function of `NetworkBuilder`; `size` may have one dimension (sound, text), two (images) or three
(volumes), so the same words write all of them. What a layer does to one sample, forward only, is a `LayerWork`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from planner.cost.training_run import LayeredNetwork, LayerWork
from simulator.program import Kernel

_SECTOR_ELEMENTS = 8
"""Numbers of 4 bytes in the least that a GPU reads from its memory."""


def divisible(value: float, divisor: int = 8) -> int:
    """Channels rounded to a multiple of `divisor`, never by more than 10 % down (MobileNetV2's reference code)."""
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


class NetworkBuilder:
    """Channels and size of the current tensor of one sample, and the layers so far.

    Convolutions pad as much as keeps the size at stride 1, unless ``padding`` says otherwise. Matrix products,
    convolutions, norms and activations other than ReLU keep their input for the backward pass, each tensor once.
    ``tokens`` says that norms sum over the channels of each position, as those of transformers do.
    """

    def __init__(self, channels: int, *size: int, tokens: bool = False) -> None:
        self.channels = channels
        self.tokens = tokens
        self.frozen = False
        self.fixed_norms = False
        self.size: tuple[int, ...] = size
        self.parameters = 0.0
        self.gates = 0.0
        self.layers: list[LayerWork] = []
        self._tensor = 0
        self._tensors = 1
        self._saved: set[int] = set()

    @property
    def positions(self) -> int:
        """Pixels (or tokens, voxels, frames) of the current tensor."""
        return math.prod(self.size)

    @property
    def elements(self) -> int:
        """Elements of the current tensor."""
        return self.channels * self.positions

    def finish(self, name: str, sample: str = "image", units: float = 1.0, area: float = 1.0) -> LayeredNetwork:
        """The network written so far."""
        return LayeredNetwork(
            name=name, layers=tuple(self.layers), parameters=self.parameters, sample=sample, units=units, area=area,
            gates=self.gates,
        )  # fmt: skip

    @contextmanager
    def branch(self) -> Iterator[NetworkBuilder]:
        """Layers of a side branch: afterwards the tensor before it is current again."""
        before = self.channels, self.size, self._tensor
        yield self
        self.channels, self.size, self._tensor = before

    def become(self, channels: int, *size: int) -> NetworkBuilder:
        """A tensor of another shape without work: concatenated branches, a reshaped tensor, another input."""
        self.channels = channels
        self.size = size or self.size
        self._new_tensor()
        return self

    def convolution(
        self,
        channels: int,
        kernel: int | tuple[int, ...] = 3,
        stride: int | tuple[int, ...] = 1,
        *,
        groups: int = 1,
        bias: bool = False,
        padding: int | None = None,
        dilation: int = 1,
    ) -> NetworkBuilder:
        """A convolution as an implicit matrix product: m output positions, n = `channels`, k input values of each."""
        kernels = self._per_dimension(kernel)
        before = self.elements
        k = self.channels // groups * math.prod(kernels)
        saved = self._save()
        self.gates += self.channels + channels if self.positions == 1 else 0
        self.channels = channels
        self.size = self._strided(kernels, self._per_dimension(stride), padding, dilation)
        self._product(
            Kernel.CONVOLUTION, before + self.elements, self.positions, channels, k, saved=saved, groups=groups
        )
        return self._biased() if bias else self

    def transposed(self, channels: int, kernel: int = 2, stride: int = 2, *, bias: bool = True) -> NetworkBuilder:
        """A transposed convolution, which multiplies the size by `stride`."""
        before, inputs, m = self.elements, self.channels, self.positions
        saved = self._save()
        area = kernel ** len(self.size)
        self.channels = channels
        self.size = tuple(side * stride for side in self.size)
        self._product(Kernel.CONVOLUTION, before + self.elements, m, channels * area, inputs, saved=saved)
        return self._biased() if bias else self

    def norm(self) -> NetworkBuilder:
        """Batch, layer, group or instance norm with scale and shift: two reads and a write.

        With ``fixed_norms`` its statistics, scale and shift are constants: each element is read and written once.
        """
        self.parameters += 2 * self.channels
        if self.fixed_norms:
            return self._pointwise(Kernel.ELEMENTWISE, 2, saved=False)
        return self._pointwise(Kernel.NORMALIZATION, 3, saved=True)

    def relu(self) -> NetworkBuilder:
        """An activation whose output tells its gradient."""
        return self._pointwise(Kernel.ACTIVATION, 2, saved=False)

    def smooth(self) -> NetworkBuilder:
        """An activation that keeps its input: GELU, SiLU, h-swish, tanh."""
        return self._pointwise(Kernel.ACTIVATION, 2, saved=True)

    def add(self) -> NetworkBuilder:
        """The sum with a tensor of the same shape: a residual connection."""
        return self._pointwise(Kernel.ELEMENTWISE, 3, saved=False)

    def weighted_sum(self, inputs: int) -> NetworkBuilder:
        """The sum of so many tensors with trained weights (arXiv:1911.09070, 3.3): each is scaled and divided.

        It is then written beside the others, which are summed up: seven passes for each and one for the sum.
        """
        return self._pointwise(Kernel.ELEMENTWISE, 7 * inputs + 1, saved=False)

    def scale(self) -> NetworkBuilder:
        """The product with a broadcast tensor: its backward pass reads and sums as well, hence four passes each way."""
        return self._pointwise(Kernel.ELEMENTWISE, 4, saved=True)

    def softmax(self) -> NetworkBuilder:
        """Probabilities over all elements and their loss."""
        return self._pointwise(Kernel.SOFTMAX, 3, saved=True)

    def smoothed_loss(self) -> NetworkBuilder:
        """Cross entropy of smoothed labels in float32, operator by operator.

        Forward log-softmax (two reads, a write) and its mean over classes (a read); backward the two gradients of the
        log-probabilities written and added (five), and that of the log-softmax (five).
        """
        kept = self._save()
        self._append(Kernel.ELEMENTWISE, elements_moved=4 * self.elements, saved=kept, single=True)
        self._append(Kernel.COPY, elements_moved=3 * self.elements, single=True)
        return self

    def focal_loss(self, outputs: int) -> NetworkBuilder:
        """Focal loss of `outputs` scores in float32, operator by operator: 17 of them forward and about as many back.

        (``SigmoidFocalClassificationLoss`` of MindSpore's ``official/cv/SSD/src/ssd.py``: from the cast to float32 and
        the one-hot labels to the sum they read or write 39 times as many elements as there are scores.)
        """
        return self._append(Kernel.ELEMENTWISE, elements_moved=39.0 * outputs, saved=8.0 * outputs, single=True)

    def steps(self, count: int, kernel: Kernel, kernels: int, elements: float) -> NetworkBuilder:
        """Each of `count` steps that wait for each other runs `kernels` kernels, which move `elements` together."""
        self._append(kernel, elements_moved=elements / kernels, saved=elements / kernels / 3, count=count * kernels)
        return self

    def dropout(self) -> NetworkBuilder:
        """The product with a random mask, of which a byte an element is kept."""
        return self._append(Kernel.ELEMENTWISE, elements_moved=2.5 * self.elements, saved=self.elements / 2)

    def accumulate(self, count: int, weights: float) -> NetworkBuilder:
        """Gradients of `weights` that are added up after each of `count` steps: two reads and a write."""
        self._append(Kernel.COPY, weights=1.5 * weights, count=count, backward_only=True)
        self.parameters -= 1.5 * weights * count
        return self

    def concatenate(self, channels: int) -> NetworkBuilder:
        """Branches copied into one tensor of `channels`."""
        self.channels = channels
        return self._pointwise(Kernel.COPY, 2, saved=False)

    def copy(self) -> NetworkBuilder:
        """The tensor written in another order."""
        return self._pointwise(Kernel.COPY, 2, saved=False)

    def unit(
        self,
        channels: int,
        kernel: int | tuple[int, ...] = 3,
        stride: int | tuple[int, ...] = 1,
        *,
        groups: int = 1,
        padding: int | None = None,
        dilation: int = 1,
        activation: str = "relu",
    ) -> NetworkBuilder:
        """Convolution, batch norm and activation (``relu``, ``smooth`` or none of them: empty)."""
        self.convolution(channels, kernel, stride, groups=groups, padding=padding, dilation=dilation).norm()
        if activation:
            self.relu() if activation == "relu" else self.smooth()
        return self

    def depthwise(self, kernel: int = 3, stride: int = 1, *, activation: str = "relu") -> NetworkBuilder:
        """A convolution of every channel by itself, batch norm and activation."""
        return self.unit(self.channels, kernel, stride, groups=self.channels, activation=activation)

    def pool(self, kernel: int, stride: int = 1, padding: int | None = None) -> NetworkBuilder:
        """Maximum or average over windows."""
        before = self.elements
        self.size = self._strided(self._per_dimension(kernel), self._per_dimension(stride), padding, 1)
        self._append(Kernel.REDUCTION, elements_moved=before + self.elements)
        return self

    def global_pool(self) -> NetworkBuilder:
        """Average over all positions."""
        self._append(Kernel.REDUCTION, elements_moved=self.elements)
        return self.become(self.channels, 1)

    def upsample(self, factor: int = 2) -> NetworkBuilder:
        """A size `factor` times as large, by copying or interpolating."""
        before = self.elements
        self.size = tuple(side * factor for side in self.size)
        self._append(Kernel.COPY, elements_moved=before + self.elements)
        return self

    def linear(self, channels: int, *, bias: bool = True) -> NetworkBuilder:
        """A matrix product at every position."""
        before, k = self.elements, self.channels
        saved = self._save()
        self.channels = channels
        self._product(Kernel.MATMUL, before + self.elements, self.positions, channels, k, saved=saved)
        self.parameters += channels if bias else 0
        return self

    def attention(self, heads: int, width: int, keys: int, windows: int = 1) -> NetworkBuilder:
        """Scores, softmax and weighted values, unfused: every query meets `keys` keys, of `width` in all heads.

        ``windows`` groups of queries have keys of their own.
        """
        queries, scores = self.positions, heads * self.positions * keys
        flops, moved = 2.0 * queries * keys * width, (queries + keys * windows) * width + scores
        head, rows, groups = width / heads, queries / windows, heads * windows
        saved = (queries + 2 * keys * windows) * width
        self._append(
            Kernel.MATMUL, flops=flops, elements_moved=moved, saved=saved, m=rows, n=keys, k=head, groups=groups
        )
        self._append(Kernel.SOFTMAX, elements_moved=3 * scores, saved=scores)
        self._append(Kernel.MATMUL, flops=flops, elements_moved=moved, m=rows, n=head, k=keys, groups=groups)
        return self.become(width)

    def regions(self, count: int, side: int, points: int = 16) -> NetworkBuilder:
        """Features of `count` regions, `side` by `side` each, from a map: RoIAlign (arXiv:1703.06870).

        An output is a weighted sum of `points` (four corners of four samples). Its gradient is added to them one by
        one, in float32. The points lie apart, so that each costs a sector of 32 bytes.
        """
        outputs = self.channels * count * side * side
        self._append(Kernel.EMBEDDING, elements_moved=outputs * points * _SECTOR_ELEMENTS, single=True)
        return self

    def embedding(self, rows: int, channels: int, trained: bool = True) -> NetworkBuilder:
        """One row of a table at every position."""
        self.become(channels)
        self._append(Kernel.EMBEDDING, elements_moved=2 * self.elements)
        self.parameters += rows * channels if trained else 0
        return self

    def recurrent(self, channels: int, *, bidirectional: bool = False, gates: int = 4) -> NetworkBuilder:
        """A recurrent layer (LSTM: four gates): its input products at once, its own step by step.

        ``m`` of the second product is 1 a sample and ``count`` the number of steps.
        """
        steps = self.positions
        directions = 2 if bidirectional else 1
        for _ in range(directions):
            with self.branch():
                self.linear(gates * channels)
                self.parameters += gates * channels
                n = gates * channels
                moved = channels + n
                self._product(Kernel.MATMUL, moved, 1, n, channels, saved=moved, count=steps)
                self.parameters -= n * channels * (steps - 1)
                self._append(Kernel.ELEMENTWISE, elements_moved=2 * moved, saved=n, count=steps)
        return self.become(channels * directions)

    def cell(self, channels: int, *, gates: int = 4) -> NetworkBuilder:
        """A recurrent cell whose input waits for its last output: one product a step, of input and state together."""
        steps, inputs, n = self.positions, self.channels, gates * channels
        both = inputs + channels
        self._product(Kernel.MATMUL, both + n, 1, n, both, saved=both + n, count=steps)
        self.parameters += n - n * both * (steps - 1)
        self._append(Kernel.ELEMENTWISE, elements_moved=2 * (channels + n), saved=n, count=steps)
        return self.become(channels)

    def halves(self) -> NetworkBuilder:
        """Both halves of the channels are taken: in the backward pass their gradients are padded and added up.

        Each is written beside as many zeros (a write of the whole, a read and a write of the half), and their sum takes
        two reads and a write.
        """
        return self._append(Kernel.COPY, elements_moved=3.5 * self.elements, backward_only=True)

    def normalized_weights(self) -> NetworkBuilder:
        """Weights so far are directions times lengths (weight norm, arXiv:1602.07868), put together in each step.

        Forward their norm is taken (a read) and they are scaled (a read, a write); backward gradient and direction are
        read for the sum, and for the gradient that is written (five).
        """
        weights = 4 * self.parameters
        self._append(Kernel.COPY, weights=weights)
        self.parameters -= weights
        return self

    def sliced(self, count: int) -> NetworkBuilder:
        """`count` slices are taken one after the other: their gradients add up.

        Each stands in a tensor of zeros as large as the whole (a write), which is added to the sum of the others (two
        reads and a write), all of them in the backward pass.
        """
        return self._append(Kernel.COPY, elements_moved=2 * self.elements, count=count, backward_only=True)

    def squeeze_excite(
        self, hidden: int, *, smooth: bool = False, bias: bool = True, dense: bool = False
    ) -> NetworkBuilder:
        """Channel weights from the global average through two products (SENet, arXiv:1709.01507).

        They are convolutions of one pixel, unless they are ``dense`` layers.
        """
        channels = self.channels
        self.gates += 0 if dense else 2 * (channels + hidden)
        with self.branch():
            self.global_pool().linear(hidden, bias=bias)
            self.smooth() if smooth else self.relu()
            self.linear(channels, bias=bias).smooth()
        return self.scale()

    def _biased(self) -> NetworkBuilder:
        """A bias after a convolution: a read and a write, and a read for its gradient, where nothing takes it along."""
        self.parameters += self.channels
        return self._pointwise(Kernel.ELEMENTWISE, 3 / 2, saved=False)

    def _pointwise(self, kernel: Kernel, factor: float, *, saved: bool) -> NetworkBuilder:
        kept = self._save() if saved else 0.0
        self._append(kernel, elements_moved=factor * self.elements, saved=kept)
        return self

    def _product(self, kernel: Kernel, moved: float, m: float, n: float, k: float, **work: float) -> None:
        """A product of an (m, k) tensor and (k, n) weights, which moves so many elements."""
        self._append(kernel, flops=2.0 * m * n * k, elements_moved=moved, weights=n * k, m=m, n=n, k=k, **work)

    def _append(self, kernel: Kernel, **work: float) -> NetworkBuilder:
        alone = kernel is Kernel.NORMALIZATION or (kernel is Kernel.ACTIVATION and work.get("saved", 0) > 0)
        vector = kernel is Kernel.SOFTMAX or (self.tokens and alone)
        layer = LayerWork(kernel=kernel, vector=vector, frozen=self.frozen, **work)  # type: ignore[arg-type]
        self.layers.append(layer)
        self.parameters += layer.weights * layer.count
        self._new_tensor()
        return self

    def _new_tensor(self) -> None:
        self._tensor = self._tensors
        self._tensors += 1

    def _save(self) -> float:
        if self._tensor in self._saved:
            return 0.0
        self._saved.add(self._tensor)
        return float(self.elements)

    def _per_dimension(self, value: int | tuple[int, ...]) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else (value,) * len(self.size)

    def _strided(
        self, kernels: tuple[int, ...], strides: tuple[int, ...], padding: int | None, dilation: int
    ) -> tuple[int, ...]:
        sides = []
        for side, kernel, stride in zip(self.size, kernels, strides, strict=True):
            reach = dilation * (kernel - 1)
            padded = side + (2 * (reach // 2) if padding is None else 2 * padding)
            sides.append(max(1, (padded - reach - 1) // stride + 1))
        return tuple(sides)
