import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from planner.execution.memory import mapped
from planner.execution.optimizers import DEFAULTS, _HostCopy, hyperparameters, make_step, torch_optimizer
from simulator.errors import ExecutionError, InputError


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


@pytest.mark.parametrize("name", sorted(DEFAULTS.keys() - {"lamb"}))
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


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_states_on_disk_are_those_in_memory(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    start = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, theirs = start.clone(), start.clone()
    on_disk = make_step(name, DEFAULTS[name], offload=True, to="disk")
    in_memory = make_step(name, DEFAULTS[name], offload=True)
    for _ in range(5):
        gradient = torch.randn(7, 5).bfloat16()
        on_disk(ours, gradient)
        in_memory(theirs, gradient)
    assert torch.equal(ours, theirs)
    assert on_disk.state.keys() == in_memory.state.keys()
    assert all(torch.equal(on_disk.state[key], value) for key, value in in_memory.state.items())
    assert not list(tmp_path.iterdir()), "files have no name once they are mapped"
    files = Path("/proc/self/maps").read_text().count(str(tmp_path))
    assert files == sum(value.dim() > 0 for value in on_disk.state.values()) > 0


def test_parameters_in_files_are_updated_there(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    start = torch.arange(6.0).reshape(2, 3)
    in_file, in_memory = mapped(start, "parameter"), start.clone()
    for parameter in (in_file, in_memory):
        step = make_step("adam", DEFAULTS["adam"], offload=True, to="disk")
        step(parameter, torch.ones(2, 3))
    assert torch.equal(in_file, in_memory)
    assert not torch.equal(in_file, start)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()


def test_a_full_disk_is_said(monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    step = make_step("adam", DEFAULTS["adam"], offload=True, to="disk")
    with pytest.raises(ExecutionError, match=r"No space left on device; set TMPDIR .* offload_to=host"):
        step(torch.zeros(3), torch.ones(3))


def test_lamb_moves_by_the_norm_of_the_whole():
    """By hand: Adam's first direction is the sign of the gradient, so both norms are known."""
    constants = replace(DEFAULTS["lamb"], learning_rate=0.5, epsilon=0.0, weight_decay=0.0)
    parameter = torch.tensor([3.0, 0.0, 4.0, 0.0], dtype=torch.float64)
    make_step("lamb", constants)(parameter, torch.tensor([2.0, -7.0, 0.1, 5.0], dtype=torch.float64))
    moved = 0.5 * 5.0 / 2.0  # rate × ‖w‖ / ‖u‖ with ‖w‖ = 5 and four directions of size 1
    expected = torch.tensor([3.0 - moved, moved, 4.0 - moved, -moved], dtype=torch.float64)
    torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)
    nothing = torch.zeros(4, dtype=torch.float64)
    make_step("lamb", constants)(nothing, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(nothing, torch.full((4,), -0.5, dtype=torch.float64))


def test_pieces_of_lamb_need_the_sums_of_all():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    pieces = [part.clone() for part in whole.chunk(4)]
    on_whole, on_pieces = make_step("lamb", DEFAULTS["lamb"]), [make_step("lamb", DEFAULTS["lamb"]) for _ in pieces]
    for _ in range(5):
        gradient = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        on_whole(whole, gradient)
        each = [step.begin(p, g) for step, p, g in zip(on_pieces, pieces, gradient.chunk(4), strict=True)]
        for step, piece in zip(on_pieces, pieces, strict=True):
            step.finish(piece, torch.stack(each).sum(0))
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-13, atol=1e-13)


def test_low_precision_keeps_what_rounds_away():
    parameter = torch.ones(4, dtype=torch.bfloat16)
    for name, rate in (("sgd", 1e-4), ("lamb", 1e-4)):
        parameter = torch.ones(4, dtype=torch.bfloat16)
        step = make_step(name, hyperparameters(name, rate))
        for _ in range(100):
            step(parameter, torch.ones(4, dtype=torch.bfloat16))
        assert parameter.float().max() < 1, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_states_on_the_host(name, dtype, monkeypatch):
    """As if the parameter were on a device of its own: a copy is updated and comes back, rounded as it is without."""
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(6, 5, generator=generator, dtype=torch.float64).to(dtype)
    theirs = ours.clone()
    offloaded, plain = make_step(name, DEFAULTS[name], offload=True), make_step(name, DEFAULTS[name])
    for _ in range(5):
        gradient = torch.randn(6, 5, generator=generator, dtype=torch.float64).to(dtype)
        with monkeypatch.context() as patched:
            patched.setattr("planner.execution.optimizers._is_on_host", lambda tensor: False)
            offloaded(ours, gradient)
        plain(theirs, gradient)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert all(value.is_cpu for value in offloaded.state.values())
    assert offloaded.state.keys() == plain.state.keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_states_of_a_device_on_the_host(name):
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    ours = theirs.cuda()
    offloaded, plain = make_step(name, DEFAULTS[name], offload=True), make_step(name, DEFAULTS[name])
    for _ in range(5):
        gradient = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        offloaded(ours, gradient.cuda())
        plain(theirs, gradient)
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-12, atol=1e-12)
    assert all(value.is_cpu for value in offloaded.state.values())


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda", True), ("privateuseone", True)])
def test_copies_on_the_host_are_pinned_beside_any_accelerator(device, pinned, monkeypatch):
    """An NPU calls itself by the name that torch keeps for devices of others."""
    asked = []

    def empty_like(like, **options):
        asked.append(options["pin_memory"])
        return SimpleNamespace(copy_=lambda other: None)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    there = torch.device(device)
    _HostCopy().of(SimpleNamespace(device=there, is_cpu=False, is_cuda=there.type == "cuda"))
    assert asked == [pinned]


def test_gradients_are_left_alone():
    for name, constants in DEFAULTS.items():
        gradient = torch.ones(3)
        step = make_step(name, constants)
        parameter = torch.zeros(3)
        step(parameter, gradient)
        step(parameter, gradient)
        assert torch.equal(gradient, torch.ones(3)), name


def test_what_is_unknown_is_refused():
    with pytest.raises(InputError, match="adagrad"):
        hyperparameters("adagrad")
    with pytest.raises(InputError, match="learning rate -1"):
        hyperparameters("sgd", -1.0)


def test_another_rate_keeps_the_other_constants():
    assert hyperparameters("adamw", 1e-2).weight_decay == DEFAULTS["adamw"].weight_decay


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_transposed_gradient_is_paired_with_the_right_elements(name):
    torch.manual_seed(0)
    parameter, gradient = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64).T
    other = parameter.clone()
    make_step(name, hyperparameters(name))(parameter, gradient)
    make_step(name, hyperparameters(name))(other, gradient.contiguous())
    assert parameter.equal(other)
