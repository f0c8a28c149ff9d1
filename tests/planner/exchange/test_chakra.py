"""Chakra traces: read again by a decoder of its own, their messages match, and their times are the simulated ones."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli.app import app
from planner.cost.software import run_for
from planner.exchange.chakra import COLLECTIVE, COMPUTE, RECEIVES, SENDS, Traces, traces
from planner.lowering.checked import captured
from planner.planning.prediction import SimulatedPlan, simulate_plan
from planner.plans.file import write_plan
from planner.plans.plan import Plan
from simulator.errors import UnsupportedError
from simulator.profiles import load_profile
from tests.planner.exchange.test_export import planned


def fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields of a message."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = content[place]
            value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
            if byte < 0x80:
                return value

    while place < len(content):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            assert key & 7 == 2
            size = varint()
            place += size
            yield key >> 3, content[place - size : place]


def packed(content: bytes) -> list[int]:
    """Whole numbers behind one another: the values of fields without their keys."""
    found, value, shift = [], 0, 0
    for byte in content:
        value, shift = value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            found.append(value)
            value = shift = 0
    return found


def decoded(content: bytes) -> list[dict[str, Any]]:
    """Nodes of a file, behind its metadata."""
    messages, place = [], 0
    while place < len(content):
        end = next(n for n in range(place, len(content)) if content[n] < 0x80) + 1
        (size,) = packed(content[place:end])
        messages.append(content[end : end + size])
        place = end + size
    assert place == len(content)
    assert dict(fields(messages[0]))[1] == b"1.0.0"
    nodes = []
    for message in messages[1:]:
        node: dict[str, Any] = {"id": 0, "waits": [], "duration": 0}
        for number, value in fields(message):
            if number in (4, 5):
                assert isinstance(value, bytes)
                node["waits"] += packed(value)
            elif number == 10:
                assert isinstance(value, bytes)
                inside = dict(fields(value))
                name = inside.pop(1)
                assert isinstance(name, bytes)
                node[name.decode()] = next(iter(inside.values()))
            else:
                node[{1: "id", 2: "name", 3: "type", 7: "duration"}[number]] = value
        nodes.append(node)
    return nodes


CASES = {
    "pipeline": ("pp=2", "tp=2", "schedule=interleaved_1f1b", "vpp=2", "optimizer_sharding=zero1"),
    "sharded": ("pp=1", "tp=2", "optimizer_sharding=zero3", "micro_batch=2"),
    "ring": ("pp=1", "tp=1", "cp=2", "context_algorithm=ring", "optimizer_sharding=none", "micro_batch=2"),
}


@cache
def simulated(name: str) -> tuple[Plan, SimulatedPlan]:
    """A plan on 8 devices and its step."""
    plan = planned(CASES[name], devices=8, batch=16)
    return plan, simulate_plan(plan, captured(plan), run_for(plan, load_profile(plan.hardware)))


@pytest.mark.parametrize("name", CASES)
def test_messages_of_all_ranks_match_and_times_are_the_simulated_ones(name: str) -> None:
    plan, found = simulated(name)
    written: Traces = traces(found, plan)
    files = {rank: decoded(content) for rank, content in written.files()}
    groups = json.loads(written.groups())
    assert files.keys() == set(range(plan.devices))
    sent: Counter[tuple[int, int, int, int]] = Counter()
    received: Counter[tuple[int, int, int, int]] = Counter()
    calls: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for rank, nodes in files.items():
        assert [node["id"] for node in nodes] == list(range(len(nodes)))
        for node in nodes:
            message = tuple(node.get(key, -1) for key in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
            if node["type"] == SENDS:
                assert message[0] == rank
                sent[message] += 1
            elif node["type"] == RECEIVES:
                assert message[1] == rank
                received[message] += 1
            elif node["type"] == COLLECTIVE:
                calls[node["pg_name"].decode()][rank].append((node["comm_type"], node["comm_size"]))
        known = {node["id"]: node["waits"] for node in nodes}
        assert {one for waits in known.values() for one in waits} <= known.keys()
        TopologicalSorter(known).prepare()  # raises where nodes wait for one another in a circle
    assert sent == received
    assert bool(sent) == (name != "sharded")
    for number, by_rank in calls.items():
        assert sorted(by_rank) == sorted(groups[number])
        assert len(set(map(tuple, by_rank.values()))) == 1  # all take part in the same order
    check_work(found, written, files)


def check_work(found: SimulatedPlan, written: Traces, files: Mapping[int, list[dict[str, Any]]]) -> None:
    """Sums over one rank of each pipeline stage are those of the simulated step."""
    heads = [files[stage * written.stride] for stage in range(len(written.nodes))]
    nodes = [node for one in heads for node in one]
    schedule, work = found.lowered.schedule, found.lowered.work
    counts = work.counts(schedule)
    kernels = [n for n, task in enumerate(work.tasks) if task.collective is None]
    flops = sum(node["num_ops"] for node in nodes if node["type"] == COMPUTE)
    assert flops == pytest.approx(sum(counts[n] * work.tasks[n].flops for n in kernels), rel=1e-6)
    calls = sum(one.calls for one in found.collectives if one.collective != "send" and written.axes[one.axis].size > 1)
    shared = sum(len(ranks) for ranks, _ in found.lowered.costs.meetings)
    assert sum(node["type"] == COLLECTIVE for node in nodes) == calls + shared
    seconds = sum(node["duration"] for node in nodes if node["type"] == COMPUTE) * 1e-6
    assert seconds == pytest.approx(sum(counts[n] * work.seconds[n] for n in kernels), rel=0.05)


def test_traces_are_written_by_the_command(tmp_path: Path) -> None:
    plan, _ = simulated("pipeline")
    strategy = tmp_path / "strategy.json"
    write_plan(plan, strategy)
    done = CliRunner().invoke(app, ["export", str(strategy), "--to", "chakra", "--json", "--quiet"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["files"] == [f"{tmp_path}/strategy.chakra.{rank}.et" for rank in range(8)] + [
        f"{tmp_path}/strategy.chakra.groups.json"
    ]
    assert all(Path(one).stat().st_size > 100 for one in said["files"])


def test_passes_that_run_together_are_refused() -> None:
    plan = planned(("pp=4", "schedule=dualpipe_v", "micro_batches=8", "optimizer_sharding=none"), devices=8, batch=32)
    found = simulate_plan(plan, captured(plan), run_for(plan, load_profile(plan.hardware)))
    with pytest.raises(UnsupportedError, match="--pin schedule=1f1b"):
        traces(found, plan)
