"""Captured graphs compute what torch's autograd computes, and know their structure."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from planner.graph.capture import capture_module
from planner.graph.cleaning import MOST_WRITTEN
from planner.graph.operator_graph import DROPOUT, WRITTEN, BatchSize, OperatorGraph, Role
from planner.graph.scaling import at_batch, at_precision
from planner.graph.tracing import unmaterialised
from planner.networks import InputSpec
from planner.sharding.local_call import Moment
from planner.sharding.local_operator import dropped, operator_number
from simulator.errors import NetworkError
from simulator.program import Kernel, Phase
from tests.oracles.graph_interpreter import autograd, random_inputs, run_graph
from tests.planner.graph.conftest import small_network

Full = Callable[[str], OperatorGraph]
SMALL = ("mlp", "gpt", "llama", "bert", "resnet50")


@pytest.mark.parametrize("name", SMALL)
def test_running_the_graph_equals_autograd(name: str, full_graph: Full) -> None:
    batch = 4
    graph = at_precision(at_batch(full_graph(name), batch), "float64")
    module = small_network(name).build(seed=1).double()
    inputs = random_inputs(graph, seed=2)
    loss, gradients = autograd(module, inputs)
    graph_loss, graph_gradients = run_graph(graph, module, inputs)
    torch.testing.assert_close(graph_loss, loss, rtol=1e-12, atol=0)
    assert gradients.keys() == graph_gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(graph_gradients[parameter], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", SMALL)
def test_nodes_are_in_order_and_names_unique(name: str, full_graph: Full) -> None:
    graph = full_graph(name)
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        assert all(ref.node < index for ref in node.tensor_inputs), node.name
        assert node.forward is None or graph.nodes[node.forward].phase is Phase.FORWARD


@pytest.mark.parametrize("name", SMALL)
def test_every_backward_operator_knows_its_forward_one(name: str, full_graph: Full) -> None:
    graph = full_graph(name)
    for node in graph.nodes:
        if node.phase is Phase.BACKWARD:
            assert (node.forward is None) == (node.role in (Role.GRADIENT_SUM, Role.CONSTANT)), node.name
        else:
            assert node.forward is None


@pytest.mark.parametrize("name", SMALL)
def test_constants_depend_on_nothing(name: str, full_graph: Full) -> None:
    graph = full_graph(name)
    for node in graph.nodes:
        if node.role is Role.CONSTANT:
            assert all(graph.nodes[ref.node].role is Role.CONSTANT for ref in node.tensor_inputs)
            assert not any(any(spec.batch_dims) for spec in node.outputs)


def test_gradient_sums_of_a_transformer_block(full_graph: Full) -> None:
    graph = full_graph("gpt")
    sums = [node.name for node in graph.nodes if node.role is Role.GRADIENT_SUM and node.module.startswith("blocks.2")]
    assert sums == [
        "blocks.2/gradient_sum",
        "blocks.2.attention/gradient_sum",
        "blocks.2.attention/gradient_sum.1",
        "blocks.2/gradient_sum.1",
    ]


def test_tied_parameters_are_one(full_graph: Full) -> None:
    graph = full_graph("gpt")
    tied = graph.parameters[0]
    assert (tied.name, tied.aliases) == ("token_embedding.weight", ("head.weight",))
    assert tied.gradient is not None
    assert graph.nodes[tied.gradient.node].role is Role.GRADIENT_SUM


def test_means_are_sums_divided_by_a_multiple_of_the_batch(full_graph: Full) -> None:
    graph = full_graph("gpt")
    loss = graph.nodes[graph.loss.node]
    assert loss.op == "aten.div.Tensor"
    assert loss.args[1] == BatchSize(12)


def test_inputs_are_bounded_by_what_they_look_up(full_graph: Full) -> None:
    graph = full_graph("resnet50")
    assert [(i.name, i.kind, i.high) for i in graph.inputs] == [("image", "image", None), ("label", "label", 1000)]


def test_sources_point_at_the_module_and_not_at_the_machine(full_graph: Full) -> None:
    graph = full_graph("gpt")
    attention = next(node for node in graph.nodes if node.kernel is Kernel.ATTENTION)
    assert attention.source.startswith("planner/networks/zoo/gpt.py:")


class _Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)


class _Chosen(_Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return out.sum() if out.sum() > 0 else out.mean()  # the line that cannot be captured


class _FixedBatch(_Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(2, 4)).mean()


class _NoScalar(_Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class _Named(_Plain):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).mean()}


class _Random(_Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * torch.rand_like(x[:, :1])).mean()


class _Sparse(_Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(x.to_sparse(), self.layer.weight.T).mean()


class _Nothing(_Plain):
    def forward(self, x: torch.Tensor) -> None:
        self.layer(x)


class _Counting(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.layer(x).mean()


class _Variance(_Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).var()


class _Table(_Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).mean() * torch.tensor(range(MOST_WRITTEN + 1))).mean()


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (_Chosen, ("aten.item.default", "tests/planner/graph/test_capture.py:", "torch.where")),
        (_FixedBatch, ("aten.view.default", "tests/planner/graph/test_capture.py:", "batch")),
        (_Sparse, ("aten._to_sparse.default at tests/planner/graph/test_capture.py:", "makes a sparse tensor")),
        (_Nothing, ("returns None", "one scalar tensor")),
        (_NoScalar, ("(1009, 3)", "one scalar")),
        (_Named, ("returns a dict", "one scalar")),
        (_Random, ("aten.rand_like.default", "random")),
        (_Counting, ("aten.add_.Tensor", "'steps'", "no state")),
        (_Variance, ("tests/planner/graph/test_capture.py:", "depends on the batch size")),
        (_Table, ("tests/planner/graph/test_capture.py:", "register it as a buffer")),
    ],
)
def test_what_cannot_be_captured_is_named_with_its_line(module: type[_Plain], parts: tuple[str, ...]) -> None:
    inputs = (InputSpec(name="x", kind="features", shape=(4,)),)
    with pytest.raises(NetworkError) as caught:
        capture_module(module, inputs, name="mine", twice=True)
    assert "'mine'" in str(caught.value) or module is _Table
    assert all(part in str(caught.value) for part in parts), str(caught.value)


class _Losses(_Plain):
    def forward(self, x: torch.Tensor, y: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.dropout(self.layer(x), 0.5)
        functional = torch.nn.functional
        return (
            functional.mse_loss(out, y)
            + functional.l1_loss(out, y)
            + functional.cross_entropy(out, label)
            + functional.nll_loss(out.log_softmax(-1), label)
            + out.mean() * torch.tensor(0.5)
            + functional.smooth_l1_loss(out, y)
            + functional.binary_cross_entropy_with_logits(out, y.sigmoid())
            + functional.kl_div(out.log_softmax(-1), y.softmax(-1), reduction="batchmean")
            + functional.cross_entropy(out, label, label_smoothing=0.1, reduction="sum") / x.shape[0]
        )


class _Inplace(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.layer(x)).square().mean()


def test_dropout_in_place_is_dropout() -> None:
    graph = capture_module(_Inplace, (InputSpec(name="x", kind="features", shape=(4,)),), name="mine", twice=True)
    assert [node.op for node in graph.nodes].count(DROPOUT) == 2


def test_mean_losses_hold_at_every_batch_with_the_masks_of_the_graph() -> None:
    inputs = (
        InputSpec(name="x", kind="features", shape=(4,)),
        InputSpec(name="y", kind="target", shape=(3,)),
        InputSpec(name="label", kind="label", shape=(), dtype="int64"),
    )
    graph = capture_module(_Losses, inputs, name="losses", twice=True)
    assert graph.notes == ()
    assert graph.inputs[2].high == 3
    graph = at_precision(at_batch(graph, 5), "float64")
    torch.manual_seed(0)
    module = _Losses().double()
    values = random_inputs(graph, seed=3)
    loss, gradients = run_graph(graph, module, values)
    number = next(operator_number(graph, node) for node in graph.nodes if node.op == DROPOUT)

    def drop(x: torch.Tensor, p: float) -> torch.Tensor:
        return dropped(x, p, number, torch.arange(x.numel()).view(x.shape), x.numel(), Moment())

    with patch.object(torch.nn.functional, "dropout", drop):
        expected, expected_gradients = autograd(module, values)
    with patch.object(torch.nn.functional, "dropout", lambda x, p: x):
        assert not loss.allclose(autograd(module, values)[0])
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-15)


class _Written(torch.nn.Module):
    """A loss with numbers that its code writes out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.factors = torch.tensor([0.5, -2.0, 1009.0], device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight * self.factors).sum() / x.shape[0]


def test_a_tensor_that_code_writes_out_is_made_in_the_graph() -> None:
    spec = InputSpec(name="x", kind="features", shape=(3,))
    graph = at_batch(capture_module(lambda: unmaterialised(_Written), [spec], name="written"), 2)
    assert WRITTEN in {node.op for node in graph.nodes}
    inputs = random_inputs(graph, seed=2)
    module = _Written()
    loss, gradients = autograd(module, inputs)
    graph_loss, graph_gradients = run_graph(graph, module, inputs)
    torch.testing.assert_close(graph_loss, loss)
    torch.testing.assert_close(graph_gradients["weight"], gradients["weight"])


class _CountedWidth(torch.nn.Module):
    """A width that the constructor reads from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, int(torch.arange(5).sum().item()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum() / x.shape[0]


def test_a_constructor_may_read_numbers_from_tensors_that_count() -> None:
    spec = InputSpec(name="x", kind="features", shape=(3,))
    graph = capture_module(lambda: unmaterialised(_CountedWidth), [spec], name="counting")
    assert graph.parameter_count == 10 * 4
