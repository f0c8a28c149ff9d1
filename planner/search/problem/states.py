"""States of variables: a choice along each mesh axis, as far as every dim divides and the setting allows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import Optimizer
from planner.graph.operator_graph import OperatorGraph, Role, TensorRef, TensorSpec
from planner.plans.pins import ParameterStorage
from planner.search.problem.costs import MeshCosts
from planner.search.problem.variables import Choice, Decisions, Kind, Variable, unnamed
from planner.sharding.placement import REPLICATE
from planner.sharding.redistribution import placement_index
from simulator.corrections import EXPERT_WORK
from simulator.program import Kernel, Phase

Port = tuple[TensorRef, bool, NDArray[np.int64]]
"""A tensor, whether it is read, and its placement in each choice."""
Ports = tuple[list[Port], NDArray[np.int64]]
"""What a variable reads and writes, and `StatesOnMesh._places` of it."""
Placed = dict[tuple[str | bool | int, ...], NDArray[np.int64]]
"""Placements of tensors by state, and their numbers."""
CONTEXT = "context"
SHARING = (CONTEXT, "expert")
"""Axes inside a stage whose ranks may share the states of what they hold copies of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is fixed for one search: mesh times, micro-batches, optimizer and restrictions.

    ``storage`` says how parameters lie along the data axis between steps; ``batch_only`` allows nothing
    but batch dims to be sharded, and shards those wherever it can (pure data parallelism); ``batch_axes`` are
    the mesh axes, by name, for which the same holds alone. On an axis named ``expert`` it holds but for what experts
    hold and work on, which may be sharded by expert. ``free_axes`` may shard the batch even where they are named
    ``tensor``. With ``experts_stay`` weights of experts lie and are read where an expert axis has them; ``expert_cut``
    says of an axis named ``tensor`` whether it cuts the ``width`` of experts or has ``whole`` ones, where it may not do
    ``any``; ``tensor_cut`` of ``width`` that it cuts the matrix of every product, where that divides. ``context`` is
    the one choice of each variable on an axis named ``context``, where the mesh has one. With ``shares_states``
    matrices that ranks of the `SHARING` axes would hold copies of are stored in shards there.
    ``sharded_gradients`` are scattered every micro-batch and accumulated in shards (ZeRO-2).
    """

    costs: MeshCosts
    micro_batches: int
    optimizer: Optimizer
    storage: ParameterStorage = "free"
    batch_only: bool = False
    batch_axes: frozenset[str] = field(default=frozenset())
    free_axes: frozenset[str] = field(default=frozenset())
    experts_stay: bool = False
    expert_cut: str = "any"
    tensor_cut: str = "any"
    context: tuple[Choice, ...] = ()
    shares_states: bool = False
    sharded_gradients: bool = False

    @property
    def expert_load(self) -> float:
        """Tokens of the busiest rank's experts over an even share; 1 where every rank has all of its experts."""
        names = {axis.name for axis in self.costs.mesh.axes}
        dealt = "expert" in names or (self.expert_cut == "whole" and "tensor" in names)
        return self.costs.hardware.training.get(EXPERT_WORK, 1.0) if dealt else 1.0


@dataclass(frozen=True, slots=True)
class States:
    """The states of a variable: ``choice[a, s]`` is the choice along mesh axis a in state s.

    ``known`` is what was worked out of them, by name, and ``placed`` where their tensors lie; variables that are alike
    (number ``kind``) share both, those that are cut alike, on any mesh, the second.
    """

    variable: Variable
    choice: NDArray[np.int64]
    kind: int = -1
    known: dict[tuple[str | bool | int, ...], Any] = field(default_factory=dict, repr=False, compare=False)
    placed: Placed = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.choice.shape[1])

    def placements(self, tensor: TensorRef, *, reads: bool) -> NDArray[np.int64]:
        """Placements of a tensor in every state, shape (axes, states)."""
        key = ("placements", reads, self.place(tensor, reads=reads))
        if key not in self.placed:
            self.placed[key] = (self.variable.read if reads else self.variable.written)[tensor][self.choice]
        return self.placed[key]

    def numbers(self, tensor: TensorRef, rank: int, *, reads: bool) -> NDArray[np.int64]:
        """Numbers of the placements of a tensor with `rank` dims, by state (`placement_index`)."""
        key = ("numbers", reads, self.place(tensor, reads=reads))
        if key not in self.placed:
            self.placed[key] = placement_index(self.placements(tensor, reads=reads), rank)
        return self.placed[key]

    def place(self, tensor: TensorRef, *, reads: bool) -> int:
        """Which of the tensors that the variable reads or writes this is."""
        return self.variable.places[reads][tensor]


class StatesOnMesh:
    """States of the variables of a graph on one mesh, each found once."""

    def __init__(self, graph: OperatorGraph, decisions: Decisions, setting: Setting) -> None:
        self.graph = graph
        self.decisions = decisions
        self.setting = setting
        self.sizes = setting.costs.mesh.sizes
        self.names = tuple(axis.name for axis in setting.costs.mesh.axes)
        self._made: dict[int, States] = {}
        self._first: dict[tuple[object, ...], States] = {}
        self._may_shard: dict[tuple[tuple[int, ...], tuple[bool, ...], int], NDArray[np.bool_]] = {}
        self._divided_by: dict[tuple[int, ...], tuple[bool, ...]] = {}

    def states(self, number: int) -> States:
        """States of one variable: a choice along each axis, as far as every dim divides."""
        if number not in self._made:
            variable = self.decisions.variables[number]
            key: tuple[object, ...] = (self.decisions.alike[number],)
            if self.setting.context:
                choice = self.setting.context[number]
                key = (*key, unnamed(choice, variable.choices[0]))
                variable = replace(variable, choices=(*variable.choices, choice))
            if key not in self._first:
                found, placed = self._known_choices(variable, self.decisions.alike[number])
                if self.setting.shares_states and variable.kind is Kind.PARAMETER:
                    found, placed = self._shared(variable, found), {}
                self._first[key] = States(variable, found, number, placed=placed)
            first = self._first[key]
            self._made[number] = States(variable, first.choice, first.kind, first.known, first.placed)
        return self._made[number]

    def _known_choices(self, variable: Variable, kind: int) -> tuple[NDArray[np.int64], Placed]:
        """`_choices` and what is known of placements, found once for what is cut and divides alike, on any mesh."""
        setting = self.setting
        known: dict[tuple[object, ...], Any] = self.decisions.states
        if setting.context:
            return self._choices(variable, self._ports(variable)), {}
        if ("ports", kind) not in known:
            ports = self._ports(variable)
            known["ports", kind] = ports, known.setdefault(("cut", self._cuts(variable, ports)), kind)
        ports, cut_alike = known["ports", kind]
        if "expert" in self.names or setting.expert_cut != "any" or setting.tensor_cut != "any":
            cut_alike = kind  # what experts and products hold is told by extents and operators
        asked = (
            setting.storage, setting.batch_only, setting.batch_axes, setting.free_axes, setting.experts_stay,
            setting.expert_cut, setting.tensor_cut,
        )  # fmt: skip
        divided = tuple([self._divided(tensor) for tensor, *_ in ports[0]])
        key = (cut_alike, self.names, asked, 1 in self.sizes and self.sizes, divided)
        if key not in known:
            known[key] = (self._choices(variable, ports), {})
        found: tuple[NDArray[np.int64], Placed] = known[key]
        return found

    def _cuts(self, variable: Variable, ports: Ports) -> tuple[object, ...]:
        """What the choices of a variable cut, whatever its operators and the extents of its tensors are."""
        tensors, places = ports
        own = variable.places[0].get(TensorRef(variable.nodes[0])) if variable.nodes else None
        cut = tuple((reads, self.graph.spec(tensor).batch_dims) for tensor, reads, _ in tensors)
        return variable.kind, own, cut, places.tobytes()

    def _divided(self, tensor: TensorRef) -> tuple[bool, ...]:
        """Whether each dim of a tensor divides by the product of any of the axes."""
        shape = self.graph.spec(tensor).shape
        if shape not in self._divided_by:
            products = [1]
            for size in self.sizes:
                products += [size * product for product in products]
            self._divided_by[shape] = tuple([extent % product == 0 for product in products for extent in shape])
        return self._divided_by[shape]

    def _choices(self, variable: Variable, ports: Ports) -> NDArray[np.int64]:
        """Choices along each axis in every state, shape (axes, states)."""
        axes, (tensors, places) = range(len(self.sizes)), ports
        if not axes:
            return np.zeros((0, 1), dtype=np.int64)
        fits = [self._fits(variable, axis, tensors, places) for axis in axes]
        wanted = [np.flatnonzero(f & self._wanted(variable, axis, tensors)) for axis, f in zip(axes, fits, strict=True)]
        if len(axes) == 1:
            return (wanted[0] if len(wanted[0]) else np.flatnonzero(fits[0]))[None, :]
        for kept in (wanted, [np.flatnonzero(f) for f in fits]):
            grid = np.indices([len(allowed) for allowed in kept]).reshape(len(kept), -1)
            choice = np.array([allowed[place] for allowed, place in zip(kept, grid, strict=True)], dtype=np.int64)
            divides = self._divides(tensors, places, choice)
            if divides.any():
                break
        return choice[:, divides]

    def _shared(self, variable: Variable, choice: NDArray[np.int64]) -> NDArray[np.int64]:
        """`_choices` of a parameter, stored in shards along the axes of `SHARING` that would repeat it.

        Of a matrix that dim is cut that no other axis cuts and that 2 divides most often, ties to the first, where it
        divides by all those axes: of a dim that two axes cut, parts can only be gathered all at once.
        """
        tensor = TensorRef(variable.nodes[0])
        shape, written = self.graph.spec(tensor).shape, variable.written[tensor]
        inside = [place for place, name in enumerate(self.names) if name in SHARING]
        found = choice.copy()
        by_dim = {int(dim): number for number, dim in reversed([*enumerate(written)]) if dim >= 0}
        for state in range(choice.shape[1] if len(shape) > 1 else 0):
            placed = written[choice[:, state]]
            repeated = [place for place in inside if placed[place] == REPLICATE]
            ranks = prod(self.sizes[place] for place in repeated)
            free = [d for d, n in enumerate(shape) if d in by_dim and d not in placed and n % ranks == 0]
            if repeated and free:
                found[repeated, state] = by_dim[max(free, key=lambda dim: (shape[dim] & -shape[dim], -dim))]
        return found

    def _ports(self, variable: Variable) -> Ports:
        """What a variable reads, then what it writes: of variables that are alike the same but for the names."""
        tensors = [(tensor, True, placed) for tensor, placed in variable.read.items()]
        tensors += [(tensor, False, placed) for tensor, placed in variable.written.items()]
        return tensors, self._places(tensors)

    def _places(self, tensors: Sequence[Port]) -> NDArray[np.int64]:
        """Placement of each tensor in each choice (tensors, choices), as places in what is said of all placements.

        Those of each tensor come behind those of the one before, dims from the front.
        """
        sizes = np.array([len(self.graph.spec(tensor).shape) + 2 for tensor, _, _ in tensors], dtype=np.int64)
        codes = np.array([placed for _, _, placed in tensors], dtype=np.int64).reshape(len(tensors), -1)
        return np.where(codes < 0, codes + sizes[:, None], codes) + (sizes.cumsum() - sizes)[:, None]

    def _fits(
        self, variable: Variable, axis: int, tensors: Sequence[Port], places: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Choices in which every dim divides along one axis alone, and is one that the axis may shard."""
        fits = np.ones(len(variable.choices), dtype=np.bool_)
        if self.setting.context:
            # The last choice is for the context axis, and no other choice is.
            fits[-1], fits[:-1] = self.names[axis] == CONTEXT, self.names[axis] != CONTEXT
        if tensors:
            allowed = np.concatenate([self._allowed(tensor, axis) for tensor, _, _ in tensors])
            fits &= allowed[places].all(axis=0)
        return fits

    def _allowed(self, tensor: TensorRef, axis: int) -> NDArray[np.bool_]:
        """Placements of a tensor whose dim divides along one axis alone, and is one that the axis may shard.

        Dims count from the front, replicated and partial from the back.
        """
        spec, size, name = self.graph.spec(tensor), self.sizes[axis], self.names[axis]
        key = spec.shape, spec.batch_dims, axis
        if key not in self._may_shard:
            tensor_axis = name == "tensor" and name not in self.setting.free_axes
            dims = [
                extent % size == 0
                and not (batch and tensor_axis)
                and (batch or size == 1 or not self.setting.batch_only)
                for extent, batch in zip(spec.shape, spec.batch_dims, strict=True)
            ]
            self._may_shard[key] = np.array([*dims, True, True], dtype=np.bool_)
        return self._may_shard[key]

    def _wanted(self, variable: Variable, axis: int, tensors: Sequence[Port]) -> NDArray[np.bool_]:
        """Choices that the axis and the setting ask for, where there are such."""
        name, kind, choices = self.names[axis], variable.kind, variable.choices
        keep = np.ones(len(choices), dtype=np.bool_)
        if name == CONTEXT and self.setting.context:
            return keep
        if kind in (Kind.INPUT, Kind.PARAMETER):
            placed = variable.written[TensorRef(variable.nodes[0])]
            if kind is Kind.INPUT:
                keep &= placed == (0 if name in ("data", "expert") else REPLICATE)
            elif self.setting.storage != "free" and name == "data":
                keep &= (placed == REPLICATE) == (self.setting.storage == "replicated")
        if (self.setting.batch_only and name == "data") or name in self.setting.batch_axes:
            for tensor, reads, placed in tensors:
                grows = self.graph.spec(tensor).batch_dims
                stored = kind is Kind.PARAMETER and not reads
                # Dims count from the front, replicated and partial from the back.
                growing = np.array([*grows, False, False], dtype=np.bool_)
                keep &= growing[placed] if any(grows) else (placed < 0) | stored | self.setting.batch_only
        if name == "expert":
            for tensor, _, placed in tensors:
                spec = self.graph.spec(tensor)
                batch = [dim for dim, grows in enumerate(spec.batch_dims) if grows]
                others = [dim for dim, extent in enumerate(spec.shape) if extent in self._experts and dim not in batch]
                keep &= np.isin(placed, [*batch, *others]) | ((placed < 0) & (not batch))
                if self.setting.experts_stay and self._of_experts(spec):
                    keep &= placed == 0
        if name == "tensor":
            keep &= self._cut(tensors, len(choices))
        return keep

    def _cut(self, tensors: Sequence[Port], choices: int) -> NDArray[np.bool_]:
        """Choices that cut experts and other matrices over tensor ranks as the setting says."""
        keep = np.ones(choices, dtype=np.bool_)
        for tensor, reads, placed in tensors:
            if self._of_experts(self.graph.spec(tensor)):
                if self.setting.expert_cut != "any":
                    keep &= placed == 0 if self.setting.expert_cut == "whole" else placed > 0
            elif self.setting.tensor_cut == "width" and reads and tensor.node in self._factors:
                keep &= placed >= 0
        return keep

    def _of_experts(self, spec: TensorSpec) -> bool:
        """Whether a tensor has a matrix of each expert, and nothing that grows with the batch."""
        return len(spec.shape) == 3 and not any(spec.batch_dims) and spec.shape[0] in self._experts

    @cached_property
    def _matrices(self) -> frozenset[TensorRef]:
        """Tensors made of parameters alone that products multiply with."""
        nodes, made = self.graph.nodes, set[int]()
        found: set[TensorRef] = set()
        for index, node in enumerate(nodes):
            refs = node.tensor_inputs
            if node.role is Role.PARAMETER or (
                node.role is Role.OPERATOR and refs and all(ref.node in made for ref in refs)
            ):
                made.add(index)
            elif node.kernel is Kernel.MATMUL and node.phase is Phase.FORWARD and refs[-1].node in made:
                found.add(refs[-1])
        return frozenset(found)

    @cached_property
    def _experts(self) -> frozenset[int]:
        """Numbers of experts: how many products with matrices of their own an operator does at once."""
        shapes = [self.graph.spec(matrix).shape for matrix in self._matrices]
        return frozenset(shape[0] for shape in shapes if len(shape) == 3)

    @cached_property
    def _factors(self) -> frozenset[int]:
        """Matrices of products and the parameters behind them, as nodes; but routers, which have a row an expert."""
        found: set[int] = set()
        for matrix in self._matrices:
            if self._experts & set(self.graph.spec(matrix).shape):
                continue
            found.add(matrix.node)
            refs = self.graph.nodes[matrix.node].tensor_inputs
            while refs:
                found.add(refs[0].node)
                refs = self.graph.nodes[refs[0].node].tensor_inputs
        return frozenset(found)

    def _divides(
        self, tensors: Sequence[Port], places: NDArray[np.int64], choice: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """States (axes, states) in which every dim divides by all the axes that shard it together."""
        keep = np.ones(choice.shape[1], dtype=np.bool_)
        if not tensors:
            return keep
        shapes = [self.graph.spec(tensor).shape for tensor, _, _ in tensors]
        if len(self.sizes) == 2:
            # Each axis divides by itself: only a dim that both shard is left to look at. What is whole or partial does.
            both = self.sizes[0] * self.sizes[1]
            divides = np.array([extent % both == 0 for shape in shapes for extent in (*shape, 0, 0)])
            one, other = places[:, choice[0]], places[:, choice[1]]
            fits: NDArray[np.bool_] = ((one != other) | divides[one]).all(axis=0)
            return fits
        for shape, (_, _, codes) in zip(shapes, tensors, strict=True):
            placements = codes[choice]
            for dim, extent in enumerate(shape):
                ways = np.ones(choice.shape[1], dtype=np.int64)
                for size, row in zip(self.sizes, placements, strict=True):
                    ways = np.where(row == dim, ways * size, ways)
                keep &= extent % ways == 0
        return keep
