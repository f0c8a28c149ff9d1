"""What is said beside plans: of their network, of what a search left out, and of what the best plan does not use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

from planner.cost.software import run_for
from planner.graph.experts import experts_per_token
from planner.graph.operator_graph import OperatorGraph, Role
from planner.planning.configured import undivided
from planner.planning.hosted import left_out
from planner.planning.one_stage import Candidate
from planner.planning.prediction import predict_plan
from planner.plans.capability import capability_of
from planner.plans.pins import Pins
from planner.plans.plan import Plan, Status, stored_parameters
from planner.search.problem.states import SHARING
from planner.sharding.rules import has_rule
from simulator.errors import UnsupportedError
from simulator.profiles import load_profile
from simulator.program import Kernel
from simulator.quantities import percent_text


def interrupted(candidates: Sequence[Candidate], explored_gap: float | None) -> Iterator[str]:
    """Say how far the best plan so far may be from the best of all, where the user has ended the search.

    Parameters
    ----------
    explored_gap : that of the search over configurations; None where there was none
    """
    if candidates:
        gap = candidates[0].plan.certificate.gap if explored_gap is None else explored_gap
        yield f"the search was interrupted: this is the best plan so far, at most {percent_text(gap)} from the best"


def other_messages_of_experts(plan: Plan, graph: OperatorGraph, pins: Pins) -> Iterator[str]:
    """Say what a plan would take with tokens that travel in another way of its software, where none was searched."""
    table = capability_of(plan.software)
    if table is None or plan.degree("expert") == 1 or pins.runs is not None or pins.expert_messages is not None:
        return
    once = experts_per_token(graph) if "tokens_once" in table.overlaps and not plan.sent_once else 0
    # Stages one behind the other have no second micro-batch to compute beside messages.
    beside = "expert_overlap" in table.overlaps and plan.micro_batches > 1 and plan.copies == 1
    beside = beside and not plan.expert_overlap and (plan.pipeline == 1 or plan.virtual > 1)
    ways = {
        "expert_messages=once_a_node": ("each token once to each node (DeepEP, HybridEP)", {"sent_once": once}),
        "expert_overlap=true": ("beside another micro-batch", {"expert_overlap": True}),
    }
    machine = load_profile(plan.hardware)
    now = predict_plan(plan, graph, run_for(plan, machine)).step_time_s
    for (pin, (how, change)), there in zip(ways.items(), (bool(once), beside), strict=True):
        if not there:
            continue
        other = replace(plan, **change)  # type: ignore[arg-type]
        found = predict_plan(other, graph, run_for(other, machine))
        if found.fits and found.step_time_s < (1 - NOTICED_GAIN) * now:
            more = "" if pin.startswith("expert_messages") else " --pin expert_messages=tokens"
            yield (
                f"tokens that travel to their experts {how} make a step {percent_text(1 - found.step_time_s / now)} "
                f"shorter; use --pin {pin}{more}"
            )


NOTICED_GAIN = 0.01
"""Part of a step that another way of messages has to save before it is said."""
NOTICED_WHOLE = 0.05
"""Part of the parameters that may stay whole, as norms and biases do, before it is said."""
NOTICED_SHARE, MEANINGLESS_SHARE = 0.01, 0.5
"""Parts of a network's work that operators without a rule may do before a plan proves nothing, or means nothing."""


def unsharded(plan: Plan, graph: OperatorGraph) -> Iterator[str]:
    """Say how much of the parameters stays whole along an axis whose ranks share states, and why ranks are left out.

    A parameter is cut along a dim that the ranks divide, in uneven shards only where all ranks are asked for. FSDP2 and
    DeepSpeed pad a shard, and so does what is predicted of their memory.
    """
    if plan.optimizer_sharding == "none":
        return
    # Frozen parameters have no states; ZeRO-3 alone shards them.
    trained = plan.optimizer_sharding != "zero3"
    stored = [*stored_parameters(graph, plan.rules, plan.layers, trained=trained)]
    total, data = sum(elements for elements, _ in stored), plan.degree("data")
    for place, axis in enumerate(plan.mesh.axes):
        whole = sum(elements for elements, placements in stored if placements[place] < 0)
        if axis.name not in ("data", *SHARING) or whole <= NOTICED_WHOLE * total:
            continue
        of_data = axis.name == "data"
        ranks = (of_data and plan.shard_size) or axis.size
        remedy = "use a shard_size that divides them, or software that pads shards" if of_data else "use fewer of them"
        yield (
            f"optimizer_sharding={plan.optimizer_sharding} over {ranks} {axis.name} ranks leaves "
            f"{percent_text(whole / total)} of the parameters whole on each of these: they have no dim that {ranks} "
            f"divides; {remedy}"
        )
    if 1 < plan.shard_size < data and data in undivided(graph, data):
        yield (
            f"{plan.shard_size} of {data} data-parallel ranks share one copy of the states: {data} divides no dim of "
            f"most parameters; --pin shard_size={data} shares it over all of them in uneven shards, which are only "
            "simulated"
        )


def without_rules(graph: OperatorGraph) -> tuple[str, ...]:
    """One message for each kind of operator that has no sharding rule, the one with the most work first."""
    work = _work(graph)
    found: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        if node.role is Role.OPERATOR and not has_rule(node.op):
            found.setdefault(node.op, []).append(index)
    parts = {op: sum(work[i] for i in indices) for op, indices in found.items()}
    return tuple(
        f"operator {op} has no sharding rule and is replicated: every rank does all of its "
        f"{percent_text(parts[op])} of the work ({len(found[op])} times, first at {graph.nodes[found[op][0]].name})"
        for op in sorted(found, key=lambda op: (-parts[op], op))
    )


def replicated_share(graph: OperatorGraph) -> float:
    """Part of a network's work that operators without a sharding rule do, from 0 to 1."""
    work = _work(graph)
    return sum(w for w, n in zip(work, graph.nodes, strict=True) if n.role is Role.OPERATOR and not has_rule(n.op))


def _work(graph: OperatorGraph) -> list[float]:
    """Each node's part of the work: of operations or of bytes that are moved, whichever is more of the network's."""
    sizes = [
        0.0
        if node.kernel is Kernel.VIEW or node.role is not Role.OPERATOR
        else float(
            sum(graph.spec(ref).size_bytes for ref in node.tensor_inputs) + sum(o.size_bytes for o in node.outputs)
        )
        for node in graph.nodes
    ]
    moved = sum(size * times for size, times in zip(sizes, graph.multiplicity, strict=True))
    done = graph.flops()
    return [
        times * max(size / moved if moved else 0.0, node.flops / done if done else 0.0)
        for size, node, times in zip(sizes, graph.nodes, graph.multiplicity, strict=True)
    ]


def refuse_meaningless(graph: OperatorGraph) -> None:
    """Refuse a network most of whose work no plan could divide.

    Raises
    ------
    UnsupportedError
        Operators without a sharding rule do more than half of the work; the message names the first.
    """
    share = replicated_share(graph)
    if share > MEANINGLESS_SHARE:
        raise UnsupportedError(
            f"network {graph.network!r}: {without_rules(graph)[0]}; no plan could divide {percent_text(share)} of the "
            "work, so that none means anything: write that operator with others that have a rule"
        )


def proven(graph: OperatorGraph, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The same plans, none of them optimal where operators without a rule do a part of the work that counts."""
    if replicated_share(graph) <= NOTICED_SHARE:
        return candidates

    def bounded(plan: Plan) -> Plan:
        optimal = plan.certificate.status is Status.OPTIMAL
        return replace(plan, certificate=replace(plan.certificate, status=Status.BOUNDED)) if optimal else plan

    return tuple(replace(candidate, plan=bounded(candidate.plan)) for candidate in candidates)


def costs_left_out(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """A message where the closed form leaves out what pins of the best plan cost, and its gap is another for that."""
    names = left_out(candidates[0].plan) if candidates else ()
    if not names or candidates[0].plan.certificate.status is Status.OPTIMAL:
        return ()
    return (
        f"the search does not count what {' and '.join(names)} cost{'s' * (len(names) == 1)}: the gap is that of the "
        "simulated step; pin recompute, micro_batch and tp to try others",
    )


def better_batches(batch: int, devices: int) -> tuple[str, ...]:
    """A message where a global batch divides by at most half of the devices: batches near it that divide by all.

    >>> better_batches(100, 16)[0].partition(";")[0]
    'global batch 100 divides by at most 4 of 16 devices'
    >>> better_batches(96, 16), better_batches(8, 64)
    ((), ())
    """
    shared = gcd(batch, devices)
    if batch < devices or 2 * shared > devices:
        return ()
    below = batch // devices * devices
    return (
        f"global batch {batch} divides by at most {shared} of {devices} devices; {below} and {below + devices} divide "
        f"by all and leave more plans: compare them with what-if --set batch={below},{batch},{below + devices}",
    )


def idle_axes(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """A message for each mesh axis of the best plan along which no operator's work is split."""
    if not candidates:
        return ()
    plan = candidates[0].plan
    everything = [rules for part in (plan.rules, *(p.rules for p in plan.layers)) for rules in part.values()]
    return tuple(
        f"the best plan splits no work along the {axis.name} axis: its {axis.size} ranks all do the same, because "
        "messages would cost more than they save"
        for i, axis in enumerate(plan.mesh.axes)
        if not any(rules[i].splits_work for rules in everything)
    )
