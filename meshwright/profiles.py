"""Hardware profiles: shipped ones, and those of the user's own machine."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from simulator.hardware import Hardware


def profile(name_or_path: str) -> Hardware:
    """Read a hardware profile by its name (``meshwright profiles``) or by the path of a YAML file.

    Raises
    ------
    InputError
        There is no such profile, or the file is wrong.

    Examples
    --------
    >>> import meshwright as mw
    >>> mw.profile("dgx-h100").devices_per_node
    8
    """
    from simulator.profiles import load_profile

    return load_profile(name_or_path)


def calibrate(device: str = "cpu", *, processes: int = 4, out: str | PathLike[str] = "local.yaml") -> Hardware:
    """Measure this machine and write its hardware profile, which `plan` takes by its path.

    Parameters
    ----------
    device
        ``cpu``, ``cuda`` or ``npu``.
    processes
        Collectives are measured among 2, 4, … up to so many.
    out
        The profile to write.

    Returns
    -------
    Hardware
        The profile.

    Raises
    ------
    InputError
        There is no such device, or the file cannot be written.

    Examples
    --------
    >>> import meshwright as mw
    >>> mw.calibrate("cpu", processes=2, out="local.yaml").name  # doctest: +SKIP
    'local'
    """
    from planner.plans.request import one_of
    from simulator.calibration.calibrate import CalibrateOptions
    from simulator.calibration.calibrate import calibrate as measure
    from simulator.profile_file import check_content
    from simulator.whole_file import check_writable

    check_writable(str(out))
    options = CalibrateOptions(
        device=one_of(device, ("cpu", "cuda", "npu"), "device"), processes=processes, out=Path(out)
    )
    return check_content(measure(options), str(out))[1]
