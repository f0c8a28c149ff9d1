"""Sizes of published networks, by the names people give them.

The sizes are those of the papers and of the published ``config.json`` files. A row of a measurement file that states
a size overrides what stands here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache

from planner.cost.training_run import Experts, LatentAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What members of a family share besides their sizes."""

    gated: bool = False
    rms_norm: bool = False
    biases: bool = True
    rotary: bool = False
    positions: bool = False
    tied_embeddings: bool = True
    causal: bool = True
    dropout: bool = False
    embedding_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One network; ``sizes`` are layers, hidden, heads, key-value heads, feed-forward, vocabulary (0: unknown)."""

    traits: Traits
    sizes: tuple[int, int, int, int, int, int]
    head_size: int = 0
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    window: int = 0
    multi_token_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Networks whose names match; ``members`` by billions of parameters as names write them."""

    pattern: str
    traits: Traits
    vocabulary: int
    members: dict[float, tuple[int, ...]]
    head_size: int = 0
    heads_of_size: dict[float, int] = field(default_factory=dict)
    window: int = 0
    tied_up_to: float = 0.0
    """Members up to this size share the embedding with the output layer."""


LLAMA = Traits(gated=True, rms_norm=True, biases=False, rotary=True, tied_embeddings=False)
LLAMA_TIED = replace(LLAMA, tied_embeddings=True)
GPT = Traits(positions=True)
BERT = Traits(positions=True, causal=False, dropout=True)
BLOOM = Traits(embedding_norm=True)
MPT = Traits(biases=False, positions=True)
OPT = Traits(positions=True, dropout=True)
NEMOTRON = Traits(biases=False, rotary=True, tied_embeddings=False)
FALCON = Traits(biases=False, rotary=True)
BAICHUAN_13 = Traits(gated=True, rms_norm=True, biases=False, tied_embeddings=False)
PARALLEL_GPT = Traits(rotary=True, tied_embeddings=False)

# layers, hidden, heads, key-value heads, feed-forward; a sixth number replaces the family's vocabulary.
_FAMILIES: tuple[_Family, ...] = (
    _Family(
        pattern=r"llama-?3\.2", traits=LLAMA_TIED, vocabulary=128256,
        members={1: (16, 2048, 32, 8, 8192), 3: (28, 3072, 24, 8, 8192)},
    ),
    _Family(
        pattern=r"llama-?3(?!\d)|deepseek-r1-distill-llama", traits=LLAMA, vocabulary=128256,
        members={8: (32, 4096, 32, 8, 14336), 70: (80, 8192, 64, 8, 28672), 405: (126, 16384, 128, 8, 53248)},
    ),
    _Family(
        pattern=r"code-?llama|llama-?2(?!\d)", traits=LLAMA, vocabulary=32000,
        members={7: (32, 4096, 32, 32, 11008), 13: (40, 5120, 40, 40, 13824), 34: (48, 8192, 64, 8, 22016),
                 70: (80, 8192, 64, 8, 28672)},
    ),
    _Family(
        pattern=r"llama|vicuna|alpaca", traits=LLAMA, vocabulary=32000,
        members={7: (32, 4096, 32, 32, 11008), 13: (40, 5120, 40, 40, 13824), 30: (60, 6656, 52, 52, 17920),
                 33: (60, 6656, 52, 52, 17920), 65: (80, 8192, 64, 64, 22016), 70: (80, 8192, 64, 8, 28672)},
    ),
    _Family(
        pattern=r"qwen-?3(?![\d.])", traits=LLAMA, tied_up_to=4, vocabulary=151936, head_size=128,
        members={0.6: (28, 1024, 16, 8, 3072), 1.7: (28, 2048, 16, 8, 6144), 4: (36, 2560, 32, 8, 9728),
                 8: (36, 4096, 32, 8, 12288), 14: (40, 5120, 40, 8, 17408), 32: (64, 5120, 64, 8, 25600)},
    ),
    _Family(
        pattern=r"qwen-?2\.5|qwq", traits=LLAMA, tied_up_to=3, vocabulary=152064,
        members={0.5: (24, 896, 14, 2, 4864, 151936), 1.5: (28, 1536, 12, 2, 8960, 151936),
                 3: (36, 2048, 16, 2, 11008, 151936), 7: (28, 3584, 28, 4, 18944), 14: (48, 5120, 40, 8, 13824),
                 32: (64, 5120, 40, 8, 27648), 72: (80, 8192, 64, 8, 29568)},
    ),
    _Family(
        pattern=r"qwen-?2(?!\d)", traits=LLAMA, tied_up_to=1.5, vocabulary=152064,
        members={0.5: (24, 896, 14, 2, 4864, 151936), 1.5: (28, 1536, 12, 2, 8960, 151936),
                 7: (28, 3584, 28, 4, 18944), 72: (80, 8192, 64, 8, 29568)},
    ),
    _Family(
        pattern=r"qwen-?1\.5", traits=LLAMA, tied_up_to=0.5, vocabulary=152064,
        members={0.5: (24, 1024, 16, 16, 2816, 151936), 1.8: (24, 2048, 16, 16, 5504, 151936),
                 4: (40, 2560, 20, 20, 6912, 151936), 7: (32, 4096, 32, 32, 11008, 151936),
                 14: (40, 5120, 40, 40, 13696), 32: (64, 5120, 40, 8, 27392), 72: (80, 8192, 64, 64, 24576),
                 110: (80, 8192, 64, 8, 49152)},
    ),
    _Family(
        pattern=r"qwen", traits=LLAMA, vocabulary=152064,
        members={1.8: (24, 2048, 16, 16, 5504, 151936), 7: (32, 4096, 32, 32, 11008, 151936),
                 14: (40, 5120, 40, 40, 13696), 72: (80, 8192, 64, 64, 24576)},
    ),
    _Family(
        pattern=r"mistral|ministral", traits=LLAMA, vocabulary=32000,
        members={7: (32, 4096, 32, 8, 14336), 12: (40, 5120, 32, 8, 14336, 131072),
                 123: (88, 12288, 96, 8, 28672, 32768)}, heads_of_size={12: 128}, window=4096,
    ),
    _Family(
        pattern=r"baichuan", traits=LLAMA, vocabulary=125696,
        members={7: (32, 4096, 32, 32, 11008), 13: (40, 5120, 40, 40, 13696)},
    ),
    _Family(
        pattern=r"intern-?lm-?2(?!\d)", traits=LLAMA, vocabulary=92544,
        members={1.8: (24, 2048, 16, 8, 8192), 7: (32, 4096, 32, 8, 14336), 20: (48, 6144, 48, 8, 16384)},
    ),
    _Family(
        pattern=r"intern-?lm", traits=LLAMA, vocabulary=103168,
        members={7: (32, 4096, 32, 32, 11008), 20: (60, 5120, 40, 40, 13824), 65: (80, 8192, 64, 64, 21760)},
    ),
    _Family(
        pattern=r"glm-?4", traits=LLAMA, vocabulary=151552, members={9: (40, 4096, 32, 2, 13696)},
    ),
    _Family(
        pattern=r"chatglm|glm-?[23]|codegeex", traits=LLAMA, vocabulary=65024, members={6: (28, 4096, 32, 2, 13696)},
    ),
    _Family(
        pattern=r"bloom", traits=BLOOM, vocabulary=250880,
        members={0.56: (24, 1024, 16, 16, 4096), 1.1: (24, 1536, 16, 16, 6144), 1.7: (24, 2048, 16, 16, 8192),
                 3: (30, 2560, 32, 32, 10240), 7.1: (30, 4096, 32, 32, 16384), 176: (70, 14336, 112, 112, 57344)},
    ),
    _Family(
        pattern=r"mpt", traits=MPT, vocabulary=50368,
        members={0.125: (12, 768, 12, 12, 3072), 0.35: (24, 1024, 16, 16, 4096), 0.76: (24, 1536, 12, 12, 6144),
                 1: (24, 2048, 16, 16, 8192), 3: (32, 2560, 20, 20, 10240), 7: (32, 4096, 32, 32, 16384),
                 13: (40, 5120, 40, 40, 20480), 30: (48, 7168, 64, 64, 28672), 70: (80, 8192, 64, 64, 32768)},
    ),
    _Family(
        pattern=r"(?:^|-)opt-\d", traits=OPT, vocabulary=50272,
        members={0.125: (12, 768, 12, 12, 3072), 0.35: (24, 1024, 16, 16, 4096), 1.3: (24, 2048, 32, 32, 8192),
                 2.7: (32, 2560, 32, 32, 10240), 6.7: (32, 4096, 32, 32, 16384), 13: (40, 5120, 40, 40, 20480),
                 30: (48, 7168, 56, 56, 28672), 66: (64, 9216, 72, 72, 36864), 175: (96, 12288, 96, 96, 49152)},
    ),
    _Family(
        pattern=r"falcon", traits=FALCON, vocabulary=65024,
        members={7: (32, 4544, 71, 1, 18176), 40: (60, 8192, 128, 8, 32768), 180: (80, 14848, 232, 8, 59392)},
    ),
    _Family(
        pattern=r"gpt-?neo-?x", traits=PARALLEL_GPT, vocabulary=50432, members={20: (44, 6144, 64, 64, 24576)},
    ),
    _Family(
        pattern=r"gpt-?neo", traits=GPT, vocabulary=50257,
        members={0.125: (12, 768, 12, 12, 3072), 1.3: (24, 2048, 16, 16, 8192), 2.7: (32, 2560, 20, 20, 10240)},
    ),
    _Family(
        pattern=r"gpt-?j", traits=PARALLEL_GPT, vocabulary=50400, members={6: (28, 4096, 16, 16, 16384)},
    ),
    _Family(
        pattern=r"pythia", traits=PARALLEL_GPT, vocabulary=50304,
        members={0.16: (12, 768, 12, 12, 3072), 0.41: (24, 1024, 16, 16, 4096), 1.4: (24, 2048, 16, 16, 8192),
                 2.8: (32, 2560, 32, 32, 10240), 6.9: (32, 4096, 32, 32, 16384), 12: (36, 5120, 40, 40, 20480)},
    ),
    _Family(
        pattern=r"megatron-?turing|mt-?nlg", traits=GPT, vocabulary=50257, members={530: (105, 20480, 128, 128, 81920)},
    ),
    _Family(
        pattern=r"nemotron-?4|nemotron", traits=NEMOTRON, vocabulary=256000,
        members={8: (32, 4096, 32, 32, 16384), 15: (32, 6144, 48, 8, 24576), 22: (40, 6144, 48, 48, 24576),
                 340: (96, 18432, 96, 8, 73728)},
    ),
    _Family(
        pattern=r"gemma-?2(?![\db])", traits=LLAMA_TIED, vocabulary=256000,
        members={2: (26, 2304, 8, 4, 9216), 9: (42, 3584, 16, 8, 14336), 27: (46, 4608, 32, 16, 36864)},
        heads_of_size={2: 256, 9: 256, 27: 128},
    ),
    _Family(
        pattern=r"gemma", traits=LLAMA_TIED, vocabulary=256000, head_size=256,
        members={2: (18, 2048, 8, 1, 16384), 7: (28, 3072, 16, 16, 24576)},
    ),
    _Family(
        pattern=r"\byi-|^yi", traits=LLAMA, vocabulary=64000,
        members={6: (32, 4096, 32, 4, 11008), 9: (48, 4096, 32, 4, 11008), 34: (60, 7168, 56, 8, 20480)},
    ),
    _Family(
        pattern=r"aquila-?2", traits=LLAMA, vocabulary=100008,
        members={7: (32, 4096, 32, 32, 11008), 34: (60, 6144, 48, 8, 24576), 70: (80, 8192, 64, 8, 28672)},
    ),
    _Family(pattern=r"aquila", traits=LLAMA, vocabulary=100008, members={7: (32, 4096, 32, 32, 11008)}),
    _Family(
        pattern=r"minicpm", traits=LLAMA_TIED, vocabulary=122753,
        members={1: (52, 1536, 24, 8, 3840, 73440), 2: (40, 2304, 36, 36, 5760)},
    ),
    _Family(
        pattern=r"deepseek", traits=LLAMA, vocabulary=102400,
        members={1.3: (24, 2048, 16, 16, 5504, 32256), 6.7: (32, 4096, 32, 32, 11008, 32256),
                 7: (30, 4096, 32, 32, 11008), 33: (62, 7168, 56, 8, 19200, 32256),
                 67: (95, 8192, 64, 8, 22016)},
    ),
    _Family(
        pattern=r"phi-?3", traits=LLAMA, vocabulary=32064,
        members={3.8: (32, 3072, 32, 32, 8192), 14: (40, 5120, 40, 10, 17920, 100352)},
    ),
    _Family(
        pattern=r"pangu", traits=GPT, vocabulary=40000,
        members={2.6: (32, 2560, 32, 32, 10240), 13: (40, 5120, 40, 40, 20480), 200: (64, 16384, 128, 128, 65536)},
    ),
    _Family(
        pattern=r"wizard-?coder|star-?coder", traits=replace(GPT, tied_embeddings=True), vocabulary=49152,
        members={3: (36, 2816, 22, 1, 11264), 7: (42, 4096, 32, 1, 16384), 15: (40, 6144, 48, 1, 24576)},
    ),
    _Family(
        pattern=r"cpm", traits=GPT, vocabulary=30000, members={2.6: (32, 2560, 32, 32, 10240)},
    ),
    _Family(
        pattern=r"gpt-?4", traits=GPT, vocabulary=50257, members={},
    ),
    _Family(
        pattern=r"gpt", traits=GPT, vocabulary=50257,
        members={0.117: (12, 768, 12, 12, 3072), 0.125: (12, 768, 12, 12, 3072), 0.345: (24, 1024, 16, 16, 4096),
                 0.76: (24, 1536, 16, 16, 6144), 1.3: (24, 2048, 16, 16, 8192), 1.5: (48, 1600, 25, 25, 6400),
                 1.7: (24, 2304, 24, 24, 9216), 2.7: (32, 2560, 32, 32, 10240), 3.6: (30, 3072, 32, 32, 12288),
                 5: (24, 4096, 32, 32, 16384), 6.7: (32, 4096, 32, 32, 16384), 7.5: (36, 4096, 32, 32, 16384),
                 13: (40, 5120, 40, 40, 20480), 18.4: (40, 6144, 48, 48, 24576), 20: (44, 6144, 48, 48, 24576),
                 22: (48, 6144, 64, 64, 24576), 39.1: (48, 8192, 64, 64, 32768), 76: (60, 10240, 80, 80, 40960),
                 145: (80, 12288, 96, 96, 49152), 175: (96, 12288, 96, 96, 49152),
                 310: (96, 16384, 128, 128, 65536), 530: (105, 20480, 128, 128, 81920),
                 1000: (128, 25600, 160, 160, 102400)},
    ),
)  # fmt: skip


def _experts(count: int, per_token: int, inner: int, shared: int = 0, dense: int = 0) -> Experts:
    return Experts(count=count, per_token=per_token, feed_forward=inner, shared_feed_forward=shared, dense_layers=dense)


_DEEPSEEK_HEADS = {"rotary_head": 64, "plain_head": 128, "value_head": 128}
_LATENT = LatentAttention(query_rank=1536, key_value_rank=512, **_DEEPSEEK_HEADS)
_LATENT_LITE = LatentAttention(query_rank=0, key_value_rank=512, **_DEEPSEEK_HEADS)

_TESTS: tuple[tuple[str, KnownModel], ...] = (
    (r"^deepseek-proxy-",
     KnownModel(traits=LLAMA, sizes=(2, 512, 8, 8, 2048, 50257), experts=_experts(8, 4, 1024, 1024, 1),
                latent_attention=LatentAttention(query_rank=256, key_value_rank=128, **_DEEPSEEK_HEADS))),
    (r"^gpt3-moe-mcore-te-tp2-pp2-ep4-etp1-no-mtp-",
     KnownModel(traits=LLAMA, sizes=(15, 1024, 32, 32, 4096, 50257), experts=_experts(32, 4, 1024, 1024, 3),
                latent_attention=_LATENT)),
    (r"^gpt3-moe-mcore-te-tp2-pp2-ep4-etp1-",
     KnownModel(traits=LLAMA, sizes=(15, 1024, 32, 32, 4096, 50257), experts=_experts(32, 4, 1024, 1024, 3),
                latent_attention=_LATENT, multi_token_layers=1)),
    (r"^gpt3-moe-mcore-te-ep8-",
     KnownModel(traits=replace(GPT, biases=False), sizes=(12, 512, 8, 8, 2048, 50257), experts=_experts(8, 2, 1024))),
    (r"^gpt3-moe-mcore-te-tp4-ep2-etp2-pp2-resume",
     KnownModel(traits=replace(GPT, biases=False), sizes=(12, 512, 8, 8, 2048, 50257),
                experts=_experts(8, 2, 1024, 512))),
    (r"^gpt3-moe-mcore-te-tp4-ep2-etp2-pp2-scoped",
     KnownModel(traits=replace(GPT, biases=False, positions=False, rotary=True, tied_embeddings=False),
                sizes=(13, 512, 8, 8, 2048, 50257), experts=_experts(8, 2, 1024, 512, 4), multi_token_layers=1)),
    (r"^deepseek-500b-tp", KnownModel(traits=LLAMA, sizes=(0, 0, 0, 0, 0, 32000))),
)  # fmt: skip
"""Networks of functional tests that share a name with a published one, as ``tests/functional_tests`` of Megatron-LM
(``model_config.yaml``) and ``tests/st`` of MindSpeed-LLM describe them."""

_SINGLE: tuple[tuple[str, KnownModel], ...] = (
    *_TESTS,
    (r"deepseek-?v?3(?!\d)|deepseek-r1(?!-distill)",
     KnownModel(traits=LLAMA, sizes=(61, 7168, 128, 128, 18432, 129280), latent_attention=_LATENT,
                experts=_experts(256, 8, 2048, 2048, 3))),
    (r"kimi-?k2", KnownModel(traits=LLAMA, sizes=(61, 7168, 64, 64, 18432, 163840), latent_attention=_LATENT,
                             experts=_experts(384, 8, 2048, 2048, 1))),
    (r"(deepseek-?v?2|moonlight).*(lite|16b)",
     KnownModel(traits=LLAMA, sizes=(27, 2048, 16, 16, 10944, 102400), latent_attention=_LATENT_LITE,
                experts=_experts(64, 6, 1408, 2816, 1))),
    (r"deepseek-?v?2(?!\d)",
     KnownModel(traits=LLAMA, sizes=(60, 5120, 128, 128, 12288, 102400), latent_attention=_LATENT,
                experts=_experts(160, 6, 1536, 3072, 1))),
    (r"qwen-?3.*235b", KnownModel(traits=LLAMA, sizes=(94, 4096, 64, 4, 12288, 151936), head_size=128,
                                  experts=_experts(128, 8, 1536))),
    (r"qwen-?3.*30b", KnownModel(traits=LLAMA, sizes=(48, 2048, 32, 4, 6144, 151936), head_size=128,
                                 experts=_experts(128, 8, 768))),
    (r"qwen-?2.*57b", KnownModel(traits=LLAMA, sizes=(28, 3584, 28, 4, 18944, 151936),
                                 experts=_experts(64, 8, 2560, 20480))),
    (r"qwen.*a2\.7b", KnownModel(traits=LLAMA, sizes=(24, 2048, 16, 16, 5632, 151936),
                                 experts=_experts(60, 4, 1408, 5632))),
    (r"mixtral.*8x3b", KnownModel(traits=LLAMA, sizes=(32, 2560, 32, 8, 8960, 32000), experts=_experts(8, 2, 8960))),
    (r"mixtral.*8x22b", KnownModel(traits=LLAMA, sizes=(56, 6144, 48, 8, 16384, 32768), experts=_experts(8, 2, 16384))),
    (r"mixtral", KnownModel(traits=LLAMA, sizes=(32, 4096, 32, 8, 14336, 32000), experts=_experts(8, 2, 14336))),
    (r"grok-?1", KnownModel(traits=LLAMA_TIED, sizes=(64, 6144, 48, 8, 32768, 131072),
                            experts=_experts(8, 2, 32768))),
    (r"gpt-?oss.*120b", KnownModel(traits=LLAMA, sizes=(36, 2880, 64, 8, 2880, 201088), head_size=64,
                                   experts=_experts(128, 4, 2880))),
    (r"gpt-?oss", KnownModel(traits=LLAMA, sizes=(24, 2880, 64, 8, 2880, 201088), head_size=64,
                             experts=_experts(32, 4, 2880))),
    (r"phi-?3\.?5-?moe", KnownModel(traits=LLAMA, sizes=(32, 4096, 32, 8, 6400, 32064), experts=_experts(16, 2, 6400))),
    (r"minicpm.*8x2b", KnownModel(traits=LLAMA_TIED, sizes=(40, 2304, 36, 36, 5760, 122753),
                                  experts=_experts(8, 2, 5760))),
    (r"palm.*540b", KnownModel(traits=replace(LLAMA_TIED, rms_norm=False), head_size=256,
                               sizes=(118, 18432, 48, 1, 73728, 256000))),
    (r"electra.*large", KnownModel(traits=BERT, sizes=(24, 1024, 16, 16, 4096, 30522))),
    (r"electra", KnownModel(traits=BERT, sizes=(12, 768, 12, 12, 3072, 30522))),
    (r"roberta.*large|xlm-?r.*large", KnownModel(traits=BERT, sizes=(24, 1024, 16, 16, 4096, 50265))),
    (r"roberta", KnownModel(traits=BERT, sizes=(12, 768, 12, 12, 3072, 50265))),
    (r"biobert", KnownModel(traits=BERT, sizes=(12, 768, 12, 12, 3072, 28996))),
    (r"distil-?bert", KnownModel(traits=BERT, sizes=(6, 768, 12, 12, 3072, 30522))),
    (r"bert.*base", KnownModel(traits=BERT, sizes=(12, 768, 12, 12, 3072, 30522))),
    (r"bert.*(huge|1\.3b)", KnownModel(traits=BERT, sizes=(32, 1280, 16, 16, 5120, 30522))),
    (r"(?<!l)bert", KnownModel(traits=BERT, sizes=(24, 1024, 16, 16, 4096, 30522))),
    (r"gpt-?2.*xl", KnownModel(traits=GPT, sizes=(48, 1600, 25, 25, 6400, 50257))),
    (r"gpt-?2.*large", KnownModel(traits=GPT, sizes=(36, 1280, 20, 20, 5120, 50257))),
    (r"gpt-?2.*medium", KnownModel(traits=GPT, sizes=(24, 1024, 16, 16, 4096, 50257))),
    (r"gpt-?2(-small)?$", KnownModel(traits=GPT, sizes=(12, 768, 12, 12, 3072, 50257))),
    (r"hu[ny]uan-?3|hy-?3(?!\d)", KnownModel(traits=LLAMA, sizes=(80, 4096, 64, 8, 13312, 120832), head_size=128,
                                           experts=_experts(192, 8, 1536, 1536, 1))),
    (r"pangu.*1b", KnownModel(traits=GPT, sizes=(26, 1536, 12, 6, 5632, 153376))),
)  # fmt: skip

_SIZE = re.compile(r"(?<![\d.x])(\d+(?:\.\d+|(?:point)\d+)?)-?([bmt])(?![a-z])")


def plain_name(name: str) -> str:
    """`name` in lower case with dashes between words: ``LLAMA3.1_405B`` is ``llama3.1-405b``.

    >>> plain_name("Meta Llama 3 (8B)")
    'meta-llama-3-8b'
    """
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def billions(name: str) -> float | None:
    """Parameters that a name states, in billions.

    >>> billions("tune_qwen25_0point5b_tp1"), billions("MPT-350m"), billions("BERT")
    (0.5, 0.35, None)
    """
    found = _SIZE.search(plain_name(name))
    if found is None:
        return None
    return float(found[1].replace("point", ".")) / {"b": 1.0, "m": 1e3, "t": 1e-3}[found[2]]


@lru_cache(maxsize=4096)
def known_model(name: str, parameters_b: float | None = None) -> KnownModel | None:
    """The published network that is called `name`; None where the name says too little.

    A member of a family is the one within 6 % of the size that the name (or `parameters_b`) states; a name of a known
    family without a known size gives a model without sizes, for its traits.
    """
    plain = re.sub(r"(qwen|llama|phi|deepseek-?v?)-?([1-4])-?([0-9])(?![0-9.]*b\b)", r"\1\2.\3", plain_name(name))
    for pattern, model in _SINGLE:
        if re.search(pattern, plain):
            return model
    family = next((f for f in _FAMILIES if re.search(f.pattern, plain)), None)
    if family is None:
        return None
    size = billions(name) or parameters_b
    near = min(family.members, key=lambda member: abs(member - (size or 0)), default=None)
    if size is None or near is None or abs(near - size) > 0.06 * size:
        return KnownModel(traits=family.traits, sizes=(0, 0, 0, 0, 0, family.vocabulary), head_size=0)
    member = family.members[near]
    vocabulary = member[5] if len(member) > 5 else family.vocabulary
    traits = BAICHUAN_13 if family.pattern == "baichuan" and near == 13 else family.traits
    if near <= family.tied_up_to:
        traits = replace(traits, tied_embeddings=True)
    layers, hidden, heads, key_value_heads, inner = member[:5]
    return KnownModel(
        traits=traits,
        sizes=(layers, hidden, heads, key_value_heads, inner, vocabulary),
        head_size=family.heads_of_size.get(near, family.head_size),
        window=family.window,
    )
