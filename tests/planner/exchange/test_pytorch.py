"""`meshwright export --to pytorch`, and `apply`: a plan on a module, with PyTorch's own parts."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.app import app
from planner.exchange.pytorch import export_module
from planner.networks import load_network
from planner.planning.planning import plan_network
from planner.plans.file import write_plan
from planner.plans.pins import Pins
from planner.plans.plan import Plan
from planner.plans.request import PlanRequest
from simulator.errors import InputError

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
OWN = "py:tests.planner.exchange.trained_by_plan:own"


@cache
def planned(network: str, *pins: str) -> Plan:
    """The best plan with these pins on four devices."""
    request = PlanRequest(
        network=network, hardware="dgx-a100", devices=4, global_batch=16, top=1, sensitivity=False, precision="fp32",
        pins=Pins.read({"sharding_threshold_kb": "0", "order": "pp-dp-tp", **dict(pin.split("=") for pin in pins)}),
    )  # fmt: skip
    return plan_network(request).candidates[0].plan


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The specification of a Llama of four layers."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return f"hf:{folder}"


SEQUENCE = ("tp=2", "sequence_parallel=true", "micro_batch=2")


def test_a_file_names_the_user_s_modules_and_pytorch_s_parts(llama: str, tmp_path: Path) -> None:
    plan = planned(llama, *SEQUENCE, "pp=1", "optimizer_sharding=zero3", "recompute=full")
    strategy, out = write_plan(plan, tmp_path / "strategy.json"), tmp_path / "plan.py"
    done = CliRunner().invoke(app, ["export", str(strategy), "--to", "pytorch", "--out", str(out), "--json", "--quiet"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["format"], said["version"], said["cannot_say"]) == ("pytorch", "2.9", [])
    text = out.read_text()
    ast.parse(text)
    assert len(text.splitlines()) < 190
    assert max(map(len, text.splitlines())) <= 120
    for expected in (
        '"model.layers.*.self_attn.q_proj": [ColwiseParallel()],',
        "loss = with_heads(loss, 2)",
        "RowwiseParallel(output_layouts=Shard(1))",
        'UNITS = [*(f"model.layers.{n}" for n in range(0, 4))]',
        '"reshard_after_forward": True',
        "checkpoint_wrapper(",
        "MICRO_BATCH = 2  # samples; of 8 a step and rank",
        "sizes = (1, 1, 2, 2)",
    ):
        assert expected in text
    assert "class Stage" not in text
    assert "meshwright" not in text.lower().replace("a plan of meshwright", "")


def test_what_pytorch_s_parts_cannot_run_is_refused_or_rounded(llama: str) -> None:
    plan = planned(llama, "tp=1", "pp=2", "schedule=1f1b", "optimizer_sharding=zero2", "micro_batch=2")
    graph = load_network(llama).capture()
    with pytest.raises(InputError, match="optimizer_sharding=zero2.*nearest: optimizer_sharding=zero1.*--round"):
        export_module(plan, graph)
    rounded = export_module(plan, graph, rounds=True)
    assert [one.rounded_to for one in rounded.cannot_say] == ["optimizer_sharding=zero1"]
    assert 'Pipeline(parts, stages, "1F1B", MICRO_BATCH)' in rounded.written.text
    assert '["model.embed_tokens", "model.layers.0", "model.layers.1"]' in rounded.written.text


@pytest.mark.parametrize(("micro_batch", "rounded_to"), [(16, []), (8, ["schedule=gpipe"])])
def test_fewer_micro_batches_than_stages_run_in_the_order_of_gpipe(micro_batch: int, rounded_to: list[str]) -> None:
    pins = ("tp=1", "pp=4", "schedule=1f1b", "optimizer_sharding=none", f"micro_batch={micro_batch}")
    plan = planned(OWN, *pins)
    assert plan.micro_batches == 16 // micro_batch
    exported = export_module(plan, load_network(OWN).capture(), rounds=bool(rounded_to))
    assert [one.rounded_to for one in exported.cannot_say] == rounded_to
    assert 'Pipeline(parts, stages, "GPipe", MICRO_BATCH)' in exported.written.text


def test_selective_recomputation_becomes_full(llama: str) -> None:
    plan = planned(llama, "tp=1", "pp=1", "optimizer_sharding=zero3", "micro_batch=2", "recompute=selective")
    rounded = export_module(plan, load_network(llama).capture(), rounds=True)
    assert [one.rounded_to.split()[0] for one in rounded.cannot_say] == ["recompute=full"]


def test_parameters_of_two_stages_are_refused() -> None:
    plan = planned("zoo:gpt2", "tp=1", "pp=2", "schedule=1f1b", "optimizer_sharding=none", "micro_batch=2")
    with pytest.raises(InputError, match=r"head\.weight.*one parameter.*--pin pp=1"):
        export_module(plan, load_network("zoo:gpt2").capture())


def test_a_module_that_counts_all_heads_is_told() -> None:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from planner.exchange.pytorch_parts import with_heads

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x).mean()

    x = torch.ones(1, 4, 2, 2)
    with_heads(loss, 4)(nn.Identity(), x)
    with pytest.raises(ValueError, match="attention has 4 heads, and a tensor rank has 2"):
        with_heads(loss, 2)(nn.Identity(), x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "pins", "applied"),
    [
        ("llama", ("tp=1", "pp=1", "micro_batch=2", "optimizer_sharding=zero3", "recompute=full"), False),
        ("llama", (*SEQUENCE, "pp=2", "schedule=1f1b", "recompute=full"), True),
        ("zoo:gpt2", ("tp=2", "pp=1", "micro_batch=2", "optimizer_sharding=zero1", "recompute=none"), False),
        (
            OWN,
            ("tp=1", "pp=2", "vpp=2", "schedule=interleaved_1f1b", "micro_batch=2", "optimizer_sharding=zero1"),
            True,
        ),
        (OWN, ("tp=1", "pp=4", "vpp=2", "schedule=zbv", "micro_batch=2", "optimizer_sharding=none"), False),
        (OWN, ("tp=1", "pp=4", "schedule=1f1b", "micro_batch=16", "optimizer_sharding=none"), True),
    ],
)
def test_four_ranks_train_as_one_process_does(
    network: str, pins: tuple[str, ...], applied: bool, llama: str, tmp_path: Path
) -> None:
    plan = planned(llama if network == "llama" else network, *pins)
    strategy = write_plan(plan, tmp_path / "strategy.json")
    arguments = [str(strategy)]
    if not applied:
        (tmp_path / "plan.py").write_text(export_module(plan, load_network(plan.network).capture()).written.text)
        arguments.append(str(tmp_path / "plan.py"))
    script = Path(__file__).with_name("trained_by_plan.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, *arguments], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads(done.stdout.splitlines()[-1])
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=1e-4)
    assert losses[0] != losses[1]
