"""Operations on pins at the server: take, give back, and claim. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ..._wire import (
    Code,
    FindReply,
    FindRequest,
    KeysRequest,
    PinsReply,
    PinsRequest,
    UnpinRequest,
)
from ...base.errors import ServerRefused
from .effects import Alone, Call, Operation, Request
from .state import ClientState

SESSION_GONE = "no_session"
FENCED = "fenced"
"""The request came too late: a later one has been done."""


def find_call(s: ClientState, names: list[str], *, prefix: bool = False) -> Call:
    """Make a FIND that pins.

    If its answer comes too late, its pins are given back.
    """
    pin_epoch = s.pin_epochs.current

    def late(reply: FindReply) -> None:
        s.disown(pin_epoch, reply.epoch, [names[at] for at in reply.positions])

    return Call(Code.FIND, FindRequest(s.token, s.pages.acknowledged, names, True, prefix, pin_epoch), late=late)


def retake_pins(s: ClientState) -> Operation[None]:
    """Pin all held keys again, in a new era.

    Views of a key with another registration are lost.
    """
    for some in portions(s.pinned.lapsed(s.era), s.max_keys):
        reply: FindReply = yield find_call(s, some)
        *where, _ = reply.columns()
        places = {some[at]: place for at, place in zip(reply.positions, zip(*where, strict=True), strict=True)}
        for key in some:
            if not s.pinned.retaken(key, places.get(key), s.era):
                s.counters.views_lost += 1


def give_back_pins(s: ClientState, *, wait: bool = True) -> Operation[None]:
    """Give back the pins that are due.

    A request that was sent is not repeated, answered or not: it is done sooner or later, and done twice it could undo a
    pin that was taken since. If it is lost, that shows in the end: see `pin_epochs`.
    """
    if s.pin_epochs.is_claiming:  # a claim under way may name the pins that are due
        if wait:
            yield Alone(_nothing)  # until that is over
        if s.pin_epochs.is_claiming:
            return
    due, s.pinned.due = s.pinned.due, []
    pin_epoch = s.pin_epochs.current
    unsent = list(portions(due, s.max_keys))
    try:
        while unsent and pin_epoch == s.pin_epochs.current:
            some = unsent[-1]
            if s.own:
                message: Request = UnpinRequest(s.token, s.pages.acknowledged, some, pin_epoch)
                call = Call(Code.UNPIN, message, sending=unsent.pop, is_awaited=wait)
            else:
                call = Call(Code.BATCH_UNPIN_KV, KeysRequest(some), sending=unsent.pop, is_awaited=wait)
            yield call
            if unsent and unsent[-1] is some:  # it could not leave now
                break
    except ServerRefused as exc:
        if exc.word == FENCED and pin_epoch != s.pin_epochs.current:
            return  # the pin was not claimed, so it has gone with the claim
        if exc.word != SESSION_GONE:
            raise
        s.unsettled = True  # and its pins are gone with it
        unsent.clear()
    finally:
        if pin_epoch == s.pin_epochs.current:  # otherwise the server is another one, or a claim has corrected its pins
            for some in unsent:
                s.pinned.due += some


def _nothing() -> Operation[None]:
    """Do nothing; run exclusively, so that running operations finish first."""
    yield from ()


def claim_pins(s: ClientState) -> Operation[None]:
    """Send the server a claim of all pins that we hold.

    Run it exclusively. The server then drops the pins that a lost answer has taken. An error or a cancel leaves the
    claim due: the next one names the pins held then.
    """
    if not s.doubts_pins():
        return
    era = s.era
    pin_epoch, keys, counts = s.begin_claim()
    is_settled = False
    n = s.max_keys
    try:
        for at in range(0, len(keys) or 1, n):  # the last one drops all other pins, so it must arrive last
            last = at + n >= len(keys)
            request = PinsRequest(
                s.token, s.pages.acknowledged, pin_epoch, keys[at : at + n], counts[at : at + n], last
            )
            reply: PinsReply = yield Call(Code.PINS, request)
            if era != s.era:
                return
            s.counters.pins_unknown += reply.dropped
        is_settled = True
    except ServerRefused as exc:
        if exc.word == SESSION_GONE:
            s.unsettled = True  # and its pins are gone with it
        elif exc.word != FENCED or pin_epoch == s.pin_epochs.current:
            raise
    finally:
        s.pin_epochs.end_claim(pin_epoch, is_settled=is_settled)
    yield from give_back_pins(s, wait=False)


def portions(keys: list[str], n: int) -> Iterable[list[str]]:
    """Split keys into requests that the server accepts."""
    if len(keys) <= n:
        return (keys,) if keys else ()
    return (keys[start : start + n] for start in range(0, len(keys), n))
