"""`meshwright check`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from planner.cli.options import TrustFile, natural, option, tells
from planner.cli.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.exchange.checking import Checked
    from planner.planning.one_stage import Candidate
    from simulator.hardware import Hardware


CheckedFormat = Literal[
    "megatron", "bridge", "torchtitan", "torchtitan-0.2", "torchtitan-npu", "deepspeed", "accelerate", "automodel",
    "mindformers", "mindformers-pynative", "mindspeed", "mindspeed-fsdp2", "galvatron", "simumax",
]  # fmt: skip
"""Formats that are read."""


@tells
def check(
    terminal: Terminal,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A launch script or configuration file.")],
    form: Annotated[CheckedFormat | None, option("--format", "Its format, where it is not recognised.")] = None,
    network: Annotated[
        str | None, option("--network", "What it trains, where the file does not state it.", "NETWORK")
    ] = None,
    hw: Annotated[str | None, option("--hw", "Where it trains.", "PROFILE")] = None,
    devices: Annotated[int | None, option("--devices", "Devices, where the file names none.", "N", natural)] = None,
    trust_file: TrustFile = False,
) -> None:
    """Check a configuration of another framework: is it legal, does it fit, how fast is it, what would be better.

    \b
    Example:
      meshwright check pretrain.sh --network zoo:llama2-7b --hw dgx-h100

    Exit code 2: it is illegal for its framework. Exit code 3: it does not fit.
    """
    from planner.exchange.checking import check as checked

    with terminal.working(f"checking {config}"):
        found = checked(config, form=form, network=network, hardware=hw, devices=devices)
    hardware = _hardware(hw) if found.found or found.best else None
    for note in found.notes if terminal.json else ():
        terminal.note(note)
    word = {0: "good", 2: "illegal", 3: "does not fit"}[found.exit_code]
    terminal.result(_document(found, hardware), word, lambda: _report(found, config))
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _hardware(name: str | None) -> Hardware | None:
    from simulator.profiles import load_profile

    return None if name is None else load_profile(name)


def _document(found: Checked, hardware: Hardware | None) -> dict[str, Any]:
    from planner.planning.documents import plan_document, prediction_document

    def shown(candidate: Candidate | None) -> dict[str, Any] | None:
        if candidate is None or hardware is None:
            return None
        return {
            "plan": plan_document(candidate.plan, hardware),
            "prediction": prediction_document(candidate.prediction),
            "gain": _gain(found, candidate),
        }

    own = shown(found.found)
    return {
        "format": found.form.name,
        "version": found.form.version,
        "legal": not found.problems,
        "fits": found.fits,
        "problems": [
            {"key": one.key, "value": one.value, "rule": one.rule, "remedy": one.remedy} for one in found.problems
        ],
        "not_read": list(found.read.not_read),
        "notes": list(found.notes),
        "plan": own and own["plan"],
        "prediction": own and own["prediction"],
        "reason": found.infeasible or None,
        "nearest_better": [{"changed": list(one.changed), **(shown(one.candidate) or {})} for one in found.near],
        "best": shown(found.best),
    }


def _gain(found: Checked, candidate: Candidate) -> float | None:
    """How many times as fast as the configuration a plan is; None where the configuration does not fit."""
    if found.found is None:
        return None
    return found.found.prediction.step_time_s / candidate.prediction.step_time_s


def _report(found: Checked, config: Path) -> Iterator[RenderableType]:
    from planner.cli.tables import plain_table
    from planner.planning.summary import degrees_text
    from simulator.quantities import bytes_text, seconds_text

    yield f"{config}: {found.form.table.framework} {found.form.version}"
    if found.problems:
        table = plain_table(("key", "name"), ("value", "text"), ("rule", "text"), ("remedy", "text"), title="Illegal")
        for one in found.problems:
            table.add_row(one.key, one.value, one.rule, one.remedy)
        yield table
        return
    yield "legal"
    yield from found.notes
    if found.read.not_read:
        yield f"not read: {', '.join(found.read.not_read)}"
    if found.fits is False:
        yield f"does not fit: {found.infeasible}"
    rows = [("as written", found.found), *((f"free: {', '.join(b.changed)}", b.candidate) for b in found.near)]
    if found.best is not None:
        rows.append(("best of all", found.best))
    shown = [(name, candidate) for name, candidate in rows if candidate is not None]
    if shown:
        table = plain_table(
            ("", "text"), ("plan", "text"), ("step time", "number"), ("gain", "number"), ("peak memory", "number")
        )
        for name, candidate in shown:
            gain = _gain(found, candidate)
            table.add_row(
                name,
                degrees_text(candidate.plan),
                seconds_text(candidate.prediction.step_time_s),
                "" if gain is None else f"{gain:.2f} ×",
                bytes_text(candidate.prediction.peak_memory_bytes),
            )
        yield table
