"""Options of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteOptions:
    """Options of a run of a plan.

    ``processes`` must equal the plan's devices and may be left out. ``data`` names a data set
    (`planner.execution.data.samples.open_dataset`), ``precision`` replaces the plan's. Without a seed it is that of the
    checkpoint to ``resume``, else 0. ``steps`` count from the beginning of training. Checkpoints go to ``save`` after
    every ``save_every`` steps and at the end. ``force`` starts a run that is predicted not to fit in memory. Logs of
    the ranks go to ``log_dir``. ``join_timeout_s`` bounds the meeting of the processes and ``timeout_s``
    each collective: a rank that hangs ends the run after it. ``measure`` clocks the instructions of more steps, and
    ``trace`` writes them beside the prediction.
    """

    strategy: str | Path
    processes: int | None = None
    steps: int = 10
    data: str | None = None
    verify: bool = False
    precision: str | None = None
    seed: int | None = None
    learning_rate: float | None = None
    device: str | None = None
    timeout_s: float = 60.0
    join_timeout_s: float = 300.0
    save: str | Path | None = None
    save_every: int | None = None
    resume: str | Path | None = None
    force: bool = False
    log_dir: str | Path | None = None
    measure: bool = False
    trace: str | Path | None = None
