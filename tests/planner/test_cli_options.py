"""What the command line reads: device counts, pins, config files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from planner.cli.app import app
from planner.cli.config import PlanSettings, with_config
from planner.cli.options import read_device_counts
from planner.plans.pins import Pins, read_pins
from simulator.errors import InputError


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8", (8,)),
        ("8,16,32", (8, 16, 32)),
        (" 8 , 16 ", (8, 16)),
        ("8,16,…,4096", (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
        ("8,16,...,64", (8, 16, 32, 64)),
        ("8,16,24,…,48", (8, 16, 24, 32, 40, 48)),
        ("8,16,…,40", (8, 16, 24, 32, 40)),
        ("1,3,…,81", (1, 3, 9, 27, 81)),
        ("1,2,…,8,16,24", (1, 2, 4, 8, 16, 24)),
    ],
)
def test_device_counts(text: str, counts: tuple[int, ...]) -> None:
    assert read_device_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a whole number"),
        ("8x", "'8x' is not a whole number"),
        ("0", "'0' is not a whole number"),
        ("-1", "'-1' is not a whole number"),
        ("8,,16", "'' is not a whole number"),
        ("16,8", "8 does not follow 16"),
        ("8,8", "8 does not follow 8"),
        ("…,8", "two counts before it"),
        ("8,…,64", "two counts before it"),
        ("8,16,…", "a count after it"),
        ("8,16,…,…,64", "two counts before it"),
        ("8,16,…,100", "does not meet 100"),
        ("8,16,48,…,100", "does not meet 100"),
        ("1,2,3,…,1000000", "more than 100 counts"),
        ("9999999999", "whole number"),
        ("²", "whole number"),
    ],
)
def test_wrong_device_counts(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_device_counts(text)


@given(st.text(alphabet="0123456789,.…x- ", max_size=20))
def test_any_text_gives_rising_counts_or_an_input_error(text: str) -> None:
    try:
        counts = read_device_counts(text)
    except InputError:
        return
    assert list(counts) == sorted(set(counts))


def test_pins() -> None:
    pins = read_pins(["tp=8", " micro_batch = 02", "recompute=full", "sequence_parallel=true", "schedule=1f1b"])
    assert pins == Pins(tp=8, micro_batch=2, recompute="full", sequence_parallel=True, schedule="1f1b")


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["tp"], "'tp' is not KEY=VALUE"),
        (["tp="], "'tp=' is not KEY=VALUE"),
        (["tq=8"], "did you mean 'tp'"),
        (["recompte=none"], "did you mean 'recompute'"),
        (["zzzzz=1"], "choose one of dp, tp"),
        (["tp=0"], "'0' is not a whole number"),
        (["tp=two"], "'two' is not a whole number"),
        (["tp=-1"], "'-1' is not a whole number"),
        (["recompute=some"], "'some' is no value of recompute"),
        (["optimizer_sharding=zero9"], "did you mean 'zero"),
        (["tp=2", "tp=4"], "already pinned to 2"),
    ],
)
def test_wrong_pins(pins: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_pins(pins)


def test_the_command_line_wins_over_the_config(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "network: zoo:mlp\nhw: dgx-a100\ndevices: 16\nglobal-batch: 64\npin: {tp: 2, dp: 8, sequence_parallel: false}\n"
    )
    settings = with_config(PlanSettings(devices=8, pins=Pins(tp=4)), path).settings
    assert (settings.network, settings.hardware, settings.devices, settings.global_batch) == (
        "zoo:mlp",
        "dgx-a100",
        8,
        64,
    )
    assert settings.pins == Pins(tp=4, dp=8, sequence_parallel=False)


@pytest.mark.parametrize("text", ["{stage_layers: [3, 5], tp: 2}", "[stage_layers=3-5, tp=2]"])
def test_pins_in_a_file_are_a_mapping_of_values_or_texts(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"pin: {text}")
    assert with_config(PlanSettings(), path).settings.pins == Pins(stage_layers=(3, 5), tp=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pin: {tp: two}", "'two' is not a whole number"),
        ("devces: 8", "'devces' is no option of plan; did you mean 'devices'"),
        ("devices: eight", "devices: 'eight' is wrong"),
        ("devices: 0", "devices: 0 is wrong"),
        ("devices: 8.5", "devices: 8.5 is wrong"),
        ("precision: fp7", "precision: 'fp7' is wrong"),
        ("seq-len: 1\nseq_len: 2", "seq_len is given twice"),
        ("- 8", "must be a mapping"),
        ("", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("!!python/object/apply:os.system [ls]", "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_wrong_configs(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        with_config(PlanSettings(), path)
    assert str(path) in str(caught.value)


def test_a_config_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        with_config(PlanSettings(), tmp_path / "none.yaml")
    with pytest.raises(InputError, match="is a folder, not a regular file"):
        with_config(PlanSettings(), tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dry-run", "--top", "2"], "--dry-run starts nothing, and --top 2 starts runs"),
        (["--dry-run", "--log-every", "1"], "--log-every says the losses of one run, and --dry-run trains none"),
        (["--virtual", "--log-every", "1"], "and --virtual trains none"),
        (["--top", "2", "--log-every", "1"], "and --top 2 trains none"),
        (["--dry-run", "--virtual"], "--dry-run starts nothing, and --virtual starts runs"),
        (["--virtual", "--slowdown", "2"], "--slowdown was given without --stragglers; add it"),
        (["--stragglers", "1"], "without --virtual"),
        (["--virtual", "--verify"], "--virtual computes nothing: --verify would do nothing"),
        (["--virtual", "--top", "2"], "--virtual computes nothing: --top would do nothing"),
        (["--virtual", "--save", "run1", "--data", "digits"], "--virtual computes nothing: --data, --save would do"),
        (["--top", "2", "--trace", "run.json"], "--trace draws one plan, --top runs several"),
        (["--top", "2", "--save", "run1"], "--save keeps one training, --top runs several"),
    ],
)
def test_options_of_execute_that_mean_nothing_together(tmp_path: Path, options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["execute", str(tmp_path / "strategy.json"), *options])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("ratio", ["0", "0.99", "nan", "inf", "1001"])
def test_experts_of_the_busiest_rank_get_at_least_an_even_share(ratio: str) -> None:
    given = ["plan", "zoo:mixtral-8x7b", "--hw", "dgx-h100", "--devices", "8", "--expert-imbalance", ratio]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "is not between 1 and 1000" in result.output
