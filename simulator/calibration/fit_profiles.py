"""Numbers of the shipped profiles, fitted to published measurements and written into the profile files.

Every fit minimises the mean of ``|ln(predicted / measured)|``, which outliers move little, with the very
functions that the simulator uses. The source of each number names its rows, and median and 90th percentile of the
relative error ``exp(|ln(predicted / measured)|) - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from simulator.calibration.fit_collectives import fit_collectives
from simulator.calibration.fit_operators import Fields, operator_fits
from simulator.calibration.fit_rows import fit_rows
from simulator.calibration.fits import FittedValues
from simulator.calibration.profile_text import with_fields
from simulator.hardware import PROFILE_SUFFIX
from simulator.profile_file import parse_profile
from simulator.whole_file import write_whole


@dataclass(frozen=True, kw_only=True)
class ProfileFit:
    """Fitted fields of one profile, the fits behind them, and the whole profile's text with them."""

    profile: str
    fields: Fields
    fits: tuple[FittedValues, ...]
    text: str


def fitted_profiles() -> tuple[str, ...]:
    """Names of the shipped profiles that published measurements speak for."""
    return tuple(rows.profile for rows in fit_rows())


def fit_profile(folder: Path, profile: str) -> ProfileFit:
    """All fits of one shipped profile.

    Parameters
    ----------
    folder
        Folder of measurements that holds ``operators/``.

    Raises
    ------
    InputError
        When no rows are known for the profile, or a measurement file is wrong (file, line and column are named).
    """
    operators = operator_fits(folder, profile)
    collectives, fits = fit_collectives(folder, profile)
    fields = {**operators.fields, **collectives}
    shipped = resources.files("hw_profiles") / (profile + PROFILE_SUFFIX)
    text = with_fields(shipped.read_text(encoding="utf-8"), fields)
    parse_profile(text.encode(), f"{profile}{PROFILE_SUFFIX}")
    return ProfileFit(profile=profile, fields=fields, fits=(*operators.fits, *fits), text=text)


def shipped_folder() -> Path:
    """Folder of the shipped profiles."""
    return Path(str(resources.files("hw_profiles")))


def write_fitted(fit: ProfileFit, folder: Path) -> Path:
    """Write the profile with its fitted numbers into `folder`, whole or not at all; returns the file."""
    path = folder / (fit.profile + PROFILE_SUFFIX)
    write_whole(path, fit.text)
    return path
