"""What can go wrong with the page store, and who must act.

An answer (a miss, a duplicate, a full pool, a pinned key) is a value. What is here means that there is no answer.
"""

from __future__ import annotations


class MaruError(Exception):
    """Base of every error of this package."""


class NoAnswer(MaruError, TimeoutError):
    """The server did not answer in time. Never a miss: what was asked for may have happened, or may happen still."""


class ServerLost(MaruError, ConnectionError):
    """The connection to the server is gone, or the server does not know this session any more."""


class ServerRefused(MaruError):
    """The server answered with an error: the text is the server's."""

    def __init__(self, text: str, word: str = "") -> None:
        super().__init__(text)
        self.word = word
        """The server's word for the reason, for programs; empty from a published server."""


class BadFrame(MaruError, ValueError):
    """The peer sent a frame whose header is unusable: nobody can tell what it answers."""


class BadMessage(MaruError, ValueError):
    """The peer sent a valid header with a body that is not a message of that code."""


class LeaseLost(MaruError):
    """A view is not valid any more: its lease is over, or the server that gave it has restarted. Do not use its bytes."""


class Damaged(MaruError):
    """The bytes of a page are not those that were stored under this key: its checksum or its generation differs."""


class NotOwner(MaruError):
    """The caller writes, frees or hands back what belongs to another session, or presents a capability for it."""


class PoolFull(MaruError):
    """There is no memory for another region, and none that could be evicted."""


class PoolInUse(MaruError):
    """The caller wants a pool directory that another server owns, here or in another process."""


class HandlerClosed(MaruError):
    """The caller uses a handler, a handle or a view after closing it."""
