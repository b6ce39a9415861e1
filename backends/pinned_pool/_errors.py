"""The exceptions of pinned pools. Each says who must act. A full pool is no exception, but an answer."""

from __future__ import annotations

from maru.base.errors import KnobError

from .._errors import BackendError, PlaceClosed


class PinnedPoolError(BackendError, RuntimeError):
    """Base of what pinned pools raise. It is a ``RuntimeError`` as well, as callers of pools over a network expect."""


class PoolUnreachable(PinnedPoolError):
    """There is no server, or the process that answers is none. An operator must start it; nothing was allocated."""


class PoolUntrusted(PinnedPoolError):
    """The listener belongs to another user. The caller starts a server, or names that user (``server_uid``)."""


class PoolLost(PinnedPoolError):
    """The connection is over: the server has ended, or has disconnected. The pool and all its blocks are gone with it."""


class PoolTimeout(PinnedPoolError, TimeoutError):
    """The server did not answer in time. The pool is still there: the same call may be made again."""


class PoolRefused(PinnedPoolError):
    """The server refuses a request, or this host cannot send it.

    The text has the reason, a want of descriptors for example. Nothing has changed.
    """


class PoolClosed(PinnedPoolError, PlaceClosed):
    """The caller uses a pool that it has closed."""


class PoolForked(PoolClosed):
    """The pool belongs to the process that this one was forked from. The caller opens one in this process."""


class BlockFreed(PinnedPoolError):
    """The caller uses a block that it has freed."""


class PinnedPoolConfigError(BackendError, KnobError):
    """The caller set a knob to a value out of range; the text names the knob, the value, and the bound."""
