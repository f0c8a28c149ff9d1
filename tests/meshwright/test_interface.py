"""`import meshwright as mw`."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from planner.cli.plan import PlanArguments
from planner.plans.pins import PIN_NAMES

ROOT = Path(__file__).parents[2]


@cache
def result() -> mw.PlanResult:
    return mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512, top=2)


@pytest.mark.parametrize("heavy", ["torch", "numpy", "pandas", "networkx", "pydantic", "rich", "planner"])
def test_importing_it_imports_nothing_heavy(heavy: str) -> None:
    code = f"import sys, meshwright; print({heavy!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_public_name_exists_and_shows_an_example() -> None:
    for name in mw.__all__:
        found = getattr(mw, name)
        examples = [line for line in (inspect.getdoc(found) or "").splitlines() if line.startswith((">>>", "..."))]
        assert any(line.startswith(">>>") for line in examples), name
        assert not re.search(r"import (planner|simulator)|from (planner|simulator)", "\n".join(examples)), name
        methods = inspect.getmembers(found, inspect.isfunction) if found.__module__.startswith("meshwright") else []
        for method_name, method in methods:
            assert method_name.startswith("_") or ">>>" in (inspect.getdoc(method) or ""), f"{name}.{method_name}"
    with pytest.raises(AttributeError, match="nothing"):
        _ = mw.nothing  # type: ignore[attr-defined]


def test_what_can_be_pinned_is_what_the_command_line_pins() -> None:
    assert set(mw.PinOptions.__annotations__) == set(PIN_NAMES)


def test_options_have_the_names_of_the_command_line() -> None:
    taken = set(inspect.signature(mw.plan).parameters) - {"inputs", "loss", "pinned"}
    named = {"sequence_length": "seq_len"}
    asked = {named.get(name, name) for name in PlanArguments.__dataclass_fields__}
    assert taken == asked - {"config", "out", "trust_file", "as_json", "quiet", "debug", "verbose"}


def test_no_public_signature_takes_anything() -> None:
    for path in (ROOT / "meshwright").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:
                assert ast.unparse(node.args.kwarg.annotation or ast.Constant("")) == "Unpack[PinOptions]"


def test_a_result_reads_well_in_a_terminal_and_in_a_notebook() -> None:
    text, page = repr(result()), result()._repr_html_()
    assert max(map(len, text.splitlines()[1:])) <= 80
    assert "step" in text
    assert "MFU" in text
    assert page.count("<tr>") == 1 + len(result().plans)
    assert repr(result().best).count("dp=") == 1


def test_pins_are_kept_and_wrong_ones_are_refused() -> None:
    assert mw.plan("zoo:mlp", "dgx-a100", 8, global_batch=512, top=1, tp=2).best.tp == 2
    assert mw.plan("zoo:mlp", "dgx-a100", 8, global_batch=512, top=1, pins={"tp": 2}).best.tp == 2
    with pytest.raises(mw.InputError, match="tensor"):
        mw.plan("zoo:mlp", "dgx-a100", 8, pins={"tensor": 2})


def test_a_plan_that_fits_nowhere_is_an_error_of_its_own() -> None:
    with pytest.raises(mw.InfeasibleError):
        mw.plan("zoo:mlp", "dgx1-v100-16g", 1, global_batch=2**22, micro_batch=2**22)


def test_a_strategy_file_is_read_as_it_was_saved(tmp_path: Path) -> None:
    again = mw.load(result().save(tmp_path / "mlp.json"))
    assert again.best.plan == result().best.plan
    assert again.prediction.step_time_s == pytest.approx(result().prediction.step_time_s)


def test_a_module_with_inputs_is_planned_simulated_and_drawn(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    batch = torch.rand(16, 32), torch.rand(16, 1)
    found = mw.plan(module, "dgx-a100", 4, inputs=batch, loss=nn.functional.mse_loss, global_batch=64, top=1)
    step = found.simulate()
    assert step.prediction.step_time_s == pytest.approx(found.prediction.step_time_s)
    assert found.timeline().save(tmp_path / "step.svg").read_text().startswith("<svg")
    step.write_trace(tmp_path / "step.json")
    assert (tmp_path / "step.json").is_file()
    with pytest.raises(mw.InputError, match="inputs are missing"):
        mw.plan(module, "dgx-a100", 4)


def test_a_configuration_of_transformers_is_the_network_of_its_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=32)
    config.save_pretrained(tmp_path)
    options = {"hardware": "dgx-a100", "devices": 4, "global_batch": 8, "top": 1}
    given, read = mw.plan(config, **options), mw.plan(f"hf:{tmp_path}", **options)
    assert given.best.plan.fingerprint == read.best.plan.fingerprint
    assert given.prediction.step_time_s == read.prediction.step_time_s


def test_profiles_are_given_by_name_or_as_they_are() -> None:
    hardware = mw.profile("dgx-a100")
    assert mw.plan("zoo:mlp", hardware, 8, global_batch=512, top=1).best.plan.hardware == "dgx-a100"


def test_a_sweep_has_a_plan_for_each_point_and_a_page(tmp_path: Path) -> None:
    sweep = mw.what_if("zoo:mlp", "dgx-a100", [1, 2], batch_per_device=64)
    assert [row["devices"] for row in sweep.rows()] == [1, 2]
    assert sweep.save(tmp_path / "sweep.html").read_text().count("dgx-a100") > 1
    with pytest.raises(KeyError):
        sweep.plan("dgx-a100", 4)


def test_examples_import_the_public_packages_alone() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in ("planner", "simulator", "reports"), path
            if isinstance(node, ast.Import):
                assert not any(one.name.startswith(("planner.", "simulator", "reports")) for one in node.names), path


def test_what_a_method_returns_reads_well_too() -> None:
    """Every object that a user gets says in a few short lines what it is, with units."""
    step = result().simulate()
    shown = {
        "plan": result().best,
        "prediction": result().prediction,
        "step": step,
        "picture": result().timeline(),
        "export": result().export("bridge", round=True),
        "profile": mw.profile("dgx-a100"),
        "budget": mw.budget("zoo:gpt2-tiny", "dgx-h100", tokens=1e9, devices=8, global_batch=64).best,
    }
    for name, one in shown.items():
        assert len(repr(one)) < 2500, name
        assert type(one).__name__ + "(" not in repr(one), name
    assert "8 × NVIDIA A100-SXM4-80GB (dgx-a100)" in repr(step)
    assert "MFU" in repr(step.prediction)
    assert "GiB usable each" in repr(shown["profile"])
    assert "days" in repr(shown["budget"])
    assert "SVG or PNG" in repr(shown["picture"])


def test_tables_of_sweeps_and_checks_fit_80_columns(tmp_path: Path) -> None:
    sweep = mw.what_if("zoo:gpt2", ["dgx-a100", "dgx-h100"], [8], global_batch=64)
    mw.plan("zoo:gpt2", "dgx-a100", 8, global_batch=64, tp=2, top=1).export("megatron", tmp_path / "a.sh", round=True)
    check = mw.check(tmp_path / "a.sh", network="zoo:gpt2", hardware="dgx-a100", better=False)
    for text in (repr(sweep), repr(check)):
        assert max(map(len, text.splitlines())) <= 80, text
    assert "micro_batch=" in repr(check)
