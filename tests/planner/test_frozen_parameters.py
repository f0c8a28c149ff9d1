"""Parameters without a gradient: no state, no sum, no update; sharded by ZeRO-3 alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.planning.planning import PlanRequest, capture_for, plan_network
from planner.planning.setting import setting_of
from planner.planning.shared_tables import SharedTables
from planner.plans.pins import Pins
from planner.plans.request import checked_pins
from planner.search.configurations.storage import Storages
from simulator.program import Kernel
from tests.planner.execution.small import LENGTH, VOCABULARY, place

HIDDEN, HEADS_OUT, INNER, LAYERS, RANK = 32, 16, 24, 2, 4
PRODUCTS = [(HIDDEN, HIDDEN), (HIDDEN, HEADS_OUT), (HIDDEN, HEADS_OUT), (HIDDEN, HIDDEN)]
PRODUCTS += [(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]
"""Inputs and outputs of the products of a layer: query, key, value, output, gate, up, down."""
REQUEST = PlanRequest(network=place("adapters"), hardware="dgx-a100", devices=2, global_batch=8, precision="fp32")


@cache
def shared() -> SharedTables:
    return SharedTables(capture_for(REQUEST))


def with_pins(**pins: str) -> PlanRequest:
    return replace(REQUEST, pins=Pins.read({"micro_batches": "1", **pins}), top=1, sensitivity=False)


def numbers() -> tuple[int, int]:
    """Frozen and trained ones."""
    trained = LAYERS * sum(RANK * (inputs + outputs) for inputs, outputs in PRODUCTS)
    frozen = LAYERS * (sum(inputs * outputs for inputs, outputs in PRODUCTS) + 2 * HIDDEN)
    return frozen + 2 * VOCABULARY * HIDDEN + HIDDEN, trained


def test_frozen_products_compute_no_gradient_of_their_weights() -> None:
    """Twice the numbers of a matrix for each token and pass; nothing goes back to where no parameter is trained."""
    graph = shared().graph
    frozen, trained = numbers()
    assert graph.parameter_count == frozen + trained
    assert sum(graph.nodes[node].outputs[0].elements for node in graph.trained) == trained
    of_frozen = LAYERS * sum(inputs * outputs for inputs, outputs in PRODUCTS) + VOCABULARY * HIDDEN
    begins = sum((outputs + RANK) * inputs for inputs, outputs in PRODUCTS[:3])
    passes = 2 * of_frozen + 3 * trained - begins
    products = sum(node.flops for node in graph.nodes if node.kernel is Kernel.MATMUL)
    assert products == 2 * LENGTH * passes


@pytest.mark.parametrize(("sharding", "shards"), [("none", 1), ("zero1", 2), ("zero3", 2)])
def test_states_are_those_of_adapters_alone(sharding: str, shards: int) -> None:
    """In the simulated step, and in the closed form of the same plan."""
    request = with_pins(dp="2", tp="1", optimizer_sharding=sharding)
    frozen, trained = numbers()
    states, held = 8 * trained // shards, 4 * (trained // shards + (frozen // 2 if sharding == "zero3" else frozen))
    result = plan_network(request, shared=shared())
    memory = result.candidates[0].prediction.memory_at_peak
    assert not any("of the parameters whole" in message for message in result.messages)
    assert (memory["optimizer_states"], memory["parameters"]) == (states, held)
    placed = setting_of(request, shared()).search.explore(checked_pins(request)).found[0]
    units, model = placed.tables.units, setting_of(request, shared()).search.model()
    resident = sum(
        model.resident_bytes(units[number], Storages.of([placed.configuration]))[0, label]
        for number, label in zip(placed.tables.chain.positions, placed.partition.labels, strict=True)
    )
    gathered = 4 * trained if sharding == "zero1" else 0
    assert resident == states + held + gathered


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"dp": "2", "optimizer_sharding": "zero3"}, {"pp": "2"}], ids=str)
def test_adapters_train_as_on_one_process(pins: dict[str, str]) -> None:
    plan = plan_network(with_pins(**pins), shared=shared()).candidates[0].plan
    report = execute_plan(plan, ExecuteOptions(strategy="unused", steps=3, verify=True, data="synthetic"))
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-5
    assert report.losses[0] != report.losses[-1]
