"""`meshwright simulate`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import DebugFlag, JsonFlag, QuietFlag
from planner.cli.terminal import Terminal

if TYPE_CHECKING:
    from planner.planning import Prediction
    from planner.strategy.plan import Plan
    from simulator.hardware import Hardware
    from simulator.program import Program
    from simulator.timeline import Timeline


class Engine(StrEnum):
    """Which engine simulates; both give the same step."""

    FAST = "fast"
    REFERENCE = "reference"


def simulate(
    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")],
    hardware: Annotated[
        str | None, typer.Option("--hw", metavar="PROFILE", help="Default: the one the plan was made for.")
    ] = None,
    engine: Annotated[Engine, typer.Option("--engine", help="Array based, or SimPy.")] = Engine.FAST,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write the step for Perfetto or Chrome.")
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Simulate one training step of a plan, task by task.

    \b
    Example: where does the time go, and a trace to open at https://ui.perfetto.dev
      meshwright simulate strategy.json --trace timeline.json
    The same plan on other hardware
      meshwright simulate strategy.json --hw dgx-h100
    """
    from planner.planning import precision_dtype, predict
    from planner.prediction import precision_notes
    from planner.strategy.file import read_plan
    from planner.strategy.loading import lower_strategy
    from simulator.trace import write_trace
    from simulator.whole_file import check_writable

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    if trace is not None:
        check_writable(trace)
    plan = read_plan(strategy)
    profile = _profile(terminal, strategy, plan, hardware)
    for note in precision_notes(profile, precision_dtype(plan.precision)):
        terminal.note(note)
    with terminal.working(f"simulating {plan.network} on {plan.mesh.size} devices"):
        lowered = lower_strategy(plan, strategy)
        prediction, timeline = predict(plan, lowered, profile)
        if engine is Engine.REFERENCE:
            from planner.prediction import prediction_of
            from simulator import engine as reference

            timeline = reference.simulate(lowered.program, profile)
            prediction = prediction_of(plan, lowered.graph, profile, timeline)
        if trace is not None:
            write_trace(timeline, lowered.program, trace, hardware=profile)
    found = _document(strategy, plan, profile, engine, prediction, timeline, lowered.program, trace)
    if terminal.json:
        terminal.document(found)
    elif terminal.quiet:
        terminal.line(f"{timeline.step_time_s!r}")
    else:
        from planner.cli.tables import simulation_report

        terminal.show(*simulation_report(plan, profile, prediction, timeline, lowered.program, trace))


def _profile(terminal: Terminal, strategy: Path, plan: Plan, name: str | None) -> Hardware:
    from simulator.errors import ProfileError
    from simulator.hardware import load_profile

    if name is not None:
        return load_profile(name)
    try:
        profile = load_profile(plan.hardware)
    except ProfileError as error:
        raise ProfileError(f"{strategy}: hardware.profile: {error}, or simulate on another with --hw") from error
    if profile.hash != plan.hardware_hash:
        terminal.note(f"profile {plan.hardware} has changed since the plan was made; the prediction is for the new one")
    return profile


def _document(
    strategy: Path,
    plan: Plan,
    hardware: Hardware,
    engine: Engine,
    prediction: Prediction,
    timeline: Timeline,
    program: Program,
    trace: Path | None,
) -> dict[str, Any]:
    from planner.documents import plan_document, prediction_document
    from simulator.timeline import top_operators

    return {
        "strategy_file": str(strategy),
        "network": plan.network,
        "hw": hardware.name,
        "engine": str(engine),
        "step_time_s": timeline.step_time_s,
        "prediction": prediction_document(prediction),
        "plan": plan_document(plan, hardware),
        "collectives": [
            {
                "collective": str(total.collective),
                "axis": total.axis,
                "calls": total.calls,
                "payload_bytes": total.payload_bytes,
                "seconds": total.seconds,
            }
            for total in timeline.collectives
        ],
        "operators": [
            {"name": total.name, "kernel": total.kernel, "calls": total.calls, "seconds": total.seconds}
            for total in top_operators(timeline, program)
        ],
        "trace": None if trace is None else str(trace),
    }
