"""A tape: forward operators as they are written down, then their derivatives in autograd's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from planner.graph.chain import common_parts
from planner.graph.operator_graph import Argument, BatchSize, Node, Role, TensorRef, TensorSpec
from simulator.program import Kernel, Phase

Dim = int | BatchSize
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """Dims and dtype of a tensor to be made; ``order`` lists its dims by falling stride, row-major if left out."""

    dims: Dims
    dtype: str = "float32"
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TapeTensor:
    """A tensor on the tape.

    ``order`` lists its dims by falling stride, as far as an operator's form depends on it: whether a view
    must copy, and which factor of a product is transposed. ``varies``: it depends on parameters or on the
    batch; ``trained``: it has a gradient, which whole numbers never have.
    """

    ref: TensorRef
    dims: Dims
    dtype: str
    order: tuple[int, ...]
    varies: bool
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TapeCall:
    """A forward operator with a gradient: its node, its arguments as given and its outputs."""

    op: str
    node: int
    path: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[TapeTensor, ...]


Derivative = Callable[["Tape", TapeCall, tuple[TapeTensor | None, ...]], Iterable[tuple[TapeTensor, TapeTensor]]]
"""Takes the gradients of a call's outputs; gives each trained input with its gradient, in order."""


def size(dim: Dim) -> int:
    """Elements along a dim at batch 1."""
    return dim.multiple if isinstance(dim, BatchSize) else dim


def elements(dims: Dims) -> int:
    """Elements of a tensor at batch 1."""
    return prod(size(dim) for dim in dims)


class Tape:
    """Writes nodes in the order they execute; names carry the path of the module it is `inside`."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.parameters: dict[str, TapeTensor] = {}
        self.gradients: dict[TensorRef, TapeTensor] = {}
        self.values: dict[TensorRef, TapeTensor] = {}
        self._calls: list[TapeCall] = []
        self._taken: Counter[str] = Counter()
        self._path = ""
        self._forward: int | None = None
        self._phase = Phase.FORWARD

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Write as a child module."""
        outer = self._path
        self._path = f"{outer}.{name}" if outer else name
        yield
        self._path = outer

    def own(self, name: str) -> TapeTensor:
        """Get a parameter of the module."""
        return self.parameters[f"{self._path}.{name}"]

    def has(self, name: str) -> bool:
        """Whether the module has a parameter."""
        return f"{self._path}.{name}" in self.parameters

    def parameter(self, name: str, dims: Dims) -> None:
        """Declare a parameter by its whole name."""
        self.parameters[name] = self._placeholder(name, TensorShape(dims=dims), Role.PARAMETER, name.rpartition(".")[0])

    def input(self, name: str, dims: Dims, dtype: str) -> TapeTensor:
        """Declare a batch tensor."""
        return self._placeholder(name, TensorShape(dims=dims, dtype=dtype), Role.INPUT, "")

    def call(
        self,
        op: str,
        *args: Any,
        dims: Dims,
        dtype: str = "float32",
        order: tuple[int, ...] | None = None,
        kernel: Kernel = Kernel.ELEMENTWISE,
        flops: float = 0.0,
        kwargs: Mapping[str, Argument] | None = None,
    ) -> TapeTensor:
        """Write an operator with one output."""
        shape = TensorShape(dims=dims, dtype=dtype, order=order)
        return self.emit(op, args, (shape,), kernel=kernel, flops=flops, kwargs=kwargs)[0]

    def emit(
        self,
        op: str,
        args: tuple[Any, ...],
        shapes: tuple[TensorShape, ...],
        *,
        kernel: Kernel,
        flops: float = 0.0,
        kwargs: Mapping[str, Argument] | None = None,
    ) -> tuple[TapeTensor, ...]:
        """Write an operator, and remember it for the backward pass if it has a gradient."""
        keywords = tuple(sorted((kwargs or {}).items()))
        read = tuple(values_in(args))
        grows = any(isinstance(dim, BatchSize) for shape in shapes for dim in shape.dims)
        varies = any(value.varies for value in read)
        backward = self._phase is Phase.BACKWARD
        role = Role.OPERATOR if varies or grows else Role.CONSTANT
        library, short = ("aten", op) if op.count(".") == 1 else op.split(".", 1)
        short, full = short.partition(".")[0], f"{library}.{short}"
        outputs = self._append(
            f"backward/{short}" if backward else short,
            shapes,
            varies=varies,
            trained=not backward and any(value.trained for value in read),
            op=full,
            role=role,
            kernel=kernel,
            args=_argument(args),
            kwargs=keywords,
            forward=self._forward if role is Role.OPERATOR else None,
            flops=flops,
        )
        if outputs[0].trained:
            call = TapeCall(
                op=short, node=outputs[0].ref.node, path=self._path, args=args, kwargs=keywords, outputs=outputs
            )
            self._calls.append(call)
        return outputs

    def backward(self, loss: TapeTensor, derivatives: Mapping[str, Derivative]) -> None:
        """Write the backward pass: calls in reverse, gradients added as they arrive, as autograd does."""
        self._phase, self._path = Phase.BACKWARD, ""
        (one,) = self._append(
            "loss_gradient",
            (TensorShape(dims=()),),
            varies=False,
            trained=False,
            op="aten.ones.default",
            role=Role.CONSTANT,
            kernel=Kernel.COPY,
            args=((),),
            kwargs=(("dtype", "torch.float32"),),
        )
        self.gradients[loss.ref] = one
        for call in reversed(self._calls):
            received = tuple(self.gradients.get(output.ref) for output in call.outputs)
            if any(gradient is not None for gradient in received):
                self._path, self._forward = call.path, call.node
                for value, gradient in tuple(derivatives[call.op](self, call, received)):
                    self._receive(value, gradient)

    def _receive(self, value: TapeTensor, gradient: TapeTensor) -> None:
        known = self.gradients.get(value.ref)
        self.gradients[value.ref] = gradient if known is None else self._sum(known, gradient)

    def _sum(self, known: TapeTensor, gradient: TapeTensor) -> TapeTensor:
        nodes = sorted((known.ref.node, gradient.ref.node))
        self._path = _sum_path([self.nodes[node].module for node in nodes])
        (total,) = self._append(
            "gradient_sum",
            (TensorShape(dims=known.dims, order=known.order),),
            varies=True,
            trained=False,
            op="aten.add.Tensor",
            role=Role.GRADIENT_SUM,
            kernel=Kernel.ELEMENTWISE,
            args=(known.ref, gradient.ref),
        )
        return total

    def _placeholder(self, name: str, shape: TensorShape, role: Role, module: str) -> TapeTensor:
        (value,) = self._append(
            name,
            (shape,),
            varies=True,
            trained=role is Role.PARAMETER,
            named_in_full=True,
            op=role.value,
            role=role,
            kernel=Kernel.VIEW,
            module=module,
        )
        return value

    def _append(
        self,
        name: str,
        shapes: tuple[TensorShape, ...],
        *,
        varies: bool,
        trained: bool,
        named_in_full: bool = False,
        module: str | None = None,
        **fields: Any,
    ) -> tuple[TapeTensor, ...]:
        module = self._path if module is None else module
        name = f"{module}/{name}" if module and not named_in_full else name
        count = self._taken[name]
        self._taken[name] += 1
        index = len(self.nodes)
        self.nodes.append(
            Node(
                name=f"{name}.{count}" if count else name,
                phase=self._phase,
                module=module,
                outputs=tuple(_spec(shape) for shape in shapes),
                **fields,
            )
        )
        made = tuple(
            TapeTensor(
                ref=TensorRef(index, output),
                dims=shape.dims,
                dtype=shape.dtype,
                order=shape.order or tuple(range(len(shape.dims))),
                varies=varies,
                trained=trained and shape.dtype.startswith("float"),
            )
            for output, shape in enumerate(shapes)
        )
        self.values.update((value.ref, value) for value in made)
        return made


def values_in(argument: Any) -> Iterator[TapeTensor]:
    """Tensors among arguments, lists flattened."""
    if isinstance(argument, TapeTensor):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from values_in(item)


def _argument(argument: Any) -> Any:
    if isinstance(argument, TapeTensor):
        return argument.ref
    return tuple(_argument(item) for item in argument) if isinstance(argument, tuple) else argument


def _spec(shape: TensorShape) -> TensorSpec:
    return TensorSpec(
        shape=tuple(size(dim) for dim in shape.dims),
        dtype=shape.dtype,
        batch_dims=tuple(isinstance(dim, BatchSize) for dim in shape.dims),
    )


def _sum_path(paths: list[str]) -> str:
    """Path of the module that both summands share, not above the block of the later one."""
    later = paths[-1].split(".")
    block = next((place + 1 for place, part in enumerate(later) if place and part.isdigit()), 0)
    return ".".join(later[: max(len(common_parts(paths)), block)])
