"""The least device count: found where more devices always help, and never said to be proven where it is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.planning import infeasible
from planner.planning.configured import Configured
from planner.plans.pins import Pins
from simulator.profiles import load_profile

A100 = load_profile("dgx-a100")


def least(fitting: set[int], devices: int) -> tuple[tuple[int, bool] | None, list[int]]:
    """What is found where exactly some counts fit, and the counts that were planned."""
    asked: list[int] = []

    def fits(_: object, __: Pins, count: int) -> object:
        asked.append(count)
        return count if count in fitting else None

    search = cast(Configured, SimpleNamespace(hardware=A100, devices=devices))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infeasible, "fitting", fits)
        return infeasible.least_devices(search, Pins()), asked


@given(devices=st.integers(1, 512), enough=st.integers(1, 1024))
def test_where_more_devices_always_help_the_least_count_is_found(devices: int, enough: int) -> None:
    counts = [n for n in range(devices + 1, A100.max_devices + 1) if A100.holds(n)]
    found, asked = least({n for n in counts if n >= enough}, devices)
    wanted = min((n for n in counts if n >= enough), default=None)
    assert (found and found[0]) == wanted
    assert len(asked) == len(set(asked))


@given(devices=st.integers(1, 256), fitting=st.sets(st.integers(2, 160), max_size=12))
def test_a_count_is_said_to_be_the_least_only_if_all_smaller_ones_were_tried(devices: int, fitting: set[int]) -> None:
    found, asked = least({8 * n for n in fitting} | {A100.max_devices}, devices)
    assert found is not None
    assert found[0] in {8 * n for n in fitting} | {A100.max_devices}
    below = {n for n in range(devices + 1, found[0]) if A100.holds(n)}
    if found[1]:
        assert below <= set(asked)
        assert not any(n in {8 * m for m in fitting} for n in below)
    else:
        assert len(asked) >= infeasible.TRIES


def test_no_count_that_fits_is_none() -> None:
    assert least(set(), 64)[0] is None
