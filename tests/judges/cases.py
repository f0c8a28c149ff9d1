"""Files of drawn plans for the frameworks to judge: legal ones, and ones that `check` calls illegal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings

from planner.exchange.formats import ExchangeFormat, rounded
from planner.exchange.training_config import TrainingConfig
from simulator.errors import InputError
from tests.planner.exchange.training_configs import training_configs

Item = TypeVar("Item")
SPREAD = 3


def drawn(form: ExchangeFormat, count: int) -> list[TrainingConfig]:
    """Legal configurations that hypothesis draws, each time the same.

    They are spread over more draws than are taken: those that hypothesis tries one after the other are much alike.
    """
    tried = SPREAD * count
    found: dict[TrainingConfig, None] = {}

    @settings(
        max_examples=20 * tried, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(config=training_configs())
    def draw(config: TrainingConfig) -> None:
        if len(found) >= tried:
            return
        try:
            nearest = rounded(config, form.table)
        except InputError:
            return
        if form.name == "megatron":  # Transformer Engine, which offloads activations, needs a device
            nearest = replace(nearest, offload_activations=False)
        if not form.violations(nearest):
            found[nearest] = None

    draw()
    return spread(list(found), count)


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """So many of them, at even distances."""
    return [*items[:: max(1, len(items) // count)]][:count]


def spoiled(form: ExchangeFormat, config: TrainingConfig) -> Iterator[tuple[TrainingConfig, str]]:
    """The same with one thing changed, and its file, as far as the file shows that it is illegal."""
    changes: list[dict[str, Any]] = [
        {"devices": (config.devices or 1) + 1},
        {"global_batch": (config.global_batch or 1) + 1},
        *([] if form.name == "deepspeed" else [{"ep": (config.ep or 1) * 3}]),  # DeepSpeed looks when it starts
        {"tensor_overlap": True, "sequence_parallel": False},
        {"cp": 3},
        (
            {"optimizer_sharding": "zero3", "shard_size": 2}
            if form.name == "deepspeed"  # whose other rules of sharding are looked at in the first step
            else {"overlap_parameters": True, "optimizer_sharding": "none", "shard_size": 0}
        ),
    ]
    if form.name == "torchtitan-npu":
        changes.append({"precision": "fp8", "tensor_overlap": True, "tp": 2 * (config.tp or 1)})
    files = [(other, form.write(other).text) for change in changes for other in [replace(config, **change)]]
    if form.name == "torchtitan-npu":
        text = form.write(replace(config, offload_optimizer=True, offload_parameters=False)).text
        files += [
            (config, text.replace("swap_optimizer", "virtual_optimizer")),
            (config, text.replace("swap_optimizer = true", "swap_optimizer = true\nvirtual_optimizer = true")),
        ]
    if form.name == "bridge":
        files.append((config, form.write(config).text.replace("sequence_parallel=false", "sequence_parallel=0")))
    if form.name == "deepspeed":  # whose batches say how many ranks there are
        batch = config.global_batch or 1
        files.append((config, form.write(config).text.replace(f'_size": {batch},', f'_size": {batch + 1},', 1)))
    for other, text in files:
        try:
            read = form.read(text, f"file{form.suffix}")
        except InputError:
            yield other, text
        else:
            if read.violations or form.violations(read.config):
                yield other, text


def case_of(form: ExchangeFormat, config: TrainingConfig, text: str, file: Path) -> dict[str, Any]:
    """Write a file, and say what its judge must know of the job."""
    file.write_text(text)
    return {
        "format": form.name,
        "file": str(file),
        "devices": config.devices,
        "data": (config.devices or 1) // ((config.tp or 1) * (config.cp or 1)),
        "experts": (config.ep or 1) > 1,
    }
