"""Redistribution, emulated rank by rank in numpy: every path ends with the same tensor, placed as asked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import lcm, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.sharding.placement import PARTIAL, REPLICATE, Mesh, MeshAxis, Placements, local_shape
from planner.sharding.redistribution import Step, placement_index, placements_of_rank, redistribution, step_table
from simulator.program import Collective

Tensor = NDArray[np.int64]
Coordinates = tuple[int, ...]


def cut(
    tensor: Tensor, placements: Placements, sizes: tuple[int, ...], random: np.random.Generator
) -> dict[Coordinates, Tensor]:
    """Pieces by mesh coordinates; a dim that several axes shard is cut by the outer axis first."""
    if not sizes:
        return {(): tensor}
    placement, size = placements[0], sizes[0]
    if placement == REPLICATE:
        parts = [tensor] * size
    elif placement == PARTIAL:
        terms = list(random.integers(-50, 50, (size - 1, *tensor.shape)))
        parts = [*terms, tensor - sum(terms)]
    else:
        parts = np.split(tensor, size, axis=placement)
    inner = [cut(part, placements[1:], sizes[1:], random) for part in parts]
    return {(i, *place): piece for i, pieces in enumerate(inner) for place, piece in pieces.items()}


def assemble(pieces: dict[Coordinates, Tensor], placements: Placements, sizes: tuple[int, ...]) -> Tensor:
    """The tensor whose pieces these are; replicas must be equal."""
    if not sizes:
        return pieces[()]
    parts = [
        assemble({place[1:]: piece for place, piece in pieces.items() if place[0] == i}, placements[1:], sizes[1:])
        for i in range(sizes[0])
    ]
    if placements[0] == REPLICATE:
        assert all(np.array_equal(part, parts[0]) for part in parts)
        return parts[0]
    return np.sum(parts, axis=0) if placements[0] == PARTIAL else np.concatenate(parts, axis=placements[0])


def apply(step: Step, pieces: dict[Coordinates, Tensor], sizes: tuple[int, ...]) -> dict[Coordinates, Tensor]:
    """What every rank holds after one step; a rank only sees the pieces of its group along the step's axis."""
    result: dict[Coordinates, Tensor] = {}
    size = sizes[step.axis]
    for place, own in pieces.items():
        me = place[step.axis]
        group = [pieces[(*place[: step.axis], i, *place[step.axis + 1 :])] for i in range(size)]
        if step.operation is Collective.ALL_GATHER:
            result[place] = np.concatenate(group, axis=step.gather_dim)
        elif step.operation is Collective.ALL_REDUCE:
            result[place] = np.sum(group, axis=0)
        elif step.operation is Collective.REDUCE_SCATTER:
            result[place] = np.split(np.sum(group, axis=0), size, axis=step.split_dim)[me]
        elif step.operation is Collective.ALL_TO_ALL:
            sent = [np.split(piece, size, axis=step.split_dim)[me] for piece in group]
            result[place] = np.concatenate(sent, axis=step.gather_dim)
        elif step.operation == "slice":
            result[place] = np.split(own, size, axis=step.split_dim)[me]
        else:
            assert step.operation == "mask"
            result[place] = own if me == 0 else np.zeros_like(own)
    return result


def ways(placements: Placements, sizes: tuple[int, ...], rank: int) -> list[int]:
    """Into how many pieces each dim is cut."""
    return [prod(size for p, size in zip(placements, sizes, strict=True) if p == dim) for dim in range(rank)]


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], int, Placements, Placements]:
    axes = draw(st.integers(1, 3))
    sizes = tuple(draw(st.integers(2, 4 if axes < 3 else 3)) for _ in range(axes))
    rank = draw(st.integers(0, 3))
    places = st.tuples(*[st.integers(PARTIAL, rank - 1)] * axes)
    return sizes, rank, draw(places), draw(places)


def impossible(source: Placements, target: Placements) -> bool:
    return any(s >= 0 and t == PARTIAL for s, t in zip(source, target, strict=True))


@settings(max_examples=300)
@given(moves(), st.integers(0, 2**32 - 1))
def test_the_steps_keep_the_tensor_and_end_in_the_target_placement(
    move: tuple[tuple[int, ...], int, Placements, Placements], seed: int
) -> None:
    sizes, rank, source, target = move
    steps = redistribution(source, target)
    assert (steps is None) == impossible(source, target)
    if steps is None:
        return
    random = np.random.default_rng(seed)
    # No larger than source and target need: every placement in between must divide as well.
    shape = tuple(lcm(a, b) for a, b in zip(ways(source, sizes, rank), ways(target, sizes, rank), strict=True))
    tensor = random.integers(-50, 50, shape)
    pieces = cut(tensor, source, sizes, random)
    state = source
    for step in steps:
        assert step.before == state
        before = next(iter(pieces.values())).size
        pieces, state = apply(step, pieces, sizes), step.after
        assert all(piece.shape == local_shape(shape, state, sizes) for piece in pieces.values())
        after = next(iter(pieces.values())).size
        assert max(before, after) == tensor.size // prod(sizes[a] for a in step.sharded_axes)
    assert state == target
    np.testing.assert_array_equal(assemble(pieces, target, sizes), tensor)


@given(moves())
def test_nothing_moves_where_nothing_changes_and_no_placement_comes_twice(
    move: tuple[tuple[int, ...], int, Placements, Placements],
) -> None:
    _, _, source, target = move
    assert redistribution(source, source) == ()
    steps = redistribution(source, target)
    visited = [source, *(step.after for step in steps or ())]
    assert len(set(visited)) == len(visited)


@pytest.mark.parametrize(
    ("source", "target", "operations"),
    [
        ((PARTIAL,), (REPLICATE,), ["all_reduce"]),
        ((PARTIAL,), (1,), ["reduce_scatter"]),
        ((0,), (REPLICATE,), ["all_gather"]),
        ((0,), (1,), ["all_to_all"]),
        ((REPLICATE,), (0,), ["slice"]),
        ((REPLICATE,), (PARTIAL,), ["mask"]),
        # Scatter on both axes; gathering or reducing the whole tensor first would move more.
        ((PARTIAL, PARTIAL), (0, 1), ["reduce_scatter", "reduce_scatter"]),
    ],
)
def test_the_known_single_moves(source: Placements, target: Placements, operations: list[str]) -> None:
    steps = redistribution(source, target)
    assert steps is not None
    assert [str(step.operation) for step in steps] == operations


@pytest.mark.parametrize(("rank", "axes"), [(0, 0), (0, 2), (1, 1), (2, 0), (3, 1), (2, 2), (1, 3)])
def test_the_table_lists_the_steps_of_redistribution(rank: int, axes: int) -> None:
    table = step_table(rank, axes)
    states = placements_of_rank(rank, axes)
    assert table.possible.shape == (len(states), len(states))
    for (p, source), (q, target) in product(enumerate(states), repeat=2):
        steps = redistribution(source, target)
        assert table.possible[p, q] == (steps is not None)
        listed = [table.kinds[i] for i in table.steps[p, q] if i < len(table.kinds)]
        assert listed == list(_messages(steps or ()))


def _messages(steps: tuple[Step, ...]) -> Iterator[tuple[Collective, int, tuple[int, ...]]]:
    for step in steps:
        if isinstance(step.operation, Collective):
            yield step.operation, step.axis, step.sharded_axes


@pytest.mark.parametrize(("rank", "axes"), [(0, 1), (1, 1), (4, 1), (0, 2), (3, 2), (2, 3)])
def test_the_index_of_a_placement_is_its_position(rank: int, axes: int) -> None:
    states = placements_of_rank(rank, axes)
    assert len(states) == (rank + 2) ** axes
    codes = np.array(states, dtype=np.int64).T
    np.testing.assert_array_equal(placement_index(codes, rank), np.arange(len(states)))


@given(moves(), st.integers(0, 2**32 - 1))
def test_cutting_and_assembling_are_inverse_on_the_ranks_of_a_mesh(
    move: tuple[tuple[int, ...], int, Placements, Placements], seed: int
) -> None:
    """The emulation itself, and that it numbers ranks as `Mesh` does."""
    sizes, rank, source, _ = move
    random = np.random.default_rng(seed)
    tensor = random.integers(-50, 50, tuple(ways(source, sizes, rank)))
    pieces = cut(tensor, source, sizes, random)
    mesh = Mesh(tuple(MeshAxis(f"axis{i}", size) for i, size in enumerate(sizes)))
    assert [mesh.coordinates(r) for r in range(mesh.size)] == list(pieces)
    np.testing.assert_array_equal(assemble(pieces, source, sizes), tensor)
