"""The operator graph of a decoder from its sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from planner.graph.operator_graph import BatchSize, NetworkInput, OperatorGraph, Parameter
from planner.networks.decoder.derivatives import DERIVATIVES
from planner.networks.decoder.layers import cross_entropy
from planner.networks.decoder.tape import Dims, Tape, TapeTensor

if TYPE_CHECKING:
    from planner.networks.inputs import InputSpec


class Decoder(Protocol):
    """Sizes of a decoder, and how its module is written down."""

    @property
    def tied(self) -> tuple[str, ...]:
        """All names of the one parameter that has several; may be empty."""

    def parameters(self, blocks: int) -> Iterator[tuple[str, Dims]]:
        """Names and dims of the parameters, tied ones once, in the module's order."""

    def logits(self, tape: Tape, tokens: TapeTensor, blocks: int) -> TapeTensor:
        """Write the forward pass of tokens ``(batch, length)``."""


def decoder_graph(
    decoder: Decoder, blocks: int, inputs: Sequence[InputSpec], *, name: str, notes: tuple[str, ...]
) -> OperatorGraph:
    """Write one training step of a decoder of so many blocks at batch 1, nothing folded."""
    tape = Tape()
    for parameter, dims in decoder.parameters(blocks):
        tape.parameter(parameter, dims)
    aliases = dict.fromkeys(decoder.tied[1:], tape.parameters[decoder.tied[0]]) if decoder.tied else {}
    names = dict(tape.parameters)
    tape.parameters.update(aliases)
    values = [tape.input(spec.name, (BatchSize(1), *spec.shape), spec.dtype) for spec in inputs]
    loss = cross_entropy(tape, decoder.logits(tape, values[0], blocks), values[1])
    tape.backward(loss, DERIVATIVES)
    return OperatorGraph(
        network=name,
        fingerprint="",
        batch_size=1,
        nodes=tuple(tape.nodes),
        parameters=tuple(
            Parameter(
                name=parameter,
                node=value.ref.node,
                gradient=tape.gradients[value.ref].ref,
                aliases=decoder.tied[1:] if decoder.tied[:1] == (parameter,) else (),
            )
            for parameter, value in names.items()
        ),
        inputs=tuple(
            NetworkInput(name=spec.name, node=value.ref.node, kind=spec.kind, high=spec.high)
            for spec, value in zip(inputs, values, strict=True)
        ),
        loss=loss.ref,
        notes=notes,
    )
