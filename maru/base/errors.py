"""The exceptions of the page store.

Each names who must act: the caller, the peer, or an operator. An answer (a miss, a duplicate, a full pool, a pinned
key) is a value. An exception means that there is no answer.
"""

from __future__ import annotations

import errno
from typing import Final

_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


def is_scarcity(error: BaseException) -> bool:
    """Return whether an error means a shortage of descriptors, threads or memory.

    The same call may succeed a moment later: the error implies nothing about its file or its peer.
    """
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SCARCE)


class MaruError(Exception):
    """Base of all exceptions of this package."""


class NoAnswer(MaruError, TimeoutError):
    """The server did not answer in time.

    This is never a miss: the request may have been carried out, or may still be.
    """


class Shortage(MaruError):
    """A large frame was not sent, for lack of descriptors or memory.

    The connection stays usable.
    """


class FateUnknown(NoAnswer):
    """A store has an unknown outcome.

    Its pages are not used again until the outcome is known.
    """


class ServerLost(MaruError, ConnectionError):
    """The connection is gone, or the server has forgotten this session."""


class ServerRefused(MaruError):
    """The server answered with an error, whose text is the server's."""

    def __init__(self, text: str, word: str = "") -> None:
        super().__init__(text)
        self.word = word
        """Code of the reason, for programs; empty from a published server."""


class UntrustedServer(MaruError):
    """The server is another user's process, or not the configured one.

    The caller must act: the text names the knob, its value, and the way out.
    """


class BadFrame(MaruError, ValueError):
    """The peer sent a frame with an unusable header.

    It is unknown which request the frame answers.
    """


class BadMessage(MaruError, ValueError):
    """The peer sent a valid header with a body of another type."""


class LeaseLost(MaruError):
    """A view's lease is over, or its server has restarted.

    The bytes of the view must not be used any more.
    """


class Damaged(MaruError):
    """The bytes of a page are not those stored under this key.

    Its checksum or its generation differs.
    """


class NotOwner(MaruError):
    """The caller uses memory of another session, or a capability for it.

    It writes, frees or hands the memory back.
    """


class PoolFull(MaruError):
    """No memory is left for another region, and none can be evicted."""


class PoolInUse(MaruError):
    """The caller wants a pool directory that another server owns.

    That server is in this process or in another.
    """


class PoolUnusable(MaruError):
    """The caller names a directory, file or device unusable for a pool.

    It cannot hold a pool, or has stopped working. The text gives the reason.
    """


class CannotMap(MaruError):
    """A region cannot be mapped in this process.

    It is gone, shorter than promised or misaligned, or no address space is left for it.
    """


class HandlerClosed(MaruError):
    """The caller uses a closed handler, handle or view."""


class JournalFailed(MaruError):
    """The journal cannot be written or read; the operator must act.

    The disk is full, or failing. No part of the record was written, so it must not be acknowledged. It may be appended
    again, before anything newer.
    """

    def __init__(self, text: str, *, lasting: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting
        """Whether a retry is useless.

        An fsync failed, and it is unknown which earlier bytes are on the disk.
        """


class ForeignJournal(MaruError):
    """The journal is of another version or pool, and was left unchanged.

    The operator of the server must choose.
    """

    def __init__(self, path: str, reason: str) -> None:
        directory = path.rpartition("/")[0] or "."
        super().__init__(
            f"{path} {reason}. Start the server that wrote it, or give this one another pool, or move "
            f"{directory}/journal.* and {directory}/snapshot.* away: then this pool begins empty"
        )
        self.path = path


def excerpt(text: str, most: int = 120) -> str:
    """Return the beginning and the end of a long text.

    The result fits into a one-line message.
    """
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2 - 3) :]}"


class KnobError(ValueError):
    """The caller set a knob to an invalid value.

    The text names the knob, the value, and the bound. Each package has a ``ConfigError``, which derives from this class
    and from the package's own base.
    """

    def __init__(self, knob: str, value: object, bound: str) -> None:
        super().__init__(f"{knob} = {excerpt(repr(value))}: {bound}")
        self.knob = knob
        self.value = value
        self.bound = bound


class ConfigError(MaruError, KnobError):
    """The caller set a knob of the page store out of range."""
