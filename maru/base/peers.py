"""Which users' servers a client trusts: the rules. Pure; :mod:`maru.base.listeners` asks the kernel.

A peer that no key proves is known by its user only. Another user's learns the keys of this one's KV cache, says where
bytes lie, and over the published protocol names the file that is mapped.

Rule 1. A listener of another user is refused. Root's is accepted: a proxy of containers is root's, and root may read all of
        it anyway.
Rule 2. If the user is unknown (another host, another network namespace), that is logged once, and the listener accepted.
Rule 3. Unless it is configured, the published protocol is spoken only over a Unix socket that this user's process listens
        at, in a directory where no other user could have put another one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import attrs

_LISTENING = "0A"
_ANY_PORT_OF = "0" * 8, "0" * 32
_MAPPED = bytes(10) + b"\xff\xff"
"""Before an address of IPv4, it is one of IPv6."""


@attrs.frozen
class Listener:
    """The listener at an address, as far as the kernel tells."""

    uids: frozenset[int] = frozenset()
    """The users of the sockets there. Empty: unknown."""
    unknown: str = ""
    """Why it cannot be told."""
    is_private: bool = False
    """Whether it is a Unix socket in a directory where only this user and root can put one."""


def why_untrusted(listener: Listener, uid: int) -> str:
    """Why not to talk to a listener; empty if nothing is against it.

    Args:
        listener: the users that listen.
        uid: this process's user.
    """
    others = listener.uids - {uid, 0}
    return f"it is served by user {min(others)}, and this process runs as {uid}" if others else ""


def may_be_published(listener: Listener, uid: int) -> bool:
    """Whether the published protocol may be spoken there without being asked for."""
    return listener.is_private and listener.uids == {uid}


def users_at(tables: Iterable[str], addresses: Iterable[bytes], port: int) -> frozenset[int]:
    """The users whose sockets serve these addresses: that listen there, or have accepted a connection there.

    A process that has accepted counts as well: it may have stopped listening since, and be the one that answers.

    Args:
        tables: texts of ``/proc/net/tcp`` and ``/proc/net/tcp6``.
        addresses: packed, of IPv4 or IPv6.
        port: theirs.
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
    """An address, and of one of IPv4 how it looks to a socket of IPv6."""
    return (address, _MAPPED + address) if len(address) == 4 else (address,)


def hexadecimal(address: bytes) -> str:
    """An address as the kernel prints it: words of four bytes, each in this machine's order."""
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(address) // 4}I", address))
