"""Made-up results of planning, for tests of what is shown and written."""

from __future__ import annotations

from dataclasses import replace

from planner.planning.planning import Candidate, Prediction, SearchResult
from planner.plans.plan import Certificate, Plan, Status
from planner.sharding.placement import Mesh, MeshAxis
from planner.sharding.rules import Rule
from planner.what_if import WhatIfRow, finish_rows

GIB = 2**30


def make_plan(data: int = 4, tensor: int = 2, **fields: object) -> Plan:
    """A plan of two operators."""
    axes = tuple(MeshAxis(name, size) for name, size in (("data", data), ("tensor", tensor)) if size > 1)
    rules = (Rule((0, -1), (0,), splits_work=True), Rule((-1, 1), (1,), splits_work=True))[: len(axes)]
    plan = Plan(
        network="zoo:gpt2",
        fingerprint="f00d",
        sequence_length=1024,
        hardware="dgx-a100",
        hardware_hash="beef",
        precision="bf16",
        optimizer="adamw",
        global_batch=8 * data,
        micro_batch=4,
        micro_batches=2,
        mesh=Mesh(axes),
        rules={"mm": rules},
        layers=(),
        optimizer_sharding="none",
        bucket_bytes=25_000_000,
        certificate=Certificate(
            status=Status.OPTIMAL,
            objective_s=0.1,
            lower_bound_s=0.1,
            elimination_width=3,
            operators=220,
            distinct_blocks=1,
        ),
    )
    return replace(plan, **fields)  # type: ignore[arg-type]


def make_prediction(step_time_s: float = 0.1, samples: int = 32, memory_bytes: int = 20 * GIB) -> Prediction:
    """A prediction of a network of 1,024 tokens a sample."""
    return Prediction(
        step_time_s=step_time_s,
        interval_s=(0.8 * step_time_s, 1.3 * step_time_s),
        label="calibrated",
        samples_per_s=samples / step_time_s,
        tokens_per_s=1024 * samples / step_time_s,
        mfu=0.412,
        peak_memory_bytes=memory_bytes,
        device_memory_bytes=78 * GIB,
        memory_at_peak={"parameters": 2 * GIB, "activations": memory_bytes - 2 * GIB, "gradients": 0},
        breakdown={
            "compute_s": 0.7 * step_time_s,
            "exposed_communication_s": 0.2 * step_time_s,
            "bubble_s": 0.0,
            "optimizer_s": 0.1 * step_time_s,
        },
    )


def make_result() -> SearchResult:
    """Three plans, best first."""
    return SearchResult(
        status=Status.OPTIMAL,
        candidates=(
            Candidate(plan=make_plan(8, 1), prediction=make_prediction(), reason=""),
            Candidate(plan=make_plan(4, 2), prediction=make_prediction(0.12), reason="20 % slower: more communication"),
            Candidate(plan=make_plan(1, 8), prediction=make_prediction(0.3), reason="3 times slower"),
        ),
        elapsed_s=0.42,
        capture_s=1.5,
        messages=("aten.odd.default has no rule and is replicated",),
        infeasible="",
    )


def infeasible_result() -> SearchResult:
    """No plan fits."""
    return SearchResult(
        status=Status.INFEASIBLE,
        candidates=(),
        elapsed_s=0.1,
        capture_s=0.2,
        messages=(),
        infeasible="peak memory 120 GiB is 42 GiB over the 78 GiB of the device; 16 devices would fit",
    )


def make_rows() -> tuple[WhatIfRow, ...]:
    """A sweep of two profiles, one count without a plan."""
    rows = []
    for speed, profile in ((1.0, "dgx-a100"), (2.1, "dgx-h100")):
        for devices in (8, 16, 32, 64, 128, 256):
            step_time_s = 0.5 / speed * (1 + 0.02 * devices**0.5)
            candidate = Candidate(
                plan=make_plan(devices // 2, 2),
                prediction=make_prediction(step_time_s, 4 * devices, int((20 + 200 / devices) * GIB)),
                reason="",
            )
            result = replace(make_result(), candidates=(candidate,))
            if profile == "dgx-a100" and devices == 8:
                result = infeasible_result()
            rows.append(
                WhatIfRow(
                    hardware=profile,
                    devices=devices,
                    global_batch=4 * devices,
                    result=result,
                    search_mode="dynamic_programming",
                )
            )
    return finish_rows(rows)
