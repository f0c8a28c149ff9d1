"""Bytes copied around messages: those that execution copies, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor

from planner.execution.communication import _cut, _pack_chunks, _pack_gather, _unpack_chunks, _unpack_flat
from planner.lowering.instructions import Communicate
from planner.lowering.writer import copied_bytes
from planner.search.problem.costs import MeshCosts
from planner.sharding.placement import Mesh, MeshAxis
from simulator.profiles import load_profile
from simulator.program import Collective
from simulator.timing import copy_time

MEMBERS = 2
GATHER, SCATTER, EXCHANGE = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL


def shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def really_copied(
    collective: Collective, tensors: Sequence[Tensor], gather: tuple[int, ...], split: tuple[int, ...]
) -> int:
    """Bytes of what is made anew: the packed message, and results that do not lie in what was received."""
    shapes = [tensor.shape for tensor in tensors]
    if collective is GATHER:
        packed, received = _pack_gather(tensors, MEMBERS)
        results = _unpack_chunks(received, shapes, MEMBERS, gather)
    else:
        packed, received = _pack_chunks(tensors, MEMBERS, split, received=1 if collective is SCATTER else MEMBERS)
        pieces = _cut(shapes, MEMBERS, split)
        results = _unpack_flat(received, pieces) if collective is SCATTER else _unpack_chunks(
            received, pieces, MEMBERS, gather
        )  # fmt: skip
    made = [] if any(shares(packed, tensor) for tensor in tensors) else [packed]
    made += [result for result in results if not shares(result, received)]
    return sum(2 * one.nbytes for one in made)


@pytest.mark.parametrize("shapes", [[(4, 6)], [(4, 6), (8, 4)]], ids=["one", "two"])
@pytest.mark.parametrize(("gather", "split"), [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("collective", [GATHER, SCATTER, EXCHANGE])
def test_copies_are_those_of_execution(collective, gather, split, shapes):
    tensors = [torch.zeros(shape) for shape in shapes]
    names = tuple(f"value {number}" for number in range(len(shapes)))
    gathers, splits = (gather,) * len(shapes), (split,) * len(shapes)
    message = Communicate(
        collective=collective, axis=0, sources=names, targets=names, gather_dims=gathers, split_dims=splits
    )
    payload = sum(4.0 * prod(shape) for shape in shapes) * (MEMBERS if collective is GATHER else 1)
    assert copied_bytes(message, payload, MEMBERS) == really_copied(collective, tensors, gathers, splits)


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.BROADCAST])
def test_what_is_always_copied_is_part_of_the_message(collective):
    message = Communicate(
        collective=collective, axis=0, sources=("a", "b"), targets=("a", "b"), gather_dims=(-1, -1), split_dims=(-1, -1)
    )
    assert copied_bytes(message, 1024.0, MEMBERS) == 0.0


def test_search_counts_what_packs_fused_messages_and_nothing_of_others():
    hardware, payload = load_profile("dgx-a100"), np.array([4e7, 1e8])
    apart = replace(hardware, copies_apart=True)
    mesh = Mesh(axes=(MeshAxis("data", 4),))

    def added(*, fused: bool) -> np.ndarray:
        without, counted = (
            MeshCosts(one, mesh, 1 << 20).message_time(GATHER, 0, payload, fused=fused) for one in (hardware, apart)
        )
        return counted - without

    np.testing.assert_allclose(added(fused=True), copy_time(hardware, 2 * (1 + 1 / 4) * payload, 4.0), rtol=1e-9)
    assert not added(fused=False).any()
