"""Plans from outside, checked against the network they are for."""

from __future__ import annotations

from collections.abc import Iterator

from planner.cost.software import fusion_of
from planner.graph.folding import block_index, template_name
from planner.graph.layer_parts import with_selective
from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.scaling import at_batch, at_precision
from planner.networks import load_network
from planner.plans.plan import NodeRules, Plan
from planner.plans.request import PRECISIONS
from planner.sharding.context import context_rules
from planner.sharding.rules import Rule, rules_for
from simulator.errors import InputError, StrategyError


def precision_dtype(name: str) -> str:
    """Translate ``fp32`` and the like; raises InputError for a name that is not known."""
    if name not in PRECISIONS:
        raise InputError(f"precision {name!r} is not one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def captured(plan: Plan, graph: OperatorGraph | None = None) -> OperatorGraph:
    """The plan's network, captured at batch 1 where `graph` is not given; StrategyError where it is another one."""
    if graph is None:
        graph = load_network(
            plan.network, sequence_length=plan.sequence_length, attention=plan.attention, norms=plan.norms,
            fusion=fusion_of(plan.software),
        ).capture()  # fmt: skip
    if graph.fingerprint != plan.fingerprint:
        length = "" if plan.sequence_length is None else f" with sequence length {plan.sequence_length}"
        raise StrategyError(
            f"the strategy is for another network: its fingerprint is {plan.fingerprint[:12]}…, that of {plan.network}"
            f"{length} is {graph.fingerprint[:12]}…; the network changed or the file was edited: plan it again"
        )
    return graph


def checked_graph(
    plan: Plan, graph: OperatorGraph | None = None, *, precision: str | None = None, even: bool = False
) -> OperatorGraph:
    """The plan's network, folded, at its precision and micro-batch, once every strategy is known to fit.

    With `even` every shard of a stored parameter has to be as large as the others, as execution needs.
    """
    dtype = precision_dtype(precision or plan.precision)
    whole = with_selective(captured(plan, graph), plan.recompute_modules)
    found = at_precision(at_batch(whole, plan.samples), dtype)
    check_rules(plan, found, even=even)
    return found


def fits_copies(plan: Plan, graph: OperatorGraph) -> bool:
    """Whether every strategy of a plan, chosen for whole micro-batches, divides what their copies have.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded, at the plan's precision and any batch.
    """
    if plan.copies > 1:
        try:
            check_rules(plan, at_batch(graph, plan.samples))
        except StrategyError:
            return False
    return True


def check_rules(plan: Plan, graph: OperatorGraph, *, even: bool = False) -> None:
    """Check that every node of a folded graph has a strategy, and one that fits; StrategyError where not.

    Shards of stored parameters may be uneven unless `even` forbids it.
    """
    known = _Known(plan, graph, even=even)
    inside: dict[str, int] = {}
    for run in graph.runs:
        offset = block_index(graph.nodes[run.first[0]].name, run.prefix)
        inside.update({template_name(graph.nodes[i].name, run.prefix): i for i in run.first})
        covered = [n for part in plan.layers if part.prefix == run.prefix for n in range(part.first, part.last + 1)]
        if sorted(covered) != list(range(offset, offset + run.count)):
            raise StrategyError(
                f"layers: those of {run.prefix!r} cover {len(covered)} blocks, but the network has "
                f"{run.prefix}.{offset} to {run.prefix}.{offset + run.count - 1}; plan it again"
            )
    for part in plan.layers:
        for name, rules in part.rules.items():
            if name not in inside:
                raise StrategyError(f"layers: {name!r} is no operator of {plan.network}; plan it again")
            known.check(inside[name], rules)
    everywhere = {n.name: i for i, n in enumerate(graph.nodes)}
    for name, rules in plan.rules.items():
        if name not in everywhere:
            raise StrategyError(f"operators: {name!r} is no operator of {plan.network}; plan it again")
        known.check(everywhere[name], rules)
    missing = next(_missing(plan, graph), None)
    if missing is not None:
        raise StrategyError(f"operators: {missing!r} has no strategy; plan the network again")


def _missing(plan: Plan, graph: OperatorGraph) -> Iterator[str]:
    """Names of nodes without a strategy."""
    blocks = {i for run in graph.runs for i in (*run.first, *run.second)}
    for index, node in enumerate(graph.nodes):
        if index not in blocks and node.role is not Role.CONSTANT and node.name not in plan.rules:
            yield node.name
    for run in graph.runs:
        for index in run.first:
            name = graph.nodes[index].name
            template = template_name(name, run.prefix)
            parts = (part for part in plan.layers if part.prefix == run.prefix)
            if graph.nodes[index].role is not Role.CONSTANT:
                given = name in plan.rules
                yield from (template for part in parts if template not in part.rules and not given)


class _Known:
    """The rules that each node may take; on a context axis also the one with which the sequence is sharded there."""

    def __init__(self, plan: Plan, graph: OperatorGraph, *, even: bool) -> None:
        self.plan, self.graph, self.even = plan, graph, even
        self.context: tuple[Rule, ...] = ()
        if plan.degree("context") > 1:
            self.context = context_rules(graph, "all_to_all" if plan.context_algorithm == "all_to_all" else "ring")

    def check(self, index: int, rules: NodeRules) -> None:
        """Check that every rule is known and that every sharded dim divides; StrategyError where not.

        Parameters may be stored in uneven shards, but where all have to be ``even``.
        """
        node, axes = self.graph.nodes[index], self.plan.mesh.axes
        known = rules_for(self.graph, node)
        fits = len(rules) == len(axes) and all(
            rule in known or (axis.name == "context" and rule == self.context[index])
            for rule, axis in zip(rules, axes, strict=True)
        )
        if not fits:
            raise StrategyError(
                f"{node.name!r}: the strategy is not one that {node.op} can take; plan the network again"
            )
        specs = [*(self.graph.spec(ref) for ref in node.tensor_inputs), *node.outputs]
        for position, spec in enumerate(specs):
            ways = [1] * len(spec.shape)
            for rule, axis in zip(rules, axes, strict=True):
                placement = (*rule.inputs, *rule.outputs)[position]
                if placement >= 0:
                    # States may be shared by some of the data-parallel ranks, the others having copies.
                    shared = self.plan.shard_size if axis.name == "data" and node.role is Role.PARAMETER else 0
                    ways[placement] *= shared or axis.size
            parts, stored = [*zip(spec.shape, ways, strict=True)], node.role is Role.PARAMETER
            if stored and self.even and any(dim % way for dim, way in parts):
                raise StrategyError(
                    f"{node.name!r}: shape {spec.shape} is stored in uneven shards, {tuple(ways)} of them, which are "
                    "simulated only; plan again with a --pin shard_size that divides it"
                )
            if any(dim < way if stored else dim % way for dim, way in parts):
                raise StrategyError(
                    f"{node.name!r}: shape {spec.shape} does not divide by {tuple(ways)}; use another device count or "
                    "batch"
                )
