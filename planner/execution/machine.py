"""Instructions compiled to closures over numbered slots: nothing is looked up while they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from planner.execution.communication import (
    FINISH,
    RUN,
    START,
    Action,
    AxisPeers,
    HostCopies,
    PreparedCollective,
    Probe,
    Slots,
    make_message,
    settled_early,
)
from planner.execution.optimizers import LossScale, StepFunction, SummedStep, overflow, unscaled
from planner.graph.operator_graph import OperatorGraph, Role
from planner.lowering.instructions import (
    Accumulate,
    BeginUpdate,
    CheckGradients,
    Communicate,
    Compute,
    HostCopy,
    Instruction,
    Mask,
    SettleScale,
    Slice,
    StoredParameter,
    Update,
    read_values,
    written_values,
)
from planner.sharding.local_call import Moment
from planner.sharding.local_context import own_part
from planner.sharding.local_operator import LocalOperator, Peers, prepare
from simulator.torch_versions import has_own_memory

NOWHERE = -1
HOST = torch.device("cpu")
BUFFER = Role.CONSTANT.value
"""Operator of a constant that is a buffer of the network."""
SEED = "loss_gradient"
"""Node of the constant that the backward pass begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What differs from rank to rank: mesh coordinates, device, and the group this rank is in on each axis.

    With pipeline stages, groups of ranks that share a parameter follow; None where this rank is in none.
    ``watch`` sees every action, where there is one; ``moment`` is where training stands, moved on by the interpreter;
    ``scale`` is that of the loss, set by the instructions.
    """

    coordinates: tuple[int, ...]
    groups: tuple[dist.ProcessGroup | None, ...]
    device: torch.device
    watch: Probe | None = None
    moment: Moment = field(default_factory=Moment)
    scale: LossScale = field(default_factory=LossScale)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A collective under way; ``settle`` finishes it if it has arrived."""

    message: PreparedCollective
    settle: Action
    sources: frozenset[int]
    targets: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds from step to step.

    Attributes
    ----------
    parameters : its shard of every parameter it stores, by name; updated in place
    optimizers : the update of each parameter, by name
    buffers : the network's buffers that the graph reads, whole, by the name of their node
    """

    parameters: Mapping[str, Tensor]
    optimizers: Mapping[str, StepFunction | SummedStep]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


class Machine:
    """Numbered slots for values, and instructions compiled to actions on them.

    Parameters
    ----------
    graph : OperatorGraph
        The unfolded graph whose nodes instructions run.
    sizes : tuple of int
        Size of each mesh axis.
    context : RankContext
        Who runs it.
    stored : sequence of StoredParameter
        Parameters that this rank holds.
    held : Held
        Those parameters, their updates, and buffers.
    copies : int
        Of a micro-batch; ``moments`` is where training stands with each.
    shared : collection of str
        Sums of gradients that another machine may have begun.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        sizes: tuple[int, ...],
        context: RankContext,
        stored: Sequence[StoredParameter],
        held: Held,
        copies: int = 1,
        shared: Collection[str] = (),
    ) -> None:
        self._graph, self._shared = graph, shared
        self._sizes, self._context = sizes, context
        self._buffers = held.buffers
        self.moments = [replace(context.moment) for _ in range(copies - 1)]
        self.moments.insert(0, context.moment)
        self._peers = [AxisPeers(context.groups, context.coordinates, moment, context.watch) for moment in self.moments]
        self._numbers: dict[str, int] = {}
        self.slots: Slots = []
        self._stored = {entry.value: self.number(entry.value) for entry in stored}
        self._updates = {entry.value: held.optimizers[entry.name] for entry in stored}
        for entry in stored:
            self.slots[self._stored[entry.value]] = held.parameters[entry.name]

    def live_bytes(self) -> int:
        """Bytes of the tensors held now, shared memory counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in self.slots
            if tensor is not None
        }
        return sum(storages.values())

    def value(self, slot: int) -> Tensor:
        """The value in a slot."""
        value = self.slots[slot]
        if value is None:
            name = next(name for name, number in self._numbers.items() if number == slot)
            raise RuntimeError(f"value {name!r} is not there when it is needed")
        return value

    def number(self, name: str) -> int:
        """Slot of a value, a new one where it is named first."""
        if not name:
            return NOWHERE
        if name not in self._numbers:
            self._numbers[name] = len(self.slots)
            self.slots.append(None)
        return self._numbers[name]

    def compile(self, instructions: Sequence[Instruction], releases: Sequence[tuple[str, ...]]) -> list[Action]:
        """Compile what runs in a row, with the values to free after each.

        A collective is waited for at the first use of what it brings; if it has arrived before, it is finished when the
        next one is sent, as it has ended by then in the simulated step.
        """
        return self.compile_parts(instructions, releases, 0)[1]

    def compile_parts(
        self, instructions: Sequence[Instruction], releases: Sequence[tuple[str, ...]], ahead: int
    ) -> tuple[list[Action], list[Action]]:
        """`compile` in two parts, the first of them so many instructions."""
        actions: list[Action] = []
        under_way: list[_Open] = []
        first = 0
        for number, (instruction, names) in enumerate(zip(instructions, releases, strict=True)):
            first = len(actions) if number == ahead else first
            touched, written = self._touches(instruction)
            freed = [self._numbers[name] for name in names if name in self._numbers]
            under_way = _wait(under_way, touched | set(freed), written, actions)
            if isinstance(instruction, Communicate) or self._comes_beside(instruction):
                if isinstance(instruction, HostCopy) or instruction.sources:  # else the operator before it has sent
                    opened = self._open(instruction)
                    actions.extend(entry.settle for entry in under_way)
                    actions.append(opened.message.start)
                    under_way.append(opened)
                actions += [_releasing(self.slots, freed)] if freed else []
            else:
                actions.append(self._watched(instruction, RUN, self._action(instruction, freed)))
        first = len(actions) if ahead >= len(instructions) else first
        _wait(under_way, {slot for entry in under_way for slot in entry.targets}, set(), actions)
        return actions[:first], actions[first:]

    def _touches(self, instruction: Instruction) -> tuple[set[int], set[int]]:
        """List the slots an instruction reads or writes, and those whose memory it changes."""
        changed = {self._stored[instruction.parameter]} if isinstance(instruction, Update) else set[int]()
        return {self.number(name) for name in (*read_values(instruction), *written_values(instruction))}, changed

    def _comes_beside(self, instruction: Instruction) -> TypeGuard[HostCopy]:
        """Whether an instruction brings a value from the host while the device computes."""
        return (
            isinstance(instruction, HostCopy) and instruction.asynchronous and not instruction.to_host and self._apart
        )

    @property
    def _apart(self) -> bool:
        """Whether the device has a memory of its own."""
        return self._context.device.type != "cpu"

    @cached_property
    def _host_copies(self) -> HostCopies:
        return HostCopies(self._context.device)

    def _open(self, instruction: Communicate | HostCopy) -> _Open:
        if isinstance(instruction, HostCopy):
            sources: tuple[int, ...] = (self.number(instruction.source),)
            targets: tuple[int, ...] = (self.number(instruction.target),)
            message = self._host_copies.bringing(self.slots, sources[0], targets[0])
        else:
            sources, targets = (tuple(map(self.number, names)) for names in (instruction.sources, instruction.targets))
            message = make_message(instruction, self.slots, sources, targets, self._group(instruction.axis))
        watched = PreparedCollective(
            start=self._watched(instruction, START, message.start),
            finish=self._watched(instruction, FINISH, message.finish),
            arrived=message.arrived,
        )
        early, settle = settled_early(watched)
        return _Open(message=early, settle=settle, sources=frozenset(sources), targets=frozenset(targets))

    def _watched(self, instruction: Instruction, part: int, action: Action) -> Action:
        watch = self._context.watch
        return action if watch is None else watch.action(instruction, part, action)

    def _group(self, axis: int) -> dist.ProcessGroup:
        group = self._context.groups[axis]
        assert group is not None  # a rank's instructions name groups it is in
        return group

    def _action(self, instruction: Instruction, freed: list[int]) -> Action:
        if isinstance(instruction, Compute):
            inputs = [self.number(name) for name in instruction.inputs]
            outputs = [self.number(name) for name in instruction.outputs]
            peers = self._peers[instruction.copy]
            return _compute(self.slots, self._operator(instruction), peers, inputs, outputs, freed)
        makers: dict[type[Instruction], Callable[[Any], Action]] = {
            HostCopy: self._host_copy,
            Slice: self._slice,
            Mask: self._mask,
            Accumulate: self._accumulate,
            CheckGradients: self._check,
            SettleScale: self._settle,
            BeginUpdate: self._begin_update,
            Update: self._update,
        }
        run, release = makers[type(instruction)](instruction), _releasing(self.slots, freed)

        def run_and_release() -> None:
            run()
            release()

        return run_and_release if freed else run

    def _operator(self, instruction: Compute) -> LocalOperator:
        graph, device = self._graph, HOST if instruction.on_host else self._context.device
        node = graph.nodes[instruction.node]
        if node.op == BUFFER:
            buffer = (self._buffers[node.name],)
            return lambda tensors, peers: buffer
        wanted, place = tuple(map(bool, instruction.outputs)), self._context.coordinates
        operator = prepare(
            graph, node, instruction.rules, self._sizes, place, device=device, cut=instruction.cut, wanted=wanted
        )
        if node.role is Role.CONSTANT and node.name.partition(".")[0] == SEED:
            operator = _scaled(operator, self._context.scale)
        if device.type == "cpu" or instruction.inputs:
            return operator
        return lambda tensors, peers: tuple(made.to(device) for made in operator(tensors, peers))

    def _host_copy(self, instruction: HostCopy) -> Action:
        slots, source, target = self.slots, self.number(instruction.source), self.number(instruction.target)
        there = HOST if instruction.to_host else self._context.device
        beside = instruction.asynchronous and self._apart

        def run() -> None:
            value = self.value(source)
            slots[target] = self._host_copies.to_host(value) if beside else value.to(there)

        return run

    def _slice(self, instruction: Slice) -> Action:
        slots, source, target = self.slots, self.number(instruction.source), self.number(instruction.target)
        size = self._sizes[instruction.axis]
        mine, dim, cut = self._context.coordinates[instruction.axis], instruction.dim, instruction.cut

        def run() -> None:
            # A copy: a view would keep the whole tensor alive.
            value = self.value(source)
            part = value.chunk(size, dim)[mine] if cut is None else own_part(value, dim, cut, mine, size)
            slots[target] = part.clone(memory_format=torch.contiguous_format)

        return run

    def _mask(self, instruction: Mask) -> Action:
        slots, source, target = self.slots, self.number(instruction.source), self.number(instruction.target)
        keeps = self._context.coordinates[instruction.axis] == 0

        def run() -> None:
            value = self.value(source)
            slots[target] = value if keeps else torch.zeros_like(value)

        return run

    def _accumulate(self, instruction: Accumulate) -> Action:
        slots = self.slots
        source, target = self.number(instruction.source), self.number(instruction.accumulator)
        first, shared = instruction.first, instruction.accumulator in self._shared

        def run() -> None:
            value = self.value(source)
            if first and (slots[target] is None or not shared):
                slots[target] = value
            else:
                # In place only where no other value shares the memory: a gradient may be a view of one.
                held = self.value(target)
                slots[target] = held.add_(value) if has_own_memory(held) else torch.add(held, value)

        return run

    def _check(self, instruction: CheckGradients) -> Action:
        slots, target = self.slots, self.number(instruction.target)
        gradients = [self.number(name) for name in instruction.gradients]

        def run() -> None:
            slots[target] = overflow([self.value(gradient) for gradient in gradients], self._context.device)

        return run

    def _settle(self, instruction: SettleScale) -> Action:
        source, scale = self.number(instruction.source), self._context.scale

        def run() -> None:
            scale.settle(bool(self.value(source)))

        return run

    def _update(self, instruction: Update) -> Action:
        slot, divisor = self.number(instruction.sums or instruction.gradient), instruction.divisor
        parameter, scale = self.value(self._stored[instruction.parameter]), self._context.scale
        step = self._updates[instruction.parameter]
        finish = self._summed(instruction.parameter).finish if instruction.sums else None

        def run() -> None:
            if not scale.skips and finish is not None:
                finish(parameter, self.value(slot))
            elif not scale.skips:
                step(parameter, unscaled(self.value(slot), divisor, scale))

        return run

    def _begin_update(self, instruction: BeginUpdate) -> Action:
        slots, gradient, target = self.slots, self.number(instruction.gradient), self.number(instruction.target)
        parameter, divisor = self.value(self._stored[instruction.parameter]), instruction.divisor
        step, scale = self._summed(instruction.parameter), self._context.scale

        def run() -> None:
            if scale.skips:  # messages go on as ever, of nothing
                slots[target] = parameter.new_zeros(2, dtype=torch.promote_types(parameter.dtype, torch.float32))
            else:
                slots[target] = step.begin(parameter, unscaled(self.value(gradient), divisor, scale))

        return run

    def _summed(self, parameter: str) -> SummedStep:
        step = self._updates[parameter]
        assert isinstance(step, SummedStep)  # lowering begins updates of no other optimizer
        return step


def _wait(under_way: list[_Open], touched: set[int], written: set[int], actions: list[Action]) -> list[_Open]:
    """Finish the collectives whose results are touched or whose sources are overwritten; return the others."""
    still: list[_Open] = []
    for entry in under_way:
        if entry.targets & touched or entry.sources & written:
            actions.append(entry.message.finish)
        else:
            still.append(entry)
    return still


def _releasing(slots: Slots, freed: Sequence[int]) -> Action:
    def run() -> None:
        for slot in freed:
            slots[slot] = None

    return run


def _scaled(operator: LocalOperator, scale: LossScale) -> LocalOperator:
    """Multiply what an operator makes."""
    return lambda tensors, peers: tuple(
        made if scale.value == 1 else made * scale.value for made in operator(tensors, peers)
    )


def _compute(
    slots: Slots,
    operator: LocalOperator,
    peers: Peers,
    inputs: list[int],
    outputs: list[int],
    freed: list[int],
) -> Action:
    if len(outputs) == 1 and outputs[0] != NOWHERE:
        target = outputs[0]

        def run_single() -> None:
            slots[target] = operator([slots[i] for i in inputs], peers)[0]  # type: ignore[misc]
            for slot in freed:
                slots[slot] = None

        return run_single
    kept = [(position, slot) for position, slot in enumerate(outputs) if slot != NOWHERE]

    def run() -> None:
        results = operator([slots[i] for i in inputs], peers)  # type: ignore[misc]
        for position, slot in kept:
            slots[slot] = results[position]
        for slot in freed:
            slots[slot] = None

    return run
