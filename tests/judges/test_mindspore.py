"""MindSpore loads the strategy files that we export, compiles with them, and saves the same strategies again.

It lives in an environment of its own: `make judge-mindspore` makes it and names its Python in MESHWRIGHT_MINDSPORE.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from planner.plans.file import export_mindspore
from planner.plans.hints import Hint, load_hints
from planner.plans.mindspore import LAYERS
from planner.search.problem.hints import constrained
from simulator.errors import InputError
from tests.judges.cases import spread
from tests.judges.test_judges import show
from tests.planner.lowering.plans import MEGATRON, one_stage
from tests.planner.search.problems import captured, make_mesh, make_problem

PYTHON = os.environ.get("MESHWRIGHT_MINDSPORE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="MESHWRIGHT_MINDSPORE names no Python; run `make judge-mindspore`"),
]
NETWORK, LAYER_COUNT, COUNT = "gpt2-tiny", 2, 50
SHAPES = tuple((devices // tensor, tensor) for devices in (4, 8, 16) for tensor in (1, 2, 4))
PARTS: tuple[tuple[Hint, ...], ...] = ((), MEGATRON[:4], MEGATRON[4:], MEGATRON)
"""What hints cut of a layer: nothing, its attention, its feed-forward network or both.

Fewer of these hints lead to the same strategies. Two kinds are not among them, which end in errors of MindSpore 2.10:
columns that are cut where the next product takes whole rows (it cuts the reshape between them over more devices than
there are), and a parameter that two operators cut in different ways."""


def judged(files: Mapping[Path, int]) -> tuple[list[dict[str, Any]], str]:
    """What MindSpore did with each file, given how many devices it is for, and its version."""
    asked = {"files": [(str(file), devices) for file, devices in files.items()], "layers": LAYER_COUNT}
    script = str(Path(__file__).with_name("mindspore_judge.py"))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, script],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        env=clean,
        cwd=next(iter(files)).parent,  # where MindSpore writes the graphs that it refuses
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["found"], answer["version"]


def exported(folder: Path) -> dict[Path, int]:
    """Files of plans on several meshes with their numbers of devices; no two files hold the same strategies."""
    graph = captured(NETWORK, LAYER_COUNT)
    found: dict[str, tuple[Path, int]] = {}
    cases = [
        (*shape, hints) for shape in SHAPES for hints in product(PARTS, repeat=2) if shape[1] > 1 or not any(hints)
    ]
    for number, (data, tensor, hints) in enumerate(cases):
        each = tuple(
            replace(hint, pattern=hint.pattern.replace("*", str(layer)))
            for layer, part in enumerate(hints)
            for hint in part
        )
        plan = one_stage(NETWORK, LAYER_COUNT, (("data", data), ("tensor", tensor)), hints=each)
        file = export_mindspore(plan, graph, folder / f"{number}.json")
        found.setdefault(json.dumps(written(file)), (file, data * tensor))
    return dict(spread([*found.values()], COUNT))


def written(file: Path) -> dict[str, Any]:
    """Strategies in a file under MindSpore's names."""
    return of_layers(json.loads(file.read_text())["parallel_strategy_item"])


def of_layers(document: dict[str, Any]) -> dict[str, Any]:
    """Strategies under MindSpore's names."""
    return {name: item for name, item in document.items() if name.partition("_")[0] in LAYERS}


def test_mindspore_saves_what_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = exported(tmp_path)
    found, version = judged(files)
    asked = [written(file) for file in files]
    saved = [{name: one["strategies"].get(name) for name in items} for one, items in zip(found, asked, strict=True)]
    other = [
        (file.name, one["refused"], {name: (items[name], got[name]) for name in items if items[name] != got[name]})
        for file, one, items, got in zip(files, found, asked, saved, strict=True)
        if items != got
    ]
    show(capsys, version, "legal", len(files), len(other))
    assert len(files) == COUNT
    assert other == []


def test_mindspore_refuses_what_hints_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts that do not divide a dim, that are more than there are devices, or of another number of dims."""
    files = {}
    for number, (file, devices) in enumerate([*exported(tmp_path).items()][::3]):
        document = json.loads(file.read_text())
        del document["meshwright"]
        for kind, parts in (("odd", [[3, 1], [1, 1]]), ("many", [[8, 1], [8, 1]]), ("flat", [[8], [1, 1]])):
            changed = copy.deepcopy(document)
            items = changed["parallel_strategy_item"]
            items["MatMul_blocks.0.expand.weight"]["parallel_strategy"] = parts
            rows, columns = parts
            items["blocks.0.expand/addmm"]["parallel_strategy"] = [columns[:1], rows, columns[::-1]]
            spoiled = tmp_path / f"{kind}{number}.json"
            spoiled.write_text(json.dumps(changed))
            files[spoiled] = devices
    problem = make_problem(captured(NETWORK, LAYER_COUNT), make_mesh(data=2, tensor=4), batch=16)
    for file in files:
        with pytest.raises(InputError):
            constrained(problem, load_hints(file))
    found, version = judged(files)
    taken = [file.name for file, one in zip(files, found, strict=True) if not one["refused"]]
    show(capsys, version, "illegal", len(files), len(taken))
    assert len(files) >= COUNT
    assert taken == []
