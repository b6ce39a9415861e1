"""KV events on the wire: event messages and a mirror's requests. Pure.

Routers of inference engines read the messages. An event message has three frames: a topic, a sequence number, and a
batch in MessagePack. That is ``[ts, events, data_parallel_rank]`` as vLLM publishes it, and two elements more, which
its readers ignore: the epoch, and the last sequence number given.

Rule 1. Sequence numbers of an epoch begin with 0 and have no gap. A batch without events (a *heartbeat*) takes none: it
        carries that of the last one, so a reader that does not know heartbeats treats it as a repetition.
Rule 2. An epoch is one run of a publisher, and never 0. Numbers of two epochs are unrelated.
Rule 3. A malformed message raises :class:`BadEvent`. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import attrs
import msgspec

BlockHash: TypeAlias = bytes | int
"""Name of a block: its key's bytes, or a number.

Some engines use numbers.
"""

END: Final = (-1).to_bytes(8, "big", signed=True)
"""Marker of an answer's end, in place of a sequence number."""
_SNAPSHOT: Final = b"snapshot"
"""Marker of a snapshot request, in place of a replay's first number.

That number is never given.
"""


class BadEvent(ValueError):
    """A message is not a KV event message, or breaks the protocol."""


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Event: blocks can be found in ``medium`` from now on.

    Facts that a tier does not know about its blocks (their tokens, their parent) have a value that means unknown.
    """

    block_hashes: list[BlockHash]
    medium: str | None
    parent_block_hash: BlockHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Event: blocks cannot be found in ``medium`` any more."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Event: no block can be found anywhere."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Events that are published together, in order."""

    ts: float
    """Time, in seconds since 1970."""
    events: list[Event]
    """Events in order; none in a heartbeat."""
    data_parallel_rank: int | None = None
    """Rank of the publishing engine's replica."""
    epoch: int = 0
    """Run of the publisher; 0 if unknown, as from other publishers."""
    last: int = -1
    """Last sequence number given in this epoch."""


class EventMessage(NamedTuple):
    """A packed batch, and its sequence number."""

    sequence: int
    payload: bytes

    def frames(self, topic: bytes) -> list[bytes]:
        """Return the frames of the message."""
        return [topic, self.sequence.to_bytes(8, "big"), self.payload]


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Batch).decode


def pack_batch(batch: Batch) -> bytes:
    """Pack a batch into a payload."""
    return _pack(batch)


def unpack_batch(payload: bytes) -> Batch:
    """Unpack the batch of a payload.

    Raises:
        BadEvent: the payload is not a batch, or its publisher sends no epoch.
    """
    try:
        batch = _unpack(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:  # ValueError: a text that is not UTF-8
        raise BadEvent(f"not a batch of KV events: {exc}") from None
    if batch.epoch <= 0:
        raise BadEvent(f"epoch = {batch.epoch}: must be positive, since it alone shows a restart of the publisher")
    return batch


def unpack_message(frames: Sequence[bytes]) -> EventMessage:
    """Return the sequence number and the payload of an event message.

    Raises:
        BadEvent: the frames are not those of an event message.
    """
    if len(frames) != 3 or len(frames[1]) != 8:
        raise BadEvent(f"an event message has a topic, 8 bytes of sequence and a payload, not {len(frames)} frames")
    return EventMessage(int.from_bytes(frames[1], "big"), frames[2])


# --- a mirror's requests ----------------------------------------------------------------------------------------------


@attrs.frozen
class Replay:
    """Request to repeat the kept events from a sequence number on.

    vLLM's subscribers send the same.
    """

    start: int


@attrs.frozen
class Snapshot:
    """Request for all stored keys."""


Request: TypeAlias = Replay | Snapshot


def pack_request(request: Request) -> list[bytes]:
    """Return the frames of a request, as a DEALER sends them."""
    if isinstance(request, Replay):
        return [b"", request.start.to_bytes(8, "big")]
    return [b"", _SNAPSHOT]


def unpack_request(frames: Sequence[bytes]) -> Request:
    """Return the request in these frames, without the peer's frame.

    Raises:
        BadEvent: the frames are not a request.
    """
    match frames:
        case [b"", b"snapshot"]:
            return Snapshot()
        case [b"", start] if len(start) == 8:
            return Replay(int.from_bytes(start, "big"))
        case _:
            raise BadEvent(f"a request for KV events is an empty frame and 8 bytes, not {[*map(len, frames)]} bytes")


@attrs.frozen
class Answer:
    """One message of an answer.

    For a :class:`Replay` an event message, for a :class:`Snapshot` a part of it; then the end.
    """

    sequence: int | None
    """Number of the event message, or the last before the snapshot.

    None at the end.
    """
    payload: bytes
    """Packed batch; at the end a heartbeat."""
    part: int | None = None
    """Number of this part of a snapshot; None in a replay.

    At the end, the number of all parts.
    """

    def frames(self, topic: bytes) -> list[bytes]:
        """Return the frames of the answer, without the peer's frame."""
        number = END if self.sequence is None else self.sequence.to_bytes(8, "big")
        frames = [b"", topic, number, self.payload]
        return frames if self.part is None else [*frames, self.part.to_bytes(8, "big")]


def unpack_answer(frames: Sequence[bytes]) -> Answer:
    """Return the answer in these frames.

    Raises:
        BadEvent: the frames are not an answer.
    """
    if not 4 <= len(frames) <= 5 or frames[0] or any(len(number) != 8 for number in (frames[2], *frames[4:])):
        raise BadEvent(f"not an answer to a request for KV events: frames of {[*map(len, frames)]} bytes")
    number = None if frames[2] == END else int.from_bytes(frames[2], "big")
    return Answer(number, frames[3], int.from_bytes(frames[4], "big") if len(frames) == 5 else None)


def hash_of_hex(key: str) -> BlockHash | None:
    """Return the bytes of a key in hexadecimal; None for other keys.

    The key must be exactly the text that is written from those bytes.
    """
    try:
        name = bytes.fromhex(key)
    except ValueError:
        return None
    return name if name.hex() == key else None
