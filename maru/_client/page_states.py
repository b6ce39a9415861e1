"""States and events of a page, and the legal moves. Pure.

An owner chooses the page for a key by itself, without asking the server. That makes a store one round trip, and it can
go wrong: a page that is used again while the server still reports the old key there gives readers another key's bytes.
Hence IN_DOUBT, and the ways out of it.

The owner decides FREE and ALLOCATED, the server every other state. Only the server knows pins: in the columns of an
owner (:mod:`maru._client.pages`) a pinned page reads REGISTERED. The diagram in the documentation is drawn from
``MOVES``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class PageState(enum.IntEnum):
    """State of a page."""

    FREE = 0
    ALLOCATED = 1
    REGISTERING = 2
    REGISTERED = 3
    PINNED = 4
    IN_DOUBT = 5
    RETURNING = 6
    QUARANTINED = 7
    ORPHAN = 8


class PageEvent(enum.Enum):
    """Event that moves a page."""

    leads_to: bytes
    """Column of ``MOVES``: the next state for each state, by number.

    ``NOWHERE`` if the event is illegal in that state.
    """

    ALLOCATE = "allocated"
    CANCEL = "cancelled before anything was sent"
    SEND = "STORE sent"
    NEW = "answered new"
    REFUSED = "answered duplicate or refused"
    DISPUTED = "answered: it holds a pinned key, or is another's"
    UNANSWERED = "timeout, cancel, disconnect"
    HELD = "RESOLVE: held"
    NOT_HELD = "RESOLVE: not held"
    UNKNOWABLE = "no RESOLVE: a published server"
    PIN = "pin"
    UNPIN = "unpin"
    LAST_UNPIN = "last unpin, or lease end"
    DROP = "deleted or evicted"
    ACKNOWLEDGE = "return acknowledged"
    END = "its owner closes, or its lease ends"


_S, _E = PageState, PageEvent

MOVES: Final[Mapping[PageState, Mapping[PageEvent, PageState]]] = {
    _S.FREE: {_E.ALLOCATE: _S.ALLOCATED, _E.END: _S.ORPHAN},
    _S.ALLOCATED: {_E.CANCEL: _S.FREE, _E.SEND: _S.REGISTERING, _E.END: _S.ORPHAN},
    _S.REGISTERING: {
        _E.NEW: _S.REGISTERED,
        _E.REFUSED: _S.FREE,
        _E.DISPUTED: _S.QUARANTINED,
        _E.UNANSWERED: _S.IN_DOUBT,
        _E.DROP: _S.RETURNING,  # the return has overtaken the answer
        _E.END: _S.ORPHAN,
    },
    _S.REGISTERED: {_E.PIN: _S.PINNED, _E.DROP: _S.RETURNING, _E.END: _S.ORPHAN},
    _S.PINNED: {_E.PIN: _S.PINNED, _E.UNPIN: _S.PINNED, _E.LAST_UNPIN: _S.REGISTERED, _E.END: _S.ORPHAN},
    _S.IN_DOUBT: {
        _E.HELD: _S.REGISTERED,
        _E.NOT_HELD: _S.FREE,
        _E.UNKNOWABLE: _S.QUARANTINED,
        _E.DROP: _S.RETURNING,  # the return has overtaken the answer
        _E.END: _S.ORPHAN,
    },
    _S.RETURNING: {_E.ACKNOWLEDGE: _S.FREE, _E.END: _S.ORPHAN},
    _S.QUARANTINED: {_E.END: _S.ORPHAN},
    _S.ORPHAN: {},
}

NOWHERE: Final = 0xFF

for _event in PageEvent:
    _column = bytearray([NOWHERE] * 256)  # for `bytes.translate`
    for _state, _moves in MOVES.items():
        _column[_state] = _moves.get(_event, NOWHERE)
    _event.leads_to = bytes(_column)


class IllegalMove(AssertionError):
    """A page got an event that is illegal in its state.

    A bug of this package; nothing was changed.
    """
