"""Mixtral on a tape: the zoo's module, and that of transformers as the capture changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.graph.operator_graph import BatchSize
from planner.networks.decoder import layers as write
from planner.networks.decoder.experts import choose_experts, mix_experts
from planner.networks.decoder.llama import HuggingFaceLlama, ZooLlama
from planner.networks.decoder.operators import view
from planner.networks.decoder.tape import Dims, Tape, TapeTensor, elements
from planner.networks.zoo.configs import MixtralConfig


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
