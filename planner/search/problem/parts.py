"""What each state of a variable, and each pair of states that share a tensor, takes: seconds by kind, bytes, elements.

One count for every search: the objective of a whole mesh adds the parts up one way
(`planner.search.problem.problem`), the labels of pipeline units another (`planner.search.units.labels`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from planner.kernel_shapes import kernel_shape, local_kernel
from planner.request import ParameterStorage
from planner.search.problem.costs import MeshCosts
from planner.search.problem.saved import saved_tensors
from planner.search.problem.variables import Choice, Decisions, Edge, Kind, Variable, masks, once_a_step, unnamed
from planner.sharding.inner_messages import inner_messages, message_bytes, summing, waiting_time
from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.redistribution import placement_index
from planner.work import Optimizer, cast_bytes, traffic_bytes, update_traffic
from simulator.corrections import kernel_factor
from simulator.kernels import has_shape_model, kernel_time, shaped_time
from simulator.program import SUMMED_CLASS, Kernel, Phase

FloatArray = NDArray[np.float64]
Port = tuple[TensorRef, bool, NDArray[np.int64]]
"""A tensor, whether it is read, and its placement in each choice."""
Placed = dict[tuple[str | bool | int, ...], NDArray[np.int64]]
"""Placements of tensors by state, and their numbers."""
Scope = tuple[int, ...]
CONTEXT = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is fixed for one search: mesh times, micro-batches, optimizer and restrictions.

    ``storage`` says how parameters lie along the data axis between steps; ``batch_only`` allows nothing
    but batch dims to be sharded, and shards those wherever it can (pure data parallelism); ``batch_axes`` are
    the mesh axes, by name, for which the same holds alone. On an axis named ``expert`` it holds but for what experts
    hold and work on, which may be sharded by expert. ``free_axes`` may shard the batch even where they are named
    ``tensor``. ``context`` is the one choice of each variable on an axis named ``context``, where the mesh has one.
    ``sharded_gradients`` are scattered every micro-batch and accumulated in shards (ZeRO-2).
    """

    costs: MeshCosts
    micro_batches: int
    optimizer: Optimizer
    storage: ParameterStorage = "free"
    batch_only: bool = False
    batch_axes: frozenset[str] = field(default=frozenset())
    free_axes: frozenset[str] = field(default=frozenset())
    context: tuple[Choice, ...] = ()
    sharded_gradients: bool = False


@dataclass(frozen=True, slots=True)
class States:
    """The states of a variable: ``choice[a, s]`` is the choice along mesh axis a in state s.

    ``known`` is what was worked out of them, by name, and ``placed`` where their tensors lie; variables that are alike
    (number ``kind``) share both, meshes with the same states the second.
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
        first = self.variable.choices[0]
        return [*(first.reads if reads else first.writes)].index(tensor)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a micro-batch, arrays of one shape: all of them, and the communication among them."""

    total: FloatArray
    communication: FloatArray


class Parts:
    """States and cost parts of the variables of a graph on one mesh."""

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

    # States

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
                self._first[key] = States(variable, found, number, placed=placed)
            first = self._first[key]
            self._made[number] = States(variable, first.choice, first.kind, first.known, first.placed)
        return self._made[number]

    def _known_choices(self, variable: Variable, kind: int) -> tuple[NDArray[np.int64], Placed]:
        """`_choices`, found once for all meshes whose axes divide the same dims, and what is known of placements."""
        setting = self.setting
        if setting.context:
            return self._choices(variable), {}
        asked = (setting.storage, setting.batch_only, setting.batch_axes, setting.free_axes)
        divided = tuple([self._divided(tensor) for tensor in (*variable.read, *variable.written)])
        key = (kind, self.names, asked, 1 in self.sizes and self.sizes, divided)
        known: dict[tuple[object, ...], tuple[NDArray[np.int64], Placed]] = self.decisions.states
        if key not in known:
            known[key] = (self._choices(variable), {})
        return known[key]

    def _divided(self, tensor: TensorRef) -> tuple[bool, ...]:
        """Whether each dim of a tensor divides by the product of any of the axes."""
        shape = self.graph.spec(tensor).shape
        if shape not in self._divided_by:
            products = [1]
            for size in self.sizes:
                products += [size * product for product in products]
            self._divided_by[shape] = tuple([extent % product == 0 for product in products for extent in shape])
        return self._divided_by[shape]

    def _choices(self, variable: Variable) -> NDArray[np.int64]:
        """Choices along each axis in every state, shape (axes, states)."""
        axes = range(len(self.sizes))
        if not axes:
            return np.zeros((0, 1), dtype=np.int64)
        tensors = [(tensor, True, placed) for tensor, placed in variable.read.items()]
        tensors += [(tensor, False, placed) for tensor, placed in variable.written.items()]
        places = self._places(tensors)
        fits = [self._fits(variable, axis, tensors, places) for axis in axes]
        wanted = [np.flatnonzero(f & self._wanted(variable, axis, tensors)) for axis, f in zip(axes, fits, strict=True)]
        if len(axes) == 1:
            return (wanted[0] if len(wanted[0]) else np.flatnonzero(fits[0]))[None, :]
        for kept in (wanted, [np.flatnonzero(f) for f in fits]):
            choice = np.zeros((0, 1), dtype=np.int64)
            for allowed in kept:
                old = np.repeat(choice, len(allowed), axis=1)
                choice = np.vstack((old, np.tile(allowed, choice.shape[1])))
            divides = self._divides(tensors, places, choice)
            if divides.any():
                break
        return choice[:, divides]

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
        return keep

    @cached_property
    def _experts(self) -> frozenset[int]:
        """Numbers of experts: how many products with matrices of their own an operator does at once."""
        nodes, made = self.graph.nodes, set[int]()
        found: set[int] = set()
        for index, node in enumerate(nodes):
            refs = node.tensor_inputs
            if node.role is Role.PARAMETER or (
                node.role is Role.OPERATOR and refs and all(ref.node in made for ref in refs)
            ):
                made.add(index)
            elif node.kernel is Kernel.MATMUL and node.phase is Phase.FORWARD and refs[-1].node in made:
                shape = self.graph.spec(refs[-1]).shape
                found |= {shape[0]} if len(shape) == 3 else set()
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

    # Seconds

    def prepare(self, edges: Collection[Edge]) -> None:
        """Time the messages of many tensors at once, and those that `handing_back` sends, of all stations."""
        gradients = (_gradient_of(variable) for variable in self.decisions.variables if variable.kind is Kind.STATION)
        tensors = [(gradient, False) for gradient in gradients if gradient is not None]
        tensors += [(edge.tensor, self.fused(edge)) for edge in edges]
        specs = [(self.graph.spec(tensor), fused) for tensor, fused in tensors]
        self.setting.costs.prepare([(len(spec.shape), spec.size_bytes, fused) for spec, fused in specs])

    def fused(self, edge: Edge) -> bool:
        """Whether a tensor moves once a step, in messages of many: parameters and their gradients."""
        return once_a_step(self.decisions.variables, edge)

    def shares(self, states: States, placements: Sequence[int]) -> FloatArray:
        """Part of a tensor that is local in each state; `placements` are those of each choice.

        Most operators of a variable read and write tensors that are cut alike.
        """
        key: tuple[str | bool | int, ...] = ("local", *placements)
        if key not in states.known:
            cut = np.array(placements, dtype=np.int64) >= 0
            share = np.ones(len(states))
            for row, size in zip(states.choice, self._axes(), strict=True):
                share = np.where(cut[row], share / size, share)
            share.setflags(write=False)
            states.known[key] = share
        found: FloatArray = states.known[key]
        return found

    def _axes(self) -> Sequence[int | NDArray[np.int64]]:
        """Ranks along each axis; of several meshes at once by state."""
        return self.sizes

    def node_seconds(self, states: States, position: int) -> Seconds:
        """Seconds of the `position`-th node of a variable in each state, with the collectives inside it."""
        key = ("seconds", position)
        if key not in states.known:
            states.known[key] = self._node_seconds(states, position)
        found: Seconds = states.known[key]
        return found

    def _node_seconds(self, states: States, position: int) -> Seconds:
        node = self.graph.nodes[states.variable.nodes[position]]
        hardware, choices = self.setting.costs.hardware, states.variable.choices
        work = np.ones(len(states))
        splits = np.array([c.rules[position].splits_work for c in choices])
        for row, size in zip(states.choice, self._axes(), strict=True):
            work = np.where(splits[row], work / size, work)
        ports = [[c.rules[position].inputs[i] for c in choices] for i in range(len(node.tensor_inputs))]
        ports += [[c.rules[position].outputs[i] for c in choices] for i in range(len(node.outputs))]
        shares = [self.shares(states, codes) for codes in ports]
        dtype = node.kernel_dtype
        moved, flops = traffic_bytes(self.graph, node, shares), node.flops * work
        shape = kernel_shape(self.graph, node) if has_shape_model(hardware, node.kernel) else None
        if shape is None:
            time = kernel_time(hardware, node.kernel, dtype, flops, moved)
        else:
            first, second, result = (shares[port] for port in shape.ports)
            local = local_kernel(node.kernel, shape.sizes, (first, second, result), work)
            time = shaped_time(hardware, node.kernel, dtype, local, flops, moved)
        time = time * self._factor(node.kernel, dtype)
        if node.kernel in SUMMED_CLASS:
            kernel, summed = SUMMED_CLASS[node.kernel], summing([c.rules[position] for c in choices])
            others = kernel_time(hardware, kernel, dtype, flops, moved) * self._factor(kernel, dtype)
            time = np.where(summed[states.choice].any(axis=0), others, time)
        if node.product_dtype:
            narrow = cast_bytes(self.graph, node, shares)
            wide = node.outputs[0].dtype
            cast_s = kernel_time(hardware, Kernel.ELEMENTWISE, wide, np.zeros_like(narrow), narrow)
            time = time + cast_s * self._factor(Kernel.ELEMENTWISE, wide)
        inside = self._inside(states, position, node, shares, time)
        return Seconds(time + inside, inside)

    def _inside(
        self, states: States, position: int, node: Node, shares: Sequence[FloatArray], work_s: FloatArray
    ) -> FloatArray:
        """Seconds an operator waits for its inner collectives."""
        inside = np.zeros(len(states))
        for number, choice in enumerate(states.variable.choices):
            for message in inner_messages(choice.rules[position]):
                for axis, size in enumerate(self.sizes):
                    payload = message_bytes(self.graph, node, message, shares, size)
                    sent = self.setting.costs.message_time(message.collective, axis, np.maximum(payload, 1.0))
                    chosen = (states.choice[axis] == number) & (payload > 0)
                    inside += np.where(chosen, waiting_time(message, size, sent, work_s), 0.0)
        return inside

    def _factor(self, kernel: Kernel, dtype: str) -> float:
        return kernel_factor(self.setting.costs.hardware, kernel, dtype, self.setting.costs.mesh.size)

    def handing_back(self, states: States) -> FloatArray:
        """Seconds in which a station turns the summed gradient into the placement it is handed back in."""
        gradient = _gradient_of(states.variable)
        if gradient is None:
            return np.zeros(len(states))
        summed = [c.rules[-1].outputs[0] if c.rules else c.reads[gradient] for c in states.variable.choices]
        before = np.array(summed, dtype=np.int64)[states.choice]
        spec = self.graph.spec(gradient)
        rank = len(spec.shape)
        table = self.setting.costs.redistribution(rank, spec.size_bytes, fused=False, masks=False)
        after = states.placements(gradient, reads=False)
        return table[placement_index(before, rank), placement_index(after, rank)]

    def elements(self, states: States) -> FloatArray:
        """Local elements of a parameter in each state."""
        ref = TensorRef(states.variable.nodes[0])
        return self.shares(states, [c.writes[ref] for c in states.variable.choices]) * self.graph.spec(ref).elements

    def update_seconds(self, states: States) -> FloatArray:
        """Seconds of the optimizer's update of the stored shard of a parameter."""
        if ("update",) not in states.known:
            states.known["update",] = self._update_seconds(states)
        found: FloatArray = states.known["update",]
        return found

    def _update_seconds(self, states: States) -> FloatArray:
        held, update = self.elements(states), self.setting.optimizer
        dtype = self.graph.spec(TensorRef(states.variable.nodes[0])).dtype
        time = kernel_time(
            self.setting.costs.hardware,
            Kernel.OPTIMIZER,
            dtype,
            held * update.flops,
            held * update_traffic(update, dtype),
        )
        return time * self._factor(Kernel.OPTIMIZER, dtype)

    def move_seconds(self, edge: Edge) -> FloatArray:
        """Seconds of moving a tensor from each state of its writer to each of its reader, infinite where impossible."""
        spec = self.graph.spec(edge.tensor)
        masked = masks(self.decisions.variables, edge)
        table = self.setting.costs.redistribution(
            len(spec.shape), spec.size_bytes, fused=self.fused(edge), masks=masked
        )
        rows, columns = self.ends(edge)
        return table[rows[:, None], columns[None, :]]

    def scatter_seconds(self, edge: Edge) -> FloatArray:
        """Seconds of a gradient's way to its shards up to its last reduce-scatter, by states as `move_seconds`."""
        spec = self.graph.spec(edge.tensor)
        rows, columns = self.ends(edge)
        return self.setting.costs.scattering(len(spec.shape), spec.size_bytes)[rows[:, None], columns[None, :]]

    def ends(self, edge: Edge) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers of the placements in which an edge's tensor is written and read, by state."""
        rank = len(self.graph.spec(edge.tensor).shape)
        return (
            self.states(edge.source).numbers(edge.tensor, rank, reads=False),
            self.states(edge.target).numbers(edge.tensor, rank, reads=True),
        )

    # Bytes

    def local_bytes(self, tensor: TensorRef, placements: NDArray[np.int64]) -> FloatArray:
        """Bytes of one rank's piece of a tensor; `placements` have shape (axes, states)."""
        share = np.full(placements.shape[1], float(self.graph.spec(tensor).size_bytes))
        for row, size in zip(placements, self.sizes, strict=True):
            share = np.where(row >= 0, share / size, share)
        return share

    def read_bytes(self, tensor: TensorRef, number: int) -> FloatArray:
        """Bytes of a tensor as a variable reads it, by state."""
        return self.local_bytes(tensor, self.states(number).placements(tensor, reads=True))

    def written_bytes(self, tensor: TensorRef, number: int) -> FloatArray:
        """Bytes of a tensor as a variable writes it, by state."""
        return self.local_bytes(tensor, self.states(number).placements(tensor, reads=False))

    @cached_property
    def station_of(self) -> Mapping[TensorRef, int]:
        """Variables that are stations, by their tensor."""
        return stations_of(self.decisions)

    def saved_charges(
        self, tensor: TensorRef, readers: Collection[int], owner: int | None
    ) -> Iterator[tuple[Scope, FloatArray]]:
        """Bytes of keeping a tensor for the variables whose backward operators read it, as `saved_pieces` says."""
        for scope, placements, differs in self.saved_pieces(tensor, readers, owner):
            size = self.local_bytes(tensor, placements)
            yield scope, size if differs is None else differs * size[None, :]

    def saved_pieces(
        self, tensor: TensorRef, readers: Collection[int], owner: int | None
    ) -> Iterator[tuple[Scope, NDArray[np.int64], NDArray[np.bool_] | None]]:
        """Placements in which a tensor is kept for the variables whose backward operators read it.

        Charged once per placement it is kept in: to its writer `owner` where that reads it itself, else to its
        station, else to its reader; a reader in another placement than the keeper's has a copy of its own.

        Yields
        ------
        scope : tuple of int
            The variable that is charged, or the keeper and the reader.
        placements : array, shape (axes, states)
            By state of the last variable of the scope.
        differs : array, shape (states of the keeper, states of the reader), optional
            Where there is a copy.
        """
        keeper = owner if owner in readers else self.station_of.get(tensor)
        if keeper is not None:
            yield (keeper,), self.states(keeper).placements(tensor, reads=False), None
        for reader in sorted(set(readers) - {keeper, owner}):
            placements = self.states(reader).placements(tensor, reads=True)
            if keeper is None:
                yield (reader,), placements, None
            else:
                rank = len(self.graph.spec(tensor).shape)
                kept = self.states(keeper).numbers(tensor, rank, reads=False)
                read = self.states(reader).numbers(tensor, rank, reads=True)
                yield (keeper, reader), placements, kept[:, None] != read[None, :]

    @cached_property
    def saved(self) -> Mapping[TensorRef, set[int]]:
        """Forward tensors that backward operators read, with the variables of those."""
        return saved_tensors(self.graph, self.decisions)


def _gradient_of(station: Variable) -> TensorRef | None:
    """The gradient that a station hands back, if any."""
    return next((ref for ref in station.choices[0].writes if ref != station.tensor), None)


def stations_of(decisions: Decisions) -> dict[TensorRef, int]:
    """Variables that are stations, by their tensor."""
    return {v.tensor: i for i, v in enumerate(decisions.variables) if v.tensor is not None}


def has_partial(placements: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a tensor is partial along some axis; `placements` have shape (axes, states)."""
    found: NDArray[np.bool_] = (placements == PARTIAL).any(axis=0)
    return found
