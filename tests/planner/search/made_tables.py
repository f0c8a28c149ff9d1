"""Tables of labels made up for tests: a few blocks between two ends, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import numpy as np

from planner.graph.chain import Boundary, Chain, Unit
from planner.graph.operator_graph import TensorRef
from planner.search.configurations.step_model import Configuration
from planner.search.units.labels import BoundaryStates, StageTables, TiedParameter, UnitLabels
from planner.search.units.records import Least
from simulator.corrections import message_time
from simulator.hardware import Hardware
from simulator.program import Collective
from simulator.topology import group_shape


@dataclass(frozen=True, kw_only=True)
class MadeUnit:
    """One unit: seconds of its passes on one device for one sample, bytes, elements, and how often it stands."""

    forward_s: float
    activation_bytes: float
    elements: float
    count: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class MadeTables:
    """What the search reads of `StageTables`."""

    chain: Chain
    units: tuple[UnitLabels, ...]
    boundaries: tuple[BoundaryStates, ...]
    tied: tuple[TiedParameter, ...]
    modes: tuple[int, ...] = (0, 1, 2)
    parts: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(graph=SimpleNamespace(trained=frozenset())))
    decisions: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(batch_sums=(), sums_over_batch=False))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many units each unit of the chain stands for."""
        return tuple(unit.count for unit in self.chain.units)

    @property
    def launches_s(self) -> np.ndarray:
        """Least seconds of the launches of both passes of every unit."""
        return np.zeros(len(self.units))

    @property
    def least_elements(self) -> np.ndarray:
        """Least elements of every unit."""
        return np.array([unit.parameter_elements.min() for unit in self.units])

    @property
    def least_frozen(self) -> np.ndarray:
        """Least elements of frozen parameters of every unit: none."""
        return np.zeros(len(self.units))

    @property
    def saved_bytes(self) -> float:
        """Bytes that may be kept."""
        return float(np.array([unit.activation_bytes[0] for unit in self.units]) @ np.array(self.counts))

    @property
    def priced(self) -> tuple[np.ndarray, np.ndarray]:
        """Least passes with the price of what they keep."""
        prices = np.array([0.1, 0.3, 1.0]) * self.least.whole_s / self.saved_bytes
        seconds = [
            sum(
                count * float((unit.forward_s + unit.backward_s + price * unit.activation_bytes).min())
                for unit, count in zip(self.units, self.counts, strict=True)
            )
            for price in prices.tolist()
        ]
        return prices, np.array(seconds)

    @property
    def least(self) -> Least:
        """Least passes of every unit and of the network; there is one state between any two units."""
        seconds = [float((unit.forward_s + unit.backward_s).min()) for unit in self.units]
        whole_s = float(np.array(seconds) @ np.array(self.counts))
        return Least(between_s=tuple(np.full((1, 1), s) for s in seconds), whole_s=whole_s, shared={})


def labels(unit: MadeUnit, samples: float, message_s: float, first: bool, last: bool) -> UnitLabels:
    """Three labels: everything kept, a part computed again, all of it computed again."""
    passes = (unit.forward_s * samples + message_s) * np.ones(3)
    again = np.array([0.0, 0.1, 1.0]) * passes
    kept = unit.activation_bytes * samples * np.array([1.0, 0.5, 0.1])
    nothing = np.zeros(3)
    return UnitLabels(
        forward_s=passes,
        backward_s=2 * passes + again,
        forward_communication_s=nothing,
        backward_communication_s=nothing,
        activation_bytes=kept,
        transient_bytes=unit.activation_bytes * samples - kept,
        waiting_bytes=kept,
        again_s=again,
        late_s=passes,
        forward_launches=nothing,
        backward_launches=nothing,
        halved=nothing,
        forward_sums_s=nothing,
        backward_sums_s=nothing,
        forward_sums=nothing,
        backward_sums=nothing,
        step_s=nothing,
        gather_s=nothing,
        cut_s=nothing,
        cut_last_s=nothing,
        parameter_elements=np.full(3, unit.elements),
        expert_elements=nothing,
        frozen_elements=nothing,
        gathered_elements=nothing,
        unsummed_elements=nothing,
        recompute=np.arange(3),
        entry=np.full(3, -1 if first else 0),
        exit=np.full(3, -1 if last else 0),
        assignments=({}, {}, {}),
    )


def made_tables(
    units: Sequence[MadeUnit], configuration: Configuration, hardware: Hardware, boundary_bytes: float = 1e7
) -> StageTables:
    """Tables of a mesh on which the tensor axis splits everything evenly and sums every unit's result twice."""
    tensor, samples = configuration.tensor, configuration.micro_batch / configuration.tensor
    group = group_shape(hardware, tensor, configuration.stride("tensor"))
    payload = np.array([boundary_bytes * configuration.micro_batch])
    message = float(message_time(hardware, Collective.ALL_REDUCE, payload, group)[0]) if tensor > 1 else 0.0
    split = [replace(u, elements=u.elements / tensor) for u in units]
    named = tuple(
        Unit(name=f"unit{n}", nodes=(), run=0 if u.count > 1 else None, count=u.count) for n, u in enumerate(units)
    )
    crossing = BoundaryStates(
        forward=((),),
        backward=((),),
        forward_bytes=np.array([boundary_bytes * configuration.micro_batch]),
        backward_bytes=np.array([boundary_bytes * configuration.micro_batch]),
    )
    between = tuple(Boundary(forward=TensorRef(0), gradient=TensorRef(0)) for _ in named[1:])
    made = MadeTables(
        chain=Chain(units=named, boundaries=between, heads=(("blocks", 0),)),
        units=tuple(labels(u, samples, 2 * message, n == 0, n == len(split) - 1) for n, u in enumerate(split)),
        boundaries=tuple(crossing for _ in between),
        tied=(),
    )
    return cast(StageTables, made)
