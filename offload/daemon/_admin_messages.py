"""What an operator and the daemon say to each other, on a listener of its own: one table of messages. Pure.

Frames are those of :mod:`offload.daemon._messages`, with codes that the engines' listener does not know.

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
"""Keys of one request: an operator looks at a prompt, not at a cache."""

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
    """It is the right one."""

    version: _Text
    """Of the package that the daemon runs."""
    pid: _U63


class Describe(Request, tag=65, frozen=True):
    """Ask what daemon this is: its listeners, tiers, sessions and limits."""


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
    """The state of its breaker: ``closed`` where all is well."""


class Described(Answer, tag=193, frozen=True):
    """What daemon it is."""

    sections: dict[str, dict[str, Fact]]
    tiers: list[TierFacts]
    sessions: list[SessionFacts]


class Inspect(Request, tag=66, frozen=True):
    """Ask where blocks are, and why they are, or are not, there."""

    keys: _Keys
    tenant: _Name = ""
    """Whose keys these are; empty: they are as they are stored."""


class BlockFacts(msgspec.Struct, frozen=True):
    """One block."""

    cause: str
    """The explanation in a word: ``found``, ``evicted``, ..."""
    text: str
    """In a sentence."""
    tiers: list[str]
    """That have it, the fastest first."""
    unavailable: list[str]
    """That did not answer."""


class Inspected(Answer, tag=194, frozen=True):
    """Where they are."""

    usable: int
    """How many leading blocks a lookup would find."""
    blocks: list[BlockFacts]


class Drain(Request, tag=67, frozen=True):
    """End the daemon as SIGTERM does. The answer comes when what was under way has ended, or was dropped."""


class Drained(Answer, tag=195, frozen=True):
    """It is drained, and about to end."""

    stores: _U63
    """That were dropped."""
    others: _U63
    """Other requests that were."""


class ListQuarantine(Request, tag=68, frozen=True):
    """Ask for the copies whose end is not proven, and for the keys that are withheld."""


class QuarantinedCopy(msgspec.Struct, frozen=True):
    """A copy without a proven end. What it touches stays taken."""

    name: str
    """The pipeline and a number."""
    blocks: int
    keys: list[bytes]
    """The first of them."""
    reason: str
    seconds: float
    """Since it was given up."""


class Quarantines(Answer, tag=196, frozen=True):
    """All of them."""

    copies: list[QuarantinedCopy]
    withheld: list[bytes]
    """Keys under which something wrong was found, and that are not served until they are stored anew; the first of them."""
    withheld_keys: int
    """How many there are."""


class ReleaseQuarantine(Request, tag=69, frozen=True):
    """Release what these copies hold, and serve these withheld keys again."""

    copies: _Names
    withheld: _Keys = msgspec.field(default_factory=list)


class Reload(Request, tag=70, frozen=True):
    """Read the settings again, as SIGHUP does."""


class Reloaded(Answer, tag=198, frozen=True):
    """They were read."""

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
"""All messages. The daemon dispatches by it, and the documentation is drawn from it."""

ADMIN_NAME_OF: Final[dict[type[Any], str]] = {kind.request: kind.name for kind in ADMIN_MESSAGES}

_requests: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(Union[tuple(ADMIN_NAME_OF)])  # noqa: UP007
_answers: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(
    Union[(*dict.fromkeys(kind.answer for kind in ADMIN_MESSAGES), Refused)]
)


def decode_admin_request(frame: bytes) -> Request:
    """A request.

    Raises:
        BadFrame: it is none.
    """
    request: Request = decoded(_requests, frame, MAX_FRAME_BYTES)
    return request


def decode_admin_answer(frame: bytes) -> Answer:
    """An answer.

    Raises:
        BadFrame: it is none.
    """
    answer: Answer = decoded(_answers, frame, MAX_FRAME_BYTES)
    return answer
