"""Run the test suite on the oldest and the newest torch that install, with every Python that is found.

    python .ci/compatibility.py                                  # every pair, as `make compatibility` does
    python .ci/compatibility.py --python 3.12 --torch newest     # one of them

Each pair gets a virtual environment of its own, which is deleted afterwards. All versions but torch's and torchvision's
are those of constraints.txt. uv installs them: it keeps one copy of each file for all environments, and a constraint in
pip's configuration does not hide the newest torch from it. pip takes over where uv does not install.

With --write the rows go into the table between the marks in a page of the documentation. A run of every pair replaces
the table; a run of some pairs replaces their rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
FREE = ("torch", "torchvision")
MANAGERS = (".pyenv/versions/{}*/bin", ".local/share/uv/python/cpython-{}*/bin", ".asdf/installs/python/{}*/bin")
BEGIN, END = "<!-- made by `make compatibility` -->", "<!-- end -->"
ROW = re.compile(r"^\| (\d[\d.]*) \| (\S+) \|.*$", re.MULTILINE)
FAILED = re.compile(r"^Failed with Python (\S+), torch ([^\s:]+): .*$", re.MULTILINE)
HEAD = "| Python | torch | torchvision | transformers | tests | failed |\n|---|---|---|---|---|---|"
INSTALLED = """
import json, sys
from importlib import metadata
found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
json.dump({name: found.get(name, "none") for name in ("torch", "torchvision", "transformers")}, sys.stdout)
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one environment came to."""

    python: str
    versions: dict[str, str]
    tests: int
    failed: tuple[str, ...]

    @property
    def pair(self) -> tuple[str, str]:
        """Which row of a table it is."""
        return self.python, self.versions["torch"]

    def __str__(self) -> str:
        found = (self.versions[name] for name in ("torch", "torchvision", "transformers"))
        return f"| {self.python} | {' | '.join(found)} | {self.tests:,} | {len(self.failed)} |"


def pythons(wanted: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Find interpreters on the path and in the folders of version managers, the newest of each minor version."""
    for version in wanted:
        folders = sorted((f for m in MANAGERS for f in Path.home().glob(m.format(version))), key=_numbers, reverse=True)
        places = [str(folder / f"python{version}") for folder in folders] + [f"python{version}"]
        for place in filter(None, map(shutil.which, places)):
            if _output([place, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]) == version:
                yield version, Path(place)
                break
        else:
            print(f"python{version} is not found: left out", flush=True)


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parent.name)]


def _output(command: Sequence[str]) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def find_uv(folder: Path) -> str | None:
    """The uv on the path, or else one installed into a folder; None without either."""
    if found := shutil.which("uv"):
        return found
    venv.create(folder, with_pip=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"]
    return str(folder / "bin" / "uv") if subprocess.run(command, check=False).returncode == 0 else None


def install(python: Path, folder: Path, torch: str, uv: str | None) -> Path | None:
    """Make a virtual environment with a torch and everything that the tests need; None where it does not install."""
    constraints = folder / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in pinned if line.partition("==")[0] not in FREE) + "\n")
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    inside = folder / "venv" / "bin" / "python"
    by_pip = [str(inside), "-m", "pip", "install", "--disable-pip-version-check"]
    ways = [by_pip] if uv is None else [[uv, "pip", "install", "--python", str(inside)], by_pip]
    wanted = ["--quiet", "--constraint", str(constraints), torch, "--editable", f"{ROOT}[dev]"]
    return inside if any(subprocess.run([*way, *wanted], check=False).returncode == 0 for way in ways) else None


def run(python: str, interpreter: Path, torch: str, jobs: int, paths: Sequence[str], uv: str | None) -> Row | None:
    """Install and test one pair; None where it does not install."""
    with tempfile.TemporaryDirectory(prefix="compatibility-") as name:
        folder = Path(name)
        begin = time.monotonic()
        inside = install(interpreter, folder, torch, uv)
        if inside is None:
            print(f"{torch} does not install with Python {python}: left out", flush=True)
            return None
        versions = json.loads(_output([str(inside), "-c", INSTALLED]))
        report = folder / "report.xml"
        pytest = [str(inside), "-m", "pytest", "-q", "-n", str(jobs), "--benchmark-disable", f"--junitxml={report}"]
        environment = {**os.environ, "PATH": f"{inside.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        subprocess.run([*pytest, *paths], cwd=ROOT, env=environment, check=False)
        tests, failed = counted(report)
        row = Row(python=python, versions=versions, tests=tests, failed=failed)
        print(f"{row} after {(time.monotonic() - begin) / 60:.0f} minutes", flush=True)
        return row


def counted(report: Path) -> tuple[int, tuple[str, ...]]:
    """How many tests a JUnit report tells of, and which of them failed or could not run."""
    if not report.exists():
        return 0, ("the test run ended without a report",)
    cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314 - written by our own pytest
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    return len(cases), tuple(f"{c.get('classname')}::{c.get('name')}" for c in failed)


def write(page: Path, rows: Sequence[Row], *, every: bool) -> None:
    """Put rows into the table between the marks of a page: in place of all others, or of those of the same pairs."""
    before, _, rest = page.read_text().partition(BEGIN)
    held, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(rows, '' if every else held)}\n\n{END}{after}")


def table(rows: Sequence[Row], held: str = "") -> str:
    """The rows, those of a table held before among them, and under them what failed."""
    lines = {found.groups(): found.group() for found in ROW.finditer(held)}
    lists = {found.groups(): found.group() for found in FAILED.finditer(held)}
    for row in rows:
        lines[row.pair] = str(row)
        lists.pop(row.pair, None)
        if row.failed:
            lists[row.pair] = f"Failed with Python {row.python}, torch {row.pair[1]}: {', '.join(row.failed)}"
    pairs = sorted(lines, key=lambda pair: [[int(number) for number in re.findall(r"\d+", one)] for one in pair])
    return "\n".join([HEAD, *map(lines.__getitem__, pairs), *(f"\n{lists[pair]}" for pair in pairs if pair in lists)])


def main() -> int:
    """Run what the command line asks for; 1 where a test failed."""
    known = runpy.run_path(str(ROOT / "simulator" / "torch_versions.py"))
    oldest, tried = (f"torch=={'.'.join(map(str, known[name]))}.*" for name in ("OLDEST", "NEWEST_TRIED"))
    torches = {"oldest": oldest, "newest": "torch", "tried": tried}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", action="append", metavar="VERSION", help=f"one of {', '.join(PYTHONS)}; default all"
    )
    parser.add_argument("--torch", action="append", choices=torches, help="default oldest and newest")
    parser.add_argument("--jobs", type=int, default=2, help="tests that run side by side")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table into this page")
    parser.add_argument("paths", nargs="*", help="tests to run; default all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="compatibility-") as name:
        uv = find_uv(Path(name))
        asked = (options.jobs, options.paths, uv)
        rows = [
            row
            for python, interpreter in pythons(options.python or PYTHONS)
            for torch in options.torch or ("oldest", "newest")
            if (row := run(python, interpreter, torches[torch], *asked))
        ]
    print(table(rows))
    if options.write is not None:
        write(options.write, rows, every=not (options.python or options.torch or options.paths))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
