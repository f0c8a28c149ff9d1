"""The plans behind the best one: strategy files beside its own, counted from 2 (``strategy.2.json``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.plans.file import write_plan
from planner.plans.plan import Plan
from simulator.errors import InputError


def alternative_file(strategy: str | Path, number: int) -> Path:
    """Where the plan of a rank stands; 1 is the strategy file itself.

    >>> alternative_file("plans/gpt.json", 3).as_posix()
    'plans/gpt.3.json'
    """
    path = Path(strategy)
    return path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def write_alternatives(strategy: str | Path, plans: Sequence[tuple[Plan, Mapping[str, object]]]) -> tuple[Path, ...]:
    """Write the plans behind the best one, each with its prediction, in the order of their ranks from 2.

    Nothing is written beside a pipe or a device.
    """
    if Path(strategy).exists() and not Path(strategy).is_file():
        return ()
    return tuple(
        write_plan(plan, alternative_file(strategy, number), prediction)
        for number, (plan, prediction) in enumerate(plans, 2)
    )


def alternative_files(strategy: str | Path, top: int) -> tuple[Path, ...]:
    """The files of the best `top` plans.

    Raises
    ------
    InputError
        There are fewer.
    """
    found = tuple(alternative_file(strategy, number) for number in range(1, top + 1))
    missing = next((number for number, path in enumerate(found, 1) if number > 1 and not path.is_file()), None)
    if missing is not None:
        raise InputError(
            f"{str(found[missing - 1])!r}, the plan of rank {missing}, does not exist: {missing - 1} of {top} plans "
            f"are there; write them with `meshwright plan … --top {top} --out {found[0]}`, or take --top {missing - 1}"
        )
    return found
