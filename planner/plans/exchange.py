"""How the tensors of a plan travel where a context says it; what is not said is as a plan has it unasked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from simulator.errors import ContextError
from simulator.program import Collective

FusedBytes = int | None
"""Bytes at which a message of several tensors is full; None for those of the plan's buckets, 0 for one tensor each."""
DataStrategy = Literal["", "data_parallel", "full_batch"] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What a context says of messages, gradients and data.

    Attributes
    ----------
    gradient_dtype : type in which narrower gradients travel; "" for their own
    whole_sums : where optimizer states alone are sharded over ranks, each adds up whole gradients and keeps its part,
        instead of getting the sum of its part alone
    all_to_all : False makes an all-gather and a slice of every all-to-all
    all_reduce_bytes, all_gather_bytes, reduce_scatter_bytes : size of fused messages of each kind
    fusion_places : all-reduces of gradients are fused by the place of their parameter in the network instead: those
        before the first place in one message, those before the second in another, and the rest in the last; each chunk
        of a pipeline sends its part of them
    fusion_groups : names of parameters with their group, whose gradients travel in one message; each of group 0
        travels alone, and those that are not named in messages of the usual size; a group that spans chunks of a
        pipeline is divided by chunk
    group_power : gradients are multiplied by the size of the group that adds them up, to this power: 1 for the sum of
        the gradients of every rank's own mean loss, −1 for what is divided by the group although the loss is a mean
    repeated_loss : gradients are multiplied by how many ranks compute the same part of the loss
    cross_batch : operators over the batch see the samples of one rank alone
    broadcast : parameters that are stored whole are sent out by the first rank before the first step
    layerwise : parameters of which every rank has its own, by name: their gradients are not added up
    data : what a rank loads of the batch: "" as the placements of the plan say, ``"data_parallel"`` its own samples,
        ``"full_batch"`` everything, or for every batch tensor in how many parts each of its dims is cut
    """

    gradient_dtype: Literal["", "float32"] = ""
    whole_sums: bool = False
    all_to_all: bool = True
    all_reduce_bytes: FusedBytes = None
    all_gather_bytes: FusedBytes = None
    reduce_scatter_bytes: FusedBytes = None
    fusion_places: tuple[int, ...] = ()
    fusion_groups: tuple[tuple[str, int], ...] = ()
    group_power: int = 0
    repeated_loss: bool = False
    cross_batch: bool = False
    broadcast: bool = False
    layerwise: tuple[str, ...] = ()
    data: DataStrategy = ""

    def fused_bytes(self, collective: Collective, usual: int) -> int:
        """Size of fused messages of one kind; `usual` where nothing is said."""
        said = {
            Collective.ALL_REDUCE: self.all_reduce_bytes,
            Collective.ALL_GATHER: self.all_gather_bytes,
            Collective.REDUCE_SCATTER: self.reduce_scatter_bytes,
        }.get(collective)
        return usual if said is None else said

    def named(self) -> dict[str, object]:
        """What is said, by name; empty where a plan does as it does unasked."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(UNASKED, name)}


UNASKED = Exchange()


def check_data(data: DataStrategy, shapes: Mapping[str, tuple[int, ...]], batch: int) -> None:
    """Hold cuts against the batch tensors of a network, given by name with their shapes without the batch.

    Raises
    ------
    ContextError
        There are more or fewer tensors or dims than cuts, or a cut does not divide its dim.
    """
    if not isinstance(data, tuple):
        return
    if len(data) != len(shapes):
        raise ContextError(
            f"dataset_strategy={data} has {len(data)} tuples, and the network reads {len(shapes)} batch tensors "
            f"({', '.join(shapes)}); give one for each"
        )
    for number, (cuts, (name, shape)) in enumerate(zip(data, shapes.items(), strict=True)):
        whole = (batch, *shape)
        if len(cuts) != len(whole):
            raise ContextError(
                f"dataset_strategy[{number}]={cuts} has {len(cuts)} numbers, and {name!r} of shape {whole} has "
                f"{len(whole)} dims; give one number for each, 1 where a dim is whole"
            )
        for dim, (parts, size) in enumerate(zip(cuts, whole, strict=True)):
            if size % parts:
                near = max(n for n in range(1, parts + 1) if size % n == 0)
                raise ContextError(
                    f"dataset_strategy[{number}][{dim}]={parts} does not divide {name!r} of shape {whole}; use {near}"
                )
