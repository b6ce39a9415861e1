"""The exceptions of the page store. Each says who must act: the caller, the peer, or an operator.

An answer (a miss, a duplicate, a full pool, a pinned key) is a value. What is here means that there is no answer.
"""

from __future__ import annotations

import errno
from typing import Final

_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


def is_scarcity(error: BaseException) -> bool:
    """Return whether an error means that descriptors, threads or memory lack.

    The same call may succeed a moment later: no fact about its file or its peer follows from it.
    """
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SCARCE)


class MaruError(Exception):
    """Base of all exceptions of this package."""


class NoAnswer(MaruError, TimeoutError):
    """The server did not answer in time. Never a miss: the request may have been carried out, or may still be."""


class Shortage(MaruError):
    """A large frame was not sent for want of descriptors or memory.

    The connection goes on.
    """


class FateUnknown(NoAnswer):
    """It is unknown whether a store took place. Its pages are not used again until that is known."""


class ServerLost(MaruError, ConnectionError):
    """The connection to the server is gone, or the server does not know this session any more."""


class ServerRefused(MaruError):
    """The server answered with an error: the text is the server's."""

    def __init__(self, text: str, word: str = "") -> None:
        super().__init__(text)
        self.word = word
        """The server's word for the reason, for programs; empty from a published server."""


class UntrustedServer(MaruError):
    """The server is not trusted: it is another user's process, or not the one that was configured.

    The caller must act: the text names the knob, its value, and the way out.
    """


class BadFrame(MaruError, ValueError):
    """The peer sent a frame whose header is unusable: it is unknown which request it answers."""


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


class PoolUnusable(MaruError):
    """The caller names a directory, file or device that cannot hold a pool, or that stopped working. The text says why."""


class CannotMap(MaruError):
    """A region cannot be mapped here: gone, shorter than promised, misaligned, or no address space is left for it."""


class HandlerClosed(MaruError):
    """The caller uses a handler, a handle or a view after closing it."""


class JournalFailed(MaruError):
    """The journal cannot be written, or read: the disk is full, or failing. The operator of the server must act.

    What was to be written was not, none of it, so it must not be acknowledged. It may be appended again, before
    anything newer.
    """

    def __init__(self, text: str, *, lasting: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting
        """Whether trying again cannot help: an fsync failed, and it is unknown which earlier bytes are on the disk."""


class ForeignJournal(MaruError):
    """The journal is of another version, or of another pool, and was left as it is. The operator of the server must choose."""

    def __init__(self, path: str, reason: str) -> None:
        directory = path.rpartition("/")[0] or "."
        super().__init__(
            f"{path} {reason}. Start the server that wrote it, or give this one another pool, or move "
            f"{directory}/journal.* and {directory}/snapshot.* away: then this pool begins empty"
        )
        self.path = path


def excerpt(text: str, most: int = 120) -> str:
    """The beginning and the end of a long text, for a message of one line."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2 - 3) :]}"


class KnobError(ValueError):
    """The caller set a knob to what it cannot be; the text names the knob, the value, and the bound.

    Each package has a ``ConfigError`` of its own, which is one of these and one of its own errors.
    """

    def __init__(self, knob: str, value: object, bound: str) -> None:
        super().__init__(f"{knob} = {excerpt(repr(value))}: {bound}")
        self.knob = knob
        self.value = value
        self.bound = bound


class ConfigError(MaruError, KnobError):
    """The caller set a knob of the page store to a value out of range."""
