"""The states of a page, what moves it, and the one table of legal moves. Pure.

An owner chooses the page for a key by itself, without asking anybody. That is what makes a store one round trip, and it is
what can go wrong: a page that is used again while the server still tells readers that it holds the old key gives them
another key's bytes. Hence IN_DOUBT, and the ways out of it.

The owner decides FREE and ALLOCATED, the server every other state. What a pin is only the server knows: in the columns of an
owner (:mod:`maru._client.pages`) a pinned page reads REGISTERED. The diagram in the documentation is drawn from ``MOVES``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class PageState(enum.IntEnum):
    """Where a page is on its way round."""

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
    """What moves a page."""

    leads_to: bytes
    """Its column of ``MOVES``: the state that follows each state, by number, and ``NOWHERE`` where no arrow leads."""

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
    """A page was asked to move where no arrow leads. A bug of this package; nothing was changed."""
