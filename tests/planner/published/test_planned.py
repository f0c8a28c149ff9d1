"""Published runs predicted by plan's own code."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from planner.cli.app import app
from planner.cost.memory.parameters import parameter_count
from planner.cost.training_run import RunPrediction, TransformerShape
from planner.planning.planning import plan_network
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest, checked_pins
from planner.published.layered.prediction import BY_LAYERS
from planner.published.pinned import NotPinnedError, pinned_run
from planner.published.planned import Planner, Workplace, command_lines, predict_planned
from planner.published.predictions import BY_LAYERS_ALONE, RECOMPUTED, score
from planner.published.reading import MeasuredRow, read_measurements
from simulator.calibration import process
from simulator.errors import InputError, MeshwrightError
from simulator.profiles import load_profile
from tests.measurements import PUBLISHED, needs_published, write_measurements

PIPELINE = {"n_layers": "6", "hidden": "256", "n_heads": "4", "vocab": "1000", "seq_len": "128", "tp": "1", "pp": "2"}


def rows_of(folder: Path, *stated: dict[str, str]) -> list[MeasuredRow]:
    return read_measurements(write_measurements(folder / "rows.csv", *stated))


def test_a_run_is_predicted_by_the_plan_of_its_pins(tmp_path: Path) -> None:
    """The prediction is that of a plan request that states what the row states."""
    stated = {**PIPELINE, "n_accels": "4", "global_batch": "16", "micro_batch": "2", "recompute_kind": "none"}
    (row,) = rows_of(tmp_path, stated)
    assert row.run is not None
    (predicted,) = predict_planned([row.run], cores=1)
    assert isinstance(predicted, RunPrediction)
    pinned = pinned_run(row.run)
    assert pinned.pins.stage_layers == (3, 3)
    (best,) = plan_network(Workplace(tmp_path).request(pinned)).candidates
    assert predicted.step_time_s == pytest.approx(best.prediction.step_time_s, rel=1e-9)
    assert predicted.peak_memory_bytes == best.prediction.peak_memory_bytes
    assert (best.plan.degree("data"), best.plan.devices) == (2, 4)


@pytest.mark.parametrize(
    ("model", "billions"),
    [("Nemotron_3_Nano", 31.6), ("Nemotron_3_Super", 120.7), ("NemotronH_56B", 56.3), ("Nemotron-H-8B", 8.1)],
)
def test_networks_of_state_space_layers_are_planned_as_published(tmp_path: Path, model: str, billions: float) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("n_layers", "hidden", "n_heads", "vocab"), "")
    stated = {**sizes, "model": model, "seq_len": "8192", "tp": "1", "pp": "1", "n_accels": "8", "global_batch": "8"}
    (row,) = rows_of(tmp_path, stated)
    assert row.run is not None
    assert isinstance(row.run.network, TransformerShape)
    config = json.loads(pinned_run(row.run).network)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    assert parameters == parameter_count(row.run.network)
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_run_that_does_not_fit_has_a_time_and_says_so(tmp_path: Path) -> None:
    """A network of 70 billion parameters on one device."""
    big = {"n_layers": "80", "hidden": "8192", "n_heads": "64", "seq_len": "512", "tp": "1", "pp": "1"}
    (row,) = rows_of(tmp_path, {**big, "n_accels": "1", "global_batch": "1", "micro_batch": "1"})
    assert row.run is not None
    (predicted,) = predict_planned([row.run], cores=1)
    assert isinstance(predicted, RunPrediction)
    assert not predicted.fits
    assert predicted.step_time_s > 0
    assert predicted.peak_memory_bytes > row.run.hardware.device_memory_bytes


def test_a_run_without_a_plan_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    """A network with an encoder beside its decoder is none that plans know."""
    stated = {**PIPELINE, "n_accels": "4", "global_batch": "16", "micro_batch": "2"}
    rows = rows_of(tmp_path, stated, {**stated, "model": "T5"})
    decoder, encoder = predict_planned([row.run for row in rows if row.run is not None], cores=1)
    assert isinstance(decoder, RunPrediction)
    assert isinstance(encoder, NotPinnedError)
    assert "encoder" in str(encoder)


def test_what_a_run_has_beside_its_software_stands_behind_the_name(tmp_path: Path) -> None:
    """Deterministic kernels, and a loss that is compiled, are settings; what the software has anyway is none."""
    stated = {**PIPELINE, "n_accels": "4", "global_batch": "16", "micro_batch": "2", "framework": "Megatron-LM (mcore)"}
    plain, tested = (
        pinned_run(row.run).software
        for row in rows_of(tmp_path, stated, {**stated, "other_flags": "deterministic-mode; cross-entropy-loss-fusion"})
        if row.run is not None
    )
    name, _, settings = tested.partition(":")
    assert plain.partition(":")[0] == name
    assert {"deterministic=true", "fused_loss=true"} <= set(settings.split(","))
    assert not {"deterministic", "fused_loss"} & {part.partition("=")[0] for part in plain.split(",")}


@pytest.mark.parametrize(
    ("framework", "sharding"),
    [("Megatron-LM (mcore)", "zero1"), ("Megatron-LM (mcore)", "none"), ("torchtitan", "zero3")],
)
def test_context_ranks_share_states_as_the_row_says(tmp_path: Path, framework: str, sharding: str) -> None:
    """Context ranks hold the same parameters: without data ranks too their states are shared out, or are not."""
    stated = {
        **PIPELINE, "pp": "1", "cp": "4", "dp": "1", "n_accels": "4", "global_batch": "4", "micro_batch": "2",
        "attention_impl": "flash attention 2", "framework": framework, "optimizer_sharding": sharding,
        "zero_fsdp": "FSDP2 over dp*cp=4" if sharding == "zero3" else "",
    }  # fmt: skip
    (row,) = rows_of(tmp_path, stated)
    assert row.run is not None
    (best,) = plan_network(Workplace(tmp_path).request(pinned_run(row.run))).candidates
    assert best.plan.optimizer_sharding == sharding


def test_layers_alone_compute_again(tmp_path: Path) -> None:
    """Recomputation in full is that of every layer of a rank; no software computes the head again."""
    stated = {**PIPELINE, "n_accels": "4", "global_batch": "16", "micro_batch": "2", "recompute_kind": "full"}
    (row,) = rows_of(tmp_path, stated)
    assert row.run is not None
    pinned = pinned_run(row.run)
    assert pinned.pins.recompute_layers == 3
    (best,) = plan_network(Workplace(tmp_path).request(pinned)).candidates
    again = [part for part in best.plan.recompute_ranges if part.mode == "full"]
    assert again
    assert not any("lm_head" in part.last or "wte" in part.first for part in again)


def test_a_window_makes_attention_cheaper(tmp_path: Path) -> None:
    """Rotary networks with a window are planned as Mistral's."""
    stated = {**PIPELINE, "pp": "1", "n_accels": "4", "global_batch": "16", "micro_batch": "2", "seq_len": "2048"}
    (row,) = rows_of(tmp_path, stated)
    assert row.run is not None
    assert isinstance(row.run.network, TransformerShape)
    shape = replace(row.run.network, gated=True, rms_norm=True, rotary=True, biases=False)
    runs = [replace(row.run, network=replace(shape, attention_window=window)) for window in (0, 128)]
    whole, within = predict_planned(runs, cores=1)
    assert isinstance(whole, RunPrediction)
    assert isinstance(within, RunPrediction)
    assert json.loads(pinned_run(runs[1]).network)["sliding_window"] == 128
    assert within.step_time_s <= whole.step_time_s


def test_dualpipe_v_has_two_chunks_a_rank(tmp_path: Path) -> None:
    stated = {**PIPELINE, "n_accels": "4", "global_batch": "16", "micro_batch": "1", "other_flags": "DualPipeV"}
    (row,) = rows_of(tmp_path, stated)
    assert row.run is not None
    pins = pinned_run(row.run).pins
    assert (pins.schedule, pins.vpp, pins.pp) == ("dualpipe_v", 2, 2)
    assert pins.stage_layers is None
    (predicted,) = predict_planned([row.run], cores=1)
    assert isinstance(predicted, RunPrediction)


def test_equal_runs_are_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = {**PIPELINE, "n_accels": "4", "global_batch": "16", "micro_batch": "2"}
    rows = rows_of(tmp_path, stated, {**stated, "notes": "a second measurement"})
    asked: list[object] = []
    predict = Planner.predict

    def counting(self: Planner, run: object) -> RunPrediction:
        asked.append(run)
        return predict(self, run)  # type: ignore[arg-type]

    monkeypatch.setattr(Planner, "predict", counting)
    found = predict_planned([row.run for row in rows if row.run is not None], cores=1)
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(asked) == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_processes_that_are_stopped_or_die_leave_their_runs_to_this_one(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.1)
    monkeypatch.setattr(process, "STOPPED_S", 0.3)
    rows = rows_of(tmp_path, *({**PIPELINE, "n_layers": layers, "global_batch": "16"} for layers in ("4", "6")))
    runs = [row.run for row in rows if row.run is not None]

    before = set(multiprocessing.active_children())

    def hit() -> None:
        while not (children := set(multiprocessing.active_children()) - before):
            time.sleep(0.01)
        for child in children:
            os.kill(child.pid or 0, number)

    hitting = threading.Thread(target=hit)
    hitting.start()
    found = predict_planned(runs, cores=2)
    hitting.join()
    assert found == predict_planned(runs, cores=1)
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.skipif(process.available_cores() < 2, reason="one core predicts alone")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_of_validate_end_with_it(number: signal.Signals, tmp_path: Path) -> None:
    path = write_measurements(tmp_path / "rows.csv", *({**PIPELINE, "n_layers": n} for n in ("4", "6", "8", "10")))
    validate = subprocess.Popen([sys.executable, "-m", "meshwright", "validate", str(path)], stdout=subprocess.DEVNULL)

    def started() -> list[int]:
        found = Path(f"/proc/{validate.pid}/task/{validate.pid}/children").read_text().split()
        return [int(pid) for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    while not (children := started()):
        assert validate.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)  # until they have begun
    validate.send_signal(number)
    validate.wait(30)
    until = time.monotonic() + 10
    while any(process.process_state(pid) not in ("", "Z") for pid in children):
        assert time.monotonic() < until, "a process was left"
        time.sleep(0.05)


def test_an_error_kills_the_children_that_were_started_meanwhile() -> None:
    context = multiprocessing.get_context("spawn")
    before = context.Process(target=time.sleep, args=(60,), daemon=True)
    meanwhile = context.Process(target=time.sleep, args=(60,), daemon=True)
    before.start()
    with suppress(BrokenProcessPool), process.children_killed_on_error():
        meanwhile.start()
        raise BrokenProcessPool
    meanwhile.join(30)
    assert meanwhile.exitcode == -signal.SIGKILL
    assert before.is_alive()
    before.kill()


def test_validate_predicts_by_plans(tmp_path: Path) -> None:
    stated = {**PIPELINE, "n_accels": "4", "global_batch": "16", "micro_batch": "2", "step_time_s": "0.1"}
    path = write_measurements(tmp_path / "rows.csv", stated)
    result = CliRunner().invoke(app, ["validate", str(path), "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    (run,) = (row.run for row in read_measurements(path))
    assert run is not None
    (told,) = predict_planned([run])
    assert isinstance(told, RunPrediction)
    assert row["predicted_step_time_s"] == pytest.approx(told.step_time_s)


def test_networks_without_a_plan_are_predicted_by_their_layers(tmp_path: Path) -> None:
    stated = {
        "model": "ssd300", "arch": "Detection", "n_layers": "", "hidden": "", "n_heads": "", "seq_len": "",
        "tp": "", "pp": "", "framework": "PyTorch", "micro_batch": "8",
    }  # fmt: skip
    rows = read_measurements(write_measurements(tmp_path / "rows.csv", stated))
    outcomes = predict_planned([row.run for row in rows if row.run is not None])
    (row,) = score(rows, outcomes)
    assert (row.status, row.group) == ("ok", BY_LAYERS_ALONE)
    assert BY_LAYERS in row.reason
    _, command = command_lines(rows, outcomes, tmp_path / "commands.csv")
    assert command == f"{row.row_id},\n"


def test_classifiers_are_those_of_timm_at_the_size_of_their_images(tmp_path: Path) -> None:
    stated = {
        "arch": "Classification", "n_layers": "", "hidden": "", "n_heads": "", "seq_len": "", "tp": "", "pp": "",
        "micro_batch": "8", "n_accels": "1", "global_batch": "8",
    }  # fmt: skip
    ascend = {"framework": "MindSpore", "accelerator": "Ascend 910", "hw": "Atlas 800"}
    rows = rows_of(
        tmp_path, {**stated, "model": "se-resnext101-32x4d", "framework": "TensorFlow"},
        {**stated, "model": "efficientnet-b4", "framework": "PyTorch"}, {**stated, "model": "vgg16", **ascend},
    )  # fmt: skip
    runs = [row.run for row in rows if row.run is not None]
    squeezed, scaled = (pinned_run(run) for run in runs[:2])
    assert (squeezed.network, scaled.network) == ("timm:seresnext101_32x4d@224", "timm:efficientnet_b4@380")
    assert "samples=augmented_image" in scaled.software
    with pytest.raises(NotPinnedError, match="dense layers"):
        pinned_run(runs[2])


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"pp": "4", "stage_layers": "2-2-2"}, "3 numbers of layers"),
        ({"pp": "2", "vpp": "2", "stage_layers": "3-3"}, "2 numbers of layers"),
        ({"stage_layers": "3-0-3"}, "0 in the first and last alone"),
        ({"recompute": "full", "recompute_layers": "1"}, "leave one of them out"),
    ],
)
def test_layers_of_stages_must_be_those_of_the_pipeline(pins: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        checked_pins(PlanRequest(network="zoo:gpt2-tiny", hardware="dgx-a100", devices=4, pins=Pins.read(pins)))


def test_stages_have_the_layers_that_are_pinned(tmp_path: Path) -> None:
    """The last chunk has the head, the first what lies before the layers."""
    request = PlanRequest(
        network="zoo:gpt2-tiny", hardware="dgx-a100", devices=2, sensitivity=False,
        pins=Pins(stage_layers=(1, 3), dp=1, tp=1, micro_batch=4, recompute_layers=1),
    )  # fmt: skip
    (best, *_) = plan_network(request).candidates
    assert best.plan.devices == 2
    with pytest.raises(MeshwrightError, match="the network has"):
        plan_network(replace(request, pins=replace(request.pins, stage_layers=(40, 30))))


def commanded(command: str, out: Path) -> tuple[float, int, set[int]]:
    """Step time and peak memory that a command prints, and the peaks that tools would show."""
    words = shlex.split(command)
    assert words[:2] == ["meshwright", "plan"]
    result = CliRunner().invoke(app, [*words[1:], "--out", str(out)])
    assert result.exit_code == 0, result.output
    prediction = json.loads(result.stdout)["prediction"]
    return prediction["step_time_s"], prediction["peak_memory_bytes"], {*(prediction["memory_figures"] or {}).values()}


def test_the_command_of_a_row_gives_its_prediction(tmp_path: Path) -> None:
    """Hints and the samples of a rank's own go into files, and a run that does not fit gets a profile of its own."""
    stated = {**PIPELINE, "n_accels": "4", "global_batch": "16", "micro_batch": "2"}
    rows = (
        stated,
        {**stated, "tp": "2", "pp": "1", "recompute_kind": "none"},
        {**stated, "n_layers": "80", "hidden": "8192", "n_heads": "64", "tp": "1", "pp": "1", "recompute_kind": "none"},
        {**stated, "model": "resnet50", "arch": "CNN", "tp": "", "pp": "", "framework": "PyTorch", "n_layers": "",
         "hidden": "", "n_heads": "", "vocab": "", "seq_len": "", "global_batch": "256", "micro_batch": "64"},
    )  # fmt: skip
    path = write_measurements(tmp_path / "rows.csv", *rows)
    out, commands = tmp_path / "predictions.csv", tmp_path / "commands.csv"
    found = CliRunner().invoke(app, ["validate", str(path), "--commands", str(commands), "--out", str(out), "--json"])
    assert found.exit_code == 0, found.output
    with out.open() as told, commands.open() as asked:
        pairs = list(zip(csv.DictReader(told), csv.DictReader(asked), strict=True))
    assert len(pairs) == len(rows)
    for predicted, row in pairs:
        assert predicted["row_id"] == row["row_id"]
        seconds, memory, figures = commanded(row["command"], tmp_path / "strategy.json")
        assert seconds == pytest.approx(float(predicted["predicted_step_time_s"]), rel=1e-5)
        shown = float(predicted["predicted_peak_memory_gib"])  # as the tool of the row counts
        assert any(size / 2**30 == pytest.approx(shown, rel=1e-5) for size in (memory, *figures))
    assert [predicted["predicted_outcome"] for predicted, _ in pairs] == ["ok", "ok", "oom", "ok"]
    options = ("--hints", "--config", f"--hw {tmp_path}")
    assert [[option in row["command"] for option in options] for _, row in pairs[1:]] == [
        [True, False, False], [False, False, True], [False, True, False],
    ]  # fmt: skip


DRAWN = 10


@pytest.mark.slow
@needs_published
def test_commands_of_published_rows_give_their_predictions(tmp_path: Path) -> None:
    """Rows drawn from all files; all 200 that are wanted take longer than the suite may."""
    rows = [row for path in sorted(PUBLISHED.glob("*.csv")) for row in read_measurements(path) if row.run]
    drawn = random.Random(0).sample(rows, DRAWN)
    outcomes = predict_planned([row.run for row in drawn if row.run])
    lines = csv.DictReader(command_lines(drawn, outcomes, tmp_path / "commands.csv"))
    commands = [line["command"] for line in lines]
    assert sum(map(bool, commands)) > DRAWN // 2
    for command, outcome in zip(commands, outcomes, strict=True):
        planned = isinstance(outcome, RunPrediction) and BY_LAYERS not in outcome.notes
        assert bool(command) == planned
        if planned and isinstance(outcome, RunPrediction):
            seconds, memory, _ = commanded(command, tmp_path / "strategy.json")
            assert seconds == pytest.approx(outcome.step_time_s, rel=1e-6), command
            assert RECOMPUTED in outcome.notes or memory == outcome.peak_memory_bytes, command


def test_products_in_tf32_run_at_their_own_rate(tmp_path: Path) -> None:
    """Faster than float32 without tensor cores, slower than 16 bits."""
    stated = {"n_layers": "4", "hidden": "4096", "n_heads": "32", "tp": "1", "pp": "1", "n_accels": "1"}
    stated |= {"global_batch": "4", "micro_batch": "4", "seq_len": "1024", "precision_kind": ""}
    rows = rows_of(tmp_path, *({**stated, "precision": precision} for precision in ("fp32", "tf32", "bf16")))
    outcomes = predict_planned([row.run for row in rows if row.run is not None], cores=1)
    single, tensor, half = (outcome.step_time_s for outcome in outcomes if isinstance(outcome, RunPrediction))
    assert half < tensor < single / 2


def test_the_cluster_is_that_of_the_row_not_of_its_profile(tmp_path: Path) -> None:
    """A slower network than the profile's takes longer, a device with less memory overflows sooner."""
    usual, slow, small = rows_of(
        tmp_path, {}, {"inter_node_link": "InfiniBand 100 Gb/s"}, {"accelerator": "V100-16GB", "accel_mem_gb": "16"}
    )
    assert slow.run is not None
    assert usual.run is not None
    assert small.run is not None
    workplace = Workplace(tmp_path)
    for row in (usual, slow, small):
        assert row.run is not None
        planned = load_profile(workplace.request(pinned_run(row.run)).hardware)
        assert planned.levels == row.run.hardware.levels
        assert planned.device_memory_bytes == row.run.hardware.device_memory_bytes
    first, second = predict_planned([usual.run, slow.run], cores=1)
    assert isinstance(first, RunPrediction)
    assert isinstance(second, RunPrediction)
    assert second.step_time_s > 1.02 * first.step_time_s
