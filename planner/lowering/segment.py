"""One micro-batch: parameters gathered before, gradients accumulated, synchronised and applied after."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import inf, prod

from planner.graph.operator_graph import DTYPE_BYTES, TensorRef
from planner.instructions import NOTHING, BeginUpdate, Communicate, Update, all_reduced, value_of_copy
from planner.lowering.adding import addition
from planner.lowering.blueprint import SAME, Block, Blueprint, Event, Use, Visit
from planner.lowering.body import Gather
from planner.lowering.copies import NOBODY
from planner.lowering.groups import ALONE, BY_SIZE
from planner.lowering.host import offloading
from planner.lowering.offload import Fetch
from planner.lowering.overflow import check_blocks, checks_gradients
from planner.lowering.placed import local_share
from planner.lowering.sums import Summed, summed
from planner.lowering.travelling import Accumulated, Entry, Gradient, Kind, Move, Pending, Then
from planner.lowering.visits import Ahead, MicroBatch, Visits
from planner.lowering.ways import Wanted, moves_together
from planner.lowering.writer import Moved, Writer
from planner.sharding.placement import Placements, placement_name
from planner.sharding.redistribution import Step
from planner.work import finish_traffic, sum_bytes, update_traffic
from simulator.program import COMPUTE_STREAM, Buffer, BufferKind, Collective, Kernel, Phase, Task


class SegmentWriter(Writer):
    """Writes what runs in one micro-batch.

    ``order`` holds drafts of the blueprint in threes: the first, the one behind the last, the unit they are run for.
    """

    def __init__(self, blueprint: Blueprint, *, first: bool, last: bool) -> None:
        super().__init__(blueprint.source)
        self.blueprint = blueprint
        self.first = first
        self.last = last
        self.order = array("q")
        self.gathers, self.fetches = Ahead(blueprint.script, Gather), Ahead(blueprint.script, Fetch)
        self.buckets: dict[Kind, Pending] = {}
        self.pending: dict[Kind, Pending] = {}
        """Buckets that are not empty."""
        self.synchronised: list[Gradient] = []
        self.persistent: list[Use] = []
        """Values that outlive a micro-batch, beside parameters, the batch and the loss."""
        self.made: dict[object, Block] = {}
        """What is run for other units again."""
        self.moves: dict[tuple[int, int], Move] = {}
        self.written: dict[int, tuple[int, int, tuple[Step, ...]]] = {}
        self.accumulated: dict[int, Accumulated] = {}
        self.sums: dict[int, str] = {}
        """What sums over whole parameters are called now, by node, where the update needs some."""

    def write(self) -> None:
        """Fill ``order``."""
        self._gather_parameters()
        batch = MicroBatch(self.order, self.persistent, self.synchronised, self.buckets, self.pending)
        visits = Visits(batch, self._visit, lambda kind: self._by_unit(kind[0]))
        for visit in self.blueprint.script:
            visits.add(visit, (self.gathers.around(visit), self.fetches.around(visit)))
            self.gathers.passed += self.gathers.count(visit)
            self.fetches.passed += self.fetches.count(visit)
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

    def _run(self, key: object, unit: int, home: int, write: Callable[..., None], *given: object) -> None:
        """Run for a unit the drafts that `write` makes the first time, of what it is given."""
        made = self.made.get(key)
        if made is None:
            before = len(self.blueprint.tasks)
            write(*given)
            for draft in self.drafts:
                self.blueprint.add(draft, home)
            self.drafts = []
            made = self.made[key] = Block(before, len(self.blueprint.tasks))
        self.order.extend((*made, unit))

    def _run_once(self, unit: int, home: int, reads: Sequence[Use], writes: Sequence[Use]) -> None:
        """Run the one draft just written, whose values are of several units."""
        number = self._add_shared(unit, home, reads, writes)
        self.order.extend((number, number + 1, unit))

    def _add_shared(self, unit: int, home: int, reads: Sequence[Use], writes: Sequence[Use]) -> int:
        """Add the one draft just written; its values are of units that lie so from `unit` wherever else it is run."""
        own = SAME - unit
        reads = [(value, own + other) for value, other in reads]
        writes = [(value, own + other) for value, other in writes]
        return self.blueprint.add(self.drafts.pop(), home, reads, writes)

    # Parameters

    def _gather_parameters(self) -> None:
        """Fetch stored shards once a step, in fused messages ahead of their use."""
        gathered = self.blueprint.gathered
        self.persistent += [(value, unit) for _, value, unit in gathered]
        if self.first:
            self._gather_fused([(wanted, unit) for wanted, _, unit in gathered])

    def _gather_fused(self, values: Sequence[tuple[Wanted, int]]) -> None:
        """Fetch parameters of all units in messages that are full at the size of a bucket."""
        units = [unit for _, unit in values]
        for items, numbers in self._ways([value for value, _ in values], self.source.gather_limit(of_unit=False)):
            own = [units[number] for number in numbers]
            first = own[0]
            key = tuple([(target, unit - first) for (_, _, target, _), unit in zip(items, own, strict=True)])
            self._run(key, first, NOBODY, self._gather_together, items, own)

    def _gather_together(self, items: list[Moved], units: Sequence[int]) -> None:
        """Write the message of parameters of several units."""
        self._step(items, Phase.FORWARD, asynchronous=True)
        value, homes = self.blueprint.value, [self.blueprint.owners[ref.node] for ref, *_ in items]
        reads = [(value(v, home), unit) for (_, v, _, _), unit, home in zip(items, units, homes, strict=True)]
        made = [(value(t, home), unit) for (_, _, t, _), unit, home in zip(items, units, homes, strict=True)]
        self._add_shared(units[0], homes[0], reads, made)

    def _ways(self, values: Sequence[Wanted], limit_bytes: float) -> Iterator[tuple[list[Moved], list[int]]]:
        """The moves of parameters to their placements, as far as they go together, with their places in `values`.

        Those in the memory of the host travel apart.
        """
        hosted = [self.source.host.holds(ref) for ref, *_ in values]
        for on_host in dict.fromkeys(sorted(hosted)):
            places = [n for n, one in enumerate(hosted) if one is on_host]
            for items, numbers in moves_together(self.source, [values[place] for place in places], limit_bytes):
                yield items, [places[number] for number in numbers]

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
        for items, _ in self._ways(gather.values, self.source.gather_limit(of_unit=True)):
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
            self.persistent.append((accumulator, unit))
            self._run(("accumulate", parameter), unit, made.home, self._accumulation, parameter, value, made.name)
            gradient = Gradient(parameter, unit, accumulator)
        if self.last:
            self._synchronise(gradient, made.behind, self.synchronised.append)

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
        """Queue a gradient's next message; full buckets travel at once, and `then` takes what arrives."""
        if not steps:
            then(gradient)
            return
        step, parameter = steps[0], gradient.parameter
        move = self.moves.get((parameter, id(step)))
        if move is None and not isinstance(step.operation, Collective):
            target = self._synchronised_name(parameter, step)
            home = self.blueprint.owners[parameter]
            item = self.source.gradient_ref(parameter), self.blueprint.names[gradient.value], target, step
            key = "move", gradient.value, target
            self._run(key, gradient.unit, home, self._step, [item], Phase.BACKWARD, False)
            moved = Gradient(parameter, gradient.unit, self.blueprint.value(target, home))
            self._synchronise(moved, steps[1:], then)
            return
        if move is None:
            move = self.moves[parameter, id(step)] = self._move_of(parameter, step)
        bucket = move.bucket
        if not bucket.entries:
            self.pending[move.key] = bucket
        bucket.entries.append((gradient, move, steps[1:], then))
        bucket.size_bytes += int(move.payload)
        if len(bucket.entries) == bucket.most or bucket.size_bytes >= bucket.full_bytes:
            self._flush(move.key)

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
        unit = entries[0][0].unit
        # Moves are kept, so that their identities stay theirs.
        key = kind, tuple([(gradient.value, id(move), gradient.unit - unit) for gradient, move, _, _ in entries])
        self._run(key, unit, NOBODY, self._send, kind, entries)
        for (parameter, its_unit, _), move, steps, then in entries:
            gradient = Gradient(parameter, its_unit, move.target)
            if steps:
                self._synchronise(gradient, steps, then)
            else:
                then(gradient)

    def _send(self, key: Kind, entries: Sequence[Entry]) -> None:
        """Write the message of gradients of several units."""
        names = self.blueprint.names
        cast = any(move.narrow_bytes for _, move, _, _ in entries)
        message = Communicate(
            collective=key[0],
            axis=key[1],
            sources=tuple([names[gradient.value] for gradient, _, _, _ in entries]),
            targets=tuple([move.made.name for _, move, _, _ in entries]),
            gather_dims=tuple([move.dims[0] for _, move, _, _ in entries]),
            split_dims=tuple([move.dims[1] for _, move, _, _ in entries]),
            asynchronous=True,
            dtype=key[2] if cast else "",
        )
        head = entries[0][0]
        name = f"{key[0]} gradients of {self.graph.nodes[head.parameter].name}"
        if len(entries) > 1:
            name += f" and {len(entries) - 1} more"
        buffers = tuple([move.made for _, move, _, _ in entries])
        payload = sum([move.payload for _, move, _, _ in entries])
        reads = [(gradient.value, gradient.unit) for gradient, _, _, _ in entries]
        made = [(move.target, gradient.unit) for gradient, move, _, _ in entries]
        home = self.blueprint.owners[head.parameter]
        if not cast:
            self._message(name, Phase.BACKWARD, message, payload, writes=buffers, dtype=key[2], on_host=key[4])
            self._add_shared(head.unit, home, reads, made)
        else:
            packed = self._pack(entries, reads, home)
            self._message(name, Phase.BACKWARD, message, payload, dtype=key[2], on_host=key[4])
            self._add_shared(head.unit, home, [*reads, packed], ())
            came = sum(move.size_bytes for _, move, *_ in entries if move.narrow_bytes)
            axis = self.source.options.mesh.axes[key[1]].name
            task = self._cast_task(f"cast back {name}", came, f"communication:{axis}", on_host=key[4])
            self._add(task, NOTHING, (), buffers)
            self._add_shared(head.unit, home, [packed], made)

    def _pack(self, entries: Sequence[Entry], reads: Sequence[Use], home: int) -> Use:
        """Time the cast of gradients to the type in which they travel; the message that is sent casts them.

        The cast back follows on the message's stream, where it begins when that has ended.
        """
        names, head = self.blueprint.names, entries[0][0]
        packed, stream = (
            f"{names[entries[0][1].target]} as it travels",
            self.came.get(names[head.value], COMPUTE_STREAM),
        )
        narrow = sum(move.narrow_bytes for _, move, *_ in entries)
        on_host = entries[0][1].key[4]
        task = self._cast_task(f"cast {len(entries)} gradients", narrow, stream, on_host=on_host)
        size = 0 if on_host else int(sum(move.payload for _, move, *_ in entries))
        self._add(task, NOTHING, (), (Buffer(name=packed, size_bytes=size, kind=BufferKind.COMMUNICATION),))
        value = self.blueprint.value(packed, home)
        self._add_shared(head.unit, home, reads, [(value, head.unit)])
        return value, head.unit

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
        if self.source.options.offload_optimizer:
            self._through_host()
        if checks_gradients(self.source):
            for block in check_blocks(self.blueprint, [(g.parameter, (g.value, g.unit)) for g in self.synchronised]):
                self.order.extend((*block, NOBODY))
        if self.source.options.optimizer.sums:
            self._begin_updates()
        for gradient in self.synchronised:
            parameter, value = gradient.parameter, gradient.value
            home = self.blueprint.owners[parameter]
            self._run(("update", parameter), gradient.unit, home, self._update_of, parameter, value)

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

    def _begin_updates(self) -> None:
        """Let every shard say its part of the sums, and add them up in one message an axis."""
        for gradient in self.synchronised:
            parameter, home = gradient.parameter, self.blueprint.owners[gradient.parameter]
            self.sums[parameter] = f"{self.graph.nodes[parameter].name}.sums"
            self._run(("begin", parameter), gradient.unit, home, self._begin_of, parameter, gradient.value)
        for message in summed(self.source, [(gradient.parameter, 1) for gradient in self.synchronised]):
            self._add_up(message)

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

    def _add_up(self, message: Summed) -> None:
        """One message of the sums of all parameters that are sharded on its axis."""
        wanted, blueprint, task = set(message.parameters), self.blueprint, message.task
        members = [gradient for gradient in self.synchronised if gradient.parameter in wanted]
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
        reads = [(blueprint.value(before[g.parameter], home), g.unit) for g, home in zip(members, homes, strict=True)]
        made = [(blueprint.value(name, home), g.unit) for name, g, home in zip(after, members, homes, strict=True)]
        self._run_once(members[0].unit, homes[0], reads, made)

    def _through_host(self) -> None:
        """Gradients go to the host, whose memory holds the states, and parameters come back, before any update."""
        source, names = self.source, self.blueprint.names
        moved = [g for g in self.synchronised if g.parameter not in source.host.parameters]
        for task in offloading(source, [(g.parameter, 1) for g in moved]):
            self._add(task, NOTHING, tuple(names[g.value] for g in moved), ())
            self._run_once(NOBODY, NOBODY, [(g.value, g.unit) for g in moved], ())
