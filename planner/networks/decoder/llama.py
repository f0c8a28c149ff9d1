"""Llama on a tape: the zoo's module, and that of transformers as the capture changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planner.networks.decoder import layers as write
from planner.networks.decoder.operators import cat, elementwise, halves, slice_last, unsqueeze
from planner.networks.decoder.tape import Dims, Tape, TapeTensor, size
from planner.networks.zoo.configs import LlamaConfig

Table = tuple[TapeTensor, TapeTensor]
_OPEN_END = (1 << 63) - 1
"""The end of a slice written without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooLlama:
    """The module of ``zoo/llama.py``."""

    config: LlamaConfig
    tied: ClassVar[tuple[str, ...]] = ()

    def parameters(self, blocks: int) -> Iterator[tuple[str, Dims]]:
        """Names and dims, in the module's order."""
        config, hidden = self.config, self.config.hidden
        head = hidden // config.heads
        queries, keys = config.heads * head, config.key_value_heads * head
        yield "token_embedding.weight", (config.vocabulary, hidden)
        for block in range(blocks):
            path = f"blocks.{block}"
            yield f"{path}.attention_norm.weight", (hidden,)
            yield f"{path}.attention.query.weight", (queries, hidden)
            yield f"{path}.attention.key.weight", (keys, hidden)
            yield f"{path}.attention.value.weight", (keys, hidden)
            yield f"{path}.attention.output.weight", (hidden, queries)
            yield f"{path}.feed_forward_norm.weight", (hidden,)
            yield from self.feed_forward_parameters(path)
        yield "norm.weight", (hidden,)
        yield "head.weight", (config.vocabulary, hidden)

    def feed_forward_parameters(self, path: str) -> Iterator[tuple[str, Dims]]:
        """Names and dims of one block's feed-forward layer."""
        hidden, inner = self.config.hidden, self.config.intermediate
        yield f"{path}.gate.weight", (inner, hidden)
        yield f"{path}.up.weight", (inner, hidden)
        yield f"{path}.down.weight", (hidden, inner)

    def logits(self, tape: Tape, tokens: TapeTensor, blocks: int) -> TapeTensor:
        """Write the forward pass of tokens ``(batch, length)``."""
        config = self.config
        x = write.embedding(tape, "token_embedding", tokens)
        table = write.rotary_table(tape, size(tokens.dims[1]), config.hidden // config.heads, config.rope_base)
        for block in range(blocks):
            with tape.inside(f"blocks.{block}"):
                x = self._block(tape, x, table)
        return write.linear(tape, "head", write.root_mean_square_norm(tape, "norm", x, config.epsilon))

    def _block(self, tape: Tape, x: TapeTensor, table: Table) -> TapeTensor:
        config = self.config
        normed = write.root_mean_square_norm(tape, "attention_norm", x, config.epsilon)
        with tape.inside("attention"):
            query, key, value = (
                write.heads(tape, write.linear(tape, name, normed), config.hidden // config.heads)
                for name in ("query", "key", "value")
            )
            query, key = (self._rotate(tape, part, table) for part in (query, key))
            mixed = write.linear(tape, "output", write.attend(tape, query, key, value))
        x = write.add(tape, x, mixed)
        normed = write.root_mean_square_norm(tape, "feed_forward_norm", x, config.epsilon)
        return write.add(tape, x, self.feed_forward(tape, normed))

    def feed_forward(self, tape: Tape, x: TapeTensor) -> TapeTensor:
        """Write one block's feed-forward layer."""
        gate = write.silu(tape, write.linear(tape, "gate", x))
        return write.linear(tape, "down", write.multiply(tape, gate, write.linear(tape, "up", x)))

    @staticmethod
    def _rotate(tape: Tape, x: TapeTensor, table: Table) -> TapeTensor:
        cosine, sine = table
        left, right = halves(tape, x)
        straight = write.multiply(tape, x, cosine)
        turned = cat(tape, (elementwise(tape, "neg.default", right), left), -1)
        return write.add(tape, straight, write.multiply(tape, turned, sine))


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceLlama:
    """Llama of transformers; sizes as in `LlamaConfig`."""

    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head: int
    epsilon: float
    rope_base: float
    tied_embedding: bool
    padding: int | None = None

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of the embedding, which may be the head too."""
        names = ("model.model.embed_tokens.weight", "model.lm_head.weight")
        return names if self.tied_embedding else names[:1]

    def parameters(self, blocks: int) -> Iterator[tuple[str, Dims]]:
        """Names and dims, in the module's order."""
        root, hidden = "model.model", self.hidden
        queries, keys = self.heads * self.head, self.key_value_heads * self.head
        yield f"{root}.embed_tokens.weight", (self.vocabulary, hidden)
        for block in range(blocks):
            path = f"{root}.layers.{block}"
            yield f"{path}.self_attn.q_proj.weight", (queries, hidden)
            yield f"{path}.self_attn.k_proj.weight", (keys, hidden)
            yield f"{path}.self_attn.v_proj.weight", (keys, hidden)
            yield f"{path}.self_attn.o_proj.weight", (hidden, queries)
            yield from self.feed_forward_parameters(f"{path}.mlp")
            yield f"{path}.input_layernorm.weight", (hidden,)
            yield f"{path}.post_attention_layernorm.weight", (hidden,)
        yield f"{root}.norm.weight", (hidden,)
        if not self.tied_embedding:
            yield "model.lm_head.weight", (self.vocabulary, hidden)

    def feed_forward_parameters(self, path: str) -> Iterator[tuple[str, Dims]]:
        """Names and dims of one block's feed-forward layer."""
        yield f"{path}.gate_proj.weight", (self.intermediate, self.hidden)
        yield f"{path}.up_proj.weight", (self.intermediate, self.hidden)
        yield f"{path}.down_proj.weight", (self.hidden, self.intermediate)

    def logits(self, tape: Tape, tokens: TapeTensor, blocks: int) -> TapeTensor:
        """Write the forward pass of tokens ``(batch, length)``."""
        with tape.inside("model"):
            with tape.inside("model"):
                x = write.embedding(tape, "embed_tokens", tokens, self.padding)
                with tape.inside("rotary_emb"):
                    table = write.rotary_table(tape, size(tokens.dims[1]), self.head, self.rope_base)
                    cosine, sine = (unsqueeze(tape, part, 0) for part in table)
                for block in range(blocks):
                    with tape.inside(f"layers.{block}"):
                        x = self._block(tape, x, (cosine, sine))
                x = write.root_mean_square_norm(tape, "norm", x, self.epsilon)
            return write.linear(tape, "lm_head", x)

    def _block(self, tape: Tape, x: TapeTensor, table: Table) -> TapeTensor:
        normed = write.root_mean_square_norm(tape, "input_layernorm", x, self.epsilon)
        with tape.inside("self_attn"):
            query, key, value = (
                write.heads(tape, write.linear(tape, name, normed), self.head)
                for name in ("q_proj", "k_proj", "v_proj")
            )
            cosine, sine = (unsqueeze(tape, part, 1) for part in table)
            query, key = (self._rotate(tape, part, (cosine, sine)) for part in (query, key))
            mixed = write.linear(tape, "o_proj", write.attend(tape, query, key, value))
        x = write.add(tape, x, mixed)
        normed = write.root_mean_square_norm(tape, "post_attention_layernorm", x, self.epsilon)
        with tape.inside("mlp"):
            narrowed = self.feed_forward(tape, normed)
        return write.add(tape, x, narrowed)

    def feed_forward(self, tape: Tape, x: TapeTensor) -> TapeTensor:
        """Write one block's feed-forward layer."""
        gate = write.linear(tape, "gate_proj", x)
        with tape.inside("act_fn"):
            gate = write.silu(tape, gate)
        return write.linear(tape, "down_proj", write.multiply(tape, gate, write.linear(tape, "up_proj", x)))

    def _rotate(self, tape: Tape, x: TapeTensor, table: Table) -> TapeTensor:
        cosine, sine = table
        half = self.head // 2
        straight = write.multiply(tape, x, cosine)
        left = slice_last(tape, x, 0, half)
        right = slice_last(tape, x, half, self.head, last=_OPEN_END)
        turned = cat(tape, (elementwise(tape, "neg.default", right), left), -1)
        return write.add(tape, straight, write.multiply(tape, turned, sine))
