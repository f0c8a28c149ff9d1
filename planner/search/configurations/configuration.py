"""A configuration: everything that a plan decides but operator strategies, stages and recomputation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from planner.search.configurations.schedule_shapes import ONE_STAGE
from planner.sharding.placement import Mesh, MeshAxis

AXES = ("pipeline", "data", "context", "expert", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Everything but operator strategies, stages and recomputation.

    ``data`` is the mesh axis: ranks that hold copies of the same experts; data-parallel ranks are ``data * expert``.
    ``order`` names the axes from the outermost to the one with neighbouring ranks. ``bucket_bytes`` is the size of
    fused messages of gradients (`planner.search.configurations.buckets`), 0 that of the model. With ``all_replicas``
    context and expert ranks that hold copies of a parameter share its states as well. With ``expert_overlap`` tokens
    travel to experts beside another micro-batch.
    """

    pipeline: int = 1
    virtual: int = 1
    schedule: str = ONE_STAGE
    data: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    order: tuple[str, ...] = AXES
    micro_batch: int = 1
    micro_batches: int = 1
    optimizer_sharding: str = "none"
    shard_size: int = 0
    offload: bool = False
    bucket_bytes: int = 0
    context_algorithm: str = "none"
    all_replicas: bool = False
    expert_overlap: bool = False

    @property
    def in_a_row(self) -> bool:
        """Whether ranks go forward with all micro-batches before any goes backward."""
        return self.schedule == "gpipe"

    @property
    def degrees(self) -> dict[str, int]:
        """Size of every axis."""
        return {axis: int(getattr(self, axis)) for axis in AXES}

    @property
    def data_parallel(self) -> int:
        """Ranks with batches of their own."""
        return self.data * self.expert

    @property
    def devices(self) -> int:
        """Product of all axes."""
        return self.pipeline * self.data * self.context * self.expert * self.tensor

    def stride(self, axis: str) -> int:
        """Distance in rank between neighbours along an axis."""
        found = 1
        for name in reversed(self.order):
            if name == axis:
                break
            found *= getattr(self, name)
        return found

    def mesh(self) -> Mesh:
        """Mesh of one stage, axes of one rank left out."""
        names = [a for a in AXES[1:] if self.degrees[a] > 1]
        strides = tuple(self.stride(name) for name in names)
        return Mesh(tuple(MeshAxis(name, self.degrees[name]) for name in names), strides or None)

    def inner_mesh(self) -> Mesh:
        """The stage mesh without its data axis: what one table of labels is about."""
        return _inner_mesh(self.pipeline, self.data, self.context, self.expert, self.tensor, self.order)

    @property
    def table_key(self) -> tuple[object, ...]:
        """Configurations with equal keys share a table of labels."""
        mesh = self.inner_mesh()
        return (mesh, self.micro_batch, self.context_algorithm, self.all_replicas)


def unstored(configuration: Configuration) -> Configuration:
    """The same for every way in which states are stored."""
    return replace(configuration, optimizer_sharding="none", shard_size=0, offload=False, bucket_bytes=0)


@lru_cache(maxsize=4096)
def _inner_mesh(pipeline: int, data: int, context: int, expert: int, tensor: int, order: tuple[str, ...]) -> Mesh:
    """As `Configuration.inner_mesh`, made once for all configurations of these degrees."""
    c = Configuration(pipeline=pipeline, data=data, context=context, expert=expert, tensor=tensor, order=order)
    degrees = c.degrees
    names = [axis for axis in AXES[2:] if degrees[axis] > 1]
    return Mesh(tuple(MeshAxis(name, degrees[name]) for name in names), tuple(c.stride(name) for name in names))
