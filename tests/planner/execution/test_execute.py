"""Plans from the search, run on real processes and held against one process in float64."""

import dataclasses
import math

import pytest
import torch

from planner.execution.launch.starting import _best_device
from planner.execution.memory import least_free_memory
from planner.execution.options import ExecuteOptions
from planner.execution.run import execute, execute_plan
from planner.planning.planning import PlanRequest, plan_network
from planner.plans.file import write_plan
from planner.plans.pins import Pins
from simulator.errors import ExecutionError, InfeasibleError, InputError, StrategyError

HARDWARE = "dgx-a100"


def make_plan(network, devices, *, batch, **pins):
    request = PlanRequest(
        network=network,
        hardware=HARDWARE,
        devices=devices,
        global_batch=batch,
        precision="fp32",
        pins=Pins.read(pins),
        top=1,
    )
    return plan_network(request).candidates[0].plan


def run(plan, **options):
    settings = {"strategy": "unused", "steps": 3, "verify": True, "precision": "fp64", **options}
    return execute_plan(plan, ExecuteOptions(**settings))


@pytest.fixture(scope="module")
def mlp():
    return make_plan("zoo:mlp", 2, batch=16, tp=2, micro_batch=4)


def test_experts_on_a_context_axis_train_as_one_process_does():
    """Experts have ten places for a sequence's tokens, which send them more: the ranks drop those that one drops."""
    report = run(make_plan("py:tests.planner.execution.small:mixtral", 2, batch=4, cp=2), data="synthetic")
    assert report.verified
    assert report.max_loss_difference < 1e-10


def test_a_strategy_file_trains_as_one_process_does(mlp, tmp_path):
    path = tmp_path / "strategy.json"
    write_plan(mlp, path)
    said = []
    report = execute(ExecuteOptions(strategy=path, steps=4, verify=True, precision="fp64"), said.append)
    assert report.verified
    assert report.max_loss_difference < 1e-10
    assert len(report.losses) == len(report.reference_losses) == report.steps == 4
    assert (report.processes, report.backend, report.launcher, report.rank) == (2, "gloo", "local processes", 0)
    times = report.measured_step_time_s
    assert 0 < times.p10 <= times.median <= times.p90
    assert report.error == pytest.approx(report.predicted_step_time_s / times.median - 1)
    assert report.measured_peak_memory_bytes > 0
    assert report.predicted_peak_memory_bytes > 0
    assert report.data == "scikit-learn digits"
    assert len(said) == 3


@pytest.mark.parametrize(
    ("network", "devices", "batch", "pins"),
    [
        pytest.param("zoo:gpt2-tiny", 4, 4, {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("zoo:mlp", 4, 16, {"dp": 2, "tp": 2, "micro_batch": 2}, marks=pytest.mark.slow),
        pytest.param("zoo:resnet50", 2, 4, {"dp": 2}, marks=pytest.mark.slow),
    ],
)
def test_equals_one_process(network, devices, batch, pins):
    report = run(make_plan(network, devices, batch=batch, **pins), steps=3 if network != "zoo:resnet50" else 2)
    assert report.max_loss_difference < 1e-10
    assert report.losses[0] != report.losses[-1], "nothing was learnt"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses(mlp):
    first, again, other = (run(mlp, verify=False, seed=seed, precision="fp32").losses for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_plan_that_computes_something_else_is_found_out(mlp, monkeypatch):
    monkeypatch.setattr("planner.execution.run.run_reference", lambda job, **_: [1.0] * job.steps)
    with pytest.raises(ExecutionError, match=r"step 0: loss .* differs from the single process's 1.0"):
        run(mlp, steps=1)


def test_a_rank_that_fails_shows_its_own_error(mlp):
    plan = dataclasses.replace(mlp, network="py:tests.planner.execution.test_execute:missing")
    with pytest.raises(InputError):
        run(plan)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processes": 3}, "--processes 3 differs from the plan's 2 devices; use --processes 2"),
        ({"steps": 0}, "--steps 0"),
        ({"timeout_s": 0.0}, "timeout of 0.0"),
        ({"timeout_s": math.nan}, "timeout of nan"),
        ({"join_timeout_s": 0.0}, "join timeout of 0.0"),
        ({"save_every": 2}, "--save-every 2 needs a folder"),
        ({"resume": "nowhere"}, "--resume nowhere: is no folder"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"precision": "fp8"}, "fp8"),
        ({"precision": "fp4"}, "fp4"),
        ({"precision": "int4"}, "precision 'int4'"),
        ({"learning_rate": -1.0}, "learning rate -1.0"),
        ({"data": "text"}, "cannot feed"),
        ({"device": "npu"}, "npu.*use --device cpu"),
        ({"strategy": "my.json", "fingerprint": "0" * 64}, "my.json: .* another network"),
        ({"strategy": "my.json", "optimizer": "lion"}, "my.json: optimizer 'lion'"),
        ({"strategy": "my.json", "optimizer_sharding": "zero2"}, "my.json: optimizer_sharding: 'zero2'"),
        ({"strategy": "my.json", "sequence_length": 128}, "my.json: network: .* another network"),
        ({"strategy": "my.json", "network": "zoo:gone"}, "my.json: no built-in network 'gone'"),
    ],
)
def test_bad_options_start_nothing(mlp, options, words, monkeypatch):
    monkeypatch.setattr("planner.execution.run.run_workers", lambda *_: pytest.fail("workers were started"))
    changes = {name: options.pop(name) for name in list(options) if hasattr(mlp, name) and name != "precision"}
    with pytest.raises(InputError, match=words):
        run(dataclasses.replace(mlp, **changes), **options)


def few_classes():
    """Tell apart fewer classes than the digits have."""
    return torch.nn.Linear(64, 8), (torch.zeros(4, 64), torch.zeros(4, dtype=torch.long)), torch.nn.CrossEntropyLoss()


def test_data_that_cannot_serve_the_network_starts_nothing(monkeypatch):
    plan = make_plan("py:tests.planner.execution.test_execute:few_classes", 2, batch=16, dp=2)
    monkeypatch.setattr("planner.execution.run.run_workers", lambda *_: pytest.fail("workers were started"))
    with pytest.raises(InputError, match="10 classes, the network 8"):
        run(plan)


def test_accelerators_are_counted_before_anything_starts(mlp, monkeypatch):
    monkeypatch.setattr("planner.execution.run.run_workers", lambda *_: pytest.fail("workers were started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="1 cuda devices, the plan needs 2; use --device cpu or plan for --devices 1"):
        run(mlp, device="cuda")
    member = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "LOCAL_RANK": "1"}
    for name, value in member.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="torchrun started local rank 1 here"):
        run(mlp, device="cuda")


def test_memory_is_looked_at_before_anything_starts(mlp, monkeypatch):
    monkeypatch.setattr("planner.execution.run.run_workers", lambda *_, **__: pytest.fail("workers were started"))
    monkeypatch.setattr("planner.execution.launch.starting.free_memory", lambda *_: 10**6)
    with pytest.raises(InfeasibleError, match=r"2 processes of .* GB at its peak, but there are 0.001 GB free on this"):
        run(mlp)
    with pytest.raises(pytest.fail.Exception):
        run(mlp, force=True)


def test_a_launcher_asks_for_free_memory_without_a_context_of_its_own(mlp, monkeypatch):
    asked = []

    def ask(*request):
        asked.append(request)
        return 10**6

    for name, value in (("is_available", lambda: True), ("device_count", lambda: 2)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: pytest.fail("a context is made in the launcher"))
    monkeypatch.setattr("planner.execution.launch.starting.dist.is_backend_available", lambda _: True)
    monkeypatch.setattr("planner.execution.launch.starting.ask_process", ask)
    with pytest.raises(InfeasibleError, match="but there are 0.001 GB free on its cuda device"):
        run(mlp, device="cuda")
    assert asked == [(least_free_memory, ("cuda", 2), "planner.execution.worker")]


def test_the_fullest_device_counts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: ((5, 3, 4)[number], 8))
    assert least_free_memory("cuda", 3) == 3


def test_a_backend_that_torch_was_built_without(mlp, monkeypatch):
    monkeypatch.setattr("planner.execution.launch.starting.dist.is_backend_available", lambda _: False)
    with pytest.raises(InputError, match="--device cpu needs the backend gloo, which this torch"):
        run(mlp, device="cpu")


def test_an_accelerator_that_is_not_there(mlp, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="'cuda' is not available .*use --device cpu"):
        run(mlp, device="cuda")


def broken_npu(folder, monkeypatch):
    """An installed torch_npu whose libraries are missing."""
    (folder / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(folder))


def test_what_torch_npu_lacks_is_said(mlp, tmp_path, monkeypatch):
    broken_npu(tmp_path, monkeypatch)
    with pytest.raises(InputError, match=r"does not load \(libhccl.so: .*\); load CANN's .* or use --device cpu"):
        run(mlp, device="npu")


def test_an_npu_that_does_not_load_leaves_the_processor(tmp_path, monkeypatch):
    broken_npu(tmp_path, monkeypatch)
    assert _best_device(1) == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.slow
def test_training_that_diverges_says_so(mlp):
    with pytest.raises(ExecutionError, match="training diverged at step .: loss (nan|inf); lower --learning-rate"):
        run(mlp, learning_rate=1e30, verify=False, precision="fp32")


def test_another_launcher_with_another_number_of_processes(mlp, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="torchrun started 4 processes, the plan is for 2"):
        run(mlp)


def test_a_strategy_for_another_network(mlp):
    with pytest.raises(StrategyError, match="fingerprint"):
        run(dataclasses.replace(mlp, fingerprint="0" * 64))


@pytest.mark.slow
def test_a_profile_that_is_gone_leaves_the_prediction_out(mlp):
    report = run(dataclasses.replace(mlp, hardware="gone.yaml"), steps=1, verify=False)
    assert report.predicted_step_time_s is None
    assert report.error is None
    assert "gone.yaml" in report.notes[0]
