"""``maru bench rpc``, the codec: what it costs to encode and decode a message of 64 entries, both ends together.

Our own messages are arrays of columns. Beside each stands a map per entry, as the published protocol has it, through the
same library: what columns are for. A published LOOKUP reply is encoded as a server encodes it, from entries that are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from .._wire import (
    HEADER_BYTES,
    BatchRegisterRequest,
    Code,
    FindReply,
    Handle,
    RegisterRequest,
    StoreRequest,
    batch_lookup_reply,
    decode_reply,
    decode_request,
    handle_bytes,
    lookup_entry,
    place,
    reply,
    request,
)
from ._keys import keys_of
from ._measure import Effort, in_turn, noisiest
from ._row import Goal, Row

ENTRIES: Final = 64
_EPOCH: Final = 0x0123_4567_89AB_CDEF
_MIB: Final = 1 << 20
_BOUND: Final = 12.0


def rows(effort: Effort) -> Iterator[Row]:
    """The rows of the codec."""
    keys = keys_of(ENTRIES)
    offsets = [at * _MIB for at in range(ENTRIES)]
    generations = list(range(1_000_000, 1_000_000 + ENTRIES))
    sums = [0xFEDC_BA98_7654_3210 - at for at in range(ENTRIES)]
    maps = [
        {"key": key, "region_id": 7, "kv_offset": offset, "kv_length": _MIB}
        for key, offset in zip(keys, offsets, strict=True)
    ]
    handle = Handle(7, 0, ENTRIES * _MIB, 0x1234_5678_9ABC_DEF0)
    found = [
        {"found": True, "handle": msgspec.structs.asdict(handle), "kv_offset": offset, "kv_length": _MIB}
        for offset in offsets
    ]
    subjects = {
        "store": _asked(
            Code.STORE,
            lambda: StoreRequest(b"s" * 16, 9, 12, 7, keys, offsets, _MIB, sums),
        ),
        "find": _find(offsets, generations, sums),
        "register": _asked(
            Code.BATCH_REGISTER_KV,
            lambda: BatchRegisterRequest(
                [RegisterRequest(key, 7, offset, _MIB) for key, offset in zip(keys, offsets, strict=True)]
            ),
        ),
        "lookup": _lookup(handle, offsets, generations),
        "maps.register": _maps({"entries": maps}),
        "maps.lookup": _maps({"entries": found}),
    }
    rounds = effort.size(2_000, 20)
    samples = in_turn("codec", effort, {name: _timed(subject, rounds) for name, subject in subjects.items()})
    for name, beside, goal in (
        ("store", "maps.register", Goal("value", "<=", _BOUND)),
        ("find", "maps.lookup", Goal("value", "<=", _BOUND)),
        ("register", "maps.register", None),
        ("lookup", "maps.lookup", None),
    ):
        yield Row(
            f"rpc.codec.{name}",
            samples[name].median,
            "us",
            "a map per entry, without types",
            samples[beside].median,
            goal,
            noisiest(samples[name], samples[beside]),
        )


def _asked(code: int, make: Callable[[], StoreRequest | BatchRegisterRequest]) -> Callable[[], object]:
    return lambda: decode_request(code, request(code, 1, make())[HEADER_BYTES:])


def _answered(code: int, make: Callable[[], bytes]) -> Callable[[], object]:
    return lambda: decode_reply(code, memoryview(make())[HEADER_BYTES:])


def _find(offsets: Sequence[int], generations: Sequence[int], sums: Sequence[int]) -> Callable[[], object]:
    places = [place(7, *where) for where in zip(offsets, [_MIB] * ENTRIES, generations, sums, strict=True)]

    def found() -> object:
        frame = reply(Code.FIND, 1, FindReply(_EPOCH, None, ENTRIES, b"".join(places)))
        answer = decode_reply(Code.FIND, memoryview(frame)[HEADER_BYTES:])
        assert isinstance(answer, FindReply)
        return answer.columns()

    return found


def _lookup(handle: Handle, offsets: Sequence[int], generations: Sequence[int]) -> Callable[[], object]:
    region = handle_bytes(handle)
    entries = [
        lookup_entry(region, offset, _MIB, generation, None)
        for offset, generation in zip(offsets, generations, strict=True)
    ]
    return _answered(Code.BATCH_LOOKUP_KV, lambda: batch_lookup_reply(1, _EPOCH, entries))


def _maps(message: object) -> Callable[[], object]:
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    return lambda: decode(encode(message))


def _timed(subject: Callable[[], object], rounds: int) -> Callable[[], float]:
    def run() -> float:
        start = time.process_time()
        for _ in range(rounds):
            subject()
        return (time.process_time() - start) / rounds * 1e6

    return run
