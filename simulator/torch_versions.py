"""The range of torch that Meshwright runs on, and what differs within it: each with its version and its reason.

All other code is written for every torch of the range. 2.9 is the oldest because it is the first with
``aot_export_joint_with_descriptors``, which captures networks.
"""

from __future__ import annotations

OLDEST = (2, 9)
NEWEST_TRIED = (2, 15)
"""The newest torch that the tests were run on."""


def torch_version() -> tuple[int, int]:
    """Major and minor version of the torch that is installed."""
    import torch

    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)


def written(version: tuple[int, int]) -> str:
    """A version as people write it.

    >>> written((2, 9))
    '2.9'
    """
    return ".".join(map(str, version))


def untried_torch() -> tuple[str, ...]:
    """A note for who captures a network or starts ranks with a torch newer than any tried; none with others."""
    version = torch_version()
    if version <= NEWEST_TRIED:
        return ()
    return (
        f"torch {written(version)} is newer than any that Meshwright was tried with (up to {written(NEWEST_TRIED)}); "
        f"if something fails, report it or use torch {written(NEWEST_TRIED)}",
    )
