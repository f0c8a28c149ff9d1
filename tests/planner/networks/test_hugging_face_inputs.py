"""What classes of transformers are given beside tokens: packed images, masks that are read, objects, known numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.graph.capture import capture_module
from planner.graph.operator_graph import WRITTEN
from planner.graph.scaling import at_batch
from planner.networks import InputSpec, Network, load_network
from simulator.errors import NetworkError, UnsupportedError
from tests.oracles.graph_interpreter import assert_equals_autograd

transformers = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}
TURNED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1]}
PACKED: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 2, "image_size": 16,
    },
    "qwen2_5_vl": {
        "depth": 2, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2, "intermediate_size": 24,
        "patch_size": 2, "window_size": 8, "fullatt_block_indexes": [1], "image_size": 16,
    },
}  # fmt: skip
PACKED = {
    kind: {"text_config": {**TEXT, "rope_parameters": TURNED}, "vision_config": vision}
    for kind, vision in PACKED.items()
}


def network(folder: Path, kind: str, length: int | None = 32, **settings: Any) -> Network:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **settings}))
    return load_network(f"hf:{folder}", sequence_length=length)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_images_are_what_transformers_makes_of_each(kind: str, tmp_path: Path) -> None:
    from planner.networks.hugging_face_running import known_tensors, running

    ours: Any = network(tmp_path, kind, **PACKED[kind]).build(seed=0)
    patches = torch.randn(2, 64, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(1))
    seen = ours.model.model.visual
    with torch.no_grad():
        with running(ours.model):
            grid = known_tensors({"grid": [[2, 8, 8]]}, patches.device)["grid"]
            found = seen(patches.flatten(0, 1), grid_thw=grid).pooler_output
        config = type(ours.model.config)(**PACKED[kind])
        twin = getattr(transformers, type(ours.model).__name__)._from_config(config, attn_implementation="eager").eval()
        twin.load_state_dict(ours.model.state_dict())
        grid = torch.tensor([[1, 8, 8], [1, 8, 8]])
        expected = twin.model.visual(patches.flatten(0, 1), grid_thw=grid).pooler_output
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_packed_images_are_captured_for_any_batch(tmp_path: Path) -> None:
    found = network(tmp_path, "qwen2_5_vl", **PACKED["qwen2_5_vl"])
    assert [spec.shape for spec in found.inputs] == [(32,), (32,), (64, 24)]
    graph = found.capture()
    assert WRITTEN in {node.op for node in graph.nodes}  # the order of windows
    assert_equals_autograd(at_batch(graph, 2), found.build(seed=0), seed=1, rtol=1e-3)


def test_numbers_that_differ_between_samples_are_refused() -> None:
    from planner.networks.hugging_face_running import _written

    assert torch.equal(_written(torch.tensor([1, 2, 1, 2]), batch=2), torch.tensor([1, 2, 1, 2]))
    with pytest.raises(NetworkError, match="differ between the samples"):
        _written(torch.tensor([1, 2, 3, 4]), batch=2)


def test_a_mask_that_code_reads_is_given(tmp_path: Path) -> None:
    settings = {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": 40, "max_seq_len": 32}
    found = network(tmp_path, "mpt", **settings)
    assert_equals_autograd(at_batch(found.capture(), 2), found.build(seed=0), seed=1, rtol=1e-4)


def test_a_class_that_takes_labels_and_refuses_them_is_not_trained(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no class of transformers computes a loss"):
        network(tmp_path, "vitpose", None)


def test_objects_are_detected_with_one_for_each_query(tmp_path: Path) -> None:
    found = network(
        tmp_path, "yolos", None, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        image_size=[32, 32], num_detection_tokens=3, id2label={"0": "a", "1": "b"},
    )  # fmt: skip
    assert [(spec.name, spec.shape) for spec in found.inputs] == [
        ("image", (3, 32, 32)), ("classes", (3,)), ("boxes", (3, 4)),
    ]  # fmt: skip
    assert_equals_autograd(at_batch(found.capture(), 2), found.build(seed=0), seed=1, rtol=1e-4)


def test_features_before_the_tokens_have_no_labels(tmp_path: Path) -> None:
    found = network(
        tmp_path, "git", **TEXT, vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 16,
        },
    )  # fmt: skip
    assert found.capture().loss


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("marian", {"is_encoder_decoder": True}), ("deberta-v2", {"type_vocab_size": 0})],
)
def test_tokens_are_what_translation_and_language_models_predict(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    found = network(tmp_path, kind, vocab_size=40, pad_token_id=0, decoder_start_token_id=0, **settings)
    assert found.inputs[-1].shape == (32,)


class _Repeated(torch.nn.Module):
    """A loss with numbers that are the same in every sample and known before a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from planner.networks.hugging_face_running import known_tensors, running

        factors = known_tensors({"factors": [[1, 2, 4]] * x.shape[0]}, x.device)["factors"]
        with running(self, x.shape[0]):
            return (x * self.weight * factors).sum() / x.shape[0]


def test_known_numbers_of_samples_that_are_alike_are_made_once() -> None:
    spec = InputSpec(name="x", kind="features", shape=(3,))
    graph = capture_module(_Repeated, [spec], name="repeated")
    (written,) = (node for node in graph.nodes if node.op == WRITTEN)
    assert not any(written.outputs[0].batch_dims)
    assert_equals_autograd(at_batch(graph, 2), _Repeated(), seed=1, rtol=1e-6)
