"""Errors of the page store as the first level.

The caller must act each time.
"""

from __future__ import annotations

from ..._errors import BackendError


class NoLayout(BackendError):
    """A store or read before the KV cache's layout is registered.

    The caller must call ``register_kv_layout`` first.
    """


class LayoutMismatch(BackendError, ValueError):
    """A second model in one :class:`MaruL1`.

    It holds blocks of one layout; the caller must open another one.
    """


class ReservationOver(BackendError):
    """Use of a reservation that was committed or aborted.

    Its pages belong to it no longer.
    """
