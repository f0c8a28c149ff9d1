"""Results as tables that read well at any width from 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.quantities import bytes_text, interval_text, percent_text, rate_text, seconds_text
from simulator.topology import level_of_axis

if TYPE_CHECKING:
    from planner.execution.run import ExecutionReport
    from planner.networks import NetworkSummary
    from planner.planning import Candidate, PlanResult, Prediction
    from planner.strategy.plan import Certificate, Plan
    from planner.what_if import WhatIfRow
    from simulator.calibration.fit_profiles import ProfileFit
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
    """Ranks with batches of their own, size of the tensor axis, and pipeline stages where there are several."""
    stages = f" × {plan.pipeline}" if plan.pipeline > 1 else ""
    return f"{plan.degree('data') * plan.degree('expert')} × {plan.degree('tensor')}{stages}"


def mesh_header(plans: Iterable[Plan]) -> str:
    """What the numbers of `mesh_text` are, as the head of a column."""
    return "data × tensor\n× stages" if any(plan.pipeline > 1 for plan in plans) else "data ×\ntensor"


def axes_text(plan: Plan) -> str:
    """The axes of one plan in words."""
    stages = f" × stages {plan.pipeline}" if plan.pipeline > 1 else ""
    return f"data {plan.degree('data') * plan.degree('expert')} × tensor {plan.degree('tensor')}{stages}"


def stages_text(plan: Plan) -> str:
    """Pipeline, copies, recomputation, context, storage and messages of a plan in words; empty where it has none."""
    parts = []
    if plan.pipeline > 1:
        chunks = f" × {plan.virtual} chunks" if plan.virtual > 1 else ""
        parts.append(f"{plan.pipeline} stages{chunks}, {plan.schedule}")
    if plan.software:
        parts.append(f"run by {plan.software}")
    if plan.attention:
        parts.append(f"attention {plan.attention}")
    if plan.copies > 1:
        parts.append(f"micro-batches in {plan.copies} copies")
    if plan.recompute != "none":
        kept = not all(part.messages for part in plan.recompute_ranges)
        parts.append(f"recomputation {plan.recompute}" + (" but of messages" if kept else ""))
    parts += [f"{name} {plan.degree(name)}" for name in ("context", "expert") if plan.degree(name) > 1]
    if plan.shard_size:
        parts.append(f"states shared by {plan.shard_size} ranks")
    if plan.offload_optimizer:
        parts.append("states in host memory" if plan.offload_to == "host" else "states on disk")
    if plan.offload_parameters:
        parts.append("parameters in host memory" if plan.offload_to == "host" else "parameters on disk")
    if plan.offload_ranges:
        parts.append("activations in host memory")
    if plan.host_embeddings:
        parts.append("embedding tables in host memory")
    if plan.context_algorithm != "none":
        parts.append(f"attention by {plan.context_algorithm}")
    if plan.degree("data") > 1:
        parts.append(f"gradients in messages of {bytes_text(plan.bucket_bytes)}")
    if plan.sharding_threshold_bytes:
        parts.append(f"parameters under {bytes_text(plan.sharding_threshold_bytes)} whole")
    return ", ".join(parts)


def batch_text(plan: Plan) -> str:
    """Samples of a micro-batch on one data-parallel rank times micro-batches."""
    return f"{plan.micro_batch} × {plan.micro_batches}"


def throughput(prediction: Prediction) -> tuple[float, str]:
    """Tokens a second where the network reads tokens, else samples."""
    if prediction.tokens_per_s is not None:
        return prediction.tokens_per_s, "tokens"
    return prediction.samples_per_s, "samples"


def memory_text(prediction: Prediction) -> str:
    """Peak memory against the device's."""
    return f"{bytes_text(prediction.peak_memory_bytes)} of {bytes_text(prediction.device_memory_bytes)}"


def plan_report(result: PlanResult, hardware: Hardware, strategy_file: str) -> Iterable[RenderableType]:
    """Everything `meshwright plan` says about a result with at least one plan."""
    plan = result.candidates[0].plan
    yield Text(
        f"{plan.network} on {plan.devices} × {hardware.device_name} ({hardware.name}), global batch "
        f"{plan.global_batch}{_length(plan)}, {plan.precision}, {plan.optimizer}",
        style="bold",
    )
    yield Padding(candidate_table(result.candidates), (1, 0, 1, 0))
    yield time_table(result.candidates)
    yield Padding(facts(_facts(result, hardware, strategy_file)), (1, 0, 0, 0))


def candidate_table(candidates: Sequence[Candidate]) -> Table:
    """The plans, best first, with their predictions."""
    first = candidates[0].prediction
    table = _table(
        ("", ""),
        (mesh_header(c.plan for c in candidates), ""),
        ("micro-\nbatch", ""),
        ("optimizer\nstate", ""),
        ("step\ntime", "right"),
        ("\ninterval", "right"),
        (f"{throughput(first)[1]}\nper s", "right"),
        ("\nMFU", "right"),
        (f"memory, of\n{bytes_text(first.device_memory_bytes)}", "right"),
    )
    for rank, candidate in enumerate(candidates, 1):
        plan, prediction = candidate.plan, candidate.prediction
        table.add_row(
            str(rank),
            mesh_text(plan),
            batch_text(plan),
            "whole" if plan.optimizer_sharding == "none" else plan.optimizer_sharding,
            seconds_text(prediction.step_time_s),
            interval_text(*prediction.interval_s),
            rate_text(throughput(prediction)[0], "").removesuffix(" /s"),
            percent_text(prediction.mfu),
            bytes_text(prediction.peak_memory_bytes),
            style="bold" if rank == 1 else "",
        )
    return table


def time_table(candidates: Sequence[Candidate]) -> Table:
    """Where the time of each plan goes, and why it lost."""
    parts = list(dict.fromkeys(part for candidate in candidates for part in candidate.prediction.breakdown))
    names = (BREAKDOWN_NAMES.get(part, part.removesuffix("_s")).replace(" ", "\n") for part in parts)
    table = _table(("", ""), *((name, "right") for name in names))
    table.add_column("why not the first")
    for rank, candidate in enumerate(candidates, 1):
        table.add_row(str(rank), *_shares(candidate.prediction, parts), candidate.reason)
    return table


def _shares(prediction: Prediction, parts: Sequence[str]) -> list[str]:
    whole = prediction.step_time_s or 1.0
    return [percent_text(prediction.breakdown.get(part, 0.0) / whole) for part in parts]


def difference_text(prediction: Prediction) -> str:
    """Where the closed form lies apart from the simulation, empty where both agree."""
    from planner.analytic import differing_term

    part = differing_term(prediction.analytic, prediction)
    if not part:
        return ""
    objective_s, name = sum(prediction.analytic.values()), BREAKDOWN_NAMES.get(part, part)
    here, there = prediction.analytic.get(part, 0.0), prediction.breakdown.get(part, 0.0)
    return (
        f"; the closed form says {seconds_text(objective_s)}: of that {name} {seconds_text(here)} "
        f"instead of {seconds_text(there)}"
    )


_SHOWN = 1e-3
"""Relative difference from which on a plan's own objective is shown beside the least."""


def _certificate_text(certificate: Certificate, prediction: Prediction) -> str:
    blocks, own_s, own = certificate.distinct_blocks, sum(prediction.analytic.values()), ""
    if certificate.of_mesh:
        space = " on its mesh"
        size = f"elimination width {certificate.elimination_width}"
        if certificate.states:
            size += (
                f", {certificate.states:,} states, {certificate.states_left:,} after reductions, largest table "
                f"{certificate.largest_table:,} entries"
            )
    else:
        space = " over all configurations"
        if own_s > certificate.objective_s * (1 + _SHOWN):
            own = f" (of this plan {seconds_text(own_s)})"
        size = f"{certificate.configurations:,} configurations bounded, {certificate.partitions:,} cut into stages"
    return (
        f"{certificate.status}{space}: objective {seconds_text(certificate.objective_s)}{own}, lower bound "
        f"{seconds_text(certificate.lower_bound_s)}, gap {percent_text(certificate.gap)}; {size}; "
        f"{certificate.operators:,} operators, {blocks} distinct block{'s' * (blocks != 1)}"
    )


def _facts(result: PlanResult, hardware: Hardware, strategy_file: str) -> Iterable[tuple[str, str]]:
    best = result.candidates[0]
    plan, certificate = best.plan, best.plan.certificate
    levels = ", ".join(
        f"{axis.name} over {level_of_axis(hardware, axis.size, plan.mesh.stride(index))}"
        for index, axis in enumerate(plan.mesh.axes)
    )
    yield "stages", stages_text(plan)
    yield "topology", levels
    yield "memory", memory_kinds_text(best.prediction.memory_at_peak)
    yield "certificate", _certificate_text(certificate, best.prediction)
    yield "prediction", f"{best.prediction.label} ({hardware.uncertainty.source}){difference_text(best.prediction)}"
    yield (
        "search",
        (
            f"{seconds_text(result.elapsed_s)} (of it simulation {seconds_text(result.simulation_s)}), "
            f"capture {seconds_text(result.capture_s)}"
        ),
    )
    if result.shadow_prices is not None:
        from planner.explanations import shadow_messages

        yield "worth", "; ".join(shadow_messages(result.shadow_prices))
    for message in result.messages:
        yield "note", message
    yield "written", strategy_file


def memory_kinds_text(kinds: Mapping[str, int]) -> str:
    """What stands in memory at the peak, largest first."""
    ordered = sorted(((size, str(kind)) for kind, size in kinds.items() if size), key=lambda item: (-item[0], item[1]))
    return ", ".join(f"{kind.replace('_', ' ')} {bytes_text(size)}" for size, kind in ordered) or "empty"


def what_if_report(rows: Sequence[WhatIfRow], rule: str, report: str | None) -> Iterable[RenderableType]:
    """Everything `meshwright what-if` prints: a table for each profile."""
    yield Text(rule)
    for profile in dict.fromkeys(row.hardware for row in rows):
        mine = [row for row in rows if row.hardware == profile]
        yield Text(f"\n{profile}", style="bold")
        yield _what_if_table(mine)
        for row in mine:
            if row.best is None:
                yield Text(f"no plan for {row.devices} devices: {row.reason}", style="red")
    if report:
        yield Text(f"\nwritten {report}")


def _what_if_table(rows: Sequence[WhatIfRow]) -> Table:
    first = next((row.best.prediction for row in rows if row.best is not None), None)
    table = _table(
        ("\ndevices", "right"),
        ("global\nbatch", "right"),
        (mesh_header(row.best.plan for row in rows if row.best is not None), ""),
        ("micro-\nbatch", ""),
        ("step\ntime", "right"),
        (f"{throughput(first)[1] if first else 'samples'}\nper s", "right"),
        ("scaling\nefficiency", "right"),
        ("\nMFU", "right"),
        (f"memory, of\n{bytes_text(first.device_memory_bytes) if first else ''}", "right"),
    )
    for row in rows:
        if row.best is None:
            table.add_row(str(row.devices), str(row.global_batch), Text("no plan", style="red"))
            continue
        plan, prediction = row.best.plan, row.best.prediction
        table.add_row(
            str(row.devices),
            str(row.global_batch),
            mesh_text(plan),
            batch_text(plan),
            seconds_text(prediction.step_time_s),
            rate_text(throughput(prediction)[0], "").removesuffix(" /s"),
            "" if row.scaling_efficiency is None else percent_text(row.scaling_efficiency),
            percent_text(prediction.mfu),
            bytes_text(prediction.peak_memory_bytes),
        )
    return table


def network_table(networks: Sequence[NetworkSummary]) -> Table:
    """The built-in networks."""
    table = _table(("network", ""), ("family", ""), ("parameters", "right"), ("batch", "right"), ("sequence", "right"))
    table.add_column("what it is")
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
    table = _table(("profile", ""), ("device", ""), ("memory", "right"), ("per node", "right"), ("at most", "right"))
    table.add_column("what it is")
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
    table = _table()
    for name in ("field", "value", "source"):
        table.add_column(name, overflow="fold")
    for row in hardware.rows:
        table.add_row(Text(row.field), Text(row.value), Text(row.source))
    yield table


def calibration_report(hardware: Hardware, path: str) -> Iterable[RenderableType]:
    """What `meshwright calibrate` measured, in short."""
    yield Text(f"{hardware.name}: {hardware.description}", style="bold")
    peaks = ", ".join(
        f"{dtype} {rate_text(flops, '').removesuffix(' /s')}FLOP/s"
        for dtype, flops in sorted(hardware.peak_flops.items(), reverse=True)
    )
    spread = hardware.uncertainty
    yield facts(
        [
            ("peak", peaks),
            ("memory", f"{bytes_text(hardware.device_memory_bytes)} at {bytes_text(hardware.memory_bandwidth)}/s"),
            (
                "collectives",
                ", ".join(f"{table.collective} × {table.group_size}" for table in hardware.collective_tables),
            ),
            ("slow-down", ", ".join(f"{n} processes {factor:.2f}" for n, factor in hardware.slowdown_table)),
            ("interval", f"−{percent_text(spread.low)} to +{percent_text(spread.high)} ({spread.label})"),
            ("written", path),
        ]
    )


def fitted_report(fit: ProfileFit, path: str) -> Iterable[RenderableType]:
    """What `meshwright calibrate --from-measurements` fitted for one profile."""
    yield Text(f"{fit.profile}: {len(fit.fields)} numbers written to {path}", style="bold")
    columns = ("fit", ""), ("rows", "right"), ("median error", "right"), ("p90", "right"), ("before", "right")
    table = _table(*columns)
    for part in fit.fits:
        before = " / ".join(percent_text(error) for error in part.errors_before or ())
        median, tail = part.errors
        table.add_row(part.name, str(len(part.ratios)), percent_text(median), percent_text(tail), before)
    yield table


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Names and values, one pair a line; pairs without a value are left out."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            table.add_row(name, Text(value))
    return table


def _length(plan: Plan) -> str:
    return f" × {plan.sequence_length} tokens" if plan.sequence_length else ""


def _table(*columns: tuple[str, str]) -> Table:
    """A table without lines; a column is its heading and ``"right"`` or nothing."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
    for heading, side in columns:
        table.add_column(heading, justify="right" if side else "left", no_wrap=True)
    return table


def simulation_report(
    plan: Plan, hardware: Hardware, prediction: Prediction, timeline: Timeline, program: Program, trace: Path | None
) -> Iterable[RenderableType]:
    """Everything `meshwright simulate` prints."""
    from simulator.timeline import top_operators

    yield Text(f"{plan.network} on {plan.devices} × {hardware.device_name} ({hardware.name})", style="bold")
    yield facts(
        [
            ("plan", f"{axes_text(plan)}, micro-batch {batch_text(plan)}"),
            (
                "step time",
                f"{seconds_text(timeline.step_time_s)} ({interval_text(*prediction.interval_s)}, {prediction.label})",
            ),
            ("throughput", f"{rate_text(*throughput(prediction))}, MFU {percent_text(prediction.mfu)}"),
            ("time", breakdown_text(timeline.breakdown, timeline.step_time_s)),
            ("peak memory", memory_text(prediction)),
            ("memory", memory_kinds_text(prediction.memory_at_peak)),
        ]
    )
    numbers = (("calls", "right"), ("time", "right"), ("share", "right"))
    operators = _table(("operator", ""), ("kernel", ""), *numbers)
    operators.columns[0].no_wrap, operators.columns[0].overflow = False, "fold"
    for total in top_operators(timeline, program):
        operators.add_row(
            Text(total.name), total.kernel, str(total.calls), seconds_text(total.seconds), percent_text(total.share)
        )
    yield Padding(operators, (1, 0, 0, 0))
    if timeline.collectives:
        collectives = _table(
            ("collective", ""), ("axis", ""), ("calls", "right"), ("payload", "right"), ("time", "right")
        )
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
        yield Padding(facts([("written", str(trace))]), (1, 0, 0, 0))


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
    table = _table(("", ""), ("predicted", "right"), ("measured", "right"), ("difference", "right"))
    table.add_row(
        "step time",
        "" if predicted is None else seconds_text(predicted),
        f"{seconds_text(time.median)} ({interval_text(time.p10, time.p90)})",
        "" if report.error is None else f"{100 * report.error:+.1f} %",
    )
    at_this_speed, speed = report.predicted_at_this_speed_s, report.machine_speed
    if at_this_speed is not None and speed is not None and report.error_at_this_speed is not None:
        table.add_row(
            f"at this speed ({speed:.0%})",
            seconds_text(at_this_speed),
            "",
            f"{100 * report.error_at_this_speed:+.1f} %",
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
