"""Rules for trusting the user that runs a server. Pure.

:mod:`maru.base.listeners` asks the kernel. A peer without a key is known by its user only. Another user's server would
learn the keys of this user's KV cache, return the offsets of bytes, and over the published protocol name the file to
map.

Rule 1. A listener of another user is refused. Root's is accepted: a proxy of containers is root's, and root may read
        everything anyway.
Rule 2. If the user is unknown (another host, another network namespace), that is logged once, and the listener
        accepted.
Rule 3. Unless it is configured, the published protocol is spoken only over a Unix socket at which this user's process
        listens, in a directory where no other user could have put another one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import attrs

_LISTENING = "0A"
_ANY_PORT_OF = "0" * 8, "0" * 32
_MAPPED = bytes(10) + b"\xff\xff"
"""Prefix that turns an IPv4 address into an IPv6 address."""


@attrs.frozen
class Listener:
    """A kernel's report on the listener at an address."""

    uids: frozenset[int] = frozenset()
    """Users of the sockets there. Empty: unknown."""
    unknown: str = ""
    """Reason why the users are unknown."""
    is_private: bool = False
    """Whether only this user and root can put a socket there.

    True for a Unix socket in a directory that no other user may write to.
    """


def why_untrusted(listener: Listener, uid: int) -> str:
    """Return the reason not to trust a listener, or an empty text.

    Args:
        listener: the users that listen.
        uid: this process's user.
    """
    others = listener.uids - {uid, 0}
    return f"it is served by user {min(others)}, and this process runs as {uid}" if others else ""


def may_be_published(listener: Listener, uid: int) -> bool:
    """Return whether to speak the published protocol there without being configured to."""
    return listener.is_private and listener.uids == {uid}


def users_at(tables: Iterable[str], addresses: Iterable[bytes], port: int) -> frozenset[int]:
    """Return the users whose sockets listen or have accepted at these addresses.

    A process that has accepted counts as well: it may have stopped listening since, and still answer.

    Args:
        tables: texts of ``/proc/net/tcp`` and ``/proc/net/tcp6``.
        addresses: packed addresses of IPv4 or IPv6.
        port: port of all the addresses.
    """
    exact = {hexadecimal(form) for address in addresses for form in forms_of(address)}
    found: set[int] = set()
    for table in tables:
        for line in table.splitlines()[1:]:
            words = line.split()
            local, _, local_port = words[1].partition(":")
            if int(local_port, 16) != port:
                continue
            if local in exact or (words[3] == _LISTENING and local in _ANY_PORT_OF):
                found.add(int(words[7]))
    return frozenset(found)


def forms_of(address: bytes) -> tuple[bytes, ...]:
    """Return an address, and for IPv4 its form on an IPv6 socket."""
    return (address, _MAPPED + address) if len(address) == 4 else (address,)


def hexadecimal(address: bytes) -> str:
    """Format an address as the kernel prints it.

    Words of four bytes, each in this machine's byte order.
    """
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(address) // 4}I", address))
