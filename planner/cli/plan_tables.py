"""What `meshwright plan` and `meshwright what-if` print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.cli.tables import (
    BREAKDOWN_NAMES,
    Kind,
    axes_text,
    batch_text,
    breakdown_text,
    facts,
    memory_kinds_text,
    memory_text,
    mesh_text,
    plain_table,
)
from planner.cost.software import uncertainty_of
from planner.planning.summary import cells, certainty, columns, heading, recompute_text, throughput
from simulator.quantities import bytes_text, interval_text, percent_text, rate_text, seconds_text
from simulator.topology import level_of_axis

if TYPE_CHECKING:
    from planner.planning.planning import Candidate, Prediction, SearchResult
    from planner.planning.prediction import SimulatedPlan
    from planner.plans.plan import Certificate, Plan
    from planner.what_if import WhatIfRow
    from simulator.hardware import Hardware


SHOWN_NOTES = 3
"""Notes beside the first table; ``--verbose`` shows all."""


def plan_report(
    result: SearchResult, hardware: Hardware, strategy_file: str, *, left_out: int = 0, verbose: bool = False
) -> Iterable[RenderableType]:
    """The text of `meshwright plan` for a result that has a plan.

    ``left_out`` slower devices of those asked for have no part in it; ``verbose`` adds the details.
    """
    best = result.candidates[0]
    yield Text(heading(best.plan, hardware), style="bold")
    if left_out:
        yield Text(f"{left_out} slower devices are left out: with them a step takes longer, see the first note")
    yield Padding(candidate_table(result.candidates), (1, 0, 1, 0))
    if verbose:
        yield time_table(result.candidates)
        yield Padding(facts(_facts(result, hardware, strategy_file)), (1, 0, 0, 0))
        return
    notes = [("note", message) for message in result.messages[:SHOWN_NOTES]]
    left = len(result.messages) - len(notes)
    yield facts(
        [
            ("sure", certainty(best.plan, best.prediction)),
            *notes,
            ("written", strategy_file),
            (
                "more",
                "--verbose: where the time goes, why the others lost"
                + (f", {left} more {'note' if left == 1 else 'notes'}" if left else ""),
            ),
        ]
    )


def candidate_table(candidates: Sequence[Candidate]) -> Table:
    """The plans, best first, with their predictions."""
    names = columns(candidates[0].prediction)
    table = plain_table(("", "name"), *((name, "number" if number else "text") for name, number in names))
    for rank, one in enumerate(candidates, 1):
        table.add_row(str(rank), *cells(one.plan, one.prediction), style="bold" if rank == 1 else "")
    return table


def mesh_header(plans: Iterable[Plan]) -> str:
    """What the numbers of `mesh_text` are, as the head of a column."""
    return "data ×\ntensor ×\nstages" if any(plan.pipeline > 1 for plan in plans) else "data ×\ntensor"


def time_table(candidates: Sequence[Candidate]) -> Table:
    """Where the time of each plan goes, and why it lost."""
    parts = list(dict.fromkeys(part for candidate in candidates for part in candidate.prediction.breakdown))
    names = (BREAKDOWN_NAMES.get(part, part.removesuffix("_s")).replace(" ", "\n") for part in parts)
    table = plain_table(("", "name"), *((name, "number") for name in names), ("why not the first", "text"))
    for rank, candidate in enumerate(candidates, 1):
        table.add_row(str(rank), *_shares(candidate.prediction, parts), candidate.reason)
    return table


def _shares(prediction: Prediction, parts: Sequence[str]) -> list[str]:
    whole = prediction.step_time_s or 1.0
    return [percent_text(prediction.breakdown.get(part, 0.0) / whole) for part in parts]


def _facts(result: SearchResult, hardware: Hardware, strategy_file: str) -> Iterable[tuple[str, str]]:
    best = result.candidates[0]
    plan, certificate = best.plan, best.plan.certificate
    levels = ", ".join(
        f"{axis.name} over {level_of_axis(hardware, axis.size, plan.mesh.stride(index))}"
        for index, axis in enumerate(plan.mesh.axes)
    )
    yield "stages", stages_text(plan)
    yield "topology", levels
    yield "memory", memory_kinds_text(best.prediction.memory_at_peak)
    yield "fits", _fits_text(best.prediction)
    yield "certificate", _certificate_text(certificate, best.prediction)
    known = uncertainty_of(hardware, plan.software, language=plan.sequence_length is not None)
    yield "prediction", f"{best.prediction.label} ({known.source}){difference_text(best.prediction)}"
    yield (
        "search",
        (
            f"{seconds_text(result.elapsed_s)} (of it simulation {seconds_text(result.simulation_s)}), "
            f"capture {seconds_text(result.capture_s)}"
        ),
    )
    if result.shadow_prices is not None:
        from planner.planning.explanations import shadow_messages

        yield "worth", "; ".join(shadow_messages(result.shadow_prices))
    for message in result.messages:
        yield "note", message
    yield "written", strategy_file


def _fits_text(prediction: Prediction) -> str:
    """How probable it is that the devices hold the plan, and what the host of a node holds of it."""
    text = f"P(fits) {percent_text(prediction.p_fits)}"
    if prediction.host_memory_bytes:
        limit = prediction.host_limit_bytes
        of = f" of {bytes_text(limit)}" if isfinite(limit) else ""
        text += f", host memory of a node {bytes_text(prediction.host_memory_bytes)}{of}"
    return text


def stages_text(plan: Plan) -> str:
    """Pipeline, copies, recomputation, context, storage and messages of a plan in words; empty where it has none."""
    chunks = f" × {plan.virtual} chunks" if plan.virtual > 1 else ""
    run_by = {"run by": plan.software, "attention": plan.attention, "norms": plan.norms}
    again = recompute_text(plan).replace("=", " ") if plan.recompute != "none" else ""
    kept = not all(part.messages for part in plan.recompute_ranges)
    away = "in host memory" if plan.offload_to == "host" else "on disk"
    said: dict[str, object] = {
        f"{plan.pipeline} stages{chunks}, {plan.schedule}": plan.pipeline > 1,
        **{f"{what} {kind}": kind for what, kind in run_by.items()},
        "messages of tensor ranks beside products": plan.tensor_overlap,
        "tokens sent once to each node": plan.sent_once,
        "tokens sent beside another micro-batch": plan.expert_overlap,
        f"busiest experts at {plan.expert_imbalance:g} times an even share": plan.expert_imbalance > 1.0,
        f"micro-batches in {plan.copies} copies": plan.copies > 1,
        again + (" but not of messages" if kept else ""): again,
        **{f"{name} {plan.degree(name)}": plan.degree(name) > 1 for name in ("context", "expert")},
        f"states shared by {plan.shard_size} ranks": plan.shard_size,
        f"states {away}": plan.offload_optimizer,
        f"parameters {away}": plan.offload_parameters,
        "activations in host memory": plan.offload_ranges,
        "embedding tables in host memory": plan.host_embeddings,
        f"attention by {plan.context_algorithm}": plan.context_algorithm != "none",
        f"gradients in messages of {bytes_text(plan.bucket_bytes)}": plan.degree("data") > 1,
        f"parameters under {bytes_text(plan.sharding_threshold_bytes)} whole": plan.sharding_threshold_bytes,
    }
    return ", ".join(text for text, holds in said.items() if holds)


def difference_text(prediction: Prediction) -> str:
    """Where the closed form lies apart from the simulation, empty where both agree."""
    from planner.planning.rescoring import differing_term

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


def what_if_report(rows: Sequence[WhatIfRow], rule: str, report: str | None) -> Iterable[RenderableType]:
    """Everything `meshwright what-if` prints: a table for each profile and setting, or each profile at one size."""
    yield Text(rule)
    at_one_size = any(row.setting for row in rows) and len({row.devices for row in rows}) == 1
    tables: dict[str, list[WhatIfRow]] = {}
    for row in rows:
        tables.setdefault(f"{row.profile}, {row.devices} devices" if at_one_size else row.label, []).append(row)
    for title, mine in tables.items():
        yield Text(f"\n{title}", style="bold")
        yield _what_if_table(mine, at_one_size=at_one_size)
        for row in mine:
            if row.best is None:
                where = f" with {row.setting}" if row.setting else ""
                yield Text(f"no plan for {row.devices} devices{where}: {row.reason}", style="red")
    if report:
        yield Text(f"\nwritten {report}")


def _what_if_table(rows: Sequence[WhatIfRow], *, at_one_size: bool) -> Table:
    first = next((row.best.prediction for row in rows if row.best is not None), None)
    memory = f"memory,\nof\n{bytes_text(first.device_memory_bytes)}" if first else "\nmemory"
    columns: dict[str, Kind] = {
        "\nwith": "text",
        "\ndevices": "number",
        "global\nbatch": "number",
        mesh_header(row.best.plan for row in rows if row.best is not None): "text",
        "micro-\nbatch": "name",
        "step\ntime": "number",
        f"{throughput(first)[1] if first else 'samples'}\nper s": "number",
        "\nMFU": "number",
        memory: "number",
        "\nscaling": "number",
    }
    left_out = {"\ndevices", "\nscaling"} if at_one_size else {"\nwith"}
    table = plain_table(*((name, kind) for name, kind in columns.items() if name not in left_out))
    for row in rows:
        own = [row.setting.replace("=", " ") if at_one_size else str(row.devices), str(row.global_batch)]
        if row.best is None:
            table.add_row(*own, Text("no plan", style="red"))
            continue
        plan, prediction = row.best.plan, row.best.prediction
        scaling = "" if row.scaling_efficiency is None else percent_text(row.scaling_efficiency)
        table.add_row(
            *own,
            mesh_text(plan),
            batch_text(plan),
            seconds_text(prediction.step_time_s),
            rate_text(throughput(prediction)[0], "").removesuffix(" /s"),
            percent_text(prediction.mfu),
            bytes_text(prediction.peak_memory_bytes),
            *(() if at_one_size else (scaling,)),
        )
    return table


def simulation_report(
    plan: Plan, hardware: Hardware, found: SimulatedPlan, trace: Path | None
) -> Iterable[RenderableType]:
    """Everything `meshwright simulate` prints."""
    prediction, pipeline, peak_rank = found.prediction, "", ""
    if plan.pipeline * plan.virtual > 1:
        chunks = f", {plan.virtual} chunks each" if plan.virtual > 1 else ""
        pipeline = f"{plan.pipeline} ranks{chunks}, {found.lowered.schedule.name}"
        peak_rank = f", on pipeline rank {prediction.peak_rank}"
    step_time, interval = seconds_text(prediction.step_time_s), interval_text(*prediction.interval_s)
    yield Text(f"{plan.network} on {hardware.devices_text(plan.devices)} ({hardware.name})", style="bold")
    yield facts(
        [
            ("plan", f"{axes_text(plan)}, micro-batch {batch_text(plan)}"),
            ("pipeline", pipeline),
            ("step time", f"{step_time} ({interval}, {prediction.label})"),
            ("throughput", f"{rate_text(*throughput(prediction))}, MFU {percent_text(prediction.mfu)}"),
            ("time", breakdown_text(prediction.breakdown, prediction.step_time_s)),
            ("peak memory", f"{memory_text(prediction)}{peak_rank}"),
            ("memory", memory_kinds_text(prediction.memory_at_peak)),
        ]
    )
    if pipeline:
        yield Padding(_ranks(plan, found), (1, 0, 0, 0))
    operators = plain_table(
        ("operator", "text"), ("kernel", "text"), ("calls", "number"), ("time", "number"), ("share", "number")
    )
    for total in found.operators:
        name, share = _operator_text(total.name), percent_text(total.seconds / (found.work_s or 1.0))
        operators.add_row(Text(name), total.kernel, str(total.calls), seconds_text(total.seconds), share)
    yield Padding(operators, (1, 0, 0, 0))
    if found.collectives:
        collectives = plain_table(
            ("collective", "text"), ("axis", "text"), ("calls", "number"), ("payload", "number"), ("time", "number")
        )
        for message in found.collectives:
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


def _operator_text(name: str) -> str:
    """The name of an operator; attention is captured on the host, and runs on the devices."""
    return name.replace("_scaled_dot_product_", "").replace("_for_cpu", "")


def _ranks(plan: Plan, found: SimulatedPlan) -> Table:
    """Table of the pipeline ranks: their units, how long they compute and wait, and their peak memory."""
    names = ("rank", "units", "computes", "idle", "peak memory")
    ranks = plain_table(*((name, "text" if name == "units" else "number") for name in names))
    for rank, memory in enumerate(found.memory):
        held = (f"{c.first} to {c.last}" if c.first != c.last else c.first for c in plan.chunks if c.rank == rank)
        ranks.add_row(
            str(rank),
            Text(", ".join(held)),
            seconds_text(float(found.result.compute_s[rank])),
            percent_text(float(found.result.bubble_s[rank]) / found.prediction.step_time_s),
            bytes_text(memory.peak_bytes),
        )
    return ranks
