"""The closed form of a step beside the simulation of the same plan, over many configurations of many networks.

    python -m benchmarks.closed_form [--samples N] [--seed S] [--case TEXT] [--csv FILE]

For every network, cluster and number of devices below, stage meshes and micro-batches are drawn, and configurations of
every schedule and storage among those on them. Each is cut into stages as the search does it, lowered and simulated.
Printed are the differences of step time and of peak memory by class, and the largest with the part of the step that
differs. Where the simulation shares a link among messages, which the closed form does not, a row counts as contended.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from planner.cost.work import optimizer
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_precision
from planner.lowering import pass_operators
from planner.networks import load_network
from planner.planning.configured import Configured
from planner.planning.prediction import predict_plan
from planner.planning.rescoring import analytic_breakdown, differing_term
from planner.plans.pins import Pins
from planner.plans.plan import Certificate, Plan, Status
from planner.search.configurations.explored import Placed
from planner.search.configurations.space import configurations
from planner.search.configurations.step_model import Configuration
from planner.search.problem.unaligned import aligned
from planner.search.stages.partition import partition
from planner.search.stages.task import simplified
from simulator.errors import MeshwrightError
from simulator.profiles import load_profile

BUCKET_BYTES = 25 * 2**20
AMPLE_BYTES = 1e15
"""So much memory that only time decides."""
MODES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network, with another number of layers if given, on a cluster, and what is pinned of its configurations."""

    network: str
    profile: str
    devices: int
    batch: int
    layers: int | None = None
    pins: Pins = field(default_factory=Pins)

    def __str__(self) -> str:
        depth = f"-{self.layers}" if self.layers else ""
        pinned = "".join(f" {name}={value}" for name, value in self.pins.named().items())
        return f"{self.network}{depth} {self.profile} {self.devices}{pinned}"


CASES = (
    Case(network="gpt2", profile="dgx-a100", devices=8, batch=64),
    Case(network="gpt2", profile="dgx-h100", devices=64, batch=512),
    Case(network="gpt2", profile="ascend910b-atlas800t-a2", devices=16, batch=128),
    Case(network="gpt3-175b", profile="dgx-a100", devices=64, batch=128, layers=8),
    Case(network="gpt3-175b", profile="dgx-a100", devices=1024, batch=1536),
    Case(network="llama2-7b", profile="dgx-a100", devices=64, batch=256),
    Case(network="llama2-7b", profile="ascend910b-atlas800t-a2", devices=64, batch=256),
    Case(network="llama2-7b", profile="dgx-h100", devices=16, batch=32, pins=Pins(cp=4)),
    Case(
        network="llama2-7b",
        profile="dgx-h100",
        devices=16,
        batch=32,
        pins=Pins(cp=4, context_algorithm="all_to_all"),
    ),
    Case(network="llama2-7b", profile="dgx-h100", devices=16, batch=64, pins=Pins(offload_optimizer=True)),
    Case(network="llama3-70b", profile="dgx-h100", devices=128, batch=256),
    Case(network="mixtral-8x7b", profile="dgx-a100", devices=64, batch=256),
    Case(network="mixtral-8x7b", profile="dgx-h100", devices=32, batch=128, pins=Pins(ep=4)),
    Case(network="bert-large", profile="dgx-a100", devices=16, batch=256),
    Case(network="resnet50", profile="dgx-a100", devices=8, batch=256),
    Case(network="resnet50", profile="dgx-a100", devices=64, batch=2048),
    Case(network="mlp", profile="dgx-a100", devices=8, batch=4096),
    Case(network="mlp", profile="dgx-a100", devices=1024, batch=65536),
)


@cache
def graph_of(case: Case) -> OperatorGraph:
    """The network, folded, at bfloat16 and batch 1."""
    graph = load_network(f"zoo:{case.network}").capture()
    if case.layers:
        graph = replace(graph, runs=tuple(replace(run, count=case.layers) for run in graph.runs))
    return at_precision(graph, "bfloat16")


def configured(case: Case) -> Configured:
    """The search of a case."""
    network, hardware, graph = load_network(f"zoo:{case.network}"), load_profile(case.profile), graph_of(case)
    update = network.default_optimizer
    base: dict[str, object] = {
        "network": network.spec, "fingerprint": graph.fingerprint, "sequence_length": network.sequence_length,
        "hardware": hardware.name, "hardware_hash": hardware.hash, "precision": "bf16", "optimizer": update,
        "global_batch": case.batch, "bucket_bytes": BUCKET_BYTES,
    }  # fmt: skip
    return Configured(
        graph=aligned(graph)[0], hardware=hardware, devices=case.devices, global_batch=case.batch,
        optimizer=optimizer(update), dtype="bfloat16", bucket_bytes=BUCKET_BYTES,
        sequence=network.sequence_length or 0, base=base,
    )  # fmt: skip


def drawn(search: Configured, case: Case, samples: int, rng: random.Random) -> Iterator[tuple[Pins, Configuration]]:
    """Configurations of a case: a few stage meshes and micro-batches, on each every schedule and storage alike."""
    by_table: dict[tuple[object, ...], dict[tuple[object, ...], list[Configuration]]] = {}
    for found in configurations(search.extent(case.pins)):
        kind = (found.schedule, found.optimizer_sharding, found.shard_size > 0)
        by_table.setdefault(found.table_key, {}).setdefault(kind, []).append(found)
    keys = sorted(by_table, key=str)
    for number in range(max(1, samples // 6)):
        pins = replace(case.pins, recompute=MODES[number % 3])
        kinds = by_table[rng.choice(keys)]
        for _ in range(6):
            yield pins, rng.choice(kinds[rng.choice(sorted(kinds, key=str))])


def solved(search: Configured, pins: Pins, c: Configuration) -> Placed | None:
    """The configuration cut into stages by time alone; None where its mesh does not suit the network."""
    try:
        tables = search.tables(pins, c)
    except MeshwrightError:
        return None
    task = search.model(limit_bytes=AMPLE_BYTES).task(tables, c)
    found = partition(simplified(task))
    return found and Placed(configuration=c, tables=tables, task=task, partition=found)


def planned(search: Configured, placed: Placed) -> Plan:
    """The plan of a configuration."""
    proof = Certificate(
        status=Status.BOUNDED, objective_s=placed.objective_s, lower_bound_s=0.0, elimination_width=0, operators=0,
        distinct_blocks=0,
    )  # fmt: skip
    return search.plan(placed, proof)


def contention_s(search: Configured, plan: Plan, step_time_s: float) -> float:
    """Seconds that messages lose to each other on links that they share."""
    with patch.object(pass_operators, "message_transfers", lambda *_: None):
        return step_time_s - predict_plan(plan, search.graph, search.hardware).step_time_s


def rows(case: Case, samples: int, seed: int) -> Iterator[dict[str, object]]:
    """Both accounts of the configurations drawn of a case."""
    search, rng = configured(case), random.Random(f"{seed} {case}")
    for pins, c in drawn(search, case, samples, rng):
        placed = solved(search, pins, c)
        if placed is None:
            continue
        plan = planned(search, placed)
        try:
            found = predict_plan(plan, search.graph, search.hardware)
        except MeshwrightError as error:
            print(f"{case}: {c}: {error}")
            continue
        analytic = analytic_breakdown(placed, search.model())
        difference = placed.objective_s / found.step_time_s - 1
        contended = abs(difference) > 0.05 and contention_s(search, plan, found.step_time_s) > 0.01 * found.step_time_s
        parts = {name: analytic[name] - seconds for name, seconds in found.breakdown.items()}
        yield {
            "case": str(case), "pp": c.pipeline, "v": c.virtual, "dp": c.data, "cp": c.context, "ep": c.expert,
            "tp": c.tensor, "order": "".join(axis[0] for axis in c.order if c.degrees[axis] > 1),
            "mb": c.micro_batch, "m": c.micro_batches, "schedule": c.schedule,
            "zero": c.optimizer_sharding, "shard": c.shard_size, "recompute": pins.recompute, "offload": c.offload,
            "contended": contended, "closed_s": placed.objective_s, "simulated_s": found.step_time_s,
            "time": difference, "term": differing_term(analytic, found),
            "memory": float(placed.partition.memory_bytes.max()) / found.peak_memory_bytes - 1,
            "closed_gib": float(placed.partition.memory_bytes.max()) / 2**30,
            "simulated_gib": found.peak_memory_bytes / 2**30,
            **{f"d_{name[:-2]}": value / found.step_time_s for name, value in parts.items()},
        }  # fmt: skip


def summary(table: pd.DataFrame, by: str) -> Table:
    """Median, p90, p95 and most of both differences, by a column."""
    shown = Table(by, "n", *(f"{what} {q}" for what in ("time", "memory") for q in ("median", "p90", "p95", "most")))
    for name, part in [*table.groupby(by), ("all", table)]:
        cells = []
        for what in ("time", "memory"):
            size = part[what].abs()
            cells += [f"{value:.1%}" for value in (*np.quantile(size, [0.5, 0.9, 0.95]), size.max())]
        shown.add_row(str(name), str(len(part)), *cells)
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=24, help="configurations of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default="", help="only cases whose name has this text")
    parser.add_argument("--csv", type=Path, help="write all rows here")
    given = parser.parse_args(arguments)
    cases = [case for case in CASES if given.case in str(case)]
    found = pd.DataFrame([row for case in cases for row in rows(case, given.samples, given.seed)])
    if given.csv:
        found.to_csv(given.csv, index=False)
    console, alone = Console(width=200), found[~found["contended"]]
    for by in ("case", "schedule", "zero", "recompute", "shard", "term"):
        console.print(summary(alone, by))
    for what in ("time", "memory"):
        worst = alone.reindex(alone[what].abs().sort_values(ascending=False).index).head(12)
        console.print(worst.drop(columns=["contended"]).to_string(index=False, float_format=lambda v: f"{v:.4g}"))


if __name__ == "__main__":
    main()
