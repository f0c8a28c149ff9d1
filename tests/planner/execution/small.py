"""Networks that train in a moment, as factories for ``py:tests.planner.execution.small:NAME``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from planner.networks.losses import mean_cross_entropy
from planner.networks.zoo.configs import GPTConfig, LlamaConfig, MixtralConfig, WideDeepConfig
from planner.networks.zoo.gpt import GPT
from planner.networks.zoo.llama import Llama
from planner.networks.zoo.mixtral import Mixtral
from planner.networks.zoo.resnet import Bottleneck, ResNet
from planner.networks.zoo.wide_deep import WideAndDeep

VOCABULARY, LENGTH = 32, 16
TABLE_ROWS = 4096


def place(name: str) -> str:
    """What plans call one of these networks."""
    return f"py:{__name__}:{name}"


def _language(module: nn.Module) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    return module, (tokens, tokens)


def gpt() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Positions that are learned, a tied embedding."""
    return _language(GPT(GPTConfig(vocabulary=VOCABULARY, hidden=16, layers=2, heads=4, positions=LENGTH)))


def llama() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Rotary positions, pairs of heads that share keys and values."""
    return _language(
        Llama(
            LlamaConfig(
                vocabulary=VOCABULARY,
                hidden=32,
                layers=2,
                heads=8,
                key_value_heads=4,
                intermediate=24,
                positions=LENGTH,
            )
        )
    )


def mixtral() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Two of four experts a token."""
    return _language(
        Mixtral(
            MixtralConfig(
                vocabulary=VOCABULARY,
                hidden=16,
                layers=2,
                heads=4,
                key_value_heads=2,
                intermediate=24,
                positions=LENGTH,
                experts=4,
                chosen_experts=2,
            )
        )
    )


def latent() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Latent attention and a dense layer in front; two of four experts a token, in groups, beside one for all."""
    from planner.networks.hugging_face_modules import trained

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
        "v_head_dim": 4, "intermediate_size": 24, "moe_intermediate_size": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "max_position_embeddings": LENGTH, "attention_dropout": 0.0,
    }  # fmt: skip
    module = trained(("small", ""), "deepseek_v3", sizes, LENGTH)
    return _language(module)


def resnet() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """One block a stage."""
    return ResNet((1, 1, 1, 1), classes=10), (torch.zeros(2, 3, 32, 32), torch.arange(2) + 8)


class Blocks(nn.Module):
    """Bottleneck blocks of a ResNet alone, with a head."""

    def __init__(self, count: int, channels: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bottleneck(channels, channels // 4, 1) for _ in range(count))
        self.head = nn.Linear(channels, 10)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """Loss of images ``(batch, channels, h, w)`` against class numbers ``(batch,)``."""
        for block in self.blocks:
            image = block(image)
        return mean_cross_entropy(self.head(image.mean((2, 3))), label)


def blocks() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Convolutions and batch norms, on images so small that the weights outweigh them."""
    return Blocks(4, 256), (torch.zeros(2, 256, 2, 2), torch.arange(2) + 8)


def wide_and_deep() -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    """Two tables that are looked up alone, larger than all other parameters."""
    module = WideAndDeep(WideDeepConfig(rows=TABLE_ROWS, categories=4, numbers=4, width=8, hidden=(16, 8)))
    rows = torch.tensor([[0, 1, 2, 3], [TABLE_ROWS - 1, 0, 0, 1]])
    return module, (torch.zeros(2, 4), rows, torch.arange(2))


def dropping() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A GPT with two dropouts a block."""
    module, inputs = gpt()
    blocks: nn.ModuleList = module.blocks  # type: ignore[assignment]
    for block in blocks:
        block.attention = nn.Sequential(block.attention, nn.Dropout(0.2))
        block.contract = nn.Sequential(block.contract, nn.Dropout(0.1))
    return module, inputs


class Adapted(nn.Module):
    """A product with frozen weights, and beside it one of low rank that is trained (LoRA, arXiv:2106.09685)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.narrow = nn.Linear(frozen.in_features, rank, bias=False)
        self.wide = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., inputs)`` to ``(..., outputs)``."""
        return self.frozen(x) + self.wide(self.narrow(x))  # type: ignore[no-any-return]


def adapters() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A Llama that is frozen but for adapters of its products."""
    network, inputs = llama()
    network.requires_grad_(False)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "head":
                setattr(module, name, Adapted(child, rank=4))
    return network, inputs
