"""Leaving equal blocks out of modules."""

from __future__ import annotations

from torch import nn

from planner.networks.shortening import KEPT, shorten


def test_equal_blocks_at_the_end_of_a_list_are_left_out() -> None:
    module = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(3, 4), *(nn.Linear(4, 4) for _ in range(9))])})
    assert shorten(module) == {"blocks": (1 + KEPT, 10)}
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

    assert shorten(nn.ModuleList([nn.ModuleList([block(window=n % 2) for n in range(9)])])) == {}
    assert shorten(nn.ModuleList([nn.ModuleList([block(layer_idx=n) for n in range(9)])])) == {"0": (KEPT, 9)}
