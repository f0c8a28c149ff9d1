"""Which network a job's messages take where the name of a host does not tell.

Gloo listens at the address that the host's name stands for. Where that is the loopback, as in containers and by default
on Debian, no other host reaches it, and the interface that leads to rank 0 is named in its place.
"""

from __future__ import annotations

import os
import socket
import struct

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
