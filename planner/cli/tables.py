"""Results as tables that read well at any width from 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.quantities import bytes_text, percent_text, rate_text, seconds_text
from simulator.topology import level_of_axis

if TYPE_CHECKING:
    from planner.execution.run import ExecutionReport
    from planner.networks import NetworkSummary
    from planner.planning import Candidate, PlanRequest, PlanResult, Prediction
    from planner.strategy.plan import Plan
    from planner.what_if import WhatIfRow
    from simulator.hardware import Hardware
    from simulator.program import Program
    from simulator.timeline import Timeline

BREAKDOWN_NAMES = {
    "compute_s": "compute",
    "exposed_communication_s": "exposed communication",
    "bubble_s": "idle",
    "optimizer_s": "optimizer",
}


def mesh_text(plan: Plan) -> str:
    """The mesh of a plan, axes outermost first, such as ``data 4 × tensor 2``."""
    return " × ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes) or "one device"


def batch_text(plan: Plan) -> str:
    """Samples of a micro-batch on one data-parallel rank times micro-batches."""
    return f"{plan.micro_batch} × {plan.micro_batches}"


def throughput_text(prediction: Prediction) -> str:
    """Tokens a second where the network reads tokens, else samples."""
    if prediction.tokens_per_s is not None:
        return rate_text(prediction.tokens_per_s, "tokens")
    return rate_text(prediction.samples_per_s, "samples")


def interval_text(prediction: Prediction) -> str:
    """The interval of the step time."""
    low, high = prediction.interval_s
    return f"{seconds_text(low)} to {seconds_text(high)}"


def memory_text(prediction: Prediction) -> str:
    """Peak memory against the device's."""
    return f"{bytes_text(prediction.peak_memory_bytes)} of {bytes_text(prediction.device_memory_bytes)}"


def plan_report(
    request: PlanRequest, result: PlanResult, hardware: Hardware, strategy_file: str
) -> Iterable[RenderableType]:
    """Everything `meshwright plan` says about a result with at least one plan."""
    best = result.candidates[0]
    plan = best.plan
    yield Text(
        f"{plan.network} on {plan.mesh.size} × {hardware.device_name} ({hardware.name}), global batch "
        f"{plan.global_batch}{_length(plan)}, {plan.precision}, {plan.optimizer}",
        style="bold",
    )
    yield candidate_table(result.candidates)
    yield time_table(result.candidates)
    yield Padding(Group(*_facts(result, hardware, strategy_file)), (1, 0, 0, 0))


def candidate_table(candidates: Sequence[Candidate]) -> Table:
    """The plans, best first, with their predictions."""
    table = _table(
        "", "mesh", "micro-batch", "optimizer state", "step time", "interval", "throughput", "MFU", "peak memory"
    )
    for column in table.columns[4:]:
        column.justify = "right"
    for rank, candidate in enumerate(candidates, 1):
        plan, prediction = candidate.plan, candidate.prediction
        table.add_row(
            str(rank),
            mesh_text(plan),
            batch_text(plan),
            "whole" if plan.optimizer_sharding == "none" else plan.optimizer_sharding,
            seconds_text(prediction.step_time_s),
            interval_text(prediction),
            throughput_text(prediction),
            percent_text(prediction.mfu),
            memory_text(prediction),
            style="bold" if rank == 1 else "",
        )
    return table


def time_table(candidates: Sequence[Candidate]) -> Table:
    """Where the time of each plan goes, and why it lost."""
    parts = list(dict.fromkeys(part for candidate in candidates for part in candidate.prediction.breakdown))
    table = _table("", *(BREAKDOWN_NAMES.get(part, part.removesuffix("_s")) for part in parts), "why not the first")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for rank, candidate in enumerate(candidates, 1):
        table.add_row(str(rank), *_shares(candidate.prediction, parts), candidate.reason)
    return table


def _shares(prediction: Prediction, parts: Sequence[str]) -> list[str]:
    whole = prediction.step_time_s or 1.0
    return [percent_text(prediction.breakdown.get(part, 0.0) / whole) for part in parts]


def _facts(result: PlanResult, hardware: Hardware, strategy_file: str) -> Iterable[Text]:
    best = result.candidates[0]
    plan, certificate = best.plan, best.plan.certificate
    levels = ", ".join(
        f"{axis.name} over {level_of_axis(hardware, axis.size, plan.mesh.stride(index))}"
        for index, axis in enumerate(plan.mesh.axes)
    )
    if levels:
        yield _fact("topology", levels)
    yield _fact("memory", memory_kinds_text(best.prediction.memory_at_peak))
    yield _fact(
        "certificate",
        f"{result.status}: objective {seconds_text(certificate.objective_s)}, lower bound "
        f"{seconds_text(certificate.lower_bound_s)}, gap {percent_text(certificate.gap)}, "
        f"elimination width {certificate.elimination_width}, {certificate.operators} operators, "
        f"{certificate.distinct_blocks} distinct blocks",
    )
    yield _fact(
        "prediction", f"{best.prediction.label} ({hardware.uncertainty.source})" if hardware.uncertainty.source else ""
    )
    yield _fact("search", f"{seconds_text(result.elapsed_s)} (capture {seconds_text(result.capture_s)})")
    for message in result.messages:
        yield _fact("note", message)
    yield _fact("written", strategy_file)


def memory_kinds_text(kinds: Mapping[str, int]) -> str:
    """What stands in memory at the peak, largest first."""
    ordered = sorted(((size, str(kind)) for kind, size in kinds.items() if size), key=lambda item: (-item[0], item[1]))
    return ", ".join(f"{kind.replace('_', ' ')} {bytes_text(size)}" for size, kind in ordered) or "empty"


def what_if_report(rows: Sequence[WhatIfRow], rule: str, report: str | None) -> Iterable[RenderableType]:
    """Everything `meshwright what-if` prints."""
    table = _table(
        "profile",
        "devices",
        "batch",
        "mesh",
        "micro-batch",
        "step time",
        "throughput",
        "efficiency",
        "MFU",
        "peak memory",
    )
    for column in (*table.columns[1:3], *table.columns[5:]):
        column.justify = "right"
    for row in rows:
        first = (row.hardware, str(row.devices), str(row.global_batch))
        if row.best is None:
            table.add_row(*first, Text("no plan", style="red"), *[""] * 6)
            continue
        plan, prediction = row.best.plan, row.best.prediction
        table.add_row(
            *first,
            mesh_text(plan),
            batch_text(plan),
            seconds_text(prediction.step_time_s),
            throughput_text(prediction),
            "" if row.scaling_efficiency is None else percent_text(row.scaling_efficiency),
            percent_text(prediction.mfu),
            memory_text(prediction),
        )
    yield Text(rule)
    yield table
    for row in rows:
        if row.best is None:
            yield Text(f"{row.hardware} × {row.devices}: {row.reason}")
    if report:
        yield _fact("written", report)


def network_table(networks: Sequence[NetworkSummary]) -> Table:
    """The built-in networks."""
    table = _table("network", "family", "parameters", "batch", "sequence", "what it is")
    for column in table.columns[2:5]:
        column.justify = "right"
    for network in networks:
        table.add_row(
            network.spec,
            network.family,
            count_text(network.parameters),
            str(network.default_global_batch),
            str(network.default_sequence_length or ""),
            network.description,
        )
    return table


def count_text(count: int) -> str:
    """A count with three figures, such as ``25.6 M``; ``B`` is 10⁹."""
    return rate_text(float(count), "").removesuffix("/s").strip().replace("G", "B")


def profile_table(profiles: Sequence[Hardware]) -> Table:
    """The built-in profiles."""
    table = _table("profile", "device", "memory", "per node", "at most", "what it is")
    for column in table.columns[2:5]:
        column.justify = "right"
    for hardware in profiles:
        table.add_row(
            hardware.name,
            hardware.device_name,
            bytes_text(hardware.device_memory_bytes),
            str(hardware.devices_per_node),
            str(hardware.max_devices),
            hardware.description,
        )
    return table


def profile_details(hardware: Hardware) -> Iterable[RenderableType]:
    """Every number of a profile with its source."""
    yield Text(f"{hardware.name}: {hardware.description}", style="bold")
    yield Text(f"hash {hardware.hash}")
    table = _table("field", "value", "source")
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    for row in hardware.rows:
        table.add_row(Text(row.field), Text(row.value), Text(row.source))
    yield table


def facts(pairs: Iterable[tuple[str, str]]) -> Group:
    """Names and values, one pair a line."""
    return Group(*(_fact(name, value) for name, value in pairs if value))


def _fact(name: str, value: str) -> Text:
    text = Text(overflow="fold")
    text.append(f"{name:<12} ", style="dim")
    text.append(value)
    return text


def _length(plan: Plan) -> str:
    return f" × {plan.sequence_length} tokens" if plan.sequence_length else ""


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def simulation_report(
    plan: Plan, hardware: Hardware, prediction: Prediction, timeline: Timeline, program: Program, trace: Path | None
) -> Iterable[RenderableType]:
    """Everything `meshwright simulate` prints."""
    from simulator.timeline import top_operators

    yield Text(f"{plan.network} on {plan.mesh.size} × {hardware.device_name} ({hardware.name})", style="bold")
    yield facts(
        [
            ("mesh", f"{mesh_text(plan)}, micro-batch {batch_text(plan)}"),
            ("step time", f"{seconds_text(timeline.step_time_s)} ({interval_text(prediction)}, {prediction.label})"),
            ("throughput", f"{throughput_text(prediction)}, MFU {percent_text(prediction.mfu)}"),
            ("time", breakdown_text(timeline.breakdown, timeline.step_time_s)),
            ("peak memory", memory_text(prediction)),
            ("memory", memory_kinds_text(prediction.memory_at_peak)),
        ]
    )
    operators = _table("operator", "kernel", "calls", "time", "share")
    for column in operators.columns[2:]:
        column.justify = "right"
    for total in top_operators(timeline, program):
        operators.add_row(
            Text(total.name), total.kernel, str(total.calls), seconds_text(total.seconds), percent_text(total.share)
        )
    yield Padding(operators, (1, 0, 0, 0))
    if timeline.collectives:
        collectives = _table("collective", "axis", "calls", "payload", "time")
        for column in collectives.columns[2:]:
            column.justify = "right"
        for message in timeline.collectives:
            collectives.add_row(
                str(message.collective),
                message.axis,
                str(message.calls),
                bytes_text(message.payload_bytes),
                seconds_text(message.seconds),
            )
        yield Padding(collectives, (1, 0, 0, 0))
    if trace is not None:
        yield _fact("written", str(trace))


def breakdown_text(breakdown: Mapping[str, float], whole: float) -> str:
    """Where the time of a step goes, in per cent."""
    return ", ".join(
        f"{BREAKDOWN_NAMES.get(part, part)} {percent_text(seconds / (whole or 1.0))}"
        for part, seconds in breakdown.items()
    )


def execution_report(report: ExecutionReport, out: Path | None) -> Iterable[RenderableType]:
    """Everything `meshwright execute` prints."""
    time, predicted = report.measured_step_time_s, report.predicted_step_time_s
    yield Text(
        f"{report.steps} steps on {report.processes} processes ({report.backend}, {report.launcher}), "
        f"{report.precision}, {report.data}",
        style="bold",
    )
    table = _table("", "predicted", "measured", "difference")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row(
        "step time",
        "" if predicted is None else seconds_text(predicted),
        f"{seconds_text(time.median)} ({seconds_text(time.p10)} to {seconds_text(time.p90)})",
        "" if report.error is None else f"{100 * report.error:+.1f} %",
    )
    memory, measured = report.predicted_peak_memory_bytes, report.measured_peak_memory_bytes
    table.add_row(
        "peak memory",
        "" if memory is None else bytes_text(memory),
        bytes_text(measured),
        f"{100 * (memory / measured - 1):+.1f} %" if memory is not None and measured else "",
    )
    yield table
    pairs = [("losses", f"{report.losses[0]:.6g} at the first step, {report.losses[-1]:.6g} at the last")]
    if report.max_loss_difference is not None:
        pairs.append(
            (
                "verified",
                f"equal to one process within {report.max_loss_difference:.2g} (allowed {report.tolerance:.2g})",
            )
        )
    pairs.append(("memory", report.measured_memory_method))
    pairs += [("note", note) for note in report.notes]
    pairs.append(("written", str(out) if out else ""))
    yield facts(pairs)
