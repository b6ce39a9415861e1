"""Operations: deleting. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..._wire import Code, DropAnswer, DropReply, DropRequest, KeyRequest, SuccessReply
from ..answers import Deleted
from ..page_states import PageState
from .connecting import settle, steadily
from .effects import Call, Operation
from .pinning import portions
from .state import ClientState

_ANSWERS = {
    DropAnswer.DELETED: Deleted.DELETED,
    DropAnswer.MISSING: Deleted.MISSING,
    DropAnswer.PINNED: Deleted.PINNED,
    DropAnswer.PROTECTED: Deleted.PROTECTED,
}


def delete(s: ClientState, keys: list[str], generations: Sequence[int] | None = None) -> Operation[list[Deleted]]:
    """Delete these keys, or only those with the given generations.

    Our own pages come back with the answer. A published server knows no generations: any page there is deleted.

    Raises:
        NoAnswer: it is unknown which are gone. Their pages come back to their owner all the same.
    """
    names = s.names(keys)
    if not s.is_ready():
        yield from settle(s)
    if not s.own:
        return (yield from _delete_published(s, names))
    answers: list[Deleted] = []
    for some in portions(names, s.max_keys):
        request_id = s.next_request()
        meant = None if generations is None else list(generations[len(answers) : len(answers) + len(some)])
        answers += yield from steadily(s, partial(_drop, s, request_id, some, meant))
    return answers


def _drop(s: ClientState, request_id: int, names: list[str], meant: list[int] | None) -> Operation[list[Deleted]]:
    reply: DropReply = yield Call(Code.DROP, DropRequest(s.token, s.pages.acknowledged, request_id, names, meant))
    return [_ANSWERS.get(answer, Deleted.PROTECTED) for answer in reply.answers]  # type: ignore[call-overload]


def _delete_published(s: ClientState, names: list[str]) -> Operation[list[Deleted]]:
    answers: list[Deleted] = []
    for name in names:
        reply: SuccessReply = yield Call(Code.DELETE_KV, KeyRequest(name))
        answers.append(Deleted.DELETED if reply.success else Deleted.MISSING_OR_PINNED)
        page = s.page_of.pop(name, None) if reply.success else None
        if page is not None and s.pages.state(page) is PageState.REGISTERED:
            s.pages.dropped([page])
    return answers
