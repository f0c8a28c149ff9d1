"""Leaving equal blocks out of modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from planner.graph.capture import capture_module
from planner.graph.folding import fold, unfold
from planner.networks.python_factory import network_of
from planner.networks.shortening import KEPT, Shortened, shorten


def test_equal_blocks_at_the_end_of_a_list_are_left_out() -> None:
    module = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(3, 4), *(nn.Linear(4, 4) for _ in range(9))])})
    assert shorten(module) == {"blocks": Shortened(kept=1 + KEPT, whole=10, start=1)}
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
        "0": Shortened(kept=KEPT, whole=9, start=0)
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


PATTERNS = {
    (0, 1) * 6: Shortened(kept=8, whole=12, start=0, period=2),
    (1, *(0, 0, 1) * 5): Shortened(kept=13, whole=16, start=1, period=3),
    (2, *(0, 1) * 6): Shortened(kept=9, whole=13, start=1, period=2),
}


@pytest.mark.parametrize(
    "kinds", [pytest.param(kinds, marks=[pytest.mark.slow] if len(kinds) > 13 else []) for kinds in PATTERNS]
)
def test_a_pattern_is_captured_a_few_times_and_the_graph_is_that_of_the_whole(kinds: tuple[int, ...]) -> None:
    assert shorten(Layers(kinds)) == {"layers": PATTERNS[kinds]}
    network = network_of(Layers(kinds), torch.zeros(2, 3))
    graph = network.capture()
    whole = fold(capture_module(lambda: network.make(None).train(), network.inputs, name=network.name))
    assert graph.runs == whole.runs
    graph, whole = unfold(graph), unfold(whole)
    assert graph.nodes == whole.nodes
    assert (graph.parameters, graph.inputs, graph.loss) == (whole.parameters, whole.inputs, whole.loss)
    assert graph.parameter_count == sum(p.numel() for p in Layers(kinds).parameters())


def test_a_pattern_that_the_last_blocks_break_is_captured_whole() -> None:
    kinds = (0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 0)
    assert shorten(Layers(kinds)) == {}
