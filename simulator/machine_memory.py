"""Memory that is free on this machine for new data, and a bound of a process to it."""

from __future__ import annotations

from pathlib import Path

MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")
STATUS = Path("/proc/self/status")


def free_memory() -> int | None:
    """Bytes free for new data, where the machine and the limit of this container allow that; None if unknown."""
    found = [bound for bound in (_field(MEMORY, "MemAvailable"), _left_in_group()) if bound is not None]
    return min(found, default=None)


def bound_memory() -> None:
    """Let allocations of this process fail that exceed what is free now, swap included.

    Otherwise Linux grants them, and once they are used it kills some process, not always this one.
    """
    import resource  # which Windows does not have

    free = free_memory()
    if free is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = status("VmData") + free + (_field(MEMORY, "SwapFree") or 0)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def status(field: str) -> int:
    """Bytes in a field of this process's status, such as VmRSS; 0 where the system has none."""
    return _field(STATUS, field) or 0


def _field(path: Path, name: str) -> int | None:
    """Read one field of a file in /proc, in bytes; None if it is missing."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _left_in_group() -> int | None:
    """Return the bytes left below the limit of this process's control group, not counting file cache as used."""
    try:
        limit, used = (GROUP / "memory.max").read_text(), int((GROUP / "memory.current").read_text())
        lines = (GROUP / "memory.stat").read_text().splitlines()
        cache = next((int(line.split()[1]) for line in lines if line.startswith("file ")), 0)
        return max(0, int(limit) - used + cache)
    except (OSError, ValueError):  # no such group, or no limit
        return None
