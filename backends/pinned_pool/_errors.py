"""What can go wrong with pinned pools, and who must act. A full pool is not among it: that is an answer."""

from __future__ import annotations

from maru._errors import KnobError

from .._errors import BackendError, PlaceClosed


class PinnedPoolError(BackendError, RuntimeError):
    """Base of what pinned pools raise. It is a ``RuntimeError`` as well, as callers of pools over a network expect."""


class PoolUnreachable(PinnedPoolError):
    """There is no server, or what answers there is none. Its operator must start it; nothing was taken."""


class PoolUntrusted(PinnedPoolError):
    """Another user's process listens there. The caller starts a server of its own, or says whose it means (``server_uid``)."""


class PoolLost(PinnedPoolError):
    """The connection is over: the server has ended, or has hung up. The pool and all its blocks are gone with it."""


class PoolTimeout(PinnedPoolError, TimeoutError):
    """The server did not answer in time. The pool is still there: the same call may be made again."""


class PoolRefused(PinnedPoolError):
    """The server does not do this for the caller; the text says why. Nothing has changed."""


class PoolClosed(PinnedPoolError, PlaceClosed):
    """The caller uses a pool that it has closed."""


class PoolForked(PoolClosed):
    """The pool belongs to the process that this one was forked from. The caller makes one here."""


class BlockFreed(PinnedPoolError):
    """The caller uses a block that it has freed."""


class PinnedPoolConfigError(BackendError, KnobError):
    """The caller set a knob to what it cannot be; the text names the knob, the value, and the bound."""
