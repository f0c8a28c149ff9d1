"""One trace of a step as predicted and as recorded, side by side, for Perfetto and Chrome.

The prediction is drawn as `simulator.pipeline_trace` draws it; below it stands one process for each rank with what its
clocks showed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planner.execution.communication import FINISH, RUN, START
from planner.execution.measuring.clocks import RECEIVE
from planner.execution.measuring.comparing import middle_step
from planner.execution.measuring.recorded import RankTimes
from planner.planning.prediction import SimulatedPlan, write_trace
from planner.plans.plan import Plan
from simulator.whole_file import write_whole

MEASURED = 100_000
"""Number of the process that holds the first rank as measured; predicted ranks have lower ones."""
MAX_RANKS = 16
MICROSECONDS = 1e6
THREADS = ("compute", "communication", "between stages")


def write_run_trace(
    path: str | Path,
    plan: Plan,
    simulated: SimulatedPlan,
    ranks: Sequence[RankTimes],
) -> Path:
    """Write the predicted step and the recorded one of median length, whole or not at all.

    Parameters
    ----------
    simulated : the predicted step
    ranks : the times of every rank, of `planner.execution.measuring.recorded.rank_times`
    """
    document = _predicted(plan, simulated)
    step = middle_step(ranks)
    for event in document["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            event["args"]["name"] += " predicted"
    document["traceEvents"] += [
        event for number, rank in enumerate(ranks[:MAX_RANKS]) for event in _measured(number, rank.of_step(step))
    ]
    document["otherData"]["measured"] = {
        "ranks_drawn": min(len(ranks), MAX_RANKS),
        "ranks": len(ranks),
        "step_time_s": max(float(rank.durations_s[step]) for rank in ranks),
        "note": "a recorded step of median length; processes named measured begin with their own first instruction",
    }
    return write_whole(path, json.dumps(document, separators=(",", ":")) + "\n")


def _predicted(plan: Plan, simulated: SimulatedPlan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        path = Path(folder) / "predicted.json"
        write_trace(simulated, plan, path)
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _measured(number: int, rank: RankTimes) -> Iterator[dict[str, Any]]:
    process = MEASURED + number
    yield _named("process_name", process, 0, name=f"rank {number} measured")
    yield _named("process_sort_index", process, 0, sort_index=process)
    for thread, name in enumerate(THREADS):
        yield _named("thread_name", process, thread, name=name)
    for event in range(len(rank.number)):
        fields = _described(rank, event)
        begin, end = float(rank.begin_s[event]), float(rank.end_s[event])
        yield {
            "ph": "X",
            "pid": process,
            "ts": begin * MICROSECONDS,
            "dur": (end - begin) * MICROSECONDS,
            **fields,
        }


def _described(rank: RankTimes, event: int) -> dict[str, Any]:
    """Thread, name, category and arguments of an event."""
    part, number = int(rank.part[event]), int(rank.number[event])
    waited = {"waited_us": round(float(rank.waited_s[event]) * MICROSECONDS, 3)} if rank.waited_s[event] else {}
    if part == RECEIVE:
        name = f"receive from stage {number}" if number >= 0 else "what was sent arrives"
        return {"tid": 2, "cat": "communication", "name": name, "args": waited}
    if part not in (RUN, START, FINISH):
        return {"tid": 1, "cat": "communication", "name": "sum inside an operator", "args": waited}
    task = rank.entries[number].task
    if task.collective is None:
        return {"tid": 0, "cat": str(task.phase), "name": task.name, "args": {"kernel": task.kernel.value}}
    name = task.name + {START: ", sent", FINISH: ", waited for"}.get(part, "")
    arguments = {"collective": str(task.collective), "axis": task.axis, "payload_bytes": task.payload_bytes, **waited}
    return {"tid": 1, "cat": "communication", "name": name, "args": arguments}


def _named(what: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": arguments}
