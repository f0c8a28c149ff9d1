"""MindSpore loads the strategy files that we export, compiles with them, and saves the same strategies again.

It lives in an environment of its own: `make judge-mindspore` makes it and names its Python in MESHWRIGHT_MINDSPORE.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from planner.plans.file import export_mindspore
from planner.plans.hints import Hint, load_hints
from planner.plans.mindspore import LAYERS
from planner.search.problem.hints import constrained
from simulator.errors import InputError
from tests.judges.test_judges import show
from tests.planner.lowering.plans import MEGATRON, one_stage
from tests.planner.search.problems import captured, make_mesh, make_problem

PYTHON = os.environ.get("MESHWRIGHT_MINDSPORE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="MESHWRIGHT_MINDSPORE names no Python; run `make judge-mindspore`"),
]
NETWORK, LAYER_COUNT, DEVICES = "gpt2-tiny", 2, 8
SHAPES = ((8, 1), (4, 2), (2, 4))
HINTS: tuple[tuple[Hint, ...], ...] = ((), MEGATRON, MEGATRON[:4], MEGATRON[4:], MEGATRON[:3], MEGATRON[3::2])
"""Two kinds are not among them, which end in errors of MindSpore 2.10: columns that are cut where the next product
takes whole rows (it cuts the reshape between them over more devices than there are), and a parameter that two
operators cut in different ways."""


def judged(files: list[Path]) -> tuple[list[dict[str, Any]], str]:
    """What MindSpore did with each file, and its version."""
    asked = {"files": [str(file) for file in files], "devices": DEVICES, "layers": LAYER_COUNT}
    script = str(Path(__file__).with_name("mindspore_judge.py"))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, script],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        env=clean,
        cwd=files[0].parent,  # where MindSpore writes the graphs that it refuses
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["found"], answer["version"]


def exported(folder: Path) -> list[Path]:
    """Files of plans on several meshes, with and without strategies on layers."""
    graph = captured(NETWORK, LAYER_COUNT)
    cases = [(data, tensor, hints) for data, tensor in SHAPES for hints in HINTS if tensor > 1 or not hints]
    return [
        export_mindspore(
            one_stage(NETWORK, LAYER_COUNT, (("data", data), ("tensor", tensor)), hints=hints),
            graph,
            folder / f"{number}.json",
        )
        for number, (data, tensor, hints) in enumerate(cases)
    ]


def of_layers(document: dict[str, Any]) -> dict[str, Any]:
    """Strategies under MindSpore's names."""
    return {name: item for name, item in document.items() if name.partition("_")[0] in LAYERS}


def test_mindspore_saves_what_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = exported(tmp_path)
    found, version = judged(files)
    written = [of_layers(json.loads(file.read_text())["parallel_strategy_item"]) for file in files]
    assert len({json.dumps(items) for items in written}) >= len(files) // 2
    saved = [{name: one["strategies"].get(name) for name in items} for one, items in zip(found, written, strict=True)]
    other = [
        (file.name, one["refused"], {name: (items[name], got[name]) for name in items if items[name] != got[name]})
        for file, one, items, got in zip(files, found, written, saved, strict=True)
        if items != got
    ]
    show(capsys, version, "legal", len(files), len(other))
    assert other == []


def test_mindspore_refuses_what_hints_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts that do not divide a dim, that are more than there are devices, or of another number of dims."""
    files = []
    for number, file in enumerate(exported(tmp_path)[::3]):
        document = json.loads(file.read_text())
        del document["meshwright"]
        for kind, parts in (("odd", [[3, 1], [1, 1]]), ("many", [[8, 1], [8, 1]]), ("flat", [[8], [1, 1]])):
            changed = copy.deepcopy(document)
            items = changed["parallel_strategy_item"]
            items["MatMul_blocks.0.expand.weight"]["parallel_strategy"] = parts
            rows, columns = parts
            items["blocks.0.expand/addmm"]["parallel_strategy"] = [columns[:1], rows, columns[::-1]]
            files.append(tmp_path / f"{kind}{number}.json")
            files[-1].write_text(json.dumps(changed))
    problem = make_problem(captured(NETWORK, LAYER_COUNT), make_mesh(data=2, tensor=4), batch=16)
    for file in files:
        with pytest.raises(InputError):
            constrained(problem, load_hints(file))
    found, version = judged(files)
    taken = [file.name for file, one in zip(files, found, strict=True) if not one["refused"]]
    show(capsys, version, "illegal", len(files), len(taken))
    assert taken == []
