"""Every two options that the search may choose together train as one process does: losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.planner.execution.combinations import (
    PARTS,
    Combination,
    factors,
    read_table,
)
from tests.planner.execution.together import EXACT, LOW, Trials, name_of

ROWS = read_table()
MOST = 20
UPDATE = "python -m tests.planner.execution.combinations writes the table anew"


def in_low_precision() -> list[tuple[Combination, str]]:
    """Rows with a precision each, so that every value of every factor is met in every one."""
    found: list[tuple[Combination, str]] = []
    for precision in LOW:
        left = set().union(*(row.items() for row in ROWS))
        while left:
            best = max(ROWS, key=lambda row: (len(left & row.items()), -int(row["devices"])))
            left -= best.items()
            found.append((best, precision))
    return found


def sets() -> Iterator[tuple[str, list[tuple[Combination, str]]]]:
    """Trials that share processes: as many ranks each, no more than `MOST` together.

    A row's precisions stand together: one process trains it in float64 once for all of them.
    """
    low = in_low_precision()
    trials = [(row, one) for row in ROWS for one in (EXACT, *(p for other, p in low if other is row))]
    for devices in dict.fromkeys(row["devices"] for row, _ in trials):
        alike = [one for one in trials if one[0]["devices"] == devices]
        for first in range(0, len(alike), MOST):
            yield f"{devices} devices, from {first}", alike[first : first + MOST]


SETS = dict(sets())


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_one_process_trains_alike(name: str) -> None:
    trials = Trials(SETS[name])
    trials.run()
    faults = {name_of(row, precision): trials.fault(row, precision) for row, precision in SETS[name]}
    assert not {name: fault for name, fault in faults.items() if fault}


@pytest.mark.slow
def test_latent_attention_trains_alike() -> None:
    """As rows of Mixtral in the table do: cut by heads, by experts, by both, and in stages."""
    pytest.importorskip("transformers")
    rows = [row for row in ROWS if row["network"] == "mixtral" and row["devices"] == "4"]
    ways = {(row["tp"], row["pp"], row["ep"]): row for row in rows}
    cut = [("4", "1", "1"), ("2", "1", "2"), ("2", "2", "1"), ("1", "2", "2")]
    taken: list[tuple[Combination, str]] = [({**ways[way], "network": "latent", "attention": ""}, EXACT) for way in cut]
    trials = Trials(taken)
    trials.run()
    assert not {name_of(*one): fault for one in taken if (fault := trials.fault(*one))}


@pytest.mark.slow
def test_experts_with_a_context_axis_train_alike() -> None:
    """Each rank gives the places of experts out among its own tokens, also beside ranks of experts and in stages."""
    ways = (
        {"network": "mixtral", "dp": "2", "cp": "2", "context_algorithm": "all_to_all"},
        {"network": "mixtral", "dp": "2", "cp": "2", "ep": "2", "expert_messages": "tokens"},
        {"network": "mixtral", "cp": "2", "tp": "2", "context_algorithm": "ring"},
        {"network": "mixtral", "cp": "2", "pp": "2", "context_algorithm": "all_to_all"},
        {"network": "mixtral", "dp": "2", "cp": "2", "context_algorithm": "ring"},
    )
    assert_all_train_alike("4", ways)


@pytest.mark.slow
def test_parts_of_layers_that_compute_again_train_alike() -> None:
    """Parts by name, with tensor ranks, stages, ranks of experts and sharded parameters."""
    ways = (
        {"network": "llama", "tp": "2", "dp": "2", PARTS: "layernorm-mlp"},
        {"network": "llama", "pp": "2", "dp": "2", PARTS: "core_attn", "attention": "unfused"},
        {"network": "llama", "dp": "4", PARTS: "mlp", "optimizer_sharding": "zero3"},
        {"network": "mixtral", "dp": "4", "ep": "2", PARTS: "moe_act"},
        {"network": "mixtral", "dp": "2", "tp": "2", PARTS: "layernorm-moe"},
    )
    assert_all_train_alike("4", [{"recompute": "selective", **way} for way in ways])


@pytest.mark.slow
def test_states_shared_over_replicas_of_all_axes_train_alike() -> None:
    """Eight ranks share states along context and expert axes; an ep beyond dp deals whole experts to tensor ranks."""
    ways = (
        {"network": "llama", "dp": "2", "cp": "4", "optimizer_sharding": "zero3", "context_algorithm": "ring"},
        {"network": "mixtral", "dp": "8", "ep": "4", "optimizer_sharding": "zero1", "micro_batch": "2"},
        {"network": "mixtral", "dp": "2", "tp": "4", "ep": "4", "optimizer_sharding": "zero2"},
        {"network": "mixtral", "dp": "2", "tp": "2", "pp": "2", "ep": "4", "optimizer_sharding": "zero1"},
    )
    assert_all_train_alike("8", ways)


def assert_all_train_alike(devices: str, ways: Sequence[Combination]) -> None:
    """Train each of the ways on so many devices and in one process; what a way leaves out is as plain as can be."""
    plain = {name: values[0] for name, values in factors().items()} | {
        "devices": devices, "global_batch": "16", "optimizer": "adam", "tp": "1", "dp": "1", "pp": "1", "cp": "1",
        "ep": "1", "micro_batch": "1", "micro_batches": "", "sharding_threshold_kb": "", "offload_to": "",
    }  # fmt: skip
    plain |= dict.fromkeys(("schedule", "context_algorithm", "expert_messages", "expert_cut"), "")
    taken: list[tuple[Combination, str]] = [({**plain, **way}, EXACT) for way in ways]
    trials = Trials(taken)
    trials.run()
    assert not {name_of(*one): fault for one in taken if (fault := trials.fault(*one))}


def test_every_value_is_in_the_table() -> None:
    """What the planner has learnt since is not tested before it stands there."""
    assert [*ROWS[0]] == [*factors()], UPDATE
    for name, values in factors().items():
        assert {row[name] for row in ROWS} == {*values}, (name, UPDATE)
