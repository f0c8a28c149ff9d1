"""State-space scans and gated delta rules: one operator each, equal to what transformers computes in products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from planner.graph.operator_graph import RECURRENCE, RECURRENCE_BACKWARD
from planner.graph.recurrence import recurrence_flops, recurrence_operator
from planner.networks import load_network
from planner.networks.hugging_face_running import running
from simulator.program import Kernel

LENGTH, HEADS, SHARED = 7, 4, 2


def draw(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("delta", [False, True])
def test_its_gradients_are_those_of_its_outputs(delta: bool) -> None:
    torch.manual_seed(0)
    query, key, value = draw(2, SHARED, LENGTH, 3), draw(2, SHARED, LENGTH, 3), draw(2, HEADS, LENGTH, 2)
    decay, rate = draw(2, HEADS, LENGTH), draw(2, HEADS, LENGTH) if delta else None
    run = recurrence_operator()
    assert torch.autograd.gradcheck(lambda *given: run(*given[:4], given[4] if delta else None, 4),
                                    tuple(x for x in (query, key, value, -decay.detach().abs().requires_grad_(), rate)
                                          if x is not None))  # fmt: skip


class _Held(torch.nn.Module):
    """Stands for a model whose code lies in a module of transformers."""


@pytest.mark.parametrize(("kind", "name"), [("qwen3_next", "torch_chunk_gated_delta_rule"),
                                            ("mamba2", "mamba2_chunk_scan")])  # fmt: skip
def test_it_computes_what_transformers_does(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    module = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=[name])
    monkeypatch.setattr(_Held, "__module__", module.__name__)
    torch.manual_seed(0)
    values, steps = torch.randn(2, LENGTH, HEADS, 3), torch.rand(2, LENGTH, HEADS)
    queries, keys = torch.randn(2, LENGTH, SHARED, 5), torch.randn(2, LENGTH, SHARED, 5)

    def computed() -> Any:
        run = getattr(module, name)
        if kind == "qwen3_next":
            return run(queries, keys, values, g=-steps, beta=steps.sqrt(), use_qk_l2norm_in_kernel=True)[0]
        rates, skipped = -torch.arange(1.0, HEADS + 1), torch.ones(HEADS)
        return run(values, steps, rates, keys, queries, 4, D=skipped, dt_bias=skipped, dt_softplus=True)

    expected = computed()
    with running(_Held()):
        found = computed()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(computed(), expected)


def test_a_scan_is_one_operator_each_way_whatever_the_length(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "mamba2", num_hidden_layers=1, vocab_size=40, hidden_size=16, num_heads=4, head_dim=8, state_size=8, n_groups=2,
        chunk_size=4,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    graphs = [load_network(f"hf:{tmp_path}", sequence_length=length).capture() for length in (8, 64)]
    assert len(graphs[0].nodes) == len(graphs[1].nodes)
    forward, backward = (next(n for n in graphs[1].nodes if n.op == op) for op in (RECURRENCE, RECURRENCE_BACKWARD))
    # A token and head: 2 groups of keys 8 wide in chunks of 4; 4 heads of values 8 wide and their states.
    assert forward.flops == 64 * (2 * 2 * 4 * 8 + 4 * (2 * 4 * 8 + 4 * 8 * 8))
    assert backward.flops == 3 * forward.flops
    assert forward.kernel is backward.kernel is Kernel.ATTENTION


def test_a_delta_rule_is_more_work() -> None:
    key, value = torch.empty(1, 2, 64, 8), torch.empty(1, 4, 64, 8)
    plain, delta = (recurrence_flops(key, value, rate, 16) for rate in (None, value))
    assert 2 * plain < delta < 4 * plain
