"""Operations: listing keys. Pure."""

from __future__ import annotations

from functools import partial

from ..._wire import Code, ListKeysReply, ListKeysRequest
from .connecting import settle, steadily
from .effects import Call, Operation
from .state import ClientState


def list_page(s: ClientState, prefix: str, cursor: int) -> Operation[tuple[list[str], int] | None]:
    """List a page of the keys that begin with a prefix, and the cursor of the next one: 0 behind the last.

    None if the server cannot list keys.

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
