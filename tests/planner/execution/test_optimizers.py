import pytest
import torch

from planner.execution.optimizers import DEFAULTS, hyperparameters, make_step, torch_optimizer
from simulator.errors import InputError, UnsupportedError


@pytest.mark.parametrize("fused", [("cpu",), ()], ids=["fused", "plain"])
@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_equals_torch(name, fused, monkeypatch):
    monkeypatch.setattr("planner.execution.optimizers.FUSED_DEVICES", fused)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(20)]
    ours, theirs = start.clone(), torch.nn.Parameter(start.clone())
    step, reference = make_step(name, DEFAULTS[name]), torch_optimizer(name, DEFAULTS[name], [theirs])
    for gradient in gradients:
        step(ours, gradient)
        theirs.grad = gradient.clone()
        reference.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_works_on_any_piece(name):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    piece = whole[2:4].clone()
    on_whole, on_piece = make_step(name, DEFAULTS[name]), make_step(name, DEFAULTS[name])
    for gradient in gradients:
        on_whole(whole, gradient)
        on_piece(piece, gradient[2:4].contiguous())
    torch.testing.assert_close(piece, whole[2:4], rtol=1e-14, atol=1e-14)


def test_low_precision_keeps_what_rounds_away():
    parameter = torch.ones(4, dtype=torch.bfloat16)
    step = make_step("sgd", hyperparameters("sgd", 1e-4))
    for _ in range(100):
        step(parameter, torch.ones(4, dtype=torch.bfloat16))
    assert parameter.float().max() < 1


def test_gradients_are_left_alone():
    for name, constants in DEFAULTS.items():
        gradient = torch.ones(3)
        step = make_step(name, constants)
        parameter = torch.zeros(3)
        step(parameter, gradient)
        step(parameter, gradient)
        assert torch.equal(gradient, torch.ones(3)), name


def test_unknown_and_unsupported():
    with pytest.raises(UnsupportedError, match="adamw"):
        hyperparameters("lamb")
    with pytest.raises(InputError, match="adagrad"):
        hyperparameters("adagrad")
    with pytest.raises(InputError, match="learning rate -1"):
        hyperparameters("sgd", -1.0)


def test_another_rate_keeps_the_other_constants():
    assert hyperparameters("adamw", 1e-2).weight_decay == DEFAULTS["adamw"].weight_decay


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_a_transposed_gradient_is_paired_with_the_right_elements(name):
    torch.manual_seed(0)
    parameter, gradient = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64).T
    other = parameter.clone()
    make_step(name, hyperparameters(name))(parameter, gradient)
    make_step(name, hyperparameters(name))(other, gradient.contiguous())
    assert parameter.equal(other)
