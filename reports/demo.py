"""The demonstration: measure this machine, plan, run for real, and put predicted beside measured.

Run it with ``python -m reports.demo``; every step is a `meshwright` command and is printed as one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.planning.prediction import HOST
from planner.plans.file import read_strategy
from planner.plans.plan import Plan
from reports import page
from reports.devices import devices_figure
from reports.page import PALETTE, Html
from simulator.profiles import load_profile
from simulator.quantities import bytes_text, interval_text, percent_text, rate_text, seconds_text
from simulator.whole_file import write_whole

if TYPE_CHECKING:
    import plotly.graph_objects as go

NETWORKS = {"zoo:mlp": "MLP", "zoo:gpt2-tiny": "small GPT-2"}
CLUSTER, CLUSTER_DEVICES = "dgx-a100", 8
KNOWN, KNOWN_NAME, KNOWN_CLUSTER, KNOWN_DEVICES = "zoo:llama2-7b", "Llama 2 7B", "dgx-h100", 64
"""A well-known network, planned for a cluster that is not at hand."""
PROCESSES = 2
STEPS = 20
WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the demonstration and what it printed."""

    line: str
    output: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One network on this machine: its plan, what was predicted and what a run measured.

    ``run`` is the document of ``execute --json``.
    """

    name: str
    plan: Plan
    prediction: Mapping[str, Any]
    run: Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demonstration and write its page."""
    parser = argparse.ArgumentParser(prog="python -m reports.demo", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/out/demo.html"), help="the page to write")
    out: Path = parser.parse_args(arguments).out
    folder = out.parent
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "local.yaml"
    commands = [_plan(folder, KNOWN, KNOWN_CLUSTER, KNOWN_DEVICES, "--global-batch", "512")]
    counts = ",".join(str(KNOWN_DEVICES * scale // 4) for scale in (1, 4, 16))
    sweep = (
        "--hw",
        KNOWN_CLUSTER,
        "--devices",
        counts,
        "--batch-per-device",
        "8",
        "--out",
        str(folder / "what-if.html"),
    )
    commands.append(_run("what-if", KNOWN, *sweep))
    commands.append(_run("calibrate", "--processes", str(PROCESSES), "--out", str(profile)))
    commands += [_plan(folder, spec, CLUSTER, CLUSTER_DEVICES) for spec in NETWORKS]
    commands += [_plan(folder, spec, str(profile), PROCESSES, "--pin", "cp=1") for spec in NETWORKS]
    for spec in NETWORKS:
        strategy, result = _strategy(folder, spec, PROCESSES), _result(folder, spec)
        options = ("--processes", str(PROCESSES), "--steps", str(STEPS), "--verify", "--out", str(result))
        commands.append(_run("execute", str(strategy), *options))
    comparisons = [_comparison(folder, spec) for spec in NETWORKS]
    _say(comparison_text(comparisons))
    known = read_strategy(_strategy(folder, KNOWN, KNOWN_DEVICES)).plan
    pictures = [_timeline(folder, KNOWN, KNOWN_NAME, f"{KNOWN_DEVICES} × {KNOWN_CLUSTER}", KNOWN_DEVICES)]
    pictures.append(devices_figure(known, load_profile(known.hardware)))
    for spec, name in NETWORKS.items():
        pictures.append(_timeline(folder, spec, name, f"{CLUSTER_DEVICES} × {CLUSTER}", CLUSTER_DEVICES))
        pictures.append(_timeline(folder, spec, name, f"{PROCESSES} processes of this machine", PROCESSES))
    write_whole(out, demo_page(commands, comparisons, pictures, planned=_known_cards(folder)))
    _say(f"\nwritten {out}")


def _plan(folder: Path, spec: str, profile: str, devices: int, *pins: str) -> Command:
    out = _strategy(folder, spec, devices)
    return _run("plan", spec, "--hw", profile, "--devices", str(devices), *pins, "--out", str(out))


def _strategy(folder: Path, spec: str, devices: int) -> Path:
    return folder / f"{spec.removeprefix('zoo:')}-{devices}.json"


def _result(folder: Path, spec: str) -> Path:
    return folder / f"{spec.removeprefix('zoo:')}-run.json"


def _run(*arguments: str) -> Command:
    """Run a command of `meshwright`, show it and what it prints; a failure ends the demonstration."""
    line = shlex.join(["meshwright", *arguments])
    _say(f"\n$ {line}")
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", *arguments],
        env={**os.environ, "COLUMNS": str(WIDTH)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    _say(done.stdout.rstrip())
    if done.returncode:
        raise SystemExit(done.returncode)
    text = "\n".join(row.rstrip() for row in done.stdout.splitlines())
    return Command(line=line, output=text, seconds=time.perf_counter() - started)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _comparison(folder: Path, spec: str) -> DemoRun:
    found = read_strategy(_strategy(folder, spec, PROCESSES))
    run = json.loads(_result(folder, spec).read_text(encoding="utf-8"))
    return DemoRun(name=NETWORKS[spec], plan=found.plan, prediction=found.prediction or {}, run=run)


def _known_cards(folder: Path) -> list[tuple[str, str, str]]:
    """Cards with the prediction for the well-known network."""
    prediction: Mapping[str, Any] = read_strategy(_strategy(folder, KNOWN, KNOWN_DEVICES)).prediction or {}
    where = f"{KNOWN_NAME} on {KNOWN_DEVICES} × {KNOWN_CLUSTER}"
    step, interval = prediction["step_time_s"], interval_text(*prediction["interval_s"])
    speed = rate_text(prediction["tokens_per_s"], "tokens")
    return [
        (f"{where}, predicted step", seconds_text(step), f"90 %: {interval}, {prediction['label']}"),
        (f"{where}, throughput", speed, f"MFU {percent_text(prediction['mfu'])}"),
    ]


def _timeline(folder: Path, spec: str, name: str, where: str, devices: int) -> Html:
    from reports.timeline import picture_svg, plan_picture

    path = _strategy(folder, spec, devices)
    found = read_strategy(path)
    plan = found.plan
    title = f"One step of {name} on {where}"
    svg = picture_svg(replace(plan_picture(plan, path), title=""))
    mesh = f"data {plan.degree('data')} × tensor {plan.degree('tensor')}"
    mesh += f" × {plan.pipeline} stages" if plan.pipeline > 1 else ""
    prediction: Mapping[str, Any] = found.prediction or {}
    step, host_s = seconds_text(prediction["step_time_s"]), prediction.get("breakdown", {}).get(HOST, 0.0)
    once = f", of which the host takes {seconds_text(host_s)} once a step (not drawn)" if host_s else ""
    return page.drawing(svg, title=title, caption=f"Simulated: {step}{once}; {mesh}. Below, the memory of one device.")


def comparison_rows(comparisons: Sequence[DemoRun]) -> list[list[str]]:
    """Predicted beside measured: one row for step time and one for memory of each network."""
    rows = []
    for comparison in comparisons:
        run, prediction = comparison.run, comparison.prediction
        time_s = run["measured_step_time_s"]
        predicted = run["predicted_step_time_s"]
        rows.append(
            [
                comparison.name,
                "step time",
                f"{seconds_text(predicted)} ({interval_text(*prediction['interval_s'])})",
                f"{seconds_text(time_s['median'])} ({interval_text(time_s['p10'], time_s['p90'])})",
                f"{100 * run['error']:+.1f} %",
            ]
        )
        peak, measured = run["predicted_peak_memory_bytes"], run["measured_peak_memory_bytes"]
        difference = f"{100 * (peak / measured - 1):+.1f} %" if measured else ""
        rows.append([comparison.name, "peak memory", bytes_text(peak), bytes_text(measured), difference])
    return rows


def comparison_text(comparisons: Sequence[DemoRun]) -> str:
    """The comparison as plain text."""
    rows = [["", "", "predicted", "measured", "difference"], *comparison_rows(comparisons)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["", f"Predicted beside measured, {PROCESSES} processes of this machine"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def demo_page(
    commands: Sequence[Command],
    comparisons: Sequence[DemoRun],
    pictures: Sequence[Html],
    *,
    planned: Sequence[tuple[str, str, str]] = (),
) -> str:
    """The page of the demonstration as text; `planned` are cards of what was planned and cannot run here."""
    columns = ["network", "", "predicted", "measured", "difference"]
    parts = [
        page.paragraph(
            f"{KNOWN_NAME}, planned for {KNOWN_DEVICES} × {KNOWN_CLUSTER}; and two small networks, planned for eight "
            "GPUs and for two processes of this machine, where they ran for real, beside their predictions.",
            lead=True,
        ),
        page.cards([*planned, *_cards(comparisons)]),
        page.heading("Predicted beside measured"),
        page.table(columns, comparison_rows(comparisons), caption="Medians over steps; in brackets the intervals"),
        page.grid(*(_time_chart(index, c) for index, c in enumerate(comparisons))),
        page.grid(*(_loss_chart(index, c) for index, c in enumerate(comparisons))),
        page.heading("One step, simulated"),
        *pictures,
        page.heading("The commands and what they printed"),
    ]
    for command in commands:
        parts.append(page.code(f"$ {command.line}\n{command.output}"))
        parts.append(page.paragraph(f"took {seconds_text(command.seconds)}"))
    return page.page("Meshwright, demonstrated", parts, footer="Written by python -m reports.demo.")


def _cards(comparisons: Sequence[DemoRun]) -> list[tuple[str, str, str]]:
    entries = []
    for comparison in comparisons:
        run = comparison.run
        median = run["measured_step_time_s"]["median"]
        predicted = seconds_text(run["predicted_step_time_s"])
        entries.append((f"{comparison.name}, measured step", seconds_text(median), f"predicted {predicted}"))
        difference, allowed = run["max_loss_difference"], run["tolerance"]
        entries.append(
            (
                f"{comparison.name}, losses",
                "equal" if difference <= allowed else "not equal",
                f"to one process, within {difference:.1g} (allowed {allowed:g})",
            )
        )
    return entries


def _time_chart(index: int, comparison: DemoRun) -> Html:
    """Predicted and measured step time, each with its interval, from zero."""
    import plotly.graph_objects as go

    run, time_s = comparison.run, comparison.run["measured_step_time_s"]
    low, high = comparison.prediction["interval_s"]
    entries = (
        ("predicted", run["predicted_step_time_s"], low, high, PALETTE[0]),
        ("measured", time_s["median"], time_s["p10"], time_s["p90"], PALETTE[1]),
    )
    figure = go.Figure()
    for name, middle, least, most, color in entries:
        figure.add_trace(
            go.Bar(
                x=[1e3 * middle],
                y=[name],
                orientation="h",
                marker={"color": color},
                error_x={"type": "data", "symmetric": False, "array": [1e3 * (most - middle)],
                         "arrayminus": [1e3 * (middle - least)], "color": "#5b6475"},
                hovertemplate="%{x:.3g} ms<extra></extra>",
                showlegend=False,
            )
        )  # fmt: skip
    figure.update_xaxes(title="milliseconds", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return page.chart(
        figure,
        identity=f"step-{index}",
        title=f"Step time: {comparison.name}",
        caption=f"Lines: the prediction's interval; the middle 80 % of {run['steps'] - run['warm_up_steps']} steps.",
        height=210,
    )


def _loss_chart(index: int, comparison: DemoRun) -> Html:
    import plotly.graph_objects as go

    run = comparison.run
    steps = list(range(1, len(run["losses"]) + 1))
    figure: go.Figure = go.Figure()
    figure.add_scatter(
        x=steps,
        y=run["reference_losses"],
        mode="lines",
        name="one process",
        line={"color": PALETTE[0], "width": 2},
    )
    figure.add_scatter(
        x=steps,
        y=run["losses"],
        mode="markers",
        name=f"{run['processes']} processes",
        marker={"color": PALETTE[1], "size": 8, "symbol": "diamond-open", "line": {"width": 2}},
    )
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="loss")
    return page.chart(
        figure,
        identity=f"loss-{index}",
        title=f"Loss: {comparison.name}",
        caption=f"Data: {run['data']}. Largest relative difference: {run['max_loss_difference']:.1e}.",
        height=270,
    )


if __name__ == "__main__":
    main()
