"""Operations: pins at the server: taking them, giving them back, and saying which we hold. Pure."""

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
"""It was asked too late: what came after it has been done."""


def find_call(s: ClientState, names: list[str], *, prefix: bool = False) -> Call:
    """A FIND that pins. Answered too late, what it has pinned is given back."""
    pin_epoch = s.pin_epochs.current

    def late(reply: FindReply) -> None:
        s.disown(pin_epoch, reply.epoch, [names[at] for at in reply.positions])

    return Call(Code.FIND, FindRequest(s.token, s.pages.acknowledged, names, True, prefix, pin_epoch), late=late)


def retake_pins(s: ClientState) -> Operation[None]:
    """Pin again what is pinned. A view of what is not the same registration any more is lost."""
    for some in portions(s.pinned.lapsed(s.era), s.max_keys):
        reply: FindReply = yield find_call(s, some)
        *where, _ = reply.columns()
        places = {some[at]: place for at, place in zip(reply.positions, zip(*where, strict=True), strict=True)}
        for key in some:
            if not s.pinned.retaken(key, places.get(key), s.era):
                s.counters.views_lost += 1


def give_back_pins(s: ClientState, *, wait: bool = True) -> Operation[None]:
    """Undo the pins that are due.

    What was sent is not asked for again, answered or not: it is done sooner or later, and done twice it could undo a pin that
    was taken since. If it is lost, that shows in the end: see `pin_epochs`.
    """
    if s.pin_epochs.is_claiming:  # what is given back now may be claimed
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
            return  # it was not claimed, so it has gone with the claim
        if exc.word != SESSION_GONE:
            raise
        s.unsettled = True  # and its pins are gone with it
        unsent.clear()
    finally:
        if pin_epoch == s.pin_epochs.current:  # or else the server is another one, or it was told by a claim
            for some in unsent:
                s.pinned.due += some


def _nothing() -> Operation[None]:
    """To be run alone: waits for what else is."""
    yield from ()


def claim_pins(s: ClientState) -> Operation[None]:
    """Tell the server which pins we hold, so that it lets go of what an answer that was lost has pinned. To be run alone.

    Whatever goes wrong, or a cancel, leaves the claim due: the next one names what is held then.
    """
    if not s.doubts_pins():
        return
    era = s.era
    pin_epoch, keys, counts = s.begin_claim()
    is_settled = False
    n = s.max_keys
    try:
        for at in range(0, len(keys) or 1, n):  # the last of them lets go, so all others must have arrived before
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
    """As many at once as the server takes."""
    if len(keys) <= n:
        return (keys,) if keys else ()
    return (keys[start : start + n] for start in range(0, len(keys), n))
