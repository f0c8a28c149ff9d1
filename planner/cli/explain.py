"""`meshwright explain`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import TrustFile, option, tells
from planner.cli.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.planning.comparing import Compared
    from planner.planning.one_stage import Candidate


@tells
def explain(
    terminal: Terminal,
    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")],
    why_not: Annotated[
        list[str], option("--why-not", "A pin that the plan was not given; may be repeated.", "KEY=VALUE")
    ],
    trust_file: TrustFile = False,
) -> None:
    """Say why a plan is not another one: the best plan under a pin beside it, task by task.

    \b
    Example: why not eight tensor-parallel ranks?
      meshwright explain strategy.json --why-not tp=8

    Exit code 3: no plan fits under the pin.
    """
    from planner.planning.comparing import why_not as compared
    from planner.planning.loading import naming
    from planner.plans.file import read_plan
    from planner.plans.pins import read_pins

    pins = read_pins(why_not)
    plan = read_plan(strategy)
    said = " ".join(f"{name}={value}" for name, value in pins.named().items())
    with terminal.working(f"planning {plan.network} with {said}"), naming(strategy):
        found = compared(plan, pins)
    terminal.result(_document(found), _verdict(found, said), lambda: _report(found, said))
    if found.instead is None:
        raise typer.Exit(3)


def _verdict(found: Compared, said: str) -> str:
    if found.instead is None:
        return f"{said}: no plan fits"
    ratio = found.instead.prediction.step_time_s / found.chosen.prediction.step_time_s
    return f"{said}: {ratio:.3f} times the step time"


def _document(found: Compared) -> dict[str, Any]:
    from planner.planning.documents import plan_document, prediction_document
    from simulator.profiles import load_profile

    hardware = load_profile(found.chosen.plan.hardware)

    def shown(candidate: Candidate) -> dict[str, Any]:
        prediction = prediction_document(candidate.prediction)
        return {"plan": plan_document(candidate.plan, hardware), "prediction": prediction}

    return {
        "chosen": shown(found.chosen),
        "instead": None if found.instead is None else shown(found.instead),
        "reason": found.infeasible or None,
        "differences": [
            {"what": one.what, "where": one.where, "seconds": one.seconds, "bytes": one.bytes}
            for one in found.differences
        ],
        "would_win_if": [
            {
                "what": one.what,
                "factor": one.factor,
                "step_time_s": one.step_time_s,
                "chosen_step_time_s": one.chosen_step_time_s,
            }
            for one in found.would_win_if
        ],
    }


def _report(found: Compared, said: str) -> Iterator[RenderableType]:
    from planner.cli.tables import plain_table, signed
    from planner.planning.summary import degrees_text
    from simulator.quantities import bytes_text, seconds_text

    table = plain_table(("", "text"), ("plan", "text"), ("step time", "number"), ("peak memory", "number"))
    for name, candidate in (("chosen", found.chosen), (said, found.instead)):
        if candidate is not None:
            prediction = candidate.prediction
            step, peak = seconds_text(prediction.step_time_s), bytes_text(prediction.peak_memory_bytes)
            table.add_row(name, degrees_text(candidate.plan), step, peak)
    yield table
    if found.instead is None:
        yield f"no plan fits with {said}: {found.infeasible}"
    if found.differences:
        more = plain_table(
            ("what", "text"), ("where", "text"), ("time", "number"), ("memory", "number"), title=f"More with {said}"
        )
        for one in found.differences:
            more.add_row(
                one.what,
                one.where,
                signed(one.seconds, seconds_text) if one.seconds else "",
                signed(one.bytes, bytes_text) if one.bytes else "",
            )
        yield more
    for change in found.would_win_if:
        yield f"{said} would be no slower with {change.factor:g} times the {change.what}"
    if found.instead is not None and not found.would_win_if:
        yield f"{said} stays slower with up to 4 times the bandwidth of any level, or samples of a step"
