"""Commands on a machine that refuses: folders that cannot be written to, no room for files, no home."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interruption import COMMANDS, NAMES, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's capabilities and limits"),
]
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
ROOM_BYTES = 500


def obeying() -> None:
    """Make the modes of files count for root as well; others have no such capability to drop."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def without_room() -> None:
    """Let no file grow beyond a few bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, ROOM_BYTES))


def run(
    arguments: list[str], environment: dict[str, str], before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},  # Python itself would cut such files short
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=300,
    )


def filled(command: str, out: Path, strategy: Path) -> list[str]:
    return [argument.format(out=out, strategy=strategy) for argument in COMMANDS[command]]


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def strategy(tmp_path_factory: pytest.TempPathFactory, cache: dict[str, str]) -> Path:
    path = tmp_path_factory.mktemp("planned") / "strategy.json"
    options = ["--hw", "dgx-a100", "--devices", "2", "--global-batch", "16", "--pin", "tp=2"]
    assert run(["plan", "zoo:mlp", *options, "--out", str(path)], cache).returncode == 0
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_cannot_be_written_is_refused(
    command: str, locked: Path, strategy: Path, cache: dict[str, str]
) -> None:
    done = run(filled(command, locked / NAMES[command], strategy), cache, obeying)
    assert done.returncode == 2, done.stderr
    assert f"cannot write '{locked / NAMES[command]}': Permission denied; choose a file" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(locked.iterdir()) == []


@pytest.mark.parametrize("command", ["plan", "simulate", "what-if", "export"])
def test_an_output_without_room_leaves_nothing(
    command: str, tmp_path: Path, strategy: Path, cache: dict[str, str]
) -> None:
    done = run(filled(command, tmp_path / NAMES[command], strategy), cache, without_room)
    assert done.returncode == 2, done.stderr
    assert "File too large; free some space" in done.stderr or "the disk is full; choose another --out" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / NAMES[command]).exists()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= ROOM_BYTES


@pytest.mark.parametrize("lack", ["leave to write", "room", "home"])
def test_a_plan_needs_no_cache(lack: str, tmp_path: Path, locked: Path) -> None:
    cache = tmp_path / "cache"
    environment, before = {
        "leave to write": ({"XDG_CACHE_HOME": str(locked)}, obeying),
        "room": ({"XDG_CACHE_HOME": str(cache)}, without_room),
        "home": ({"XDG_CACHE_HOME": "", "HOME": "/proc/nobody"}, None),
    }[lack]
    done = run(["plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "2", "--out", "/dev/null"], environment, before)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(locked.iterdir()) == []
    assert not [path for path in cache.glob("meshwright/*") if path.is_file()]
