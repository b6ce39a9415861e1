"""Operations: listing keys. Pure."""

from __future__ import annotations

from functools import partial
from typing import Final

import attrs

from ..._wire import Code, ListKeysReply, ListKeysRequest
from ...base.errors import ServerRefused
from .connecting import settle, steadily
from .effects import Call, Operation
from .pinning import FENCED
from .state import ClientState

_TOO_MANY: Final = "too_many"
_SOON: Final = 0.05
"""Seconds until a refused listing is begun again, at first."""
_LATER: Final = 1.0
"""Seconds until a refused listing is begun again, at most."""
_PATIENCE: Final = 20.0
"""Seconds for which a refused listing is begun again.

A million keys take a second or two, and four clients list at once.
"""


@attrs.define(eq=False)
class Listing:
    """A listing of keys, begun again if the server has no place."""

    keys: list[str] = attrs.field(factory=list)
    """Keys that have come since its last beginning."""
    cursor: int = 0
    """Cursor of the next page."""
    _pause: float = _SOON
    _until: float | None = None

    def take(self, keys: list[str], cursor: int) -> bool:
        """Add a page; return whether it was the last one."""
        self.keys += keys
        self.cursor = cursor
        return not cursor

    def begin_again(self, refused: ServerRefused, now: float) -> float:
        """Forget the pages; return the seconds until the first is due.

        Raises:
            ServerRefused: for another reason, or for too long.
        """
        if self._until is None:
            self._until = now + _PATIENCE
        if refused.word not in (_TOO_MANY, FENCED) or now >= self._until:
            raise refused
        self.keys, self.cursor = [], 0
        pause, self._pause = self._pause, min(2 * self._pause, _LATER)
        return pause


def list_page(s: ClientState, prefix: str, cursor: int) -> Operation[tuple[list[str], int] | None]:
    """List one page of keys, and the cursor of the next page.

    The keys begin with a prefix. The cursor is 0 after the last page. ``None`` if the server cannot list keys.

    Raises:
        NoAnswer: the server did not answer.
        ServerRefused: the listing is over, or too many clients list keys: begin again later.
    """
    if not s.is_ready():
        yield from settle(s)
    if not s.lists_keys:
        return None
    return (yield from steadily(s, partial(_list, s, s.salt + prefix, cursor)))


def _list(s: ClientState, name: str, cursor: int) -> Operation[tuple[list[str], int]]:
    request = ListKeysRequest(s.token, s.pages.acknowledged, name, cursor)
    reply: ListKeysReply = yield Call(Code.LIST_KEYS, request)
    start = len(s.salt)
    return [key[start:] for key in reply.keys], reply.cursor
