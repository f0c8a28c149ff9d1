"""Passes of chunks: units that are alike are written once, to what each of them would be written to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.lowering.chunk_passes import PassWriter
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.written import PassDraft
from planner.plans.plan import Plan
from simulator.profiles import load_profile
from tests.planner.lowering.plans import one_stage, pipelined, recomputing
from tests.planner.search.problems import captured

HARDWARE = load_profile("dgx-a100")
LAYERS = 12
GRAPH = captured("gpt2-tiny", LAYERS)


def drafts(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> tuple[list[PassDraft], list[list[object]], int]:
    """Every pass as it is written, with the tasks of its operators, and how many units were written for it."""
    found: list[PassDraft] = []
    tasks: list[list[object]] = []
    units = 0
    write, unit = PassWriter.write, PassWriter._unit

    def written(self: PassWriter) -> PassDraft:
        found.append(write(self))
        tasks.append([[self.work.tasks[n] for n in numbers] for numbers in found[-1].tasks])
        return found[-1]

    def one(self: PassWriter, number: int, given: int) -> int:
        nonlocal units
        units += 1
        return unit(self, number, given)

    with monkeypatch.context() as patch:
        patch.setattr(PassWriter, "write", written)
        patch.setattr(PassWriter, "_unit", one)
        if not known:
            patch.setattr(PassWriter, "_known_unit", lambda self, number, given, *_: one(self, number, given))
        lower_pipeline(plan, GRAPH, HARDWARE)
    return found, tasks, units


@pytest.mark.parametrize("bucket_bytes", [1, 40_000, 10**9])
@pytest.mark.parametrize(
    ("level", "schedule", "virtual"),
    [("zero1", "1f1b", 1), ("zero2", "zbv", 2), ("zero3", "interleaved_1f1b", 2), ("zero3", "1f1b", 1)],
)
def test_units_that_are_alike_are_written_once(
    level: str, schedule: str, virtual: int, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = one_stage("gpt2-tiny", LAYERS, (("data", 2), ("tensor", 2)), storage="sharded")
    plan = recomputing(replace(plan, optimizer_sharding=level), GRAPH, "selective")
    plan = replace(pipelined(plan, GRAPH, 2, schedule, virtual), bucket_bytes=bucket_bytes)
    found, tasks, few = drafts(plan, monkeypatch, known=True)
    each, theirs, all_units = drafts(plan, monkeypatch, known=False)
    assert tasks == theirs
    for ours, other in zip(found, each, strict=True):
        assert (ours.stream, ours.waits, ours.after) == (other.stream, other.waits, other.after)
        assert (ours.ahead, ours.output, ours.synchronised) == (other.ahead, other.output, other.synchronised)
    assert few < all_units
