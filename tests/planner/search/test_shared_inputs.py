"""Equal blocks that all read one tensor of the batch, such as a mask, are planned as the same blocks written out."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from planner.cost.work import optimizer
from planner.graph.capture import capture_module
from planner.graph.folding import fold, unfold
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.search.units.labels import StageDecisions, UnitWeights, stage_tables
from simulator.profiles import load_profile
from tests.planner.search.problems import BUCKET_BYTES, make_mesh
from tests.planner.sharding.small_networks import BatchTensor

INPUTS = (
    BatchTensor(name="x", kind="features", shape=(8, 16)),
    BatchTensor(name="kept", kind="target", shape=(8, 1)),
)


class Block(nn.Module):
    """Two products, each of what a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return (self.other(self.one(x * kept) * kept) + x).relu()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x, kept = self.first(x * kept), kept * 1.0
        for block in self.blocks:
            x = block(x, kept)
        return x.square().mean()


def least(graph: OperatorGraph, tensor: int) -> float:
    tables = stage_tables(
        at_batch(graph, 8), StageDecisions(graph), load_profile("dgx-a100"), make_mesh(tensor=tensor),
        optimizer=optimizer("adamw"), bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip
    assert all(len(unit.forward_s) for unit in tables.units)
    return tables.minimum(UnitWeights(step=1 / 64)).value


@pytest.mark.parametrize("tensor", [1, 2])
def test_folded_blocks_cost_what_they_cost_written_out(tensor: int) -> None:
    folded = fold(capture_module(Masked, INPUTS, name="masked"))
    assert [run.count for run in folded.runs] == [4]
    assert least(folded, tensor) == pytest.approx(least(unfold(folded), tensor), rel=1e-9)
