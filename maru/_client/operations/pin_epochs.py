"""What this client cannot know of its pins at the server, and how it comes to know it. Pure.

A FIND whose answer was lost has pinned what nobody here knows of; an UNPIN whose request was lost has not given back what
nobody here holds any more. Neither can be asked for again: done twice, an UNPIN undoes a pin that somebody relies on. So the
client says once what it holds, all of it, and the server lets go of the rest. What is under way meanwhile is kept apart by a
number, the *pin epoch*, that every FIND and UNPIN bears (``turn`` on the wire).

Rule 1. What is claimed is what is held at the moment at which an epoch begins. An answer to a FIND of an earlier one is not
        used any more: the claim does not name what it has pinned.
Rule 2. What is due to be given back at that moment is not, since it is not claimed. Until the claim is answered nothing is
        given back: it may be claimed.
Rule 3. A claim is due only when an answer has not come for as long as anybody waits for one, and until one was answered. What
        it was due for is forgotten when it begins: the next one is due for what is lost from then on.
Rule 4. Another era begins another epoch as well: what was asked of a server that is gone and arrives at the next one, behind
        what is asked of that, does nothing. What a FIND that came first has pinned is not given back, since an UNPIN that
        came first may have undone that already: a claim is due at once.
"""

from __future__ import annotations

from typing import Final

from .effects import Call

MOST_UNANSWERED: Final = 4_096
"""Calls that are remembered one by one. More of them than that are as good as a lost one."""


class PinEpochs:
    """The pin epochs of one client: which one it is in, and whether the server has to be told what is pinned."""

    def __init__(self) -> None:
        self.current = 0
        """What a FIND or an UNPIN bears that is sent now."""
        self.claimed = 0
        """Of what was asked in earlier epochs of this era, nothing is pinned that the last claim does not name."""
        self.is_claiming = False
        """A claim is under way."""
        self.is_lost = False
        """Something is pinned that is not held here, and what undoes it may have been done already: a claim is due at once."""
        self._is_unsettled = False  # a claim was begun and none was answered since
        self._unanswered: dict[Call, None] = {}  # calls given up

    @property
    def waits(self) -> bool:
        """Whether answers may still come that nobody waits for."""
        return bool(self._unanswered)

    def next_era(self) -> None:
        """Another server, or another session. What was sent to the one before may still arrive, and pin something here."""
        self.current += 1
        self.claimed = 0

    def forget(self) -> None:
        """The session is over, and with it all that it has pinned or may still pin."""
        self._is_unsettled = self.is_lost = False
        self._unanswered.clear()

    # --- answers --------------------------------------------------------------------------------------------------

    def gave_up(self, call: Call, epoch: int) -> None:
        """Note that this FIND or UNPIN of that epoch is not waited for any more. It was sent, and its answer may still come."""
        if epoch < self.claimed:
            return
        self._unanswered[call] = None
        if len(self._unanswered) > MOST_UNANSWERED:
            self._unanswered.clear()
            self.is_lost = True

    def answered(self, call: Call) -> None:
        """Its answer has come after all."""
        self._unanswered.pop(call, None)

    # --- claims ---------------------------------------------------------------------------------------------------

    def is_due(self, sent_before: float) -> bool:
        """Whether a claim is due: an answer is missing to what was sent before that time, or the last claim has none."""
        if self._is_unsettled or self.is_lost:
            return True
        return any([call.sent_at <= sent_before for call in self._unanswered])

    def begin_claim(self) -> int:
        """Begin an epoch by claiming what is held now; its number."""
        self.current += 1
        self.claimed = self.current
        self.is_claiming = self._is_unsettled = True
        self.is_lost = False
        self._unanswered.clear()
        return self.current

    def end_claim(self, epoch: int, *, is_settled: bool) -> None:
        """It was answered, or nobody waits for that any more."""
        self.is_claiming = False
        if is_settled and epoch == self.claimed:
            self._is_unsettled = False
