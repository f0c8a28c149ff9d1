"""GPT-2 and GPT-3 on a tape: the zoo's module, and that of transformers as the capture changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planner.networks.decoder import layers as write
from planner.networks.decoder.operators import arange, elementwise, unsqueeze
from planner.networks.decoder.tape import Dims, Tape, TapeTensor, size
from planner.networks.zoo.configs import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooGPT:
    """The module of ``zoo/gpt.py``."""

    config: GPTConfig
    tied: ClassVar[tuple[str, ...]] = ("token_embedding.weight", "head.weight")

    def parameters(self, blocks: int) -> Iterator[tuple[str, Dims]]:
        """Names and dims, in the module's order."""
        config, hidden = self.config, self.config.hidden
        yield "token_embedding.weight", (config.vocabulary, hidden)
        yield "position_embedding.weight", (config.positions, hidden)
        for block in range(blocks):
            yield from _with_bias(f"blocks.{block}.attention_norm", hidden)
            for projection in ("query", "key", "value", "output"):
                yield from _with_bias(f"blocks.{block}.attention.{projection}", hidden, hidden, hidden)
            yield from _with_bias(f"blocks.{block}.feed_forward_norm", hidden)
            yield from _with_bias(f"blocks.{block}.expand", 4 * hidden, 4 * hidden, hidden)
            yield from _with_bias(f"blocks.{block}.contract", hidden, hidden, 4 * hidden)
        yield from _with_bias("norm", hidden)

    def logits(self, tape: Tape, tokens: TapeTensor, blocks: int) -> TapeTensor:
        """Write the forward pass of tokens ``(batch, length)``."""
        positions = arange(tape, size(tokens.dims[1]))
        x = write.embedding(tape, "token_embedding", tokens)
        x = write.add(tape, x, write.embedding(tape, "position_embedding", positions))
        for block in range(blocks):
            with tape.inside(f"blocks.{block}"):
                x = self._block(tape, x)
        return write.linear(tape, "head", write.layer_norm(tape, "norm", x, 1e-5))

    def _block(self, tape: Tape, x: TapeTensor) -> TapeTensor:
        normed = write.layer_norm(tape, "attention_norm", x, 1e-5)
        with tape.inside("attention"):
            head = self.config.hidden // self.config.heads
            query, key, value = (
                write.heads(tape, write.linear(tape, name, normed), head) for name in ("query", "key", "value")
            )
            mixed = write.linear(tape, "output", write.attend(tape, query, key, value))
        x = write.add(tape, x, mixed)
        widened = write.linear(tape, "expand", write.layer_norm(tape, "feed_forward_norm", x, 1e-5))
        return write.add(tape, x, write.linear(tape, "contract", write.gelu(tape, widened)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceGPT2:
    """GPT-2 of transformers with separate projections; sizes as in `GPTConfig`."""

    vocabulary: int
    positions: int
    hidden: int
    heads: int
    inner: int
    epsilon: float
    tied_embedding: bool

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of the embedding, which may be the head too."""
        names = ("model.transformer.wte.weight", "model.lm_head.weight")
        return names if self.tied_embedding else names[:1]

    def parameters(self, blocks: int) -> Iterator[tuple[str, Dims]]:
        """Names and dims, in the module's order."""
        root, hidden, inner = "model.transformer", self.hidden, self.inner
        yield f"{root}.wte.weight", (self.vocabulary, hidden)
        yield f"{root}.wpe.weight", (self.positions, hidden)
        for block in range(blocks):
            path = f"{root}.h.{block}"
            yield from _with_bias(f"{path}.ln_1", hidden)
            for projection in ("q_proj", "k_proj", "v_proj", "c_proj"):
                yield from _with_bias(f"{path}.attn.{projection}", hidden, hidden, hidden)
            yield from _with_bias(f"{path}.ln_2", hidden)
            yield from _with_bias(f"{path}.mlp.c_fc", inner, hidden, inner)
            yield from _with_bias(f"{path}.mlp.c_proj", hidden, inner, hidden)
        yield from _with_bias(f"{root}.ln_f", hidden)
        if not self.tied_embedding:
            yield "model.lm_head.weight", (self.vocabulary, hidden)

    def logits(self, tape: Tape, tokens: TapeTensor, blocks: int) -> TapeTensor:
        """Write the forward pass of tokens ``(batch, length)``."""
        with tape.inside("model"):
            with tape.inside("transformer"):
                x = write.embedding(tape, "wte", tokens)
                positions = elementwise(tape, "add.Tensor", arange(tape, size(tokens.dims[1])), 0)
                positions = unsqueeze(tape, positions, 0)
                x = write.add(tape, x, write.embedding(tape, "wpe", positions))
                for block in range(blocks):
                    with tape.inside(f"h.{block}"):
                        x = self._block(tape, x)
                x = write.layer_norm(tape, "ln_f", x, self.epsilon)
            return write.linear(tape, "lm_head", x)

    def _block(self, tape: Tape, x: TapeTensor) -> TapeTensor:
        normed = write.layer_norm(tape, "ln_1", x, self.epsilon)
        with tape.inside("attn"):
            head = self.hidden // self.heads
            query, key, value = (
                write.heads(tape, write.linear(tape, name, normed), head) for name in ("q_proj", "k_proj", "v_proj")
            )
            mixed = write.straight_linear(tape, "c_proj", write.attend(tape, query, key, value))
        x = write.add(tape, mixed, x)
        normed = write.layer_norm(tape, "ln_2", x, self.epsilon)
        with tape.inside("mlp"):
            widened = write.straight_linear(tape, "c_fc", normed)
            with tape.inside("act"):
                widened = write.gelu(tape, widened)
            narrowed = write.straight_linear(tape, "c_proj", widened)
        return write.add(tape, x, narrowed)


def _with_bias(name: str, outputs: int, *weight: int) -> Iterator[tuple[str, Dims]]:
    """Weight, of the dims given or a vector, and bias."""
    yield f"{name}.weight", weight or (outputs,)
    yield f"{name}.bias", (outputs,)
