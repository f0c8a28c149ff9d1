"""Gradients of micro-batches are added up in place, where that changes nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.execution.machine import Held, Machine, RankContext
from planner.lowering.instructions import Accumulate
from planner.networks import load_network


def machine() -> Machine:
    graph = load_network("py:planner.networks.small:tiny_perceptron").capture()
    context = RankContext(coordinates=(), groups=(), device=torch.device("cpu"))
    return Machine(graph, (), context, (), Held(parameters={}, optimizers={}))


def add_up(subject: Machine, terms: list[Tensor]) -> Tensor:
    """Every micro-batch puts its gradient into one slot, which is freed behind the addition."""
    source = subject.number("gradient")
    for number, term in enumerate(terms):
        subject.slots[source] = term
        (action,) = subject.compile(
            [Accumulate(source="gradient", accumulator="sum", first=number == 0)], [("gradient",)]
        )
        action()
    return subject.value(subject.number("sum"))


def test_sums_stay_where_the_first_gradient_was() -> None:
    terms = [torch.full((4, 4), float(n)) for n in (1, 2, 3)]
    place, others = terms[0].data_ptr(), [term.clone() for term in terms[1:]]
    subject = machine()
    source = subject.number("gradient")
    while terms:
        first = len(terms) == 3
        subject.slots[source] = terms.pop(0)
        (action,) = subject.compile([Accumulate(source="gradient", accumulator="sum", first=first)], [("gradient",)])
        action()
    found = subject.value(subject.number("sum"))
    assert found.data_ptr() == place
    assert torch.equal(found, torch.ones(4, 4) + others[0] + others[1])


def test_what_shares_its_memory_with_another_value_stays_as_it_is() -> None:
    """The first gradient is a view of a value that is read again later, such as that of a residual connection."""
    value = torch.ones(2, 8)
    found = add_up(machine(), [value.view(4, 4), torch.full((4, 4), 2.0), torch.full((4, 4), 3.0)])
    assert torch.equal(value, torch.ones(2, 8))
    assert torch.equal(found, torch.full((4, 4), 6.0))
