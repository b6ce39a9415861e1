"""What can go wrong with the page store as the first level, and who must act: the caller, each time."""

from __future__ import annotations

from ..._errors import BackendError


class NoLayout(BackendError):
    """The caller stores or reads before the layout of its KV cache is known: ``register_kv_layout`` comes first."""


class LayoutMismatch(BackendError, ValueError):
    """The caller registers a second model: one :class:`MaruL1` holds blocks of one layout. Open another one for it."""


class ReservationOver(BackendError):
    """The caller uses a reservation that was committed or aborted: its pages are not its own any more."""
