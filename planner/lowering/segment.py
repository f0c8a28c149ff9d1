"""One micro-batch: parameters gathered before, gradients accumulated, synchronised and applied after."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from math import inf, prod

import numpy as np

from planner.cost.work import finish_traffic, sum_bytes, update_traffic
from planner.graph.operator_graph import DTYPE_BYTES, TensorRef
from planner.lowering.adding import addition
from planner.lowering.blueprint import NO_VALUES, Block, Blueprint, Event, Shared, Visit, shared
from planner.lowering.body import Fetch, Gather
from planner.lowering.copies import NOBODY
from planner.lowering.groups import ALONE, BY_SIZE
from planner.lowering.host import offloading
from planner.lowering.instructions import NOTHING, BeginUpdate, Communicate, Update, all_reduced, value_of_copy
from planner.lowering.overflow import check_blocks, checks_gradients
from planner.lowering.placed import local_share
from planner.lowering.runs import RunWriter
from planner.lowering.sums import Summed, summed
from planner.lowering.travelling import Accumulated, Gradient, Kind, Leg, Move, Pending, Sent, Then
from planner.lowering.visits import Ahead, MicroBatch, Visits
from planner.lowering.ways import moves_together
from planner.lowering.writer import in_order
from planner.sharding.placement import Placements, placement_name
from planner.sharding.redistribution import Step
from simulator.program import COMPUTE_STREAM, Buffer, BufferKind, Collective, Kernel, Phase, Task
from simulator.task_table import IntArray


class SegmentWriter(RunWriter):
    """Writes what runs in one micro-batch."""

    def __init__(self, blueprint: Blueprint, *, first: bool, last: bool) -> None:
        super().__init__(blueprint, first=first)
        self.last = last
        self.gathers, self.fetches = Ahead(blueprint.script, Gather), Ahead(blueprint.script, Fetch)
        self.buckets: dict[Kind, Pending] = {}
        self.pending: dict[Kind, Pending] = {}
        """Buckets that are not empty."""
        self.synchronised = array("q")
        """Gradients that have arrived, in threes."""
        self.legs: dict[tuple[int, int], Leg] = {}
        """Legs by the value that takes them and the identity of their steps."""
        self.written: dict[int, tuple[int, int, tuple[Step, ...]]] = {}
        self.accumulated: dict[int, Accumulated] = {}
        self.sums: dict[int, str] = {}
        """What sums over whole parameters are called now, by node, where the update needs some."""

    def write(self) -> None:
        """Fill ``order``."""
        self._gather_parameters()
        batch = MicroBatch(self.order, self.persistent, self.synchronised, self.buckets, self.pending)
        visits = Visits(batch, self._visit, lambda kind: self._by_unit(kind[0]))
        ahead = [items for items in (self.gathers, self.fetches) if items.items]
        for stretch in self.blueprint.script:
            events, units = stretch
            if not any(items.count(events) for items in ahead):
                visits.add_all(stretch)
                continue
            for unit in units:
                visits.add(Visit(events, unit), tuple([items.around(Visit(events, unit)) for items in ahead]))
                for items in ahead:
                    items.passed += items.count(events)
        visits.restore()
        while self.pending:
            self._flush(next(iter(self.pending)))
        if self.last:
            self._update()

    def _visit(self, visit: Visit) -> None:
        """Write what runs in a row for a unit."""
        events, unit = visit
        passed, fetched = self.gathers.passed, self.fetches.passed
        for event in events:
            if isinstance(event, Block):
                self.order.extend((*event, unit))
            elif isinstance(event.item, Gather):
                self._gather_units(self.gathers.items, passed)
                passed += 1
            elif isinstance(event.item, Fetch):
                for fetch, its_unit in self.fetches.items[fetched + 1 if fetched else 0 : fetched + 2]:
                    self._fetch_back(fetch, its_unit)
                fetched += 1
            else:
                self._gradient(event, event.item, unit)

    # Parameters and activations of units

    def _gather_units(self, gathers: Sequence[tuple[Gather, int]], position: int) -> None:
        """At the first operator of a unit, gather what the next one needs, and its own where none was before.

        A unit's parameters travel in one message, and so do the gradients of the unit before.
        """
        self._flush_units()
        here, _ = gathers[position]
        starts = position == 0 or gathers[position - 1][0].phase is not here.phase
        wanted = [gathers[position]] if starts else []
        if position + 1 < len(gathers) and gathers[position + 1][0].phase is here.phase:
            wanted.append(gathers[position + 1])
        for gather, unit in wanted:
            home = gather.unit if self.blueprint.copies.of_unit else NOBODY
            self._run(("gather", gather.unit, gather.phase), unit, home, self._gather, gather)

    def _gather(self, gather: Gather) -> None:
        limit = self.source.gather_limit(of_unit=True)
        for travelling in moves_together(self.source, gather.values, np.arange(len(gather.values)), limit, self.ways):
            for items in travelling.messages():
                self._step(items, gather.phase, asynchronous=True)
        for draft in self.drafts:
            draft.beside = True

    def _fetch_back(self, fetch: Fetch, unit: int) -> None:
        """Bring back what a unit has on the host: its own where it is the first, and of the next."""
        home = fetch.unit if self.blueprint.copies.of_unit else NOBODY
        self._run(("fetch", fetch.unit), unit, home, self._fetched, fetch)

    def _fetched(self, fetch: Fetch) -> None:
        self.drafts += fetch.drafts

    # Gradients

    def _gradient(self, event: Event, ref: TensorRef, unit: int) -> None:
        """Hand a complete gradient on: to its accumulator, or first to the rank that accumulates its part."""
        known, copy = self.written.get(id(event)), event.copy
        if known is None:
            parameter = self.source.gradient_of[ref]
            name = value_of_copy(self.source.value_name(ref, self.source.output_placements(ref)), copy)
            known = parameter, self.blueprint.named(name), self.source.gradient_path(parameter)[0]
            self.written[id(event)] = known
        parameter, value, ahead = known
        copies = self.source.options.copies
        if copies > 1:
            total, home = f"{self.graph.nodes[parameter].name}.gradient of all copies", self.blueprint.owners[parameter]
            placements = self.source.output_placements(ref)
            key = "add up", parameter, copy
            self._run(key, unit, home, self._add_to, parameter, value, total, placements, copy == 0)
            value = self.blueprint.value(total, home)
        if copy + 1 < copies:
            return
        gradient = Gradient(parameter, unit, value)
        if ahead:
            self._synchronise(gradient, ahead, self._accumulate)
        else:
            self._accumulate(gradient)

    def _accumulate(self, gradient: Gradient) -> None:
        parameter, unit, value = gradient
        if parameter not in self.accumulated:
            name, home = f"{self.graph.nodes[parameter].name}.accumulated", self.blueprint.owners[parameter]
            self.accumulated[parameter] = Accumulated(name, home, self.source.gradient_path(parameter)[1])
        made = self.accumulated[parameter]
        if self.source.options.micro_batches > 1:
            accumulator = self.blueprint.value(made.name, made.home)
            self.persistent.extend((accumulator, unit))
            self._run(("accumulate", parameter), unit, made.home, self._accumulation, parameter, value, made.name)
            gradient = Gradient(parameter, unit, accumulator)
        if self.last:
            self._synchronise(gradient, made.behind, self.synchronised.extend)

    def _accumulation(self, parameter: int, value: int, accumulator: str) -> None:
        source = self.source
        ahead, _ = source.gradient_path(parameter)
        placements = ahead[-1].after if ahead else source.output_placements(source.gradient_ref(parameter))
        self._add_to(parameter, value, accumulator, placements, self.first)

    def _add_to(self, parameter: int, value: int, accumulator: str, placements: Placements, first: bool) -> None:
        name = self.blueprint.names[value]
        stream = self.came.get(name, COMPUTE_STREAM)
        self.drafts.append(addition(self.source, parameter, name, accumulator, placements, stream, first=first))

    def _synchronise(self, gradient: Gradient, steps: tuple[Step, ...], then: Then) -> None:
        """Let a gradient take `steps`, which are kept; `then` takes what arrives."""
        if not steps:
            then(gradient)
            return
        parameter, unit, value = gradient
        key = value, id(steps)
        leg = self.legs.get(key)
        if leg is None:
            leg = self.legs[key] = self._leg(parameter, value, steps, then)
        self._travel(unit, leg)

    def _travel(self, unit: int, leg: Leg) -> None:
        """Queue a gradient's next message; full buckets travel at once."""
        for block in leg.blocks:
            self.order.extend((*block, unit))
        move = leg.move
        if move is None:
            leg.then(Gradient(leg.parameter, unit, leg.value))
            return
        bucket = move.bucket
        if not bucket.entries:
            self.pending[move.key] = bucket
        bucket.entries.append((unit, leg))
        bucket.size_bytes += int(move.payload)
        if len(bucket.entries) == bucket.most or bucket.size_bytes >= bucket.full_bytes:
            self._flush(move.key)

    def _leg(self, parameter: int, value: int, steps: tuple[Step, ...], then: Then) -> Leg:
        """What `steps` need up to the next message."""
        blocks: list[Block] = []
        for place, step in enumerate(steps):
            if isinstance(step.operation, Collective):
                move = self._move_of(parameter, step)
                return Leg(parameter, value, tuple(blocks), move, steps[place + 1 :], then)
            target, home = self._synchronised_name(parameter, step), self.blueprint.owners[parameter]
            item = self.source.gradient_ref(parameter), self.blueprint.names[value], target, step
            blocks.append(self._block(("move", value, target), home, self._step, [item], Phase.BACKWARD, False))
            value = self.blueprint.value(target, home)
        return Leg(parameter, value, tuple(blocks), None, (), then)

    def _bucket(self, kind: Kind) -> Pending:
        """Where gradients of a kind wait."""
        if kind[3] != BY_SIZE:
            return Pending(1 if kind[3] == ALONE else self._assigned[kind], inf)
        if self._by_unit(kind[0]) and self.source.options.exchange.reduce_scatter_bytes is None:
            return Pending(inf, inf)
        return Pending(inf, self.source.fused_bytes(kind[0]))

    @cached_property
    def _assigned(self) -> Counter[Kind]:
        """How many gradients are to travel in each message, where it is said which."""
        steps = [(p, step) for p in self.source.fusion_groups for part in self.source.gradient_path(p) for step in part]
        return Counter(self._kind(p, step) for p, step in steps if isinstance(step.operation, Collective))

    def _kind(self, parameter: int, step: Step) -> Kind:
        assert isinstance(step.operation, Collective)  # slices and masks are moved at once
        ref = self.source.gradient_ref(parameter)
        dtype = self.source.travelling_dtype(self.graph.spec(ref))
        group = self.source.fusion_group(parameter, step.operation)
        return step.operation, step.axis, dtype, group, self.source.host.holds(ref)

    def _move_of(self, parameter: int, step: Step) -> Move:
        ref, kind = self.source.gradient_ref(parameter), self._kind(parameter, step)
        spec = self.graph.spec(ref)
        on_wire = self.source.travelling_bytes(spec)
        name, size = self._synchronised_name(parameter, step), self.source.local_bytes(spec, step.after)
        if kind not in self.buckets:
            self.buckets[kind] = self._bucket(kind)
        return Move(
            key=kind,
            bucket=self.buckets[kind],
            target=self.blueprint.value(name, self.blueprint.owners[parameter]),
            made=Buffer(name=name, size_bytes=0 if kind[4] else size, kind=BufferKind.GRADIENT),
            size_bytes=size,
            payload=on_wire / prod(self.source.sizes[a] for a in step.sharded_axes),
            dims=(step.gather_dim, step.split_dim),
            narrow_bytes=0 if spec.dtype == kind[2] else self.source.local_bytes(spec, step.before),
        )

    def _by_unit(self, collective: Collective) -> bool:
        """Whether gradients travel unit by unit, as the parameters do."""
        return bool(self.source.by_unit) and collective is Collective.REDUCE_SCATTER

    def _flush_units(self) -> None:
        for key in [key for key in self.pending if self._by_unit(key[0])]:
            self._flush(key)

    def _synchronised_name(self, parameter: int, step: Step) -> str:
        return f"{self.graph.nodes[parameter].name}.gradient@{','.join(map(placement_name, step.after))}"

    def _flush(self, kind: Kind) -> None:
        entries = self.pending.pop(kind).emptied()
        unit = entries[0][0]
        # Legs are kept, so that their identities stay theirs.
        key = kind, tuple([(own - unit, id(leg)) for own, leg in entries])
        self._run(key, unit, NOBODY, self._send, kind, [(own, leg, leg.move) for own, leg in entries])
        for own, leg in entries:
            if leg.behind is None:
                assert leg.move is not None  # it waited for that
                leg.behind = self._leg(leg.parameter, leg.move.target, leg.steps, leg.then)
            self._travel(own, leg.behind)

    def _send(self, key: Kind, entries: Sequence[Sent]) -> None:
        """Write the message of gradients of several units."""
        names = self.blueprint.names
        # Copies of layers that are written once share a leg.
        moves = {id(leg): (leg, move) for _, leg, move in entries}
        place = {key: number for number, key in enumerate(moves)}
        sources, targets, gathered, cut, buffers, payloads, values, arrived = in_order(
            [
                (names[leg.value], move.made.name, *move.dims, move.made, move.payload, leg.value, move.target)
                for leg, move in moves.values()
            ],
            [place[id(leg)] for _, leg, _ in entries],
        )
        cast = any(move.narrow_bytes for _, move in moves.values())
        message = Communicate(
            collective=key[0],
            axis=key[1],
            sources=sources,
            targets=targets,
            gather_dims=gathered,
            split_dims=cut,
            asynchronous=True,
            dtype=key[2] if cast else "",
        )
        unit, head, _ = entries[0]
        name = f"{key[0]} gradients of {self.graph.nodes[head.parameter].name}"
        if len(entries) > 1:
            name += f" and {len(entries) - 1} more"
        payload = sum(payloads)
        units = [own for own, *_ in entries]
        reads, made = shared(values, units), shared(arrived, units)
        home = self.blueprint.owners[head.parameter]
        if not cast:
            self._message(name, Phase.BACKWARD, message, payload, writes=buffers, dtype=key[2], on_host=key[4])
            self._add_shared(unit, home, reads, made)
        else:
            packed = self._pack(entries, reads, home)
            both = Shared(*map(np.concatenate, zip(reads, packed, strict=True)))
            self._message(name, Phase.BACKWARD, message, payload, dtype=key[2], on_host=key[4])
            self._add_shared(unit, home, both, NO_VALUES)
            came = sum(move.size_bytes for *_, move in entries if move.narrow_bytes)
            axis = self.source.options.mesh.axes[key[1]].name
            task = self._cast_task(f"cast back {name}", came, f"communication:{axis}", on_host=key[4])
            self._add(task, NOTHING, (), buffers)
            self._add_shared(unit, home, packed, made)

    def _pack(self, entries: Sequence[Sent], reads: Shared, home: int) -> Shared:
        """Time the cast of gradients to the type in which they travel; the message that is sent casts them.

        The cast back follows on the message's stream, where it begins when that has ended.
        """
        names, (unit, head, move) = self.blueprint.names, entries[0]
        packed, stream = f"{names[move.target]} as it travels", self.came.get(names[head.value], COMPUTE_STREAM)
        narrow = sum(move.narrow_bytes for *_, move in entries)
        on_host = move.key[4]
        task = self._cast_task(f"cast {len(entries)} gradients", narrow, stream, on_host=on_host)
        size = 0 if on_host else int(sum(move.payload for *_, move in entries))
        self._add(task, NOTHING, (), (Buffer(name=packed, size_bytes=size, kind=BufferKind.COMMUNICATION),))
        found = shared([self.blueprint.value(packed, home)], [unit])
        self._add_shared(unit, home, reads, found)
        return found

    def _cast_task(self, name: str, narrow_bytes: int, stream: str, *, on_host: bool) -> Task:
        """Tensors read in their own type and written in one of twice the width, or the other way round."""
        return Task(
            name=name,
            phase=Phase.BACKWARD,
            stream=stream,
            kernel=Kernel.ELEMENTWISE,
            bytes_moved=3.0 * narrow_bytes,
            on_host=on_host,
        )

    def _update(self) -> None:
        rows = np.array(self.synchronised, dtype=np.int64).reshape(-1, 3)
        if self.source.options.offload_optimizer:
            self._through_host(_gradients(rows))
        if checks_gradients(self.source):
            for block in check_blocks(self.blueprint, rows[:, 0].tolist(), Shared(rows[:, 2], rows[:, 1])):
                self.order.extend((*block, NOBODY))
        if self.source.options.optimizer.sums:
            self._begin_updates(_gradients(rows))
        self._run_each(rows[:, 0], rows[:, 1], partial(self._update_block, rows))

    def _update_block(self, rows: IntArray, place: int) -> Block:
        parameter, _, value = rows[place].tolist()
        home = self.blueprint.owners[parameter]
        return self._block(("update", parameter), home, self._update_of, parameter, value)

    def _update_of(self, parameter: int, value: int) -> None:
        update, node, name = self.source.options.optimizer, self.graph.nodes[parameter], self.blueprint.names[value]
        dtype = node.outputs[0].dtype
        flops, moved = float(update.flops), update_traffic(update, dtype)
        reads: tuple[str, ...] = (node.name, name)
        if update.sums:
            flops, moved = 2.0, finish_traffic(dtype)
            reads = (node.name, self._direction_name(parameter), self.sums[parameter])
        instruction = Update(
            parameter=node.name,
            gradient=name,
            divisor=self.source.divisor(parameter),
            sums=self.sums.get(parameter, ""),
        )
        self._add(self._update_task("update", parameter, flops, moved), instruction, reads, ())

    def _update_task(self, verb: str, parameter: int, flops: float, moved: int) -> Task:
        """Work on the stored shard of a parameter; `flops` and bytes `moved` are those of an element."""
        node = self.graph.nodes[parameter]
        elements = node.outputs[0].elements * local_share(self.source.stored[parameter], self.source.sizes)
        return Task(
            name=f"{verb} {node.name}",
            phase=Phase.UPDATE,
            kernel=Kernel.OPTIMIZER,
            dtype=node.outputs[0].dtype,
            flops=elements * flops,
            bytes_moved=elements * moved,
            on_host=self.source.updated_on_host(parameter),
        )

    # Optimizers that need sums over whole parameters

    def _begin_updates(self, synchronised: Sequence[Gradient]) -> None:
        """Let every shard say its part of the sums, and add them up in one message an axis."""
        for gradient in synchronised:
            parameter, home = gradient.parameter, self.blueprint.owners[gradient.parameter]
            self.sums[parameter] = f"{self.graph.nodes[parameter].name}.sums"
            self._run(("begin", parameter), gradient.unit, home, self._begin_of, parameter, gradient.value)
        for message in summed(self.source, [(gradient.parameter, 1) for gradient in synchronised]):
            self._add_up(message, synchronised)

    def _begin_of(self, parameter: int, value: int) -> None:
        update, node, name = self.source.options.optimizer, self.graph.nodes[parameter], self.blueprint.names[value]
        spec, target = node.outputs[0], self.sums[parameter]
        moved = update_traffic(update, spec.dtype) - finish_traffic(spec.dtype)
        size = self.source.local_bytes(spec, self.source.stored[parameter]) // DTYPE_BYTES[spec.dtype]
        direction = Buffer(
            name=self._direction_name(parameter),
            size_bytes=0 if self.source.updated_on_host(parameter) else size * max(4, DTYPE_BYTES[spec.dtype]),
            kind=BufferKind.GRADIENT,
        )
        sums = Buffer(name=target, size_bytes=sum_bytes(update, spec.dtype), kind=BufferKind.COMMUNICATION)
        instruction = BeginUpdate(
            parameter=node.name, gradient=name, divisor=self.source.divisor(parameter), target=target
        )
        task = self._update_task("begin update of", parameter, update.flops - 2.0, moved)
        self._add(task, instruction, (node.name, name), (direction, sums))

    def _direction_name(self, parameter: int) -> str:
        return f"{self.graph.nodes[parameter].name}.direction"

    def _add_up(self, message: Summed, synchronised: Sequence[Gradient]) -> None:
        """One message of the sums of all parameters that are sharded on its axis."""
        wanted, blueprint, task = set(message.parameters), self.blueprint, message.task
        members = [gradient for gradient in synchronised if gradient.parameter in wanted]
        before = {parameter: self.sums[parameter] for parameter in wanted}
        self.sums |= {parameter: f"{name}@{task.axis}" for parameter, name in before.items()}
        after = [self.sums[gradient.parameter] for gradient in members]
        instruction = all_reduced(message.axis, [before[gradient.parameter] for gradient in members], after)
        update, nodes = self.source.options.optimizer, self.graph.nodes
        writes = tuple(
            Buffer(
                name=name,
                size_bytes=sum_bytes(update, nodes[gradient.parameter].outputs[0].dtype),
                kind=BufferKind.COMMUNICATION,
            )
            for name, gradient in zip(after, members, strict=True)
        )
        self._message(
            task.name, Phase.UPDATE, instruction, task.payload_bytes,
            writes=writes, dtype=task.dtype, on_host=task.on_host,
        )  # fmt: skip
        homes = [blueprint.owners[gradient.parameter] for gradient in members]
        units = [gradient.unit for gradient in members]
        reads = [blueprint.value(before[g.parameter], home) for g, home in zip(members, homes, strict=True)]
        made = [blueprint.value(name, home) for name, home in zip(after, homes, strict=True)]
        self._run_once(members[0].unit, homes[0], shared(reads, units), shared(made, units))

    def _through_host(self, synchronised: Sequence[Gradient]) -> None:
        """Gradients go to the host, whose memory holds the states, and parameters come back, before any update."""
        source, names = self.source, self.blueprint.names
        moved = [g for g in synchronised if g.parameter not in source.host.parameters]
        for task in offloading(source, [(g.parameter, 1) for g in moved]):
            self._add(task, NOTHING, tuple(names[g.value] for g in moved), ())
            reads = shared([g.value for g in moved], [g.unit for g in moved])
            self._run_once(NOBODY, NOBODY, reads, NO_VALUES)


def _gradients(rows: IntArray) -> list[Gradient]:
    return [Gradient(*row) for row in rows.tolist()]
