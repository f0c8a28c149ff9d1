"""Messages beside computation are finished as soon as they have arrived, and give their memory back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from planner.execution.machine import Held, Machine, RankContext
from planner.lowering.instructions import Communicate, Slice
from planner.networks import load_network
from simulator.program import Collective


@dataclass(eq=False)
class Wire:
    """Stands for a group of one: what was sent stands here until its message is released, as in a library."""

    arrived: bool = True
    sent: list[weakref.ref[Work]] = field(default_factory=list)

    def size(self) -> int:
        """Ranks of the group."""
        return 1

    def send(self, message: Tensor, **_: Any) -> Work:
        """Begin a collective."""
        work = Work(self, message)
        self.sent.append(weakref.ref(work))
        return work

    @property
    def held(self) -> int:
        """Messages whose memory stands."""
        return sum(ref() is not None for ref in self.sent)


class Work:
    """A collective under way."""

    def __init__(self, wire: Wire, message: Tensor) -> None:
        self.wire, self.message, self.waits = wire, message, 0

    def is_completed(self) -> bool:
        """Whether waiting takes no time."""
        return self.wire.arrived

    def wait(self) -> None:
        """Wait for the end; nobody waits twice."""
        self.waits += 1
        assert self.waits == 1


def gradients(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, count: int = 4, *, beside: bool = True
) -> tuple[Machine, list[Any]]:
    """A rank that all-reduces so many gradients one after the other and reads the first of them at the end."""
    monkeypatch.setattr(dist, "all_reduce", wire.send)
    graph = load_network("py:planner.networks.small:tiny_perceptron").capture()
    context = RankContext(coordinates=(0,), groups=(wire,), device=torch.device("cpu"))  # type: ignore[arg-type]
    subject = Machine(graph, (1,), context, (), Held(parameters={}, optimizers={}))
    messages = [
        Communicate(collective=Collective.ALL_REDUCE, axis=0, sources=(f"gradient{n}",), targets=(f"sum{n}",),
                    gather_dims=(-1,), split_dims=(-1,), asynchronous=beside)
        for n in range(count)
    ]  # fmt: skip
    reader = Slice(source="sum0", target="own", axis=0, dim=0, cut=None)
    releases = [*((f"gradient{n}",) for n in range(count)), ()]
    return subject, subject.compile([*messages, reader], releases)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(("arrived", "most"), [(True, 1), (False, 4)])
def test_what_has_arrived_gives_its_memory_back_before_the_next_is_sent(
    arrived: bool, most: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for a message before its first use, as in the simulated step, however soon that comes."""
    wire = Wire(arrived=arrived)
    subject, actions = gradients(wire, monkeypatch, beside=beside)
    for _ in range(2):  # steps
        for n in range(4):
            subject.slots[subject.number(f"gradient{n}")] = torch.full((8,), float(n))
        held = []
        for action in actions:
            action()
            held.append(wire.held)
        assert max(held) == most
        assert wire.held == 0
        assert [float(subject.value(subject.number(f"sum{n}"))[0]) for n in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert len(wire.sent) == 8
