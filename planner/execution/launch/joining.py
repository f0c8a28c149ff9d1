"""How the processes of a job come together, and what is said when one does not come."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from planner.execution.launch.membership import Membership
from simulator.errors import ExecutionError, InputError

VARIABLE = "GLOO_SOCKET_IFNAME"
NAME_BYTES = 15
GET_ADDRESS = 0x8915
"""``SIOCGIFADDR`` of Linux: the IPv4 address of an interface."""


def name_interface(address: str, port: int) -> str | None:
    """Let gloo use the interface that leads to a job's meeting point, where it would find none itself.

    Returns its name if it was named, and leaves alone what the user has named, and jobs of one host.
    """
    if VARIABLE in os.environ or not means_loopback(socket.gethostname()) or means_loopback(address):
        return None
    own = _own_address(address, port)
    found = None if own is None else interface_of(own)
    if found is not None:
        os.environ[VARIABLE] = found
    return found


def interface_of(address: str) -> str | None:
    """The interface of this host with an IPv4 address; None where there is none, or the system does not tell."""
    try:
        import fcntl

        names = [name for _, name in socket.if_nameindex()]
    except (ImportError, OSError):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            request = struct.pack("256s", name.encode()[:NAME_BYTES])
            try:
                answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def means_loopback(host: str) -> bool:
    """Whether a name stands for this host alone; one that stands for nothing leads no farther."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return True
    return all(map(says_loopback, found))


def says_loopback(host: str) -> bool:
    """Whether a name says by itself that no other host is meant.

    >>> [says_loopback(host) for host in ("localhost", "127.0.1.1", "::1", "node7")]
    [True, True, True, False]
    """
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _own_address(address: str, port: int) -> str | None:
    """The address from which this host reaches another; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


LINGER_S = 2.0
"""Rank 0 keeps the meeting point open for this long after it has given up, so that the others see why."""
SHOWN = 8

LISTEN = "MESHWRIGHT_LISTEN"
"""Variable that names the address at which rank 0 listens, where it is not the one that the others connect to."""


def meet(membership: Membership, timeout_s: float, digest: str) -> Store:
    """Meet the other processes of a job, and return the store they share.

    Parameters
    ----------
    timeout_s : float
        How long to wait for the last of them.
    digest : str
        Of what this process has been asked to do; all must have been asked the same.

    Raises
    ------
    ExecutionError
        Some did not come: names them.
    InputError
        Two have the same rank, or were asked for different things.
    """
    end = time.monotonic() + timeout_s
    store = _store(membership, timeout_s)
    rank, size = membership.rank, membership.world_size
    try:
        if store.add(f"rank/{rank}", 1) > 1:
            raise InputError(
                f"two processes have rank {rank} of {size} at {_place(membership)}; give each process a rank of its "
                "own, and each job a port of its own"
            )
        store.set(f"digest/{rank}", digest)
        if store.add("arrived", 1) == size:
            store.set("complete", "")
        _wait(store, membership, end, timeout_s)
        _check_alike(store, rank, size, digest)
    except (RuntimeError, OSError) as error:
        raise ExecutionError(
            f"rank {rank} of {size} lost the meeting point {_place(membership)} ({_short(error)}): rank 0 has ended; "
            "see its output"
        ) from error
    return store


def _place(membership: Membership) -> str:
    return f"{membership.address}:{membership.port}"


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _store(membership: Membership, timeout_s: float) -> Store:
    """Connect to the store of the launcher's agent, or to that which rank 0 opens."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    opens = membership.rank == 0 and not hosted
    listening = _listen(membership) if opens else None
    try:
        found = TCPStore(
            membership.address,
            membership.port,
            membership.world_size,
            is_master=opens,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except (RuntimeError, OSError, ValueError) as error:
        if opens:
            raise _cannot_listen(membership, _short(error)) from error
        raise ExecutionError(
            f"rank {membership.rank} of {membership.world_size} did not reach {_place(membership)} within "
            f"{timeout_s:g} s; check that rank 0 runs there and that the port is open, or give --join-timeout more"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"meshwright/{attempt}", found)


def _listen(membership: Membership) -> socket.socket:
    """Listen where the job says that rank 0 is, or where the user says, and nowhere else.

    Left to itself the store would listen on all interfaces of the host.
    """
    address = os.environ.get(LISTEN) or membership.address
    try:
        found = socket.getaddrinfo(address, membership.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _cannot_listen(membership, f"{address} is no address ({error.strerror})") from error
    family, _, _, _, place = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    several = membership.local_size < membership.world_size
    if several and means_loopback(address) and not says_loopback(address):
        raise _cannot_listen(
            membership, f"on this host the name {address} stands for {place[0]}, which no other host reaches"
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(socket.SOMAXCONN)
    except OSError as error:
        listening.close()
        taken = error.errno == errno.EADDRINUSE
        raise _cannot_listen(membership, "the port is taken" if taken else str(error.strerror)) from error
    return listening


def _cannot_listen(membership: Membership, reason: str) -> ExecutionError:
    return ExecutionError(
        f"rank 0 cannot listen at {_place(membership)}: {reason}; set MASTER_PORT to a free port and MASTER_ADDR to an "
        f"address of rank 0's host, the same for all, or {LISTEN} to the address that rank 0 listens at"
    )


def _wait(store: Store, membership: Membership, end: float, timeout_s: float) -> None:
    try:
        store.wait(["complete"], timedelta(seconds=max(0.1, end - time.monotonic())))
    except (RuntimeError, OSError) as error:
        size = membership.world_size
        missing = [rank for rank in range(size) if not store.check([f"rank/{rank}"])]
        if not missing:
            raise
        if membership.rank == 0:
            time.sleep(LINGER_S)
        raise ExecutionError(
            f"only {size - len(missing)} of {size} processes came to {_place(membership)} within {timeout_s:g} s, "
            f"missing rank {_shown(missing)}; see why it was not started, or give --join-timeout more"
        ) from error


def _check_alike(store: Store, rank: int, size: int, digest: str) -> None:
    """Let rank 0 see who was asked for something else than itself, and tell all."""
    if rank == 0:
        given = store.multi_get([f"digest/{one}" for one in range(size)])
        store.set("unlike", _shown([one for one, theirs in enumerate(given) if theirs.decode() != digest]))
    unlike = store.get("unlike").decode()
    if unlike:
        if rank == 0:
            time.sleep(LINGER_S)
        raise InputError(
            f"rank {unlike} was started with another strategy or other options than rank 0; start all alike"
        )


def _shown(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:SHOWN])) + (", …" if len(ranks) > SHOWN else "")


@contextmanager
def process_group(backend: str, store: Store, membership: Membership, timeout_s: float) -> Iterator[None]:
    """Have a default process group whose operations wait no longer than ``timeout_s`` for another rank."""
    name_interface(membership.address, membership.port)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=membership.rank,
        world_size=membership.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
