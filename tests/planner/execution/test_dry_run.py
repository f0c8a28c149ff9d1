"""What a rank would do is told without starting any, and is what it does."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
from torch.distributed.pipelining.schedules import _Action

from planner.execution.launch.dry_run import rank_line
from planner.execution.measuring.recorded import rank_entries
from planner.execution.options import ExecuteOptions
from planner.execution.run import rehearse
from planner.lowering.instructions import BeginUpdate, Communicate
from planner.planning.loading import lower_to_run
from planner.plans.file import write_plan
from tests.planner.execution.made import make_plan


def lines(network, devices, *, batch, **pins):
    lowered = lower_to_run(make_plan(network, devices, batch=batch, **pins), "unused")
    return lowered, [rank_line(lowered, rank) for rank in range(devices)]


def test_data_parallel_ranks_hold_everything_and_sum_gradients():
    lowered, found = lines("zoo:mlp", 2, batch=16, dp=2, optimizer_sharding="none", micro_batch=4)
    shapes = [lowered.graph.nodes[p.node].outputs[0].shape for p in lowered.graph.parameters]
    whole = sum(4 * prod(shape) for shape in shapes)
    for rank, line in enumerate(found):
        assert (line.rank, line.place, line.stages) == (rank, {"data": rank}, ())
        assert (line.parameters, line.parameter_bytes) == (len(shapes), whole)
        assert line.passes == ("0F0", "0B0", "0F1", "0B1")
        assert all(shape[0] == 4 for shape in line.inputs.values())
        assert {message.group for message in line.messages} == {(0, 1)}
        sums = [message for message in line.messages if message.collective == "all_reduce"]
        assert sum(message.total_bytes for message in sums) >= whole


def test_sharded_ranks_hold_a_part():
    _, found = lines("zoo:mlp", 4, batch=16, dp=2, tp=2)
    assert [line.place for line in found] == [{"data": d, "tensor": t} for d in (0, 1) for t in (0, 1)]
    groups = {(message.axis, message.group) for message in found[3].messages}
    assert groups <= {("data", (1, 3)), ("tensor", (2, 3))}
    assert len(groups) == 2


def test_stages_send_to_one_another():
    lowered, found = lines("zoo:gpt2-tiny", 2, batch=8, pp=2, vpp=1, micro_batch=2, schedule="1f1b")
    assert [line.stages for line in found] == [(0,), (1,)]
    for line, peer in zip(found, (1, 0), strict=True):
        sends = [message for message in line.messages if message.collective == "send"]
        assert [(message.group, message.count) for message in sends] == [((line.rank, peer), lowered.micro_batches)]
        crossing = lowered.stages[0].leaves
        assert sends[0].total_bytes == lowered.micro_batches * 4 * prod(crossing.shape)
        kinds = Counter(_Action.from_str(text).computation_type.name for text in line.passes)
        assert kinds["FORWARD"] == lowered.micro_batches
    assert "tokens" in found[0].inputs
    assert "tokens" not in found[1].inputs


def test_copies_of_a_micro_batch_cross_together():
    plan = make_plan("zoo:gpt2-tiny", 2, batch=8, pp=2, vpp=1, micro_batch=2, schedule="1f1b")
    whole, halves = (rank_line(lower_to_run(replace(plan, copies=copies), "unused"), 0) for copies in (1, 2))
    sends = [[message for message in line.messages if message.collective == "send"] for line in (whole, halves)]
    assert sends[0] == sends[1] != []


def test_stages_add_up_norms_of_the_parameters_that_their_ranks_share():
    """LAMB needs two numbers of every whole parameter, in the precision that it is updated in."""
    plan = replace(make_plan("zoo:gpt2-tiny", 4, batch=8, tp=2, pp=2, vpp=1, schedule="1f1b"), optimizer="lamb")
    lowered = lower_to_run(plan, "unused", precision="fp64")
    for rank in range(4):
        update = lowered.ranks[lowered.pipeline_rank(rank)].update
        begun = {one.target for one in update if isinstance(one, BeginUpdate)}
        sums = [one for one in update if isinstance(one, Communicate) and begun.intersection(one.sources)]
        assert sum(len(one.sources) for one in sums) > 1
        timed = [entry.task.payload_bytes for entry in rank_entries(plan, lowered, rank)]
        assert {2.0 * 8 * len(one.sources) for one in sums} <= {*timed}
        told = sum(line.total_bytes for line in rank_line(lowered, rank).messages)
        least = rank_line(lower_to_run(replace(plan, optimizer="sgd"), "unused", precision="fp64"), rank).messages
        assert told == sum(line.total_bytes for line in least) + sum(2 * 8 * len(one.sources) for one in sums)


def test_a_dry_run_starts_nothing_and_says_what_this_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr("planner.execution.run.run_workers", lambda *_, **__: pytest.fail("workers were started"))
    monkeypatch.setattr("planner.execution.launch.starting.free_memory", lambda *_: 1000)
    path = tmp_path / "strategy.json"
    write_plan(make_plan("zoo:mlp", 2, batch=16, tp=2), path)
    found = rehearse(ExecuteOptions(strategy=path, steps=7))
    assert (found.processes, found.backend, found.first_step, found.steps) == (2, "gloo", 0, 7)
    assert "there are 1e-06 GB free" in found.refused
    assert len(found.ranks) == 2
    assert rehearse(ExecuteOptions(strategy=path, force=True)).refused is None
