"""The messages between an operator and the daemon, in one table. Pure.

They have a listener of their own. Frames are those of :mod:`offload.daemon._messages`, with codes that the engines'
listener does not know.

Rule 1. ``hello`` comes first, with the token. Without it everything else is refused.
Rule 2. One request at a time on a connection. Every request has one answer: its own, or
    :class:`~offload.daemon._messages.Refused`; then it has changed nothing.
Rule 3. Everything is bounded, by the types below.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias, Union

import msgspec

from backends.abc import MAX_KEY_BYTES
from maru.base.typed_frames import decoded

from ._messages import MAX_CREDENTIAL_BYTES, MAX_FRAME_BYTES, MAX_NUMBERS, Answer, Done, MessageKind, Refused, Request

MAX_ADMIN_KEYS: Final = 1_024
"""Most keys in one request.

An operator looks at a prompt, not at a cache.
"""

_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=4_096)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Key = Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]
_Keys = Annotated[list[_Key], msgspec.Meta(max_length=MAX_ADMIN_KEYS)]
_Names = Annotated[list[_Name], msgspec.Meta(max_length=MAX_NUMBERS)]

Fact: TypeAlias = bool | int | float | str
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class AdminHello(Request, tag=64, frozen=True):
    """Show the token."""

    token: Annotated[bytes, msgspec.Meta(max_length=MAX_CREDENTIAL_BYTES)]


class Admitted(Answer, tag=192, frozen=True):
    """Reply to AdminHello: the token is right."""

    version: _Text
    """Version of the package that the daemon runs."""
    pid: _U63


class Describe(Request, tag=65, frozen=True):
    """Ask for the daemon's listeners, tiers, sessions and limits."""


class SessionFacts(msgspec.Struct, frozen=True):
    """One session of an engine."""

    number: int
    name: str
    tenant: str
    silent: float
    """Seconds since its engine was heard."""
    requests: int
    holds: int
    caches: int
    announced: int = 0
    """Reservations of pages that it writes itself."""


class TierFacts(msgspec.Struct, frozen=True):
    """One tier."""

    name: str
    kind: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    held_blocks: int
    breaker: str
    """State of its breaker: ``closed`` if all is well."""


class Described(Answer, tag=193, frozen=True):
    """Reply to Describe: the daemon's state."""

    sections: dict[str, dict[str, Fact]]
    tiers: list[TierFacts]
    sessions: list[SessionFacts]


class Inspect(Request, tag=66, frozen=True):
    """Ask for the places of blocks, and the reasons.

    A reason explains why a block is there, or is not.
    """

    keys: _Keys
    tenant: _Name = ""
    """Tenant of the keys; empty: the keys are as stored."""


class BlockFacts(msgspec.Struct, frozen=True):
    """One block."""

    cause: str
    """The explanation in a word: ``found``, ``evicted``, ..."""
    text: str
    """The explanation in a sentence."""
    tiers: list[str]
    """Tiers that have it, the fastest first."""
    unavailable: list[str]
    """Tiers that did not answer."""


class Inspected(Answer, tag=194, frozen=True):
    """Reply to Inspect: the places of the blocks."""

    usable: int
    """Number of leading blocks that a lookup would find."""
    blocks: list[BlockFacts]


class Drain(Request, tag=67, frozen=True):
    """End the daemon as SIGTERM does.

    The answer comes when running requests have ended, or were dropped.
    """


class Drained(Answer, tag=195, frozen=True):
    """Reply to Drain: the daemon is drained, and about to end."""

    stores: _U63
    """Dropped stores."""
    others: _U63
    """Other dropped requests."""


class ListQuarantine(Request, tag=68, frozen=True):
    """Ask for copies without a proven end, and for withheld keys."""


class QuarantinedCopy(msgspec.Struct, frozen=True):
    """A copy without a proven end. Its memory stays taken."""

    name: str
    """The pipeline and a number."""
    blocks: int
    keys: list[bytes]
    """The first of its keys."""
    reason: str
    seconds: float
    """Seconds since it was given up."""


class Quarantines(Answer, tag=196, frozen=True):
    """Reply to ListQuarantine: all copies and withheld keys."""

    copies: list[QuarantinedCopy]
    withheld: list[bytes]
    """The first withheld keys.

    Wrong content was found under them, and they are not served until they are stored again.
    """
    withheld_keys: int
    """Number of withheld keys."""


class ReleaseQuarantine(Request, tag=69, frozen=True):
    """Release the memory of copies, and serve withheld keys again."""

    copies: _Names
    withheld: _Keys = msgspec.field(default_factory=list)


class Reload(Request, tag=70, frozen=True):
    """Read the settings again, as SIGHUP does."""


class Reloaded(Answer, tag=198, frozen=True):
    """Reply to Reload: the settings that were refused."""

    refused: list[str]
    """Settings that differ and were not changed: they need a restart."""


class SetLogLevel(Request, tag=71, frozen=True):
    """Log from this level on, until the settings are read again."""

    level: LogLevel


ADMIN_MESSAGES: Final = (
    MessageKind("hello", AdminHello, Admitted),
    MessageKind("describe", Describe, Described),
    MessageKind("inspect", Inspect, Inspected),
    MessageKind("drain", Drain, Drained),
    MessageKind("list_quarantine", ListQuarantine, Quarantines),
    MessageKind("release_quarantine", ReleaseQuarantine, Done),
    MessageKind("reload", Reload, Reloaded),
    MessageKind("set_log_level", SetLogLevel, Done),
)
"""All messages: the daemon's dispatch table, and a source of the documentation."""

ADMIN_NAME_OF: Final[dict[type[Any], str]] = {kind.request: kind.name for kind in ADMIN_MESSAGES}

_requests: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(Union[tuple(ADMIN_NAME_OF)])  # noqa: UP007
_answers: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(
    Union[(*dict.fromkeys(kind.answer for kind in ADMIN_MESSAGES), Refused)]
)


def decode_admin_request(frame: bytes) -> Request:
    """Decode a request.

    Raises:
        BadFrame: it is none.
    """
    request: Request = decoded(_requests, frame, MAX_FRAME_BYTES)
    return request


def decode_admin_answer(frame: bytes) -> Answer:
    """Decode an answer.

    Raises:
        BadFrame: it is none.
    """
    answer: Answer = decoded(_answers, frame, MAX_FRAME_BYTES)
    return answer
