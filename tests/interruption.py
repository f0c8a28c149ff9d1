"""Interrupts commands at many moments by every signal, and looks what is left: `python -m tests.interruption`.

Each run is a command, a moment (a part of how long it takes undisturbed), a signal and the process that gets it. The
promise: it ends within 30 s of the signal (of being continued, where the command itself was stopped), with an exit code
that fits, without a traceback, with its output whole or absent, and none of its processes stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from simulator.errors import MeshwrightError
from simulator.profiles import load_profile
from tests.planner.execution.processes import MARK, marked, parent, wait_until_gone

ROOT = Path(__file__).parents[1]
PROMISE_S = 30.0
SIGNALS = ("INT", "TERM", "HUP", "KILL", "STOP")
MOMENTS = (0.15, 0.4, 0.6, 0.8, 0.95)
CAUGHT = ("INT", "TERM", "HUP")
"""Signals after which a command can still delete its temporary files."""
TARGETS = ("command", "other")
"""The command itself, or another of its processes, drawn at random."""
COMMANDS: Mapping[str, Sequence[str]] = {
    "plan": ("plan", "zoo:gpt2-tiny", "--hw", "dgx-a100", "--devices", "4", "--pin", "pp=1", "--out", "{out}"),
    "simulate": ("simulate", "{strategy}", "--trace", "{out}"),
    "what-if": ("what-if", "zoo:mlp", "--hw", "dgx-a100", "--devices", "2,4,8", "--jobs", "2", "--out", "{out}"),
    "execute": ("execute", "{strategy}", "--steps", "40", "--device", "cpu", "--out", "{out}"),
    "export": ("export", "{strategy}", "--to", "mindspore", "--out", "{out}"),
    "calibrate": ("calibrate", "--device", "cpu", "--processes", "2", "--out", "{out}"),
}
NAMES = {**dict.fromkeys(COMMANDS, "out.json"), "what-if": "out.html", "calibrate": "out.yaml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run; ``processes`` counts for `execute`."""

    command: str
    moment: float
    signal: str
    target: str
    processes: int = 2


def cases(
    command: str, processes: Sequence[int], moments: Sequence[float], signals: Sequence[str], targets: Sequence[str]
) -> Iterator[Case]:
    """All runs of a command."""
    for count, moment, name, target in itertools.product(
        processes if command == "execute" else [2], moments, signals, targets
    ):
        yield Case(command=command, moment=moment, signal=name, target=target, processes=count)


class Bench:
    """Strategy files, and how long each command takes when nothing happens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lasts: dict[tuple[str, int], float] = {}

    def try_case(self, case: Case) -> list[str]:
        """Run one case; returns what was promised and not kept."""
        lasts = self._length(case.command, case.processes)
        out = self._folder / secrets.token_hex(4) / NAMES[case.command]
        out.parent.mkdir()
        process, mark = self._start(case, out)
        try:
            time.sleep(case.moment * lasts)
            target = self._target(case, process.pid, mark)
            if target is None or process.poll() is not None:
                process.communicate(timeout=10 * lasts + 60)
                return []
            with suppress(ProcessLookupError):
                os.kill(target, getattr(signal, f"SIG{case.signal}"))
            ended = [*self._ended(case, process, mark, target, lasts)]
            tidy = case.signal in CAUGHT and target == process.pid
            return [*ended, *_whole(out), *(_left_beside(out) if tidy else ())]
        finally:
            for pid in marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()

    def _ended(self, case: Case, process: subprocess.Popen[str], mark: str, target: int, lasts: float) -> Iterator[str]:
        itself = target == process.pid
        if case.signal == "STOP" and itself:
            ranks = [pid for pid in marked(mark) if pid != process.pid and parent(parent(pid)) == process.pid]
            left = wait_until_gone(ranks, PROMISE_S)
            if left:
                yield f"{len(left)} ranks stayed beside their stopped launcher"
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        # A command that goes on without the process that was hit takes the rest of its time as well.
        patience = PROMISE_S if itself and case.signal != "STOP" else PROMISE_S + 4 * lasts
        try:
            _, errors = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            yield f"still runs {patience:.0f} s after the signal"
            return
        left = wait_until_gone(marked(mark), PROMISE_S)
        if left:
            yield f"{len(left)} processes stayed"
        if "Traceback" in errors or "internal error" in errors:
            yield "traceback: " + errors.strip().splitlines()[-1][:200]
        if process.returncode not in _codes(case, itself):
            yield f"exit code {process.returncode}: {errors.strip()[-200:]}"

    def _target(self, case: Case, pid: int, mark: str) -> int | None:
        if case.target == "command":
            return pid
        others = [one for one in marked(mark) if one != pid]
        return random.Random(repr(case)).choice(others) if others else None

    def _start(self, case: Case, out: Path) -> tuple[subprocess.Popen[str], str]:
        mark = secrets.token_hex(8)
        strategy = self._strategy(case.processes)
        arguments = [one.format(out=out, strategy=strategy) for one in COMMANDS[case.command]]
        process = subprocess.Popen(
            [sys.executable, "-m", "planner.cli", *arguments],
            cwd=ROOT,
            env={**os.environ, MARK: mark, "TMPDIR": str(out.parent)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_heed_signals,
        )
        return process, mark

    def _strategy(self, processes: int) -> Path:
        path = self._folder / f"strategy{processes}.json"
        if not path.exists():
            made = ["plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", str(processes), "--global-batch", "16"]
            subprocess.run(
                [sys.executable, "-m", "planner.cli", *made, "--pin", f"tp={processes}", "--out", str(path)],
                cwd=ROOT,
                check=True,
                capture_output=True,
            )
        return path

    def _length(self, command: str, processes: int) -> float:
        if (command, processes) not in self._lasts:
            case = Case(command=command, moment=0, signal="", target="", processes=processes)
            out = self._folder / NAMES[command]
            self._strategy(processes)
            begin = time.monotonic()
            process, _ = self._start(case, out)
            _, errors = process.communicate(timeout=600)
            if process.returncode:
                raise RuntimeError(f"{command} fails undisturbed: {errors}")
            self._lasts[command, processes] = time.monotonic() - begin
        return self._lasts[command, processes]


def _heed_signals() -> None:
    """Undo what a shell does to commands in its background: they ignore SIGINT, and under nohup SIGHUP."""
    for name in CAUGHT:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)


def _codes(case: Case, itself: bool) -> set[int]:
    """Exit codes that fit: of success where the signal came late, of the signal, of a run that lost a process."""
    number = getattr(signal, f"SIG{case.signal}")
    if itself and case.signal != "STOP":
        return {0, -number, 128 + number}
    return {0, 4, 130} if case.command in ("execute", "calibrate") else {0}


def _whole(out: Path) -> Iterator[str]:
    """Say where the output is half a file."""
    if not out.exists():
        return
    try:
        if out.suffix == ".json":
            json.loads(out.read_text())
        elif out.suffix == ".yaml":
            load_profile(str(out))
        elif not out.read_text().rstrip().endswith("</html>"):
            yield "half an output"
    except (ValueError, MeshwrightError):
        yield "half an output"


def _left_beside(out: Path) -> Iterator[str]:
    """Say which files stay beside the output, where temporary ones were as well."""
    torch_cache = "torchinductor_"  # PyTorch makes this folder, and uses it again
    others = sorted(path.name for path in out.parent.iterdir() if path != out and not path.name.startswith(torch_cache))
    if others:
        yield f"left behind: {', '.join(others)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the table and print a line for each run that broke a promise, and one for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--command", nargs="*", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--signal", nargs="*", default=list(SIGNALS), choices=SIGNALS)
    parser.add_argument("--target", nargs="*", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--moment", nargs="*", type=float, default=list(MOMENTS))
    parser.add_argument("--processes", nargs="*", type=int, default=[2, 8])
    given = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for command in given.command:
            tried = broken = 0
            for case in cases(command, given.processes, given.moment, given.signal, given.target):
                problems = bench.try_case(case)
                tried += 1
                broken += bool(problems)
                for problem in problems:
                    print(f"{case}: {problem}", flush=True)
            print(f"{command}: {tried} runs, {broken} broke a promise", flush=True)
            failed += broken
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
