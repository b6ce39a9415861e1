"""The records of a flight recording, as MessagePack arrays. Pure.

There is also the description of the observed pipelines.

Rule 1. A record has no key and no token, only 8-byte hashes of keys, side by side in one column (:class:`KeyHasher`).
Rule 2. A record is bounded: it has at most :data:`MOST_KEYS` hashes and texts of at most :data:`MOST_TEXT` characters.
    The number of hashes left out of a column is known from the number of blocks in the record.
Rule 3. Decoded values are checked by their types: a damaged record is a :class:`msgspec.ValidationError`, never a wrong
    value.
"""

from __future__ import annotations

import hashlib
import os
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from backends.abc import Key, Unproven

MOST_KEYS: Final = 2_048
"""Most hashes in one column, or in all columns of one mapping.

So the largest record is smaller than a segment.
"""
MOST_TEXT: Final = 200
"""Most characters in one text: an error's name, a policy's reason."""

Hashes: TypeAlias = Annotated[bytes, Meta(max_length=MOST_KEYS * 8)]
"""A column of 8-byte hashes."""
Text: TypeAlias = Annotated[str, Meta(max_length=MOST_TEXT)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]
Groups: TypeAlias = Annotated[list[tuple[Text, Hashes]], Meta(max_length=16)]
"""Blocks by the reason or error that they have in common."""
Blocks: TypeAlias = Literal["weak", "strong", "external"]
Stage: TypeAlias = Literal["admission", "awaiting", "batching"]
Event: TypeAlias = Literal["transfer", "pre_claim", "post_claim", "xfer_start", "xfer_end"]


class Record(Struct, frozen=True, array_like=True, gc=False):
    """Base class of all records."""


class Enqueued(Record, frozen=True, array_like=True, gc=False, tag=1):
    """A pipeline has accepted a container."""

    pipeline: Number
    """The position of the pipeline in the description."""
    number: Number
    blocks: Blocks
    size: Number
    """Number of its blocks."""
    waits: Number
    """Number of its precondition; 0 without one.

    Containers that wait for the same have the same number.
    """
    keys: Hashes
    queued: Number = 0
    """Containers before it that admission had not taken yet.

    If there are any, it was enqueued in the same tick as the one before.
    """


class Reached(Record, frozen=True, array_like=True, gc=False, tag=2):
    """A container has entered a stage.

    It is recorded if the container may have had to wait before.
    """

    pipeline: Number
    number: Number
    stage: Stage


class BatchReached(Record, frozen=True, array_like=True, gc=False, tag=3):
    """A batch has reached a step of its transfer."""

    pipeline: Number
    event: Event
    numbers: Annotated[list[Number], Meta(max_length=4_096)]


class Settled(Record, frozen=True, array_like=True, gc=False, tag=4):
    """A container is terminal."""

    pipeline: Number
    number: Number
    status: Literal["COMPLETE", "CANCELLED", "FAILED"]
    size: Number
    """Number of its blocks."""
    completed: Number
    """Blocks of these that are at the destination."""
    error: Text = ""
    """Class of its error, and that of the cause after a slash."""
    filtered: Groups = []
    failed: Groups = []
    evicted: Hashes = b""


class CancelRequested(Record, frozen=True, array_like=True, gc=False, tag=5):
    """The cancellation of a container was requested."""

    pipeline: Number
    number: Number


class LeftBlocks(Record, frozen=True, array_like=True, gc=False):
    """Found blocks that were left to be computed (``load_or_recompute``)."""

    why: Literal["recompute", "late", "slower"]
    tier: Text
    start: Number
    """Position of the first of them in the keys of the lookup."""
    blocks: Number
    load_seconds: float | None
    """Expected seconds of loading them; ``None``: not known."""
    recompute_seconds: float


class LookedUp(Record, frozen=True, array_like=True, gc=False, tag=6):
    """An engine has answered a lookup."""

    keys: Hashes
    asked: Number
    segments: Annotated[list[tuple[Text, Number]], Meta(max_length=256)]
    """Tiers of the prefix, with numbers of blocks, in order."""
    unavailable: Annotated[list[tuple[Text, Text]], Meta(max_length=64)] = []
    """Tiers that were left out, each with the class of the error."""
    left: LeftBlocks | None = None
    """Blocks found after these segments that are computed sooner."""


class Loaded(Record, frozen=True, array_like=True, gc=False, tag=7):
    """An engine has loaded blocks of a hit, or some of them."""

    keys: Hashes
    asked: Number
    loaded: Number
    seconds: float
    error: Text = ""
    """Class of the first block's error, if one was not loaded."""
    left: LeftBlocks | None = None
    """Position and reason of a load that was given up."""


class Deleted(Record, frozen=True, array_like=True, gc=False, tag=8):
    """An engine has deleted blocks."""

    keys: Hashes
    asked: Number


class HealthChanged(Record, frozen=True, array_like=True, gc=False, tag=9):
    """A tier's breaker has changed its state."""

    tier: Text
    state: Text


class Noted(Record, frozen=True, array_like=True, gc=False, tag=10):
    """A fault: the name of a broken rule, or of an exception."""

    rule: Text
    text: Text


class Thinned(Record, frozen=True, array_like=True, gc=False, tag=11):
    """A time in which only numbers were recorded.

    The details would have cost too much.
    """

    seconds: float
    containers: Number
    batches: Number


AnyRecord: TypeAlias = (
    Enqueued
    | Reached
    | BatchReached
    | Settled
    | CancelRequested
    | LookedUp
    | Loaded
    | Deleted
    | HealthChanged
    | Noted
    | Thinned
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyRecord).decode


# --- the description
# -----------------------------------------------------------------------------------------------------


class TierDescription(Struct, frozen=True, kw_only=True):
    """A tier as a scenario file describes it."""

    name: str
    kind: Literal["memory", "file", "other"]
    capacity: Annotated[int, Meta(ge=0)]
    """Capacity in blocks; 0: unknown."""
    block_bytes: Annotated[int, Meta(ge=0)]
    checksums: bool = True


class PipelineDescription(Struct, frozen=True, kw_only=True):
    """A pipeline and its configuration."""

    name: str
    source: str
    to: str
    chain: list[str] = []
    knobs: dict[str, Any] = {}
    """The fields of ``PipelineConfig``, with those of its ``BatchConfig`` among them."""


class EngineDescription(Struct, frozen=True, kw_only=True):
    """An engine over some of the tiers."""

    tiers: list[str]
    promote: bool = False
    on_load_failure: Literal["miss", "retry", "fail"] = "miss"
    breaker: dict[str, Any] = {}
    load_or_recompute: dict[str, Any] = {}
    """Its knobs; empty if it is off."""


class Description(Struct, frozen=True, kw_only=True):
    """The subject of a recording.

    It is written when the recording begins, and again when a pipeline is added.
    """

    version: str = ""
    """Version of the package that wrote it."""
    tiers: list[TierDescription] = []
    pipelines: list[PipelineDescription] = []
    engine: EngineDescription | None = None


# --- hashes of keys -----------------------------------------------------------------------------------------------------


class KeyHasher:
    """Hashes keys for one recording.

    The secrets are in no recording, so that no guess of a key can be tried on one. The interpreter's own hash of bytes
    is a SipHash with a random secret of the process, and is kept with the bytes. If ``PYTHONHASHSEED`` has fixed that
    secret, each key is hashed by BLAKE2 under the salt instead: ten times as long.
    """

    def __init__(self) -> None:
        self._salt = os.urandom(16)
        self._secret = bool(sys.flags.hash_randomization) and os.environ.get("PYTHONHASHSEED", "") in ("", "random")

    def column(self, keys: Sequence[Key]) -> bytes:
        """Return the hashes of the first :data:`MOST_KEYS` keys as a column."""
        keys = keys if len(keys) <= MOST_KEYS else keys[:MOST_KEYS]
        salt = self._salt
        if self._secret:
            return array("q", [hash((salt, key)) for key in keys]).tobytes()
        return b"".join([hashlib.blake2b(key, digest_size=8, key=salt).digest() for key in keys])


def hashes_of(column: bytes) -> list[str]:
    """Return the hashes of a column, as text."""
    return [column[at : at + 8].hex() for at in range(0, len(column) - 7, 8)]


def grouped(reasons: Mapping[Key, object], hasher: KeyHasher) -> list[tuple[str, bytes]]:
    """Group blocks by reason, or by class of error.

    There are only the first blocks, in 16 groups at most.
    """
    groups: dict[str, list[Key]] = {}
    for key, reason in islice(reasons.items(), MOST_KEYS):
        groups.setdefault(error_text(reason), []).append(key)
    return [(text, hasher.column(keys)) for text, keys in list(groups.items())[:16]]


def error_text(error: object) -> str:
    """Return a reason, or an error's class and its cause's.

    They are separated by a slash. The text of an error may have keys in it.
    """
    if error is None:
        return ""
    if isinstance(error, str):
        return error[:MOST_TEXT]
    cause = getattr(error, "__cause__", None)
    names: Iterable[object] = (error,) if cause is None else (error, cause)
    # For an executor's own class of error, only matters whether it proves an end.
    return "/".join(["Unproven" if isinstance(one, Unproven) else type(one).__name__ for one in names])[:MOST_TEXT]
