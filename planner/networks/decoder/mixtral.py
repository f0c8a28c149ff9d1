"""Mixtral on a tape: the zoo's module, and that of transformers as the capture changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.graph.operator_graph import PLACES, BatchSize
from planner.networks.decoder import layers as write
from planner.networks.decoder.llama import HuggingFaceLlama, ZooLlama
from planner.networks.decoder.operators import bmm, elementwise, expand, transpose, unsqueeze, view
from planner.networks.decoder.tape import Dims, Tape, TapeTensor, TensorShape, elements, size
from planner.networks.zoo.configs import MixtralConfig, places_of
from simulator.program import Kernel


def choose_experts(tape: Tape, logits: TapeTensor, chosen: int) -> tuple[TapeTensor, TapeTensor]:
    """Write the weights and numbers ``(tokens, chosen)`` of each token's best experts."""
    shares = tape.call("_softmax.default", logits, -1, False, dims=logits.dims, kernel=Kernel.SOFTMAX)
    dims = (logits.dims[0], chosen)
    shapes = (TensorShape(dims=dims), TensorShape(dims=dims, dtype="int64"))
    best, index = tape.emit("topk.default", (shares, chosen), shapes, kernel=Kernel.REDUCTION)
    total = tape.call("sum.dim_IntList", best, (-1,), True, dims=(dims[0], 1), kernel=Kernel.REDUCTION)
    return elementwise(tape, "div.Tensor", best, total), index


def mix_experts(
    tape: Tape, x: TapeTensor, index: TapeTensor, weights: TapeTensor, parameters: tuple[TapeTensor, ...], act: str
) -> TapeTensor:
    """Write the experts' mixture of ``x`` ``(tokens, hidden)``; `act` names the activation's module, if it has one."""
    gate, up, down = parameters
    tokens, experts, chosen, hidden = elements(x.dims[:1]), size(gate.dims[0]), size(index.dims[1]), x.dims[1]
    capacity = places_of(tokens, chosen, experts)
    slots = experts * capacity
    sequences = view(tape, x, (BatchSize(1), tokens, hidden))
    place, kept, token = _places(tape, view(tape, index, (BatchSize(1), tokens * chosen)), chosen, experts, capacity)
    taken = _gather(tape, sequences, token)
    by_expert = transpose(tape, view(tape, taken, (BatchSize(1), experts, capacity, hidden)), 0, 1)
    by_expert = view(tape, by_expert, (experts, BatchSize(capacity), hidden))
    opening = _silu(tape, bmm(tape, by_expert, transpose(tape, gate, 1, 2)), act)
    gated = elementwise(tape, "mul.Tensor", opening, bmm(tape, by_expert, transpose(tape, up, 1, 2)))
    out = bmm(tape, gated, transpose(tape, down, 1, 2))
    out = transpose(tape, view(tape, out, (experts, BatchSize(1), capacity, hidden)), 0, 1)
    out = view(tape, out, (BatchSize(1), slots, hidden))
    returned = _gather(tape, out, place)
    shares = elementwise(tape, "mul.Tensor", view(tape, weights, place.dims), kept)
    weighted = elementwise(tape, "mul.Tensor", returned, unsqueeze(tape, shares, -1))
    apart = view(tape, weighted, (x.dims[0], chosen, hidden))
    return tape.call("sum.dim_IntList", apart, (1,), dims=x.dims, kernel=Kernel.REDUCTION)


def _silu(tape: Tape, x: TapeTensor, module: str) -> TapeTensor:
    if not module:
        return elementwise(tape, "silu.default", x, kernel=Kernel.TRANSCENDENTAL)
    with tape.inside(module):
        return elementwise(tape, "silu.default", x, kernel=Kernel.TRANSCENDENTAL)


def _places(tape: Tape, index: TapeTensor, chosen: int, experts: int, capacity: int) -> tuple[TapeTensor, ...]:
    """Write the place of each choice ``(batch, choices)``, whether it has one, and the token of each place."""
    dims, places = index.dims, (index.dims[0], experts * capacity)
    shapes = tuple(
        TensorShape(dims=d, dtype=dtype) for d, dtype in ((dims, "int64"), (dims, "bool"), (places, "int64"))
    )
    return tape.emit(PLACES, (index, chosen, experts, capacity), shapes, kernel=Kernel.REDUCTION)


def _gather(tape: Tape, x: TapeTensor, index: TapeTensor) -> TapeTensor:
    """Take rows ``(batch, choices, hidden)`` of ``x`` by an index ``(batch, choices)``."""
    dims = (*index.dims, x.dims[2])
    wide = expand(tape, unsqueeze(tape, index, -1), dims)
    return tape.call("gather.default", x, 1, wide, dims=dims, kernel=Kernel.EMBEDDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooMixtral(ZooLlama):
    """The module of ``zoo/mixtral.py``."""

    config: MixtralConfig

    def feed_forward_parameters(self, path: str) -> Iterator[tuple[str, Dims]]:
        """Names and dims of one block's experts."""
        config = self.config
        for name in ("gate", "up"):
            yield f"{path}.experts.{name}", (config.experts, config.intermediate, config.hidden)
        yield f"{path}.experts.down", (config.experts, config.hidden, config.intermediate)
        yield f"{path}.experts.router.weight", (config.experts, config.hidden)

    def feed_forward(self, tape: Tape, x: TapeTensor) -> TapeTensor:
        """Write one block's experts."""
        with tape.inside("experts"):
            tokens = _tokens(tape, x)
            weights, index = choose_experts(tape, write.linear(tape, "router", tokens), self.config.chosen_experts)
            parameters = tape.own("gate"), tape.own("up"), tape.own("down")
            return view(tape, mix_experts(tape, tokens, index, weights, parameters, ""), x.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceMixtral(HuggingFaceLlama):
    """Mixtral of transformers; sizes as in `MixtralConfig`."""

    experts: int
    chosen_experts: int

    def feed_forward_parameters(self, path: str) -> Iterator[tuple[str, Dims]]:
        """Names and dims of one block's experts."""
        yield f"{path}.gate.weight", (self.experts, self.hidden)
        for name in ("gate_proj", "up_proj"):
            yield f"{path}.experts.{name}", (self.experts, self.intermediate, self.hidden)
        yield f"{path}.experts.down_proj", (self.experts, self.hidden, self.intermediate)

    def feed_forward(self, tape: Tape, x: TapeTensor) -> TapeTensor:
        """Write one block's experts."""
        tokens = _tokens(tape, x)
        logits = write.linear(tape, "gate", tokens)
        with tape.inside("gate"):
            weights, index = choose_experts(tape, logits, self.chosen_experts)
        with tape.inside("experts"):
            parameters = tape.own("gate_proj"), tape.own("up_proj"), tape.own("down_proj")
            mixed = mix_experts(tape, tokens, index, weights, parameters, "act_fn")
        return view(tape, mixed, x.dims)


def _tokens(tape: Tape, x: TapeTensor) -> TapeTensor:
    """All tokens of all samples ``(tokens, hidden)``."""
    return view(tape, x, (BatchSize(elements(x.dims[:2])), x.dims[2]))
