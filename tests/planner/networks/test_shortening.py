"""Leaving equal blocks out of modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from planner.graph.capture import capture_module
from planner.graph.folding import fold, unfold
from planner.graph.operator_graph import OperatorGraph
from planner.networks.python_factory import network_of
from planner.networks.shortening import KEPT, Shortened, shorten
from planner.planning.planning import plan_network
from planner.plans.request import PlanRequest


def test_equal_blocks_at_the_end_of_a_list_are_left_out() -> None:
    module = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(3, 4), *(nn.Linear(4, 4) for _ in range(9))])})
    assert shorten(module) == {"blocks": Shortened(tuple(range(1 + KEPT)), (0, *[1] * 9))}
    assert len(module["blocks"]) == 1 + KEPT


def test_lists_without_blocks_with_one_or_with_the_same_one_stay() -> None:
    shared = nn.Linear(2, 2)
    lists = [nn.ModuleList(), nn.Sequential(), nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([shared] * 9)]
    assert shorten(nn.ModuleList(lists)) == {}
    assert [len(part) for part in lists] == [0, 0, 1, 9]


def test_blocks_that_differ_in_a_setting_are_not_alike_but_in_their_place_are() -> None:
    def block(**settings: object) -> nn.Module:
        made = nn.Identity()
        for name, value in settings.items():
            setattr(made, name, value)
        return made

    squares = nn.ModuleList([nn.ModuleList([block(window=n * n) for n in range(9)])])
    assert shorten(squares) == {}
    assert shorten(nn.ModuleList([nn.ModuleList([block(layer_idx=n) for n in range(9)])])) == {
        "0": Shortened(tuple(range(KEPT)), (0,) * 9)
    }


class Layer(nn.Module):
    def __init__(self, width: int, kind: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width * (kind + 1))
        self.outer = nn.Linear(width * (kind + 1), width)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer((torch.relu, torch.tanh, torch.sigmoid)[self.kind](self.inner(x)))


class Layers(nn.Module):
    def __init__(self, kinds: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(3, 4), nn.ModuleList(Layer(4, kind) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum() / x.numel()


KINDS = {
    (0, 1) * 6: (0, 1, 2, 3, 4, 5, 10, 11),
    (1, *(0, 0, 1) * 4): (0, 1, 2, 3, 4, 6, 11, 12),
    (2, *(0, 1) * 6): (0, 1, 2, 3, 4, 5, 11, 12),
    (0, 1, 0, 0, 2, 0, 1, 1, 0, 2, 0, 0, 0, 1, 1, 2, 2, 1, 0, 1): (0, 1, 2, 3, 4, 6, 7, 9, 18, 19),
}
"""Blocks of several kinds, and the places of those that are captured."""


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "".join(map(str, kinds)))
def test_few_blocks_of_each_kind_are_captured_and_the_graph_is_that_of_the_whole(kinds: tuple[int, ...]) -> None:
    (shortened,) = shorten(Layers(kinds)).values()
    assert shortened.kept == KINDS[kinds]
    assert_whole(Layers(kinds), torch.zeros(2, 3))


def assert_whole(module: nn.Module, example: Tensor) -> OperatorGraph:
    """Check that the graph from a few blocks is that of all of them."""
    network = network_of(module, example)
    graph = network.capture()
    whole = fold(capture_module(lambda: network.make(None).train(), network.inputs, name=network.name))
    assert graph.runs == whole.runs
    graph, whole = unfold(graph), unfold(whole)
    assert graph.nodes == whole.nodes
    assert (graph.parameters, graph.inputs, graph.loss) == (whole.parameters, whole.inputs, whole.loss)
    assert graph.parameter_count == sum(p.numel() for p in module.parameters())
    return graph


def test_lists_side_by_side_keep_the_same_blocks() -> None:
    class Normed(Layers):
        def __init__(self) -> None:
            super().__init__((0, 1) * 6)
            self.norms = nn.ModuleList(nn.LayerNorm(4, bias=n % 5 == 0) for n in range(12))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = layer(norm(x))
            return x.square().sum() / x.numel()

    assert_whole(Normed(), torch.zeros(2, 3))


def test_what_blocks_are_may_be_looked_up_in_a_configuration() -> None:
    class Configured(Layers):
        def __init__(self) -> None:
            super().__init__((0, 1) * 6)
            self.config = SimpleNamespace(layer_types=["plain", "double"] * 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for place, layer in enumerate(self.layers):
                x = layer(x * 2 if self.config.layer_types[place] == "double" else x)
            return x.square().sum() / x.numel()

    assert_whole(Configured(), torch.zeros(2, 3))


def test_blocks_that_refer_to_others_than_their_neighbours_are_captured_whole() -> None:
    class Skipping(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = early = self.first(x)
            for layer in self.layers:
                x, early = layer(x) + early, x
            return x.square().sum() / x.numel()

    assert_whole(Skipping((0, 1) * 5), torch.zeros(2, 3))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.inner(y), torch.tanh(x) + y


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(3, 4), nn.ModuleList(Pair() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.first(x)
        for layer in self.layers:
            x, y = layer(x, y)
        return (x * y).square().sum() / x.numel()


def test_blocks_that_hand_two_tensors_to_each_other_are_written_out() -> None:
    network = network_of(Pairs(), torch.zeros(2, 3))
    assert not network.capture().runs
    assert plan_network(PlanRequest(network=network, hardware="dgx-a100", devices=2, global_batch=4)).candidates


class Reused(nn.Module):
    def __init__(self, product: nn.Linear, *, relu: bool) -> None:
        super().__init__()
        self.product, self.relu = product, relu

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.relu if self.relu else torch.tanh)(self.product(x))


class Twice(nn.Module):
    """Every product stands in two blocks that are far from each other."""

    def __init__(self, products: int) -> None:
        super().__init__()
        shared = [nn.Linear(4, 4) for _ in range(products)]
        self.down, self.up = (
            nn.ModuleList(Reused(product, relu=n % 3 == side) for n, product in enumerate(shared)) for side in (0, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.down, *self.up):
            x = block(x)
        return x.square().sum() / x.numel()


@pytest.mark.slow
@pytest.mark.parametrize("products", [10, 31])
def test_parameters_that_many_blocks_share_are_planned(products: int) -> None:
    network = network_of(Twice(products), torch.zeros(2, 4))
    assert plan_network(PlanRequest(network=network, hardware="dgx-a100", devices=2, global_batch=4)).candidates
