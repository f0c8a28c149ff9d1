"""Configurations of other frameworks, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.plans import HardwareLike, TrainingPlan, profile_of
from planner.planning import summary
from simulator.profiles import load_profile

if TYPE_CHECKING:
    from planner.exchange.checking import Checked
    from planner.exchange.formats import Violation
    from planner.planning.one_stage import Candidate


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of checking a configuration.

    Attributes
    ----------
    format : the framework's format that was read
    problems : rules of the framework that it breaks
    fits : whether it fits in memory; None where that is not known
    plan : the configuration as a plan; None where nothing predicts it
    nearest_better : better plans near it, each with the choices that differ
    best : the best plan of all that the framework can run

    Examples
    --------
    >>> import meshwright as mw, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "train.sh")
    ...     _ = file.write_text("torchrun --nproc_per_node 8 train.py --tensor-model-parallel-size 3")
    ...     found = mw.check(file)
    >>> found.format, found.legal, found.problems[-1].key
    ('megatron', False, 'WORLD_SIZE')
    """

    format: str
    problems: tuple[Violation, ...]
    fits: bool | None
    notes: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()
    plan: TrainingPlan | None = None
    nearest_better: tuple[tuple[tuple[str, ...], TrainingPlan], ...] = field(default=())
    best: TrainingPlan | None = None

    @property
    def legal(self) -> bool:
        """Whether the framework takes it."""
        return not self.problems

    def __repr__(self) -> str:
        if self.problems:
            return "\n".join([f"{self.format}: illegal", *map(str, self.problems)])
        fits = {True: "fits", False: "does not fit", None: "not known whether it fits"}[self.fits]
        shown = [("as written", self.plan), *((f"free: {', '.join(free)}", plan) for free, plan in self.nearest_better)]
        shown.append(("best of all", self.best))
        rows = [(name, *summary.cells(one.plan, one.prediction)) for name, one in shown if one is not None]
        first = next((one for _, one in shown if one is not None), None)
        table = (
            [] if first is None else [summary.plain_text_table((("", False), *summary.columns(first.prediction)), rows)]
        )
        return "\n".join([f"{self.format}: legal, {fits}", *table, *self.notes])


def check(
    config: str | PathLike[str],
    *,
    format: str | None = None,  # noqa: A002
    network: str | None = None,
    hardware: HardwareLike | None = None,
    devices: int | None = None,
    better: bool = True,
) -> CheckResult:
    """Check a configuration of another framework: is it legal, does it fit, how fast is it, what would be better.

    Parameters
    ----------
    config
        A launch script of Megatron-LM, or a configuration of torchtitan, DeepSpeed, Accelerate or Megatron-Bridge.
    format
        Its format, where it is not recognised.
    network, hardware, devices
        What it trains and where, as far as the file does not say.
    better
        Whether better plans are searched.

    Raises
    ------
    InputError
        The file cannot be read, or its format is not known.

    Examples
    --------
    >>> import meshwright as mw, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "ds_config.json")
    ...     _ = file.write_text('{"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}}')
    ...     mw.check(file, format="deepspeed").legal
    True
    """
    from planner.exchange.checking import check as checked

    name = None if hardware is None else profile_of(hardware)
    found = checked(Path(config), form=format, network=network, hardware=name, devices=devices, better=better)
    return _result(found, name)


def _result(found: Checked, hardware: str | None) -> CheckResult:
    def plan_of(candidate: Candidate | None) -> TrainingPlan | None:
        if candidate is None or hardware is None:
            return None
        return TrainingPlan(plan=candidate.plan, hardware=load_profile(hardware), predicted=candidate.prediction)

    near = [(one.changed, plan_of(one.candidate)) for one in found.near]
    return CheckResult(
        format=found.form.name,
        problems=found.problems,
        fits=found.fits,
        notes=(*found.notes, *([found.infeasible] if found.infeasible else [])),
        not_read=tuple(found.read.not_read),
        plan=plan_of(found.found),
        nearest_better=tuple((changed, plan) for changed, plan in near if plan is not None),
        best=plan_of(found.best),
    )
