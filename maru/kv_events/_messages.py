"""KV events on the wire: the messages that routers of inference engines read, and how a mirror asks for what it missed. Pure.

An event message has three frames: a topic, a sequence number, and a batch in MessagePack. That is ``[ts, events,
data_parallel_rank]`` as vLLM publishes it, and two elements more, which its readers pass over: the epoch, and the last sequence
number given.

Rule 1. Sequence numbers of an epoch begin with 0 and have no gap. A batch without events (a *heartbeat*) takes none: it carries
        that of the last one, so a reader that knows nothing of heartbeats takes it for a repetition.
Rule 2. An epoch is one run of a publisher, and never 0. Numbers of two epochs have nothing to do with each other.
Rule 3. What is malformed is a :class:`BadEvent`. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import attrs
import msgspec

BlockHash: TypeAlias = bytes | int
"""What names a block: the bytes of its key, or a number, as some engines have it."""

END: Final = (-1).to_bytes(8, "big", signed=True)
"""In place of a sequence number: the answer to a request ends here."""
_SNAPSHOT: Final = b"snapshot"
"""In place of the number from which on to replay: that one will never be given."""


class BadEvent(ValueError):
    """A message is not a KV event message, or breaks the protocol."""


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    """These blocks can be found in ``medium`` from now on.

    What a tier does not know of its blocks (their tokens, what they continue) has the value that says so.
    """

    block_hashes: list[BlockHash]
    medium: str | None
    parent_block_hash: BlockHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    """These blocks cannot be found in ``medium`` any more."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """No block can be found anywhere."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Events that are told together, in order."""

    ts: float
    """When, in seconds since 1970."""
    events: list[Event]
    """What happened; nothing, in a heartbeat."""
    data_parallel_rank: int | None = None
    """Of the engine's replica that tells."""
    epoch: int = 0
    """Which run of the publisher tells; 0 where it does not say, as other publishers do not."""
    last: int = -1
    """The last sequence number given in this epoch."""


class EventMessage(NamedTuple):
    """A batch, packed, and its sequence number."""

    sequence: int
    payload: bytes

    def frames(self, topic: bytes) -> list[bytes]:
        """Its frames."""
        return [topic, self.sequence.to_bytes(8, "big"), self.payload]


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Batch).decode


def pack_batch(batch: Batch) -> bytes:
    """A batch, as a payload."""
    return _pack(batch)


def unpack_batch(payload: bytes) -> Batch:
    """The batch of a payload.

    Raises:
        BadEvent: it is none, or of a publisher that does not tell its epoch.
    """
    try:
        batch = _unpack(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:  # ValueError: a text that is no UTF-8
        raise BadEvent(f"no batch of KV events: {exc}") from None
    if batch.epoch <= 0:
        raise BadEvent(f"epoch = {batch.epoch}: without one, a restart of the publisher could not be told from silence")
    return batch


def unpack_message(frames: Sequence[bytes]) -> EventMessage:
    """The sequence number and the payload of an event message's frames.

    Raises:
        BadEvent: these are not the frames of one.
    """
    if len(frames) != 3 or len(frames[1]) != 8:
        raise BadEvent(f"an event message has a topic, 8 bytes of sequence and a payload, not {len(frames)} frames")
    return EventMessage(int.from_bytes(frames[1], "big"), frames[2])


# --- what a mirror asks for -------------------------------------------------------------------------------------------


@attrs.frozen
class Replay:
    """Tell again what was told from this sequence number on, as far as it is kept. As vLLM's subscribers ask."""

    start: int


@attrs.frozen
class Snapshot:
    """Tell everything that is held."""


Request: TypeAlias = Replay | Snapshot


def pack_request(request: Request) -> list[bytes]:
    """The frames of a request, as a DEALER sends them."""
    if isinstance(request, Replay):
        return [b"", request.start.to_bytes(8, "big")]
    return [b"", _SNAPSHOT]


def unpack_request(frames: Sequence[bytes]) -> Request:
    """The request with these frames, without the one that names the peer.

    Raises:
        BadEvent: it is none.
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
    """One message of an answer: to a :class:`Replay` an event message, to a :class:`Snapshot` a part of it; then the end."""

    sequence: int | None
    """Of the event message; of the last one before the snapshot; None at the end."""
    payload: bytes
    """The batch; at the end a heartbeat."""
    part: int | None = None
    """The number of this part of the snapshot; at its end, how many there were. None in a replay."""

    def frames(self, topic: bytes) -> list[bytes]:
        """Its frames, without the one that names the peer."""
        number = END if self.sequence is None else self.sequence.to_bytes(8, "big")
        frames = [b"", topic, number, self.payload]
        return frames if self.part is None else [*frames, self.part.to_bytes(8, "big")]


def unpack_answer(frames: Sequence[bytes]) -> Answer:
    """The answer with these frames.

    Raises:
        BadEvent: it is none.
    """
    if not 4 <= len(frames) <= 5 or frames[0] or any(len(number) != 8 for number in (frames[2], *frames[4:])):
        raise BadEvent(f"no answer to a request for KV events: frames of {[*map(len, frames)]} bytes")
    number = None if frames[2] == END else int.from_bytes(frames[2], "big")
    return Answer(number, frames[3], int.from_bytes(frames[4], "big") if len(frames) == 5 else None)


def hash_of_hex(key: str) -> BlockHash | None:
    """The bytes that a key is the hexadecimal text of, as it is written from bytes; None for any other key."""
    try:
        name = bytes.fromhex(key)
    except ValueError:
        return None
    return name if name.hex() == key else None
