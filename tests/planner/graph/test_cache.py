"""Graphs on disk: exact, fast without torch, and never trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from planner.graph import cache
from planner.graph.folding import fold
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.graph.serialization import fingerprint, graph_from_json, graph_to_json
from planner.networks import load_network

Full = Callable[[str], OperatorGraph]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def place(tmp_path: Path, full_graph: Full, monkeypatch: pytest.MonkeyPatch) -> Path:
    full_graph("mlp")  # captured, and kept elsewhere, before this cache is empty
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(cache.SWITCH, raising=False)
    return tmp_path / "meshwright"


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet50"])
def test_json_keeps_a_graph_exactly(name: str, full_graph: Full) -> None:
    graph = at_batch(fold(full_graph(name)), 3)
    assert graph_from_json(json.loads(json.dumps(graph_to_json(graph)))) == graph


def test_a_stored_graph_is_loaded(place: Path, full_graph: Full) -> None:
    assert cache.load("key") is None
    cache.store("key", full_graph("mlp"))
    assert cache.load("key") == full_graph("mlp")
    assert [path.name for path in place.iterdir()] == ["key.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 99}', '{"format": 1, "nodes": 3}', "nul\x00"])
def test_damaged_files_are_ignored(content: str, place: Path) -> None:
    place.mkdir()
    (place / "key.json").write_text(content)
    assert cache.load("key") is None


def test_a_truncated_file_is_ignored(place: Path, full_graph: Full) -> None:
    cache.store("key", full_graph("mlp"))
    file = place / "key.json"
    file.write_bytes(file.read_bytes()[:-40])
    assert cache.load("key") is None


def test_a_file_with_another_number_is_ignored(place: Path, full_graph: Full) -> None:
    cache.store("key", full_graph("mlp"))
    file = place / "key.json"
    file.write_bytes(file.read_bytes().replace(b'"batch_size":1', b'"batch_size":0'))
    assert cache.load("key") is None


def test_the_files_used_last_are_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT_FILES", 3)
    for key in ("a", "b", "c"):
        cache.write(key, [key])
        os.utime(place / f"{key}.json", (ord(key), ord(key)))
    assert cache.read("a") == ["a"]
    cache.write("d", ["d"])
    assert sorted(path.name for path in place.iterdir()) == ["a.json", "c.json", "d.json"]


def test_off_means_no_file(place: Path, full_graph: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.SWITCH, "off")
    cache.store("key", full_graph("mlp"))
    assert cache.load("key") is None
    assert not place.exists()


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, full_graph: Full) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(cache.SWITCH, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    cache.store("key", full_graph("mlp"))
    assert cache.load("key") is None


def test_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, full_graph: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache.store("key", full_graph("mlp"))
    assert cache.load("key") is None


QWEN = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("source", ["zoo:bert-large", "hf:"])
def test_a_cached_network_is_captured_without_torch_and_its_fingerprint_is_the_same_elsewhere(
    source: str, place: Path, tmp_path: Path
) -> None:
    """Another process draws other hashes; that it captures the same under any is shown by whole plans."""
    if source == "hf:":
        (tmp_path / "config.json").write_text(json.dumps(QWEN))
        source = f"hf:{tmp_path}"
    graph = load_network(source, sequence_length=8).capture()
    assert list(place.iterdir())
    script = (
        "import sys; from planner.networks import load_network, capture; "
        "from planner.graph.serialization import fingerprint; "
        f"g = capture(load_network({source!r}, sequence_length=8)); "
        "print(g.fingerprint, fingerprint(g), 'torch' in sys.modules, 'networkx' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    assert run.stdout.split() == [graph.fingerprint, graph.fingerprint, "False", "False"]


def test_fingerprints_follow_structure_not_names(full_graph: Full) -> None:
    graph = fold(full_graph("gpt"))
    renamed = tuple(replace(node, name=node.name + "x", source="elsewhere.py:1") for node in graph.nodes)
    assert fingerprint(replace(graph, network="other", nodes=renamed)) == fingerprint(graph)
    assert fingerprint(full_graph("gpt")) != fingerprint(graph)
    deeper = replace(graph, runs=(replace(graph.runs[0], count=7),))
    assert fingerprint(deeper) != fingerprint(graph)
    with pytest.raises(ValueError, match="batch 1"):
        fingerprint(at_batch(graph, 2))


def test_versions_are_those_that_packages_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: cache.version(name) for name in ("torch", "numpy")} == {
        name: metadata.version(name) for name in ("torch", "numpy")
    }
    assert cache.version("no-such-distribution") == "absent"
    monkeypatch.setattr(metadata.PathDistribution, "read_text", lambda *_: None)
    monkeypatch.setattr(metadata, "version", lambda _: "1.2 of another file")
    assert cache.version("numpy") == "1.2 of another file"
