"""Whose process is at the other end of a TCP connection of this host, as the kernel's tables tell it. Pure.

Rule 1. Only a connection that both ends hold counts. Of one whose process has closed it the kernel says that it is root's, and
        what it has sent may still be read.
Rule 2. A connection that is not in the tables is nobody's.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final, TypeAlias

from .._peers import forms_of, hexadecimal

TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")

Address: TypeAlias = tuple[str, int]
"""Host, as a number, and port."""

_ESTABLISHED: Final = b"01"
_NO_INODE: Final = b"0"
_LOCAL, _REMOTE, _STATE, _USER, _INODE = 1, 2, 3, 7, 9


def connections(tables: Iterable[bytes]) -> dict[tuple[bytes, bytes], int]:
    """The user of each end of each established connection, by its own address and the other end's.

    Args:
        tables: what is in :data:`TABLES`.
    """
    found = {}
    for table in tables:
        for line in table.splitlines()[1:]:
            fields = line.split()
            if len(fields) > _INODE and fields[_STATE] == _ESTABLISHED and fields[_INODE] != _NO_INODE:
                found[fields[_LOCAL], fields[_REMOTE]] = int(fields[_USER])
    return found


def user_of(table: dict[tuple[bytes, bytes], int], local: Address, remote: Address) -> int | None:
    """The user at the other end of our connection, or None where nobody holds it any more.

    Args:
        table: of :func:`connections`.
        local: our address.
        remote: the other end's.
    """
    for ends in zip(_printed(remote), _printed(local), strict=True):  # its own address comes first in its line
        if ends in table:
            return table[ends]
    return None


def _printed(address: Address) -> list[bytes]:
    """As the kernel does it: of an address of IPv4 in two ways, for a socket of IPv6 may be at the other end."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    packed = socket.inet_pton(family, host.partition("%")[0])
    return [f"{hexadecimal(form)}:{port:04X}".encode() for form in forms_of(packed)]
