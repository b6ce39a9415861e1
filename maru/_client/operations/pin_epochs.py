"""Pin epochs: how a client corrects pins after lost messages. Pure.

A FIND whose answer was lost has pinned keys that the client does not know of; an UNPIN whose request was lost has not
given back pins that the client does not hold any more. Neither can be repeated: done twice, an UNPIN undoes a pin that
is still relied on. So the client once sends a claim of all that it holds, and the server drops the rest. Requests under
way meanwhile are kept apart by a number, the *pin epoch*, that every FIND and UNPIN bears (``turn`` on the wire).

Rule 1. A claim names the pins that are held at the moment at which an epoch begins. An answer to a FIND of an earlier
        one is not used any more: the claim does not name the pins that it took.
Rule 2. Pins that are due to be given back at that moment are not given back, since they are not claimed. Until the
        claim is answered nothing is given back: it may be claimed.
Rule 3. A claim is due only when an answer has not come for as long as any call waits for one, and until one was
        answered. Its causes are forgotten when it begins: the next claim is due for messages lost from then on.
Rule 4. Another era begins another epoch as well: a request to a server that is gone does nothing if it arrives at the
        next one after requests to that one. Pins of a FIND that came first are not given back, since an UNPIN that came
        first may have undone them already: a claim is due at once.
"""

from __future__ import annotations

from typing import Final

from .effects import Call

MOST_UNANSWERED: Final = 4_096
"""Most calls that are remembered one by one.

More of them are treated as a lost one.
"""


class PinEpochs:
    """The pin epochs of one client, with the causes for a claim."""

    def __init__(self) -> None:
        self.current = 0
        """Pin epoch of a FIND or an UNPIN that is sent now."""
        self.claimed = 0
        """Epoch of the last claim.

        Of the pins requested in earlier epochs of this era, none is left that the claim does not name.
        """
        self.is_claiming = False
        """Whether a claim is under way."""
        self.is_lost = False
        """Whether a claim is due at once.

        The server has pins that are not held here, and the requests that undo them may have been done already.
        """
        self._is_unsettled = False  # a claim was begun and none was answered since
        self._unanswered: dict[Call, None] = {}  # calls given up

    @property
    def waits(self) -> bool:
        """Whether late answers may still come."""
        return bool(self._unanswered)

    def next_era(self) -> None:
        """Begin an era, with another server or another session.

        Requests to the one before may still arrive, and pin keys here.
        """
        self.current += 1
        self.claimed = 0

    def forget(self) -> None:
        """Forget all causes: the session is over, with all its pins."""
        self._is_unsettled = self.is_lost = False
        self._unanswered.clear()

    # --- answers --------------------------------------------------------------------------------------------------

    def gave_up(self, call: Call, epoch: int) -> None:
        """Record that a FIND or UNPIN of that epoch was given up.

        It was sent, and its answer may still come.
        """
        if epoch < self.claimed:
            return
        self._unanswered[call] = None
        if len(self._unanswered) > MOST_UNANSWERED:
            self._unanswered.clear()
            self.is_lost = True

    def answered(self, call: Call) -> None:
        """Record that the answer to a call has come late."""
        self._unanswered.pop(call, None)

    # --- claims ---------------------------------------------------------------------------------------------------

    def is_due(self, sent_before: float) -> bool:
        """Return whether a claim is due.

        It is if an answer is missing to a call that was sent before that time, or if the last claim has no answer.
        """
        if self._is_unsettled or self.is_lost:
            return True
        return any([call.sent_at <= sent_before for call in self._unanswered])

    def begin_claim(self) -> int:
        """Begin an epoch with a claim of held pins; return its number."""
        self.current += 1
        self.claimed = self.current
        self.is_claiming = self._is_unsettled = True
        self.is_lost = False
        self._unanswered.clear()
        return self.current

    def end_claim(self, epoch: int, *, is_settled: bool) -> None:
        """End a claim that was answered or given up."""
        self.is_claiming = False
        if is_settled and epoch == self.claimed:
            self._is_unsettled = False
