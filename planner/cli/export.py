"""`meshwright export`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from planner.cli.check import CheckedFormat
from planner.cli.options import TrustFile, check_out, option, tells
from planner.cli.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.exchange.exporting import CannotSay
    from planner.exchange.formats import ExchangeFormat
    from planner.plans.file import StrategyFile
    from planner.plans.plan import Plan


Format = Literal[CheckedFormat, "chakra", "schedule-csv", "pytorch", "mindspore", "meshwright"]
"""Files that a plan can be written to."""
_SUFFIX = {"chakra": "", "schedule-csv": ".csv", "pytorch": ".py"}
_VERSION = {"schedule-csv": "torch 2.9", "mindspore": "2.10", "meshwright": "2"}


@tells
def export(
    terminal: Terminal,
    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file, of either format.")],
    out: Annotated[Path | None, option("--out", "Where to write; by default beside the strategy.", "FILE")] = None,
    to: Annotated[Format, option("--to", "The format to write.")] = "mindspore",
    rounds: Annotated[
        bool, option("--round", "Write the nearest plan that the framework can run, and list what differs.")
    ] = False,
    trust_file: TrustFile = False,
) -> None:
    """Write a plan for the framework that trains with it, or as MindSpore's JSON strategy file.

    What a framework cannot run is an error; with --round the nearest plan is written, and what each change makes of
    step time and memory is listed.

    \b
    Examples:
      meshwright export strategy.json --to megatron --round --out plan.sh
      meshwright export strategy.json --to pytorch --out plan.py
      meshwright export strategy.json --out mindspore.json
    """
    from planner.exchange.registry import FORMATS
    from planner.lowering.checked import captured
    from planner.planning.loading import naming
    from planner.plans.file import export_mindspore, read_strategy, write_plan
    from simulator.whole_file import write_whole

    form = FORMATS.get(to)
    found = read_strategy(strategy)
    path = out or strategy.with_suffix(f".{to}{form.suffix if form else _SUFFIX.get(to, '.json')}")
    check_out("--out", path, (strategy,))
    if form is not None or to == "pytorch":
        _exchange(terminal, found, strategy, form, path, rounds=rounds)
        return
    if to == "chakra":
        _traces(terminal, found.plan, strategy, path)
        return
    if to == "meshwright":
        written = write_plan(found.plan, path, found.prediction)
    elif to == "schedule-csv":
        written = write_whole(path, _schedule(found.plan))
    else:
        with terminal.working("capturing the network"), naming(strategy):
            graph = captured(found.plan)
        written = export_mindspore(found.plan, graph, path, found.prediction)
    if terminal.json:
        said = {"format": to, "version": _VERSION[to], "files": [str(written)]}
        terminal.document({"strategy_file": str(written), **said, "cannot_say": [], "environment": {}})
    else:
        terminal.line(str(written))


def _traces(terminal: Terminal, plan: Plan, strategy: Path, prefix: Path) -> None:
    """Write the execution trace of every rank of a simulated step, ``PREFIX.RANK.et``, and the groups of ranks."""
    from planner.cost.software import run_for
    from planner.exchange.chakra import VERSION, traces
    from planner.planning.loading import strategy_graph
    from planner.planning.prediction import simulate_plan
    from simulator.profiles import load_profile
    from simulator.whole_file import write_whole

    with terminal.working(f"simulating {plan.network} on {plan.devices} devices"):
        with strategy_graph(plan, strategy) as graph:
            written = traces(simulate_plan(plan, graph, run_for(plan, load_profile(plan.hardware))), plan)
        groups = write_whole(f"{prefix}.groups.json", written.groups())
        files = [str(write_whole(f"{prefix}.{rank}.et", content)) for rank, content in written.files()]
    said = {"format": "chakra", "version": VERSION, "files": [*files, str(groups)]}
    document = {**said, "cannot_say": [], "environment": {}}
    terminal.result(document, str(prefix), lambda: iter([f"{prefix}.*.et: traces of {len(files)} ranks"]))


def _schedule(plan: Plan) -> str:
    """The order of the passes, in PyTorch's format ``compute_only``."""
    from planner.lowering.pipeline import plan_schedule
    from simulator.errors import InputError
    from simulator.schedules import format_schedule_csv

    if plan.pipeline == 1:
        raise InputError(
            "a schedule file orders the passes of a pipeline, but the plan has one stage; plan with --pin pp=2"
        )
    return format_schedule_csv(plan_schedule(plan))


def _exchange(
    terminal: Terminal, found: StrategyFile, strategy: Path, form: ExchangeFormat | None, path: Path, *, rounds: bool
) -> None:
    """Write for a framework, or without a format as a Python file for PyTorch."""
    from planner.exchange.exporting import export_plan
    from planner.exchange.pytorch import TABLE, export_module
    from planner.lowering.checked import captured
    from planner.planning.loading import naming
    from planner.plans.capability import capabilities
    from simulator.whole_file import write_whole

    table = capabilities()[TABLE] if form is None else form.table
    version = table.version if form is None else form.version
    with terminal.working(f"writing for {table.framework} {version}"), naming(strategy):
        graph = captured(found.plan)
        if form is None:
            exported = export_module(found.plan, graph, rounds=rounds)
        else:
            exported = export_plan(found.plan, graph, form, rounds=rounds)
    write_whole(path, exported.written.text)
    document = {
        "format": TABLE if form is None else form.name,
        "version": version,
        "files": [str(path)],
        "cannot_say": [
            {
                "what": one.what,
                "rounded_to": one.rounded_to,
                "step_time_s": one.step_time_s,
                "peak_memory_bytes": one.peak_memory_bytes,
            }
            for one in exported.cannot_say
        ],
        "environment": dict(exported.written.environment),
    }
    said = f"{path}: for {table.framework} {version}"
    terminal.result(document, str(path), lambda: _report(said, exported.cannot_say, found))


def _report(said: str, cannot_say: Sequence[CannotSay], found: StrategyFile) -> Iterator[RenderableType]:
    from planner.cli.tables import plain_table
    from simulator.quantities import bytes_text, seconds_text

    yield said
    if cannot_say:
        before = (found.prediction or {}).get("step_time_s")
        planned = f", {seconds_text(before)} as planned" if isinstance(before, float) else ""
        table = plain_table(
            ("cannot run", "text"), ("written instead", "text"), ("step time", "number"), ("peak memory", "number"),
            title=f"Rounded{planned}",
        )  # fmt: skip
        for one in cannot_say:
            table.add_row(
                one.what,
                one.rounded_to,
                "not planned" if one.step_time_s is None else seconds_text(one.step_time_s),
                "" if one.peak_memory_bytes is None else bytes_text(one.peak_memory_bytes),
            )
        yield table
