"""What installing brings and leaves alone, by pip's own report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pip(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def environment_with(folder: Path, versions: dict[str, str]) -> Path:
    """An environment that holds no package but what pip reads of these."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    for name, version in versions.items():
        information = site / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (information / "INSTALLER").write_text("pip\n")
        (information / "RECORD").write_text("")
    return folder / "bin" / "python"


def brought(interpreter: Path, folder: Path, *wanted: str) -> dict[str, str]:
    """What pip would install, by name."""
    report = folder / "report.json"
    found = pip("--python", interpreter, "install", "--quiet", "--dry-run", "--report", report, *wanted)
    assert found.returncode == 0, found.stderr
    return {i["metadata"]["name"]: i["metadata"]["version"] for i in json.loads(report.read_text())["install"]}


def pinned(file: str) -> dict[str, str]:
    """Versions of packages in a file, by name."""
    lines = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\\n]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}


def test_the_lock_has_a_digest_for_each_version_that_is_pinned() -> None:
    wanted, locked = pinned("constraints.txt"), pinned("requirements.lock")
    assert wanted.items() <= locked.items()
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = [*named["dependencies"], *(one for more in named["optional-dependencies"].values() for one in more)]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", one)[0]).lower() for one in every}
    assert names - {"meshwright"} <= set(locked)
    entries = re.split(r"^(?=[A-Za-z0-9])", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == len(locked)
    assert all("--hash=sha256:" in entry for entry in entries)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("wheel")
    if pip("download", "--quiet", "--no-deps", "--dest", folder / "probe", "simpy").returncode:
        pytest.skip("pip finds no index here")
    built = pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    assert built.returncode == 0, built.stderr
    return str(next(folder.glob("meshwright-*.whl")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "extra", "named"),
    [
        ({"torch": "2.9.1", "numpy": "1.26.4", "pandas": "2.2.2", "transformers": "5.0.0"}, "hf", ()),
        ({"torch": "2.9.1", "numpy": "2.0.2", "transformers": "5.12.1"}, "hf", ()),
        ({"torch": "2.9.1", "numpy": "2.0.2"}, "vision", ("torch==2.9.1",)),
        ({"torch": "2.9.1", "numpy": "1.26.4"}, "hf", ("numpy==1.26.4",)),
    ],
    ids=["oldest", "without pandas", "without torchvision", "old NumPy without pandas"],
)
def test_installing_leaves_what_is_there(
    there: dict[str, str], extra: str, named: tuple[str, ...], wheel: str, tmp_path: Path
) -> None:
    """The newest torchvision brings its own torch and the newest pandas NumPy 2, unless the one to keep is named."""
    interpreter = environment_with(tmp_path / "there", there)
    assert not there.keys() & brought(interpreter, tmp_path, f"{wheel}[{extra}]", *named).keys()
