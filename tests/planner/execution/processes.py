"""The processes of a command as the system shows them: which there are, what they do, where they listen."""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = "MESHWRIGHT_TEST_MARK"
"""Variable whose value tells the processes of one command from all others."""
LISTENS = "0A"


def marked(mark: str) -> list[int]:
    """Living processes that were started with a mark, and what they have started."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0") and state(int(entry.name)) not in "ZX":
                    found.append(int(entry.name))
    return sorted(found)


def state(pid: int) -> str:
    """Letter of a process's state, `X` where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(pid: int) -> bool:
    return state(pid) not in "ZX"


def line(pid: int) -> str:
    """Command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait_until_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until processes have ended; returns those that have not."""
    end = time.monotonic() + timeout_s
    left = list(pids)
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = [pid for pid in left if alive(pid)]
    return left


def listening(pids: Iterable[int]) -> set[str]:
    """Addresses at which processes listen."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(str(entry.readlink()).removeprefix("socket:[").rstrip("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for text in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = text.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _address(text: str) -> str:
    """An address as the kernel writes it, in words of the machine's byte order."""
    words = [struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
