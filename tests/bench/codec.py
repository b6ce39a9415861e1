"""``python -m tests.bench codec``: the cost of encoding and decoding a message of 64 entries, both ends together.

Our own messages are arrays of columns. Beside each stands a map per entry, as the published protocol has it, through the
same library: what columns are for. A published LOOKUP reply is encoded as a server encodes it, from entries that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import process_time
from typing import Final

import msgspec

from maru._wire import (
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
from maru.bench._keys import keys_of
from maru.bench.measure import Effort, Row, measure, seconds_of

ENTRIES: Final = 64
_EPOCH: Final = 0x0123_4567_89AB_CDEF
_MIB: Final = 1 << 20
_GOAL: Final = "value <= 12"


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of the codec."""
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
    samples = measure(
        "codec", effort, {name: partial(seconds_of, one, rounds, process_time) for name, one in subjects.items()}
    )
    for name, limit, goal in (
        ("store", "maps.register", _GOAL),
        ("find", "maps.lookup", _GOAL),
        ("register", "maps.register", None),
        ("lookup", "maps.lookup", None),
    ):
        yield samples.row(f"rpc.codec.{name}", "us", name, "a map per entry, without types", limit, goal, scale=1e6)


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
