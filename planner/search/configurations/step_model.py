"""The closed form of one training step: what the search over configurations minimises.

Seconds of a step of M micro-batches on p pipeline ranks::

    sum over chunks fill  +  sum over turns max over ranks (M (F + B + stall) - fill + once)

F and B are the passes of a chunk, messages inside the stage mesh, sums over the batch inside operators and
recomputation included; the fill is what `planner.search.configurations.schedule_shapes` says of the schedule, for a
rank computes nothing again before it has the gradient; a turn is one chunk of each rank. Turns that are unequally long
may even out: what the schedule says of them is simulated pass by pass, but no rank takes less than all of its chunks.
``once`` is what a rank does once a step:

* its optimizer update, on the part of the states that it holds, and, where those live in the memory of the host,
  gradients on their way there and parameters on their way back;
* what the gathers of parameters expose: those inside the stage mesh and, with ZeRO-1 and 2, those over the data axis
  hide behind the forward passes of their units, but for the first message;
* what the sums of gradients expose: messages start behind the backward pass of their unit in the last micro-batch, one
  after the other, those over the data axis behind those inside the stage mesh. A parameter travels whole, others in
  messages as large as a bucket, or as a chunk has gradients: each has its latency, and the last one is exposed.

With several micro-batches every one but the first adds its gradients to those before, a kernel for each parameter,
with weight gradients where those are put off.
ZeRO-2 reduce-scatters every micro-batch's gradients in buckets, ZeRO-3 those of a unit in one message, and gathers a
unit's parameters in one before its forward and its backward pass, over the data axis and inside the stage mesh: a pass
of a unit takes as long as the longer of its work and its messages (`.passes`: in pipelines, of the work beside them).
They take turns with the messages inside passes that have the same stream, one for each axis, in pipelines one for all,
and hide behind the rest of the pass, on one stage behind the part of it before the first of those: what began before
holds it up. Sums over the batch travel as states are shared: where a part of the data axis
shares them, inside that part and then over its groups. Where weight gradients are put off, operators that make both
kinds of gradients are launched once for each, half of their work late.
GPipe's stand between others of their kind (`.passes.Row`), and its ends of chunks are exposed once a step.
No pass is shorter than the launches of its kernels (`simulator.launches`). ``stall`` is what ZeRO-3 exposes between the
passes of a chunk (the scatter and the gather of its first unit), and by how much the sum of the loss takes longer than
the passes beside it; else that slows these alone. What happens at both ends of a chunk is shared out over the units, so
that the objective stays a sum. A message slows the kernels beside it: with l seconds of work lost in each
(`Hardware.lost_to_messages`), W of work and m of messages that it hides take ``max(W + l m, m)``. Nothing else
overlaps, and links are shared as `simulator.topology` has it for groups of one kind.

Memory of a rank: parameters, gradients and optimizer states, each whole or sharded by the ZeRO level; parameters that
are gathered for the step; gradients as large as operators write them before they are summed; activations of the
micro-batches in flight; what stands while one unit goes backward: gradients on their way, gathered parameters, and
the term of a tied parameter that waits for the others. In schedules that put weight gradients off, micro-batches in
flight have gone forward only, or wait for those with what they read, at whatever instant takes most. Of software with a
name, what layers keep, the sums of gradients and buffers are those of `planner.cost.memory` (`.storage.Held`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.work import NARROW_RANGE
from planner.graph.operator_graph import DTYPE_BYTES
from planner.graph.recompute import MODES
from planner.search.configurations.configuration import AXES, Configuration, unstored
from planner.search.configurations.messages import DataMessages, sends_s, told_s, unit_sums_s, whole_sums_s
from planner.search.configurations.passes import Row, beside, paced_passes, passes_beside_messages
from planner.search.configurations.schedule_shapes import SPLIT, ScheduleShape, schedule_shape
from planner.search.configurations.storage import Storage, Storages, scatters_each
from planner.search.configurations.stored_ways import (
    JoinedUnits,
    StoredWays,
    Surroundings,
    Tied,
    joined_units,
    merged,
    uneven_passes_s,
)
from planner.search.stages.fragments import ACTIVATION, STEADY, TRANSIENT, FloatArray, Fragments, IntArray
from planner.search.stages.task import PartitionTask
from planner.search.stages.unit_pins import FREE, UnitPins
from simulator.launches import send_stall
from simulator.program import Collective
from simulator.timing import host_time
from simulator.topology import neighbour_distances

if TYPE_CHECKING:
    from planner.search.units.labels import StageTables, UnitLabels

Passes = tuple[FloatArray, FloatArray, FloatArray, FloatArray, tuple[Row | None, ...]]
"""Both passes of units, what may be put off, what is exposed at the ends of chunks, and passes in a row."""

__all__ = ["AXES", "Configuration", "StepModel", "StoredWays"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepModel(Storage):
    """Turns labels into fragments and partition tasks of a configuration.

    ``unit_pins`` are what is fixed of single units. ``gradient_dtype`` is what gradients are summed in, empty for that
    of the parameters; with ``whole_sums`` ZeRO-1 sums them whole; with ``own_samples`` operators over the batch see the
    samples of one rank alone.
    """

    bucket_bytes: float
    unit_pins: UnitPins = FREE
    gradient_dtype: str = ""
    whole_sums: bool = False
    own_samples: bool = False

    def task(self, tables: StageTables, configuration: Configuration) -> PartitionTask:
        """The partition task of a configuration."""
        return self.tasks(tables, [configuration])[0]

    def tasks(self, tables: StageTables, configurations: Sequence[Configuration]) -> list[PartitionTask]:
        """Partition tasks of a placed configuration whose states are stored in several ways, alike on the host or not.

        Those differ in the values of their ways alone, but where neighbouring units that are alike in one are not in
        another.
        """
        found, together = dict[Configuration, PartitionTask](), dict[int, list[Configuration]]()
        for configuration in configurations:
            shared = configuration.shard_size if tables.decisions.sums_over_batch else 0
            together.setdefault(shared, []).append(configuration)
        for ways in together.values():
            joined = self.joined(tables, ways[0])
            stored = self.stored(joined.labels, Storages.of(ways), joined.whole, joined.trained)
            shape = self.shape(ways[0], together=self.ends_together(tables, ways[0]))
            values = stored.values(shape, ways[0].micro_batches)
            for number, way in enumerate(ways):
                found[way] = self._task(tables, way, joined, stored.of(number), values[number])
        return [found[configuration] for configuration in configurations]

    def _task(
        self,
        tables: StageTables,
        configuration: Configuration,
        joined: JoinedUnits,
        stored: StoredWays,
        values: FloatArray,
    ) -> PartitionTask:
        """The partition task of ways whose `StoredWays.values` are given."""
        shape = self.shape(configuration, together=self.ends_together(tables, configuration))
        modes, rows = [unit.recompute for unit in joined.units], [unit.count for unit in tables.chain.units]
        on_host = partial(self._on_host, micro_batches=configuration.micro_batches)
        kinds, counts = merged(*self.unit_pins.apart(joined.fragments(values), rows, modes, on_host))
        return replace(
            self.unlimited_task(tables, configuration, kinds, counts),
            limit_bytes=self.room_bytes(configuration),
            cuts=self.unit_pins.cuts,
            apart_s=joined.step_s(stored, self.hardware, tables, configuration, shape),
        )

    def unlimited_task(
        self, tables: StageTables, c: Configuration, kinds: Sequence[Fragments], counts: Sequence[int]
    ) -> PartitionTask:
        """The partition of some ways under the schedule of a configuration, without its memory limit and pins."""
        together = self.ends_together(tables, c)
        shape = self.shape(c, together=together)
        return PartitionTask(
            kinds=tuple(kinds),
            counts=tuple(counts),
            sends_s=self.sends_s(tables, c),
            fill_sends=shape.fill_sends,
            steady_sends=shape.steady_sends,
            ranks=c.pipeline,
            chunks=c.virtual,
            rank_of=shape.rank_of,
            in_flight=shape.in_flight,
            limit_bytes=np.inf,
            hidden_share=shape.hidden_share,
            still_sends=shape.still_sends,
            uneven_s=partial(uneven_passes_s, c, together) if c.virtual > 1 else None,
        )

    def joined(self, tables: StageTables, configuration: Configuration) -> JoinedUnits:
        """The ways of all units with what depends on the whole pipeline and the data axis."""
        placed = unstored(configuration)
        if configuration.shard_size and tables.decisions.sums_over_batch:
            placed = replace(placed, shard_size=configuration.shard_size)
        return _joined(self, tables, placed)

    def _on_host(self, ways: Fragments, micro_batches: int) -> Fragments:
        """Ways of a unit whose activations wait on the host: copies hide behind passes, two units' stand at once."""
        values = ways.values.copy()
        kept = values[:, ACTIVATION].copy()
        there_s = host_time(self.hardware, kept, copies=0.0)
        values[:, STEADY] = np.maximum(values[:, STEADY], 2.0 * micro_batches * there_s)
        values[:, TRANSIENT] += 2.0 * kept
        values[:, ACTIVATION] = 0.0
        return replace(ways, values=values)

    def kernels_s(
        self, labels: UnitLabels, configuration: Configuration, trained: int | IntArray = 1
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds (ways,) of the kernels of a micro-batch in their stream, and of the update."""
        c, storages = configuration, Storages.of([configuration])
        elements = labels.parameter_elements + labels.expert_elements
        passes = sum(paced_passes(self.hardware, labels, split=c.schedule in SPLIT)[:2])
        kernels = passes - labels.forward_communication_s - labels.backward_communication_s
        if not scatters_each(c):
            kernels = kernels + self.accumulation_s(labels, elements, storages, trained)[0]
        return kernels + self._cuts_s(labels, storages)[0][0], self.update_s(elements, storages, trained)[0]

    def shape(self, configuration: Configuration, *, together: bool = False) -> ScheduleShape:
        """The schedule in numbers, with ranks that end a step ``together`` or not."""
        c = configuration
        overlaps, stall = self.hardware.overlaps_communication, send_stall(self.hardware)
        return schedule_shape(
            c.schedule, c.pipeline, c.virtual, c.micro_batches, overlaps=overlaps, stall=stall, together=together
        )

    def ends_together(self, tables: StageTables, configuration: Configuration) -> bool:
        """Whether the first and the last rank wait for each other at the end of a step.

        They tell each other in float16 whether gradients are numbers, and sum those of a parameter that both read.
        """
        if configuration.pipeline == 1:
            return False
        tied = any(tied.trained for tied in tables.tied) and _tied_at(self, configuration) is Tied.APART
        return self.dtype == NARROW_RANGE or tied

    def stored(
        self, labels: UnitLabels, storages: Storages, whole: Surroundings, trained: int | IntArray = 1
    ) -> StoredWays:
        """The ways of units with states stored in several ways, `trained` parameters in the unit of each.

        Of the schedule it matters how backward passes are split, and how many chunks there are.
        """
        c, lost, last = storages.placed, self.hardware.lost_to_messages, np.asarray(labels.exit) < 0
        elements, messages = labels.parameter_elements + labels.expert_elements, self._messages(whole, storages)
        forward_s, backward_s, late_s, stall_s, rows = self._passes(labels, elements, messages, whole, trained)
        loss_s = np.array([[told_s(self.hardware, c.data, c.stride("data"), way.shard_size)] for way in storages.ways])
        ends = c.pipeline * c.virtual / whole.units
        stall_s = stall_s + np.maximum(0.0, ends * loss_s - forward_s - backward_s)
        forward_s = forward_s + np.where(last, lost * loss_s, 0.0)
        sync_s, last_s = self._synchronisation_s(labels, elements, messages, trained)
        behind = (1 - lost) * sync_s + np.where(last, loss_s, 0.0)
        if self.hardware.overlaps_communication:
            behind = behind - (backward_s - _taking_turns_s(labels, c)[1])
        kept = labels.activation_bytes
        if c.schedule in SPLIT:
            kept = self.shape(c).held_bytes(kept, labels.waiting_bytes)
        return StoredWays(
            forward_s=forward_s,
            backward_s=backward_s,
            late_s=late_s,
            stall_s=stall_s,
            once_s=self._once_s(labels, elements, forward_s, messages, trained)
            + lost * sync_s
            + c.pipeline / whole.units * (1 - lost) * messages.first_gather_s(),
            queue_s=np.maximum(behind, (1 - lost) * last_s),
            backlog_s=behind,
            activation_bytes=kept,
            resident_bytes=self.resident_bytes(labels, storages),
            transient_bytes=labels.transient_bytes + self.gathered_bytes(labels, storages, messages.bucket),
            rows=rows,
        )

    def sends_s(self, tables: StageTables, configuration: Configuration) -> FloatArray:
        """(units - 1, states) seconds of an activation and of its gradient over a cut, the mean of all neighbours."""
        c = configuration
        return sends_s(self.hardware, tables, neighbour_distances(self.hardware, c.pipeline, c.stride("pipeline")))

    # Data parallelism

    def _messages(self, whole: Surroundings, storages: Storages) -> DataMessages:
        """Messages of what a chunk sends, in as few as the size of a bucket allows."""
        c = storages.placed
        sent = whole.elements / (c.pipeline * c.virtual) * DTYPE_BYTES[self.dtype]
        buckets = [way.bucket_bytes or self.bucket_bytes for way in storages.ways]
        return DataMessages(
            hardware=self.hardware,
            storages=storages,
            bucket=np.array([[max(1.0, sent / max(1, ceil(sent / bucket)))] for bucket in buckets]),
            element_bytes=DTYPE_BYTES[self.dtype],
            summed_bytes=DTYPE_BYTES[self.gradient_dtype or self.dtype],
            whole_sums=self.whole_sums,
        )

    def _synchronisation_s(
        self, labels: UnitLabels, elements: FloatArray, messages: DataMessages, trained: int | IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds (storages, ways) of the sums of gradients, once a step, and of the last message of them."""
        storages, size = messages.storages, np.maximum(elements * DTYPE_BYTES[self.dtype], 1.0)
        full, once = messages.bucket / DTYPE_BYTES[self.dtype], ~(storages.whole | storages.each)
        data_s, alone = messages.reduced_s(elements), messages.reduced_s(full)
        if once.any():
            data_s = data_s + messages.scattered_s(self._written(labels, elements), once)
            alone = alone + messages.scattered_s(full, once)
        inside_s = self._inside_sums(labels, storages)[1]
        # Where stages follow one another their ranks have one stream of messages beside the passes, else one an axis.
        sync_s = data_s + inside_s if storages.placed.pipeline > 1 else np.maximum(data_s, inside_s)
        # A parameter travels whole.
        part = np.minimum(1.0, np.maximum(messages.bucket, size / trained) / size)
        return sync_s, np.where(elements > 0, np.maximum(alone, sync_s * part), 0.0)

    @staticmethod
    def _written(labels: UnitLabels, elements: FloatArray) -> FloatArray:
        """Elements of gradients as they are scattered over the data axis, which comes before the axes of the stage.

        Those that nothing sums inside the stage are cut first.
        """
        return elements + np.where(labels.step_s > labels.gather_s, labels.unsummed_elements, 0.0)

    @staticmethod
    def _inside_sums(labels: UnitLabels, storages: Storages) -> tuple[FloatArray, FloatArray]:
        """Seconds of the sums of gradients inside the stage mesh: of every micro-batch, and once a step.

        Sharded gradients are summed shard by shard. Where every micro-batch's are scattered, the last scattering of a
        gradient is the last thing done at once. Parameters that are gathered inside the stage are those whose
        gradients are scattered there, which takes as long.
        """
        sums = labels.step_s - labels.gather_s
        scattered = np.where(storages.each, np.minimum(labels.gather_s, sums), 0.0)
        return scattered / storages.shards, (sums - scattered) / storages.shards

    @staticmethod
    def _cuts_s(labels: UnitLabels, storages: Storages) -> tuple[FloatArray, FloatArray]:
        """Seconds in which whole gradients are cut to the parts that are stored: every micro-batch, and once a step.

        What is scattered over the data axis is cut before, unless it has one dim, which that axis cuts first.
        """
        each_s = np.where(storages.each, labels.cut_s, 0.0)
        return each_s, np.where(storages.each, labels.cut_last_s, labels.cut_s + labels.cut_last_s)

    def _passes(
        self,
        labels: UnitLabels,
        elements: FloatArray,
        messages: DataMessages,
        whole: Surroundings,
        trained: int | IntArray,
    ) -> Passes:
        """Passes with the messages of every micro-batch, what may be put off, and what is exposed at ends of chunks."""
        storages, c = messages.storages, messages.storages.placed
        forward_s, backward_s, late_s = paced_passes(self.hardware, labels, split=c.schedule in SPLIT)
        backward_s = backward_s + self._cuts_s(labels, storages)[0]
        inside_s = self._inside_sums(labels, storages)[0]
        accumulation = self.accumulation_s(labels, elements, storages, trained)
        found = np.zeros((4, *backward_s.shape))
        rows: list[Row | None] = [None] * len(storages.ways)
        found[0], found[1], found[2] = forward_s, backward_s + accumulation, late_s + accumulation
        scattering = storages.each & ~storages.zero3
        if scattering.any():
            scatter = messages.scattered_s(self._written(labels, elements), scattering) + inside_s
            turns_s, sums = _taking_turns_s(labels, c)[1], labels.backward_sums if c.pipeline == 1 else 0.0
            part = np.minimum(1.0, elements * DTYPE_BYTES[self.dtype] / messages.bucket)
            scattered = beside(self.hardware, backward_s, scatter + accumulation, turns_s, sums, part)
            found[1] = np.where(scattering, scattered, found[1])
        gathering = storages.zero3[:, 0]
        if gathering.any():
            gather, scatter = self._unit_messages(labels, elements, messages)
            scatter = scatter + inside_s[gathering] + accumulation[gathering]
            passes_s = (forward_s, backward_s[gathering], late_s)
            *sharded, row = self._passes_gathering(labels, passes_s, (gather, scatter), messages, whole)
            for seconds, kind in zip(found, sharded, strict=True):
                seconds[gathering] = kind
            for number, place in enumerate(np.flatnonzero(gathering).tolist()):
                rows[place] = None if row is None else row.of(number)
        return found[0], found[1], found[2], found[3], tuple(rows)

    def _unit_messages(
        self, labels: UnitLabels, elements: FloatArray, messages: DataMessages
    ) -> tuple[FloatArray, FloatArray]:
        """(ZeRO-3, ways) seconds in which the parameters of a unit are gathered and its gradients scattered."""
        size = elements * DTYPE_BYTES[self.dtype]
        read = size + labels.frozen_elements * DTYPE_BYTES[self.dtype]
        sent = np.where(size > 0, self._written(labels, elements) * DTYPE_BYTES[self.dtype], 0.0)
        gather = messages.of_units_s(Collective.ALL_GATHER, read)
        return gather + labels.gather_s, messages.of_units_s(Collective.REDUCE_SCATTER, sent)

    def _passes_gathering(
        self,
        labels: UnitLabels,
        passes_s: tuple[FloatArray, FloatArray, FloatArray],
        messages_s: tuple[FloatArray, FloatArray],
        messages: DataMessages,
        whole: Surroundings,
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, Row | None]:
        """`_passes` of units whose parameters are gathered for each, (ZeRO-3, ways).

        Between a backward pass and the next one stand the scatter and the gather of the first unit of a chunk.
        """
        c, hardware = messages.storages.placed, self.hardware
        if c.pipeline > 1 and hardware.overlaps_communication:
            return self._passes_of_stages(labels, passes_s, messages_s, messages, whole)
        (forward_s, backward_s, late_s), (gather, scatter) = passes_s, messages_s
        if c.schedule in SPLIT:
            early_s = beside(hardware, backward_s - late_s, gather, labels.backward_sums_s)
            late_s = beside(hardware, late_s, scatter)
            backward_s = early_s + late_s
        else:
            backward_s = beside(hardware, backward_s, gather + scatter, labels.backward_sums_s, labels.backward_sums)
        first, last = np.asarray(labels.entry) < 0, np.asarray(labels.exit) < 0
        exposed = np.where(first, 1.0, whole.inner_ends(c)) * (scatter + gather)
        exposed = exposed + np.where(last, gather, 0.0)
        if not hardware.overlaps_communication:
            exposed = np.zeros_like(exposed)
        exposed = (1 - hardware.lost_to_messages) * exposed
        forward_s = beside(hardware, forward_s, gather, labels.forward_sums_s, labels.forward_sums)
        return forward_s, backward_s, late_s, exposed, None

    def _passes_of_stages(
        self,
        labels: UnitLabels,
        passes_s: tuple[FloatArray, FloatArray, FloatArray],
        messages_s: tuple[FloatArray, FloatArray],
        messages: DataMessages,
        whole: Surroundings,
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, Row | None]:
        """`_passes_gathering` of units whose parameters a rank of a pipeline gathers one unit ahead."""
        c, first, last = messages.storages.placed, np.asarray(labels.entry) < 0, np.asarray(labels.exit) < 0
        lost, inside_s = self.hardware.lost_to_messages, _taking_turns_s(labels, c)
        ends_s = np.where(first, 1.0, whole.inner_ends(c)) * (1 - lost) * sum(messages_s)
        if c.in_a_row:
            modes = np.asarray(labels.recompute)
            full = modes == MODES.index("full")
            row = Row(
                forward_s=passes_s[0], backward_s=passes_s[1], gather=messages_s[0],
                again=np.where(first & ~full, 0.0, messages_s[0]), scatter=messages_s[1], inside_s=inside_s,
                recomputes=modes != MODES.index("none"), lost=lost,
            )  # fmt: skip
            return *row.alone(first, whole.usual_s[0]), passes_s[2], ends_s / c.micro_batches, row
        usual = max(1.0, whole.usual_elements * DTYPE_BYTES[self.dtype])
        found_s = passes_beside_messages(
            passes_s, messages_s, (first, last), (*whole.usual_s, messages.usual_gather_s(usual)),
            split=c.schedule in SPLIT, inside_s=inside_s, lost=lost,
        )  # fmt: skip
        return *found_s, ends_s, None

    def _once_s(
        self,
        labels: UnitLabels,
        elements: FloatArray,
        forward_s: FloatArray,
        messages: DataMessages,
        trained: int | IntArray,
    ) -> FloatArray:
        """Seconds of the update, of the way to the host and back, and what gathering parameters exposes."""
        hardware, storages = self.hardware, messages.storages
        seconds = self.update_s(elements, storages, trained) + self._cuts_s(labels, storages)[1]
        gather = labels.gather_s + messages.gathered_s(elements, ~(storages.whole | storages.zero3))
        hidden = forward_s - _taking_turns_s(labels, storages.placed)[0] if hardware.overlaps_communication else 0.0
        exposed = np.maximum(gather - hidden, hardware.lost_to_messages * gather)
        return np.where(elements > 0, seconds + np.where(storages.zero3, 0.0, exposed), labels.step_s)

    def batch_sums_s(self, tables: StageTables, configuration: Configuration, *, least: bool = False) -> FloatArray:
        """(units, 2) seconds of the sums over the batch that operators wait for, forward and backward.

        With what operators that sum in their middle take longer than in one piece, cut by the whole tensor axis. The
        ``least`` are those of any number of ranks that share states.
        """
        c = configuration
        if c.data == 1 or self.own_samples or not tables.decisions.sums_over_batch:
            return np.zeros((len(tables.chain.units), 2))
        shards = None if least else c.shard_size
        return unit_sums_s(self.hardware, tables, c.data, c.stride("data"), shards, c.tensor, c.devices)

    def whole_batch_sums_s(self, tables: StageTables, configuration: Configuration, *, least: bool = False) -> float:
        """Seconds of `batch_sums_s` of the whole network."""
        c = configuration
        if c.data == 1 or not tables.decisions.sums_over_batch:
            return 0.0
        shards = None if least else c.shard_size
        return whole_sums_s(self.hardware, tables, c.data, c.stride("data"), shards, c.tensor, c.devices)


def _taking_turns_s(labels: UnitLabels, c: Configuration) -> tuple[FloatArray, FloatArray]:
    """Seconds (ways,) of the messages inside both passes with which those over the data axis take turns.

    Where stages follow one another their ranks have one stream of messages, else one an axis.
    """
    if c.pipeline > 1:
        return labels.forward_communication_s, labels.backward_communication_s
    return labels.forward_sums_s, labels.backward_sums_s


@lru_cache(maxsize=4)
def _joined(model: StepModel, tables: StageTables, placed: Configuration) -> JoinedUnits:
    """The units of a placed configuration: it is stored in several ways one after the other."""
    joined = joined_units(tables, _tied_at(model, placed) if tables.tied else Tied.TOGETHER, DTYPE_BYTES[model.dtype])
    layer = joined.units[int(np.argmax(tables.counts))]
    kept = model.software.kept_bytes(joined.labels, layer, placed)
    joined = replace(joined, labels=replace(joined.labels, activation_bytes=kept))
    return joined.waiting(model.batch_sums_s(tables, placed), tables.decisions.batch_sums)


def _tied_at(model: StepModel, c: Configuration) -> Tied:
    if c.pipeline == 1:
        return Tied.SUMMED if c.micro_batches > 1 else Tied.ONCE
    rank_of = model.shape(c).rank_of
    return Tied.APART if rank_of[0] != rank_of[-1] else Tied.TOGETHER
