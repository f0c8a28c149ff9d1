"""Rules along a context axis: a whole step on emulated ranks in float64 equals the step on one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.graph.attention import MASKED, MASKED_BACKWARD
from planner.graph.capture import capture_module
from planner.graph.masked_attention import masked_attention_operator
from planner.graph.operator_graph import PLACES, OperatorGraph, Role, TensorRef
from planner.graph.scaling import at_batch, at_precision
from planner.networks import load_network
from planner.networks.zoo.bert import Bert
from planner.networks.zoo.configs import BertConfig, GPTConfig, LlamaConfig, MixtralConfig
from planner.networks.zoo.gpt import GPT
from planner.networks.zoo.llama import Llama
from planner.networks.zoo.mixtral import Experts
from planner.networks.zoo.table import language_inputs
from planner.sharding.context import ALGORITHMS, Algorithm, context_axis, context_rules, positions_of
from planner.sharding.inner_messages import inner_messages, message_bytes, message_count
from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.sequence import ATTENTION, ATTENTION_BACKWARD
from simulator.errors import UnsupportedError
from tests.planner.sharding.context_ranks import Step
from tests.planner.sharding.small_networks import graph, tokens

TOLERANCE = 1e-10
VOCABULARY, LENGTH = 24, 16


@cache
def zoo(name: str, batch: int = 2) -> OperatorGraph:
    """Small networks of the zoo's modules in float64."""
    make = {
        "gpt": lambda: GPT(GPTConfig(vocabulary=VOCABULARY, hidden=16, layers=1, heads=4, positions=LENGTH)),
        "llama": lambda: Llama(
            LlamaConfig(
                vocabulary=VOCABULARY,
                hidden=32,
                layers=1,
                heads=8,
                key_value_heads=4,
                intermediate=24,
                positions=LENGTH,
            )
        ),
        "bert": lambda: Bert(
            BertConfig(vocabulary=VOCABULARY, hidden=16, layers=1, heads=4, intermediate=32, positions=LENGTH)
        ),
    }[name]
    inputs = language_inputs(VOCABULARY, LENGTH, masked=name == "bert")
    return at_precision(at_batch(capture_module(make, inputs, name=name), batch), "float64")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("name", "size"), [("gpt", 2), ("gpt", 4), ("llama", 4), ("bert", 4)])
def test_a_step_on_ranks_equals_the_step_on_one(name: str, algorithm: Algorithm, size: int) -> None:
    network = zoo(name)
    step = Step(network, algorithm, size, causal=name != "bert")
    for index, rule in enumerate(step.rules):
        node = network.nodes[index]
        for output, placement in enumerate(rule.outputs):
            if node.outputs[output].shape != (0,):
                assert step.difference(TensorRef(index, output), placement) < TOLERANCE, (node.name, rule)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_described_messages_are_those_that_are_sent(name: str, algorithm: Algorithm) -> None:
    """Elements sent by a rank; heads that are copies of one count once."""
    network, size = zoo(name), 4
    step = Step(network, algorithm, size, causal=True)
    seen = 0
    for index, rule in enumerate(step.rules):
        node = network.nodes[index]
        shares = [1 / size] * (len(rule.inputs) + len(rule.outputs))
        messages = inner_messages(rule)
        sent = sum(message_bytes(network, node, m, shares) * message_count(m, size) for m in messages)
        assert sent == 8 * step.traffic.get(node.name, 0), node.name
        seen += bool(sent)
    assert seen == 2


def test_shared_heads_travel_once() -> None:
    divisors = {m.divisor for rule in context_rules(zoo("llama")) for m in rule.messages}
    assert divisors == {2}
    assert {m.divisor for rule in context_rules(zoo("gpt")) for m in rule.messages} == {1}


@pytest.mark.parametrize("spec", ["zoo:gpt3-175b", "zoo:llama3-70b"])
def test_parameters_are_whole_their_gradients_partial_and_all_work_is_split(spec: str) -> None:
    network = load_network(spec).capture()
    rules = context_rules(network)
    placed = {TensorRef(i, o): p for i, rule in enumerate(rules) for o, p in enumerate(rule.outputs)}
    for parameter in network.parameters:
        assert placed[TensorRef(parameter.node)] == REPLICATE
        assert parameter.gradient is None or placed[parameter.gradient] in (PARTIAL, REPLICATE)
    assert placed[network.loss] == PARTIAL
    for node, rule in zip(network.nodes, rules, strict=True):
        assert rule.splits_work or not node.flops, node.name
        assert bool(rule.messages) == (node.op in (ATTENTION, ATTENTION_BACKWARD))
    large = [p for p in network.parameters if network.nodes[p.node].outputs[0].elements > 1e6 and p.gradient]
    assert all(placed[p.gradient] == PARTIAL for p in large if p.gradient)


def test_positions_are_dealt_out_so_that_causal_work_is_even() -> None:
    for size in (2, 4):
        dealt = [positions_of(16, rank, size, causal=True) for rank in range(size)]
        assert sorted(p for part in dealt for p in part) == list(range(16))
        for turn in range(1, size):
            pairs = [sum(k <= q for q in dealt[rank] for k in dealt[(rank - turn) % size]) for rank in range(size)]
            assert len(set(pairs)) == 1


def test_sizes_that_do_not_fit() -> None:
    network = load_network("zoo:llama3-70b", sequence_length=48).capture()
    ring, exchange = (context_axis(network, algorithm) for algorithm in ALGORITHMS)
    assert ring.obstacle(8) is None
    assert ring.obstacle(16) == "context=16 cuts 48 tokens into 32 equal parts, 2 a rank; use 12 or 24"
    assert ring.obstacle(8, tensor=64) is None
    assert exchange.obstacle(4, tensor=2) is None
    assert exchange.obstacle(16) is not None
    assert exchange.obstacle(4, tensor=4) == (
        "context=4 × tensor=4 does not divide 8 heads, which all_to_all exchanges; use fewer, or ring"
    )


class Sinking(nn.Module):
    """Attends to a window; every two heads share one of keys and values, and every head has a sink if so asked."""

    def __init__(self, *, sinks: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.query, self.shared = nn.Linear(16, 16), nn.Linear(16, 16)
        self.sinks = nn.Parameter(torch.zeros(4)) if sinks else None

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        hidden = self.words(ids)
        shape = (*ids.shape, -1, 4)
        query = self.query(hidden).reshape(shape).transpose(1, 2)
        key, value = self.shared(hidden).reshape(shape).transpose(1, 2).chunk(2, 1)
        wide = [t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(query.shape) for t in (key, value)]
        mixed, _ = masked_attention_operator()(query, *wide, True, 6, 0, 0.5, 0.0, self.sinks)
        scores = self.head(mixed.transpose(1, 2).reshape(hidden.shape)).flatten(0, 1)
        return F.cross_entropy(scores, following.flatten(), reduction="sum") / following.numel()


@pytest.mark.parametrize("sinks", [False, True])
def test_attention_over_part_of_the_keys_runs_by_all_to_all(sinks: bool) -> None:
    """A step on two ranks equals that on one: each has the sinks of its heads, and their gradient adds up."""
    made = capture_module(lambda: Sinking(sinks=sinks), tokens(LENGTH, VOCABULARY), name="sinking")
    network = at_precision(at_batch(made, 2), "float64")
    step = Step(network, "all_to_all", 2, causal=True)
    apart = 0
    for index, rule in enumerate(step.rules):
        node = network.nodes[index]
        assert bool(rule.messages) == (node.op in (MASKED, MASKED_BACKWARD))
        for output, placement in enumerate(rule.outputs):
            if node.outputs[output].shape != (0,):
                assert step.difference(TensorRef(index, output), placement) < TOLERANCE, (node.name, rule)
                apart += node.op == MASKED_BACKWARD and placement == PARTIAL
    assert apart == sinks
    assert context_axis(network, "all_to_all").obstacle(4) is not None  # two heads of keys and values
    with pytest.raises(UnsupportedError, match="masked_attention.*cannot work on part of the sequence"):
        context_axis(network, "ring")


class Mixing(nn.Module):
    """Experts without attention."""

    def __init__(self, length: int) -> None:
        super().__init__()
        config = MixtralConfig(
            vocabulary=VOCABULARY, hidden=16, layers=1, heads=4, key_value_heads=2, intermediate=24, positions=length,
            experts=4, chosen_experts=2,
        )  # fmt: skip
        self.words, self.experts, self.head = nn.Embedding(VOCABULARY, 16), Experts(config), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        scores = self.head(self.experts(self.words(ids))).flatten(0, 1)
        return F.cross_entropy(scores, following.flatten(), reduction="sum") / following.numel()


def test_experts_give_their_places_to_the_tokens_of_each_rank_apart() -> None:
    """Two ranks drop the tokens that experts drop of two samples of half the length."""
    whole, halves = (
        at_precision(
            at_batch(capture_module(lambda n=n: Mixing(n), tokens(n, VOCABULARY), name="mixing"), LENGTH // n),
            "float64",
        )
        for n in (LENGTH, LENGTH // 2)
    )
    step, apart = Step(whole, "all_to_all", 2, causal=False), Step(halves, "all_to_all", 1, causal=False)
    places = next(index for index, node in enumerate(whole.nodes) if node.op == PLACES)
    kept = [float(piece.double().mean()) for piece in step.pieces[TensorRef(places, 1)]]
    assert min(kept) < 1
    for parameter, alone in zip(whole.parameters, halves.parameters, strict=True):
        assert parameter.gradient is not None
        assert alone.gradient is not None
        together = torch.stack(step.pieces[parameter.gradient]).sum(0)
        torch.testing.assert_close(together, apart.whole[alone.gradient], rtol=1e-10, atol=1e-12)
    assert context_axis(whole, "ring").obstacle(4) == (
        "context=4 does not divide the 10 places that experts have for tokens; use 2 or 5"
    )


class Pooled(nn.Module):
    """Reads its first token only."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(24, 8), nn.Linear(8, 24)

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.words(ids)[:, 0]), following[:, 0], reduction="sum") / ids.shape[0]


class Placed(nn.Module):
    """Adds a table of its own to every position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(24, 24), nn.Parameter(torch.zeros(8, 24))

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        scores = (self.words(ids) + self.places).flatten(0, 1)
        return F.cross_entropy(scores, following.flatten(), reduction="sum") / following.numel()


@pytest.mark.parametrize(("make", "name"), [(Pooled, "select"), (Placed, "places")])
def test_an_operator_without_a_rule_is_named(make: type[nn.Module], name: str) -> None:
    network = capture_module(make, tokens(8, 24), name="odd")
    with pytest.raises(UnsupportedError, match=rf"'odd' cannot be sharded along its sequence: \S*{name}.*cp=1"):
        context_rules(network)


def test_attention_in_pieces_and_networks_without_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="two dims along the sequence"):
        context_rules(graph("bert"))
    with pytest.raises(UnsupportedError, match="reads no token sequences"):
        context_rules(graph("image"))


def test_every_node_has_a_rule_of_its_own_shape() -> None:
    network = zoo("llama")
    for node, rule in zip(network.nodes, context_rules(network), strict=True):
        assert (len(rule.inputs), len(rule.outputs)) == (len(node.tensor_inputs), len(node.outputs))
        assert node.role is not Role.INPUT or rule.outputs == (1,)
