"""Networks from a user's function, and what is said when it is wrong."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from planner.graph.folding import unfold
from planner.graph.scaling import at_batch, at_precision
from planner.networks import load_network
from simulator.errors import InputError, NetworkError
from tests.oracles.graph_interpreter import assert_equals_autograd

SOURCE = """
from types import SimpleNamespace

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.inner(x)))


def classifier():
    net = nn.Sequential(nn.Linear(6, 8), *(Residual(8) for _ in range(5)), nn.Linear(8, 3))
    return net, (torch.randn(4, 6), torch.zeros(4, dtype=torch.long)), nn.CrossEntropyLoss()


def drawn():
    return nn.Linear(6, 1000), (torch.randn(4, 6), torch.randint(1000, (4,))), nn.CrossEntropyLoss()


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.register_buffer("scale", torch.arange(8.0))

    def forward(self, tokens):
        return (self.table(tokens) * self.scale).square().mean()


def language():
    return Tokens(), torch.zeros(2, 5, dtype=torch.long)


def number():
    return 3


def no_tensors():
    return nn.Linear(2, 2), "inputs"


def no_loss():
    return nn.Linear(2, 2), (torch.zeros(1, 2), torch.zeros(1, 2)), 0.5


def uneven():
    return nn.Linear(2, 2), (torch.zeros(1, 2), torch.zeros(3, 2)), nn.MSELoss()


def scalar():
    return nn.Linear(2, 2), torch.tensor(1.0)


def broken():
    return nn.Linear(2, "two")


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        if x.sum() > 0:
            return self.inner(x).sum()
        return self.inner(x).mean()


def branches():
    return Branches(), torch.zeros(1, 2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.table(tokens)).square().mean()


def on_meta():
    with torch.device("meta"):
        return Tied().bfloat16(), torch.zeros(2, 5, dtype=torch.long)


def with_values():
    steps = int(torch.tensor(3).item())
    return Residual(4), (torch.zeros(2, 4), torch.from_numpy(torch.ones(2, 4).numpy() * steps)), nn.L1Loss()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, *, first, second, label=None):
        scores = self.one(first) + self.other(second)
        if label is None:
            return scores
        return SimpleNamespace(loss=nn.functional.cross_entropy(scores, label), scores=scores)


def by_name():
    names = {"second": torch.zeros(2, 5), "first": torch.zeros(2, 4), "label": torch.zeros(2, dtype=torch.long)}
    return Pair(), names


def by_name_with_loss():
    return *by_name(), nn.CrossEntropyLoss()


def by_number():
    return Pair(), {1: torch.zeros(2, 4)}


not_callable = 5
"""
_serial = count()


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_network_{next(_serial)}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize("factory", ["classifier", "language", "by_name", "by_name_with_loss"])
def test_a_users_network_equals_autograd(factory: str, module_name: str) -> None:
    network = load_network(f"py:{module_name}:{factory}")
    graph = at_precision(unfold(at_batch(network.capture(), 7)), "float64")
    assert_equals_autograd(graph, network.build(seed=2).double(), seed=3, rtol=1e-11)


def test_its_description_blocks_and_bounds(module_name: str) -> None:
    network = load_network(f"py:{module_name}:classifier")
    graph = network.capture()
    assert (network.family, network.sequence_length, network.default_global_batch) == ("features", None, 4)
    assert [(i.kind, i.high) for i in graph.inputs] == [("features", None), ("label", 3)]
    assert [(run.prefix, run.count) for run in graph.runs] == [("module", 5)]
    assert any("batch norm" in note for note in graph.notes)
    assert any(node.source.startswith(f"{module_name}.py:") for node in graph.nodes)


def test_a_language_network(module_name: str) -> None:
    network = load_network(f"py:{module_name}:language", sequence_length=5)
    assert (network.family, network.sequence_length) == ("language", 5)
    assert network.capture().inputs[0].high == 40
    with pytest.raises(InputError, match="9"):
        load_network(f"py:{module_name}:language", sequence_length=9)


def test_a_factory_may_build_on_the_meta_device_and_in_any_precision(module_name: str) -> None:
    graph = load_network(f"py:{module_name}:on_meta").capture()
    assert [(p.name, p.aliases) for p in graph.parameters] == [("table.weight", ("head.weight",))]
    assert {spec.dtype for node in graph.nodes for spec in node.outputs} == {"float32", "int64"}


def test_a_factory_may_look_at_values(module_name: str) -> None:
    assert load_network(f"py:{module_name}:with_values").capture().parameter_count == 28


def test_drawn_examples_do_not_change_the_network(module_name: str) -> None:
    before = torch.get_rng_state()
    fingerprints = {load_network(f"py:{module_name}:drawn").capture().fingerprint for _ in range(3)}
    assert len(fingerprints) == 1
    torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("factory", "parts"),
    [
        ("number", ("returns int", "(module, inputs)")),
        ("no_tensors", ("inputs are str", "(module, inputs)")),
        ("no_loss", ("loss is float",)),
        ("by_number", ("names (1,)", "a dict")),
        ("uneven", ("[1, 3]", "one batch size")),
        ("scalar", ("scalar", "dim 0")),
        ("broken", ("TypeError", ".py:")),
        ("absent", ("no function 'absent'", "classifier")),
        ("not_callable", ("no function 'not_callable'",)),
        ("", ("incomplete", "py:MODULE:FACTORY")),
    ],
)
def test_wrong_factories_say_what_to_return(factory: str, parts: tuple[str, ...], module_name: str) -> None:
    with pytest.raises(NetworkError) as caught:
        load_network(f"py:{module_name}:{factory}")
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_data_dependent_control_flow_names_operator_and_line(module_name: str) -> None:
    line = SOURCE.splitlines().index("        if x.sum() > 0:") + 1
    with pytest.raises(NetworkError, match=rf"aten\.item\.default at {module_name}\.py:{line} .*torch\.where"):
        load_network(f"py:{module_name}:branches").capture()


def test_a_factory_may_be_in_folders_without_an_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in any project of today; the packages have not been imported before."""
    folder = tmp_path / "outer_without_init" / "inner"
    folder.mkdir(parents=True)
    (folder / "made.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_network("py:outer_without_init.inner.made:classifier").capture().parameters


def test_missing_and_failing_modules(tmp_path: Path, module_name: str) -> None:
    with pytest.raises(NetworkError, match="no module 'nowhere_at_all'"):
        load_network("py:nowhere_at_all:make")
    (tmp_path / f"{module_name}_needs.py").write_text("import nowhere_at_all\n")
    with pytest.raises(NetworkError, match="needs module 'nowhere_at_all'"):
        load_network(f"py:{module_name}_needs:make")
    (tmp_path / f"{module_name}_fails.py").write_text("x = 1 / 0\n")
    with pytest.raises(NetworkError, match=r"ZeroDivisionError at .*_fails\.py:1"):
        load_network(f"py:{module_name}_fails:make")
    (tmp_path / f"{module_name}_syntax.py").write_text("def broken(:\n")
    with pytest.raises(NetworkError, match=r"SyntaxError at .*_syntax\.py:1: "):
        load_network(f"py:{module_name}_syntax:make")
    (tmp_path / f"{module_name}_exits.py").write_text("def make(): raise SystemExit(7)\ndef needs(a): pass\n")
    with pytest.raises(NetworkError, match=r"the factory fails: SystemExit at .*_exits\.py:1: 7"):
        load_network(f"py:{module_name}_exits:make")
    with pytest.raises(NetworkError, match=r"the factory fails: TypeError: needs\(\) missing"):
        load_network(f"py:{module_name}_exits:needs")
