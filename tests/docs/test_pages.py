"""The documentation: its commands exist, its links lead somewhere, and its examples run.

One rule for all pages: what stands in a block marked ``sh`` or ``python`` is run, in the order of the page, in one
folder. Blocks marked ``text`` are shown only: outputs, and commands that need other machines. Blocks marked ``py`` are
parts of a program that the reader completes.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from planner.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^ {4,}(?:\$ )?|^|`)(meshwright [a-z][^`\n]*)", re.MULTILINE)
LONGEST = 250


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _examples(page: Path) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind in ("sh", "python")]


RUN = [page for page in PAGES if _examples(page)]


def run(command: str) -> Result:
    """Run a line that begins with ``meshwright``."""
    return CliRunner().invoke(app, shlex.split(command, comments=True)[1:], prog_name="meshwright")


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_and_options_exist(page: Path) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    context = typer.Context(group)
    for line in COMMAND.findall(page.read_text(encoding="utf-8")):
        words = line.partition("#")[0].split()[1:]
        command = group.get_command(context, words[0])
        assert command is not None, line
        inner = getattr(command, "commands", None)
        if inner is not None and len(words) > 1 and words[1] in inner:
            command = inner[words[1]]
        known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
        for word in words:
            if word.startswith("--") and re.fullmatch(r"--[a-z-]+", word.partition("=")[0]):
                assert word.partition("=")[0] in known, line


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=_name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {"__name__": "page"}
    for kind, text in _examples(page):
        if kind == "python":
            exec(compile(text, _name(page), "exec"), known)
            continue
        for line in text.splitlines():
            done = run(line)
            assert done.exit_code == 0, f"{line}\n{done.output}"


@pytest.mark.parametrize("page", RUN, ids=_name)
def test_examples_use_the_public_interface(page: Path) -> None:
    for _, text in _examples(page):
        assert not re.search(r"^\s*(from planner|import planner\.)", text, re.MULTILINE)


def _table(page: Path, heading: str) -> list[list[str]]:
    """Cells of the rows of the table under a heading."""
    text = page.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def _holds(document: object, path: str) -> bool:
    """Whether a document has the value that ``a.b[].c`` names."""
    for key in path.split("."):
        name, rows, _ = key.partition("[]")
        assert isinstance(document, dict), path
        if name not in document:
            return False
        document = document[name]
        if rows:
            assert isinstance(document, list), path
            document = document[0]
    return True


@pytest.mark.slow
def test_an_agent_that_follows_its_page_literally_finds_what_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "agent-skill.md"
    times = []
    for question, command, read in _table(page, "Commands by question"):
        done = run(command.strip("`"))
        assert done.exit_code == 0, f"{question}: {done.stderr}"
        document = json.loads(done.stdout)
        for path in re.findall(r"`([^`]+)`", read):
            assert _holds(document, path), f"{command}: {path}"
        if command.startswith("`meshwright plan"):
            times.append(document["prediction"]["step_time_s"])
    assert times[1] > times[0]
    wrong = next(line for line in COMMAND.findall(page.read_text(encoding="utf-8")) if "zoo:gpt3 " in line)
    done = run(wrong)
    assert (done.exit_code, json.loads(done.stdout)["error"]["kind"]) == (2, "NetworkError")
