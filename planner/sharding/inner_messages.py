"""The collectives inside operators: how often they are sent, how much, and how long an operator waits for them.

Search and lowering time every inner collective by these functions, whatever the operator: the all-reduced
statistics of a synchronised batch norm, what ranks agree on in a softmax over classes that are cut, the keys and
values that go round in ring attention (Liu et al., arXiv:2310.01889), the exchange between sequence and heads (Jacobs
et al., arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import DTYPE_BYTES, Node, OperatorGraph, TensorSpec
from planner.sharding.rule_notation import InnerMessage, Rule
from simulator.program import SUMMED_CLASS, Collective, Kernel, Phase

PAIR = 2
"""Keys and values, or their gradients."""
Amount = TypeVar("Amount", float, NDArray[np.float64])


def summing(rules: Sequence[Rule]) -> NDArray[np.bool_]:
    """Which rules (rules,) have sums over ranks in the middle of their operator."""
    return np.array([rule.reduced_elements > 0 for rule in rules], dtype=np.bool_)


def local_class(node: Node, rules: Sequence[Rule]) -> Kernel:
    """Class of the kernel of one rank's part of an operator."""
    usual = node.timed_as
    summed = SUMMED_CLASS.get(usual, usual)
    return summed if summed is not usual and summing(rules).any() else usual


def bytes_of_sums(node: Node, elements: float) -> float:
    """Bytes of so many numbers that are summed over ranks in the middle of an operator.

    Means and mean squares of a batch norm travel in float64: the difference between the second and the square of the
    first is what is wanted. Sums of gradients travel in the dtype of the result.
    """
    statistics = node.kernel in SUMMED_CLASS and node.phase is Phase.FORWARD
    return elements * DTYPE_BYTES["float64" if statistics else node.outputs[0].dtype]


def inner_messages(rule: Rule) -> tuple[InnerMessage, ...]:
    """List the collectives inside an operator along one mesh axis, in order.

    What goes round behind keys and values, the sums of their gradients, is a piece late, and so in messages of its own.
    """
    found = [one for message in rule.messages for one in _apart(message)]
    if rule.reduced_elements:
        found.insert(0, InnerMessage(Collective.ALL_REDUCE, elements=rule.reduced_elements))
    return tuple(found)


def _apart(message: InnerMessage) -> tuple[InnerMessage, ...]:
    half = len(message.tensors) // 2
    if not message.circulating or half < PAIR:
        return (message,)
    halves = message.tensors[:half], message.tensors[half:]
    return tuple(replace(message, tensors=tensors, together=len(halves)) for tensors in halves)


def message_count(message: InnerMessage, size: int) -> int:
    """How many times in a row a message is sent on an axis of `size` ranks."""
    return size - 1 if message.circulating else 1


def message_bytes(
    graph: OperatorGraph, node: Node, message: InnerMessage, shares: Sequence[Amount], size: int = 1
) -> Amount:
    """Payload in bytes of sending a message once.

    Parameters
    ----------
    shares : sequence
        For each tensor input, then each output: the part of the tensor that is local, as `traffic_bytes` takes it.
    size : int
        Ranks of the axis whose rule has the message; only messages of ``uncut`` tensors ask for it.
    """
    specs = (*(graph.spec(ref) for ref in node.tensor_inputs), *node.outputs)
    total = shares[0] * 0.0
    if message.elements:
        total = total + bytes_of_sums(node, message.elements) * shares[of_channels(node)]
    times = message.gathered * (size if message.uncut else 1)
    for position in message.tensors:
        total = total + shares[position] * (sent_bytes(specs[position], message) * times)
    return total


def of_channels(node: Node) -> int:
    """Number of a tensor of a batch norm that has an element a channel: its mean, or what its gradient reads of it."""
    return len(node.tensor_inputs) + 1 if node.phase is Phase.FORWARD else 2


def sent_bytes(spec: TensorSpec, message: InnerMessage) -> float:
    """Bytes that a whole tensor adds to one rank's payload of a message."""
    widened = max(1.0, DTYPE_BYTES["float32"] / DTYPE_BYTES[spec.dtype]) if message.uncut else 1.0
    return spec.size_bytes * widened / message.divisor


EXCHANGES = (Collective.ALL_TO_ALL, Collective.ALL_GATHER)
"""How an operator exchanges one cut of its tensors for another."""


def without_all_to_alls(rule: Rule, size: int) -> Rule:
    """The rule with an all-gather, of which every rank keeps its piece, for each all-to-all inside the operator."""
    if all(message.collective is not Collective.ALL_TO_ALL for message in rule.messages):
        return rule
    messages = tuple(
        replace(message, collective=Collective.ALL_GATHER, gathered=size)
        if message.collective is Collective.ALL_TO_ALL
        else message
        for message in rule.messages
    )
    return replace(rule, messages=messages)


def waiting_time(message: InnerMessage, size: int, message_s: Amount, work_s: Amount) -> Amount:
    r"""Seconds an operator takes longer because of a message.

    A circulating message that is overlapped travels beside size − 1 of the size equal parts of the work, of which it
    has its share where k messages do: :math:`(n - 1) \max(0, t - w / (k n))`; any other is waited for.

    Parameters
    ----------
    message_s, work_s : float or array
        Seconds of sending the message once, and of the local work of the operator without messages.
    """
    if not message.overlapped:
        return message_s * message_count(message, size)
    part = work_s / ((size if message.circulating else 1) * message.together)
    late = (message_s - part) * message_count(message, size)
    return late * (late > 0)
