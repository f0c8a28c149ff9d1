"""All ranks of a lowered plan in one process, instruction by instruction, compared with the whole tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from planner.instructions import Accumulate, Communicate, Compute, LoweredPlan, Mask, Slice
from planner.sharding.checking import assemble, cut
from planner.sharding.local_operator import call_operator, prepare
from simulator.program import Collective


def no_reduction(tensor: Tensor, axis: int) -> Tensor:
    """Operators that reduce inside are not for this oracle."""
    raise NotImplementedError("an operator reduces inside")


def whole_values(lowered: LoweredPlan, given: dict[int, Tensor]) -> list[tuple[Tensor, ...]]:
    """Outputs of every node, computed on whole tensors; `given` holds parameters and inputs by node."""
    values: list[tuple[Tensor, ...]] = []
    for index, node in enumerate(lowered.graph.nodes):
        if index in given:
            values.append((given[index],))
        else:
            values.append(call_operator(lowered.graph, node, [values[r.node][r.output] for r in node.tensor_inputs]))
    return values


def mismatches(lowered: LoweredPlan, given: dict[int, Tensor], tolerance: float = 1e-9) -> Iterator[tuple[str, float]]:
    """Run the first segment on all ranks; yield every operator whose reassembled output is not the whole one's."""
    graph, mesh = lowered.graph, lowered.mesh
    whole = whole_values(lowered, given)
    ranks = range(mesh.size)
    names = {graph.nodes[i].name: i for i in given}
    stored = {p.value: p.placements for p in (*lowered.parameters, *lowered.inputs)}
    values: list[dict[str, Tensor]] = [{} for _ in ranks]
    for name, index in names.items():
        pieces = cut(given[index], stored[name], mesh.sizes)
        for rank in ranks:
            values[rank][name] = pieces[mesh.coordinates(rank)]
    for instruction in lowered.instructions[0]:
        if isinstance(instruction, Compute):
            node = graph.nodes[instruction.node]
            made = []
            for rank in ranks:
                run = prepare(graph, node, instruction.rules, mesh.sizes, mesh.coordinates(rank))
                made.append(run([values[rank][v] for v in instruction.inputs], no_reduction))
            for output, name in enumerate(instruction.outputs):
                if name:
                    for rank in ranks:
                        values[rank][name] = made[rank][output]
                    placements = tuple(rule.outputs[output] for rule in instruction.rules)
                    pieces = {mesh.coordinates(rank): made[rank][output] for rank in ranks}
                    joined, spread = assemble(pieces, placements, mesh.sizes)
                    expected = whole[instruction.node][output]
                    scale = float(expected.abs().max()) if expected.is_floating_point() and expected.numel() else 1.0
                    error = float((joined.double() - expected.double()).abs().max()) if expected.numel() else 0.0
                    error = max(error, spread)
                    if error > tolerance * max(scale, 1e-30):
                        yield name, error
        elif isinstance(instruction, Accumulate):
            for rank in ranks:
                values[rank][instruction.accumulator] = values[rank][instruction.source].clone()
        elif isinstance(instruction, Slice):
            size = mesh.sizes[instruction.axis]
            for rank in ranks:
                pieces = values[rank][instruction.source].chunk(size, instruction.dim)
                values[rank][instruction.target] = pieces[mesh.coordinates(rank)[instruction.axis]]
        elif isinstance(instruction, Mask):
            for rank in ranks:
                kept = values[rank][instruction.source]
                first = mesh.coordinates(rank)[instruction.axis] == 0
                values[rank][instruction.target] = kept if first else torch.zeros_like(kept)
        elif isinstance(instruction, Communicate):
            _communicate(instruction, lowered, values)


def _communicate(message: Communicate, lowered: LoweredPlan, values: list[dict[str, Tensor]]) -> None:
    for group in lowered.mesh.groups(message.axis):
        for i, (source, target) in enumerate(zip(message.sources, message.targets, strict=True)):
            pieces = [values[rank][source] for rank in group]
            size = len(group)
            for position, rank in enumerate(group):
                if message.collective is Collective.ALL_REDUCE:
                    result = torch.stack(pieces).sum(0)
                elif message.collective is Collective.ALL_GATHER:
                    result = torch.cat(pieces, message.gather_dims[i])
                elif message.collective is Collective.REDUCE_SCATTER:
                    result = torch.stack(pieces).sum(0).chunk(size, message.split_dims[i])[position]
                else:
                    parts = [piece.chunk(size, message.split_dims[i])[position] for piece in pieces]
                    result = torch.cat(parts, message.gather_dims[i])
                values[rank][target] = result
