"""Exceptions of pinned pools. A full pool is not one.

Each names who must act. A full pool is an answer.
"""

from __future__ import annotations

from maru.base.errors import KnobError

from .._errors import BackendError, PlaceClosed


class PinnedPoolError(BackendError, RuntimeError):
    """Base of the exceptions of pinned pools.

    It is a ``RuntimeError`` as well, as callers of pools over a network expect.
    """


class PoolUnreachable(PinnedPoolError):
    """No pinned pool's server answers.

    An operator must start it; nothing was allocated.
    """


class PoolUntrusted(PinnedPoolError):
    """The listener belongs to another user.

    The caller must start a server, or name that user (``server_uid``).
    """


class PoolLost(PinnedPoolError):
    """The connection is over, and the pool and its blocks are gone.

    The server has ended, or has disconnected.
    """


class PoolTimeout(PinnedPoolError, TimeoutError):
    """The server did not answer in time.

    The pool is still there: the same call may be made again.
    """


class PoolRefused(PinnedPoolError):
    """The server refuses a request, or this host cannot send it.

    The text has the reason, a lack of descriptors for example. Nothing has changed.
    """


class PoolClosed(PinnedPoolError, PlaceClosed):
    """Use of a pool that the caller has closed."""


class PoolForked(PoolClosed):
    """Use of a pool that was inherited by a fork.

    It belongs to the parent process. The caller opens one in this process.
    """


class BlockFreed(PinnedPoolError):
    """Use of a block that the caller has freed."""


class PinnedPoolConfigError(BackendError, KnobError):
    """A value of a knob that is out of range.

    The text names the knob, the value, and the bound.
    """
