"""Combinations that the search may choose on four ranks train as one process does, in float64."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.planner.execution.made import make_plan, run
from tests.planner.execution.small import place

DEVICES, BATCH, COUNT, SEED = 4, 8, 4, 20
AXES = {"gpt": ("dp", "tp", "cp", "pp"), "llama": ("dp", "tp", "cp", "pp"), "mixtral": ("dp", "tp", "pp")}


def drawn(random: Random) -> tuple[str, dict[str, Any]]:
    """A network and the pins of a plan for it."""
    network = random.choice(sorted(AXES))
    pins: dict[str, Any] = dict.fromkeys(AXES[network], 1)
    for axis in random.choices(AXES[network], k=2):
        pins[axis] *= 2
    if pins["pp"] > 2:  # two blocks make two stages
        pins["pp"], pins["dp"] = 2, 2
    if pins["pp"] > 1:
        pins["schedule"] = random.choice(["gpipe", "1f1b", "zb_h1"])
    pins["micro_batch"] = random.choice([1, 2])
    pins["recompute"] = random.choice(["none", "selective", "full"])
    pins["offload_optimizer"] = random.choice(["true", "false"])
    if pins["dp"] > 1:
        pins["optimizer_sharding"] = random.choice(["none", "zero1", "zero2", "zero3"])
    if network == "mixtral" and pins["dp"] > 1:
        pins["ep"] = random.choice([1, pins["dp"]])
        if pins["ep"] > 1:  # experts take the whole data axis: nothing is left to shard over
            pins["optimizer_sharding"] = "none"
    if pins["tp"] > 1:
        pins["sequence_parallel"] = random.choice(["true", "false"])
    if pins.get("cp", 1) > 1:
        pins["context_algorithm"] = random.choice(["ring", "all_to_all"])
    return network, pins


def samples() -> list[tuple[str, dict[str, Any]]]:
    """The same ones each time, no two alike."""
    random = Random(SEED)
    found: list[tuple[str, dict[str, Any]]] = []
    while len(found) < COUNT:
        sample = drawn(random)
        if sample not in found:
            found.append(sample)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("network", "pins"), samples())
def test_losses_are_those_of_one_process(network: str, pins: dict[str, Any]) -> None:
    plan = make_plan(place(network), DEVICES, batch=BATCH, **pins)
    report = run(plan)
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-10, pins
    assert report.losses[0] != report.losses[-1]


ZERO_BUBBLE = {"dp": 2, "pp": 2, "tp": 1, "cp": 1, "schedule": "zbv", "micro_batch": 2, "copies": 2}
SHARDS_AND_REPLICAS = {"dp": 8, "tp": 1, "pp": 1, "cp": 1, "optimizer_sharding": "zero3", "shard_size": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "batch", "precision", "pins"),
    [(8, 8, "fp32", SHARDS_AND_REPLICAS), (4, 16, "fp16", ZERO_BUBBLE)],
    ids=["shards within replicas", "zero bubble with copies in fp16"],
)
def test_what_is_seldom_put_together(devices: int, batch: int, precision: str, pins: dict[str, Any]) -> None:
    plan = make_plan(place("gpt"), devices, batch=batch, precision=precision, **pins)
    report = run(plan, timeout_s=240)
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-10
    assert report.losses[0] != report.losses[-1]
