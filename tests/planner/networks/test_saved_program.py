"""Saved programs of torch.export are captured as the modules that they were exported from."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from planner.cli.app import app
from planner.execution.reference import _SameMasks
from planner.graph.operator_graph import OperatorGraph
from planner.networks import load_network
from planner.networks.python_factory import network_of
from planner.networks.trust import files_are_trusted, trust_files
from planner.sharding.local_call import Moment
from simulator.errors import InputError, NetworkError


class Tagger(nn.Module):
    """Tied embeddings, a batch norm, dropout, and the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 8)
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 256, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = F.dropout(self.inner(self.norm(self.table(tokens).transpose(1, 2)).transpose(1, 2)), 0.1)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


EXAMPLE = (torch.arange(12).view(2, 6), torch.arange(12).view(2, 6))
BATCH = {0: torch.export.Dim("batch")}


def save(path: Path, module: nn.Module, inputs: tuple[Tensor, ...], shapes: object) -> str:
    torch.export.save(torch.export.export(module, inputs, dynamic_shapes=shapes), path)  # type: ignore[arg-type]
    return f"pt2:{path}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return save(tmp_path_factory.mktemp("saved") / "tagger.pt2", Tagger(), EXAMPLE, (BATCH, BATCH))


@pytest.fixture
def trusted() -> Iterator[None]:
    trust_files(True)
    yield
    trust_files(False)


def told(graph: OperatorGraph) -> list[tuple[object, ...]]:
    """What the operators of a graph are, without the places of the source that they come from."""
    return [(node.name, node.op, node.args, node.outputs, node.phase) for node in graph.nodes]


@pytest.mark.usefixtures("trusted")
def test_a_saved_program_is_captured_as_its_module(saved: str) -> None:
    network = load_network(saved)
    of_module = network_of(Tagger(), EXAMPLE)
    assert network.inputs == of_module.inputs
    assert (network.spec, network.family, network.sequence_length) == (saved, "language", 6)
    graph, expected = network.capture(), of_module.capture()
    assert [(p.name, p.aliases) for p in graph.parameters] == [(p.name, p.aliases) for p in expected.parameters]
    assert ("head.weight",) in {p.aliases for p in graph.parameters}
    assert told(graph) == told(expected)
    assert set(expected.notes) <= {*graph.notes, *network.notes}


@pytest.mark.usefixtures("trusted")
def test_training_starts_from_the_parameters_of_the_file(saved: str) -> None:
    torch.manual_seed(0)
    wanted = dict(Tagger().named_parameters())
    module = load_network(saved).build(seed=7)
    found = dict(module.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert module(*(torch.cat([tensor] * 3) for tensor in EXAMPLE)).shape == ()


@pytest.mark.usefixtures("trusted")
def test_one_process_draws_the_masks_of_a_program_as_of_its_module(saved: str) -> None:
    torch.manual_seed(0)
    losses = []
    for module in (Tagger().train(), load_network(saved).build(seed=7)):
        with _SameMasks([3], Moment(seed=1, step=0, micro_batch=0)):
            losses.append(float(module(*EXAMPLE).detach()))
    assert losses[0] == losses[1]


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features)  # type: ignore[no-any-return]


class Mean(Outputs):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features).mean()


class Named(Mean):
    def forward(self, *, features: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(features)


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return f"pt2:{path}"


def without_example(path: Path) -> str:
    program = torch.export.export(Mean(), (torch.ones(2, 4),), dynamic_shapes=(BATCH,))
    program.example_inputs = None
    torch.export.save(program, path)
    return f"pt2:{path}"


def by_name(path: Path) -> str:
    program = torch.export.export(Named(), (), {"features": torch.ones(2, 4)}, dynamic_shapes={"features": BATCH})
    torch.export.save(program, path)
    return f"pt2:{path}"


FAULTS: dict[str, tuple[Callable[[Path], str], tuple[str, ...]]] = {
    "fixed batch": (lambda p: save(p, Mean(), (torch.ones(5, 4),), None), ("batch of 5", "input 0", 'Dim("batch")')),
    "no loss": (lambda p: save(p, Outputs(), (torch.ones(2, 4),), (BATCH,)), ("returns (batch, 3)", "mean loss")),
    "no example": (without_example, ("without its example inputs",)),
    "by name": (by_name, ("features=", "by position")),
    "text": (lambda p: written(p, b"hello"), ("cannot be read as a saved program",)),
    "empty": (lambda p: written(p, b""), ("cannot be read as a saved program",)),
    "pickle": (lambda p: written(p, pickle.dumps({"a": 1})), ("cannot be read as a saved program",)),
    "no file": (lambda p: f"pt2:{p}", ("there is no file",)),
    "folder": (lambda p: f"pt2:{p.parent}", ("there is no file",)),
}


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_such_program_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    make, words = FAULTS[fault]
    spec = make(tmp_path / "network.pt2")
    with pytest.raises(NetworkError) as error:
        load_network(spec)
    assert error.value.exit_code == 2
    assert all(word in str(error.value) for word in (spec, *words)), str(error.value)


@pytest.mark.usefixtures("trusted")
def test_a_truncated_file_is_refused(saved: str, tmp_path: Path) -> None:
    content = Path(saved.removeprefix("pt2:")).read_bytes()
    for length in (10, len(content) // 2, len(content) - 1):
        with pytest.raises(NetworkError, match="cannot be read as a saved program"):
            load_network(written(tmp_path / "cut.pt2", content[:length]))


@pytest.mark.usefixtures("trusted")
def test_another_sequence_length_than_the_programs_is_refused(saved: str) -> None:
    with pytest.raises(InputError, match=r"tokens of lengths \[6, 6\].*not 8"):
        load_network(saved, sequence_length=8)


def test_nothing_of_a_file_is_loaded_unless_it_is_trusted(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.export, "load", lambda path: pytest.fail("loaded"))
    with pytest.raises(InputError, match=r"tagger\.pt2.*--trust-file") as error:
        load_network(saved)
    assert error.value.exit_code == 2


def test_trust_lasts_for_one_command(saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> Result:
        found = CliRunner().invoke(app, list(arguments))
        assert not files_are_trusted()
        return found

    monkeypatch.chdir(tmp_path)
    Path("tagger.pt2").write_bytes(Path(saved.removeprefix("pt2:")).read_bytes())
    asked = ("plan", "pt2:tagger.pt2", "--hw", "dgx-a100", "--devices", "2", "--global-batch", "8", "--top", "1")
    for arguments in (asked, ("simulate", "strategy.json"), ("execute", "strategy.json", "--dry-run")):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert "--trust-file" in refused.output
        assert run(*arguments, "--trust-file").exit_code == 0
    save(Path("tagger.pt2"), Mean(), (torch.ones(2, 4),), (BATCH,))
    other = run("simulate", "strategy.json", "--trust-file")
    assert other.exit_code == 2
    assert "strategy.json" in other.output
