"""``maru bench rpc``: costs of requests, compared with a bare echo.

The echo carries the same bytes. Server and echo are separate processes, the clients are in this one. They take turns,
over TCP and over a Unix socket; and over the channel of this host, compared with an echo of packets. (A handler at the
Unix socket of a server of ours uses the channel: there it is compared with ZeroMQ's echo.) A *single* operation is
EXISTS of one key, through the handlers. Batches have 64 keys, go through a bare client (`_bare`), and count from the
arguments to the decoded reply; the server writes its journal. If a goal compares with the published server, the row's
goal is the figure that follows from that server's own.

Rates use elapsed time. The cost of a message beyond its echo is processor time of all processes that it passes: the
difference of two elapsed times is smaller than the noise of the machine, and may be negative.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter, process_time
from typing import Final, Literal

import trio

from .._client.blocking import MaruHandler
from .._client.handler import MaruHandler as TrioHandler
from .._wire import (
    AllocRequest,
    BatchLookupReply,
    BatchRegisterRequest,
    Code,
    DropRequest,
    FindReply,
    FindRequest,
    KeyRequest,
    KeysRequest,
    RegisterRequest,
    ReturnRequest,
    StoreRequest,
    request,
)
from ._bare import Bare
from ._keys import keys_of
from .echo import Caller, Echo, PacketCaller, echo
from .measure import Clock, Effort, Row, Samples, measure
from .processes import BenchFailed, Server, processor_time, server

Transport = Literal["tcp", "ipc"]

BATCH: Final = 64
"""Keys in a batch."""
_WINDOW: Final = 64
"""Single requests in flight at once."""
_AHEAD: Final = 16
"""Batches in flight at once."""
_PAGE_BYTES: Final = 64
_AT_ONCE: Final = 4_096
_INSTANCE: Final = "bench"
_CAPACITY_BYTES: Final = 256 << 20

_LOCKSTEP: Final[Mapping[tuple[str, Transport], float]] = {
    ("trio", "tcp"): 0.65,
    ("trio", "ipc"): 0.75,
    ("blocking", "tcp"): 0.70,
    ("blocking", "ipc"): 0.75,
}
_PIPELINED: Final = {"trio": 0.70, "blocking": 0.95}
_OF_CHECKPOINTS: Final = "ratio <= 24"
"""Goal for a message's processor time in Python, in checkpoints of trio.

It covers all processes that the message passes, without its echo.
"""
_THEIRS: Final = 120_000
"""Keys per second that the published server looked up in batches.

Measured on the machine that the goals come from.
"""


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of requests."""
    with echo() as bare, server(_CAPACITY_BYTES) as ours:
        transports: tuple[Transport, ...] = ("tcp", "ipc")
        for transport in transports:
            yield from _single(transport, bare.addresses[transport], ours.addresses[transport], effort)
        yield from _channel(bare, ours, effort)
        yield from _relayed(bare, ours, effort)
        for transport in transports:
            yield from _batches(transport, bare.addresses[transport], ours.addresses[transport], effort)


# --- single operations ----------------------------------------------------------------------------------------------


def _single(transport: Transport, bare: str, ours: str, effort: Effort) -> Iterator[Row]:
    calls = effort.size(4_096, 2 * _WINDOW)
    [key] = keys_of(1)
    messages = [request(Code.EXISTS_KV, 1, KeyRequest(key))] * calls
    with Caller(bare) as caller, MaruHandler(server_url=ours, pool_size=0, index="off") as handler:
        lockstep = measure(f"single, {transport}", effort, _lockstep(caller, handler, ours, key, messages))
        pipelined = measure(
            f"{_WINDOW} in flight, {transport}",
            effort,
            {
                "trio": partial(trio.run, _trio_pipelined, ours, key, calls),
                "echo": lambda: caller.pipelined(messages, _WINDOW),
                "blocking": lambda: _blocking_pipelined(handler, key, calls),
            },
        )
    for face in ("trio", "blocking"):
        name, goal = f"rpc.single.lockstep.{face}.{transport}", f"ratio >= {_LOCKSTEP[face, transport]:g}"
        yield lockstep.row(name, "calls/s", face, "bare echo, lockstep", "echo", goal)
    for face in ("trio", "blocking"):
        name, goal = f"rpc.single.window{_WINDOW}.{face}.{transport}", f"ratio >= {_PIPELINED[face]:g}"
        yield pipelined.row(name, "calls/s", face, "bare echo, pipelined", "echo", goal)


def _lockstep(
    caller: Caller | PacketCaller, handler: MaruHandler, address: str, key: str, messages: Sequence[bytes]
) -> dict[str, Callable[[], float]]:
    """Return the subjects that make one call after the other.

    They are both faces, and an echo.
    """
    return {
        "trio": partial(trio.run, _trio_lockstep, address, key, len(messages)),
        "echo": lambda: caller.lockstep(messages),
        "blocking": lambda: _blocking_lockstep(handler, key, len(messages)),
    }


def _channel(bare: Echo, ours: Server, effort: Effort) -> Iterator[Row]:
    """Measure the channel of this host, next to an echo of packets.

    The difference is Python, of both ends.
    """
    calls, address = effort.size(4_096, 2 * _WINDOW), ours.addresses["ipc"]
    [key] = keys_of(1)
    messages = [request(Code.EXISTS_KV, 1, KeyRequest(key))] * calls
    with (
        PacketCaller(bare.addresses["channel"]) as caller,
        MaruHandler(server_url=address, pool_size=0, index="off") as handler,
    ):
        measured = measure("single, channel", effort, _lockstep(caller, handler, address, key, messages))
        python = _python("channel", caller, bare.pid, address, (ours.pid,), effort)
    for face in ("trio", "blocking"):
        name = f"rpc.single.lockstep.{face}.channel"
        yield measured.row(name, "calls/s", face, "bare echo of packets", "echo")
    for face in ("trio", "blocking"):
        yield _python_row(python, face, f"{face}.channel")


def _relayed(bare: Echo, ours: Server, effort: Effort) -> Iterator[Row]:
    """Measure TCP, which is relayed, next to ZeroMQ's echo.

    The difference is Python, of both ends and of the relay.
    """
    with Bare(ours.addresses["ipc"]) as client:
        relay: int = client.ask(Code.DESCRIBE, None).sections["relay"]["pid"]
    address = ours.addresses["tcp"]
    with Caller(bare.addresses["tcp"]) as caller:
        python = _python("tcp", caller, bare.pid, address, (ours.pid, relay), effort)
    with MaruHandler(server_url=address, pool_size=0, index="off") as handler:
        calls, [key], clock = effort.size(4_096, 2 * _WINDOW), keys_of(1), partial(processor_time, relay)
        relays = measure(
            "processor time, relay", effort, {"relay": lambda: 1e6 / _blocking_lockstep(handler, key, calls, clock)}
        )
    for face in ("trio", "blocking"):
        yield _python_row(python, face, f"{face}.tcp")
    python |= relays
    yield python.row("rpc.relay.tcp", "us", "relay", "a checkpoint of trio", "checkpoint")


def _python(
    transport: str, caller: Caller | PacketCaller, echoing: int, address: str, serving: Sequence[int], effort: Effort
) -> Samples:
    """Measure a message's processor time beyond its echo, in microseconds.

    Returns a sample for each face, and for a checkpoint of trio.
    """
    calls = effort.size(4_096, 2 * _WINDOW)
    [key] = keys_of(1)
    messages = [request(Code.EXISTS_KV, 1, KeyRequest(key))] * calls
    of_echo = partial(processor_time, os.getpid(), echoing)
    of_ours = partial(processor_time, os.getpid(), *serving)

    def beside_echo() -> dict[str, float]:
        # All within one repetition: the speed of a processor changes between two of them.
        echo = caller.lockstep(messages, of_echo)
        rates = {
            "trio": trio.run(_trio_lockstep, address, key, calls, of_ours),
            "blocking": _blocking_lockstep(handler, key, calls, of_ours),
        }
        spent = {face: (1 / rate - 1 / echo) * 1e6 for face, rate in rates.items()}
        return {"checkpoint": 1e6 / trio.run(_checkpoints, calls), **spent}

    with MaruHandler(server_url=address, pool_size=0, index="off") as handler:
        return measure(f"processor time, {transport}", effort, {"python": beside_echo})


def _python_row(python: Samples, face: str, case: str) -> Row:
    return python.row(f"rpc.python.{case}", "us", face, "a checkpoint of trio", "checkpoint", _OF_CHECKPOINTS)


async def _checkpoints(calls: int) -> float:
    """Measure checkpoints of a lone task, per second of processor time."""
    start = process_time()
    for _ in range(calls):
        await trio.lowlevel.checkpoint()
    return calls / (process_time() - start)


async def _trio_lockstep(address: str, key: str, calls: int, clock: Clock = perf_counter) -> float:
    async with TrioHandler(server_url=address, pool_size=0, index="off") as handler:
        await handler.exists(key)
        start = clock()
        for _ in range(calls):
            await handler.exists(key)
        return calls / (clock() - start)


async def _trio_pipelined(address: str, key: str, calls: int) -> float:
    async def some() -> None:
        for _ in range(calls // _WINDOW):
            await handler.exists(key)

    async with TrioHandler(server_url=address, pool_size=0, index="off") as handler:
        await handler.exists(key)
        start = perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(_WINDOW):
                nursery.start_soon(some)
        return calls / (perf_counter() - start)


def _blocking_lockstep(handler: MaruHandler, key: str, calls: int, clock: Clock = perf_counter) -> float:
    start = clock()
    for _ in range(calls):
        handler.exists(key)
    return calls / (clock() - start)


def _blocking_pipelined(handler: MaruHandler, key: str, calls: int) -> float:
    begin = handler.begin.exists
    start = perf_counter()
    tickets = deque(begin(key) for _ in range(_WINDOW))
    for _ in range(calls - _WINDOW):
        tickets.popleft().result()
        tickets.append(begin(key))
    for ticket in tickets:
        ticket.result()
    return calls / (perf_counter() - start)


# --- batches --------------------------------------------------------------------------------------------------------


def _batches(transport: Transport, bare: str, ours: str, effort: Effort) -> Iterator[Row]:
    batches = effort.size(1_024, 2 * _AHEAD)
    with Caller(bare) as caller, Bare(ours) as published, Bare(ours) as own:
        # A key is stored once, so the keys that are looked up are never deleted.
        stored, written = _grouped(keys_of(_AHEAD * BATCH, transport)), _grouped(keys_of(batches * BATCH, "written"))
        token = own.greet(lease=60.0)
        _register(published, _region(published, len(stored), None), stored)
        asked = [stored[at % len(stored)] for at in range(batches)]

        def lookup(window: int = 1) -> float:
            messages = [partial(KeysRequest, keys) for keys in asked]
            return published.rate(Code.BATCH_LOOKUP_KV, messages, window, _all_found)

        def find(window: int = 1) -> float:
            messages = [partial(FindRequest, token, 0, keys, False, False) for keys in asked]
            return own.rate(Code.FIND, messages, window, lambda reply: reply.found == BATCH, FindReply.columns)

        def register() -> float:
            region_id = _region(published, len(written), None)
            rate = _register(published, region_id, written)
            published.ask(Code.RETURN_ALLOC, ReturnRequest(_INSTANCE, region_id))
            _drop(own, token, written)
            return rate

        def store() -> float:
            region_id = _region(own, len(written), token)
            rate = _store(own, token, region_id, written)
            own.ask(Code.RETURN_ALLOC, ReturnRequest(_INSTANCE, region_id, token))
            _drop(own, token, written)
            return rate

        def echoed(message: bytes, window: int = 1) -> Callable[[], float]:
            messages = [message] * batches
            return lambda: caller.lockstep(messages) if window == 1 else caller.pipelined(messages, window)

        lookup_bytes = request(Code.BATCH_LOOKUP_KV, 1, KeysRequest(asked[0]))
        find_bytes = request(Code.FIND, 1, FindRequest(token, 0, asked[0], False, False))
        looked_up = measure(
            f"lookups of {BATCH}, {transport}",
            effort,
            {
                "lookup": lookup,
                "lookup.echo": echoed(lookup_bytes),
                "find": find,
                "find.echo": echoed(find_bytes),
            },
        )
        ahead = measure(
            f"{_AHEAD} lookups of {BATCH} in flight, {transport}",
            effort,
            {
                "lookup": lambda: lookup(_AHEAD),
                "lookup.echo": echoed(lookup_bytes, _AHEAD),
                "find": lambda: find(_AHEAD),
                "find.echo": echoed(find_bytes, _AHEAD),
            },
        )
        registered = measure(
            f"registrations of {BATCH}, {transport}",
            effort,
            {
                "register": register,
                "register.echo": echoed(request(Code.BATCH_REGISTER_KV, 1, _registration(0, written[0], 0))),
                "store": store,
                "store.echo": echoed(request(Code.STORE, 1, _storing(token, 1, 0, written[0], 0))),
            },
        )
    beside = "bare echo of these bytes"
    for samples, subject, goal in (
        (registered, "register", "ratio >= 0.45"),
        (registered, "store", None),
        (looked_up, "lookup", "ratio >= 0.55"),
        (looked_up, "find", None),
    ):
        name = f"rpc.{subject}{BATCH}.{transport}"
        yield samples.row(name, "calls/s", subject, beside, f"{subject}.echo", goal)
    for samples, way, subject, goal in (
        (looked_up, "lockstep", "lookup", f"value >= {3 * _THEIRS}"),
        (looked_up, "lockstep", "find", None),
        (ahead, f"window{_AHEAD}", "lookup", None),
        (ahead, f"window{_AHEAD}", "find", f"value >= {15 * _THEIRS}"),
    ):
        name = f"rpc.keys.{way}.{subject}.{transport}"
        yield samples.row(name, "keys/s", subject, beside, f"{subject}.echo", goal, scale=BATCH)


def _all_found(reply: BatchLookupReply) -> bool:
    return len(reply.entries) == BATCH and all([entry.found for entry in reply.entries])


def _grouped(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[start : start + BATCH]) for start in range(0, len(keys), BATCH)]


def _register(client: Bare, region_id: int, batches: Sequence[Sequence[str]]) -> float:
    """Register as a published client does. Returns batches per second."""
    messages = [partial(_registration, region_id, keys, at) for at, keys in enumerate(batches)]
    return client.rate(Code.BATCH_REGISTER_KV, messages, 1, lambda reply: reply.success and all(reply.results))


def _registration(region_id: int, keys: Sequence[str], at: int) -> BatchRegisterRequest:
    return BatchRegisterRequest(
        [RegisterRequest(key, region_id, offset, _PAGE_BYTES) for key, offset in zip(keys, _offsets(at), strict=True)]
    )


def _store(client: Bare, token: bytes, region_id: int, batches: Sequence[Sequence[str]]) -> float:
    """Store with our own code. Returns batches per second."""
    messages = [partial(_storing, token, at + 1, region_id, keys, at) for at, keys in enumerate(batches)]
    return client.rate(Code.STORE, messages, 1, lambda reply: not any(reply.statuses))


def _storing(token: bytes, attempt: int, region_id: int, keys: Sequence[str], at: int) -> StoreRequest:
    return StoreRequest(token, 0, attempt, region_id, list(keys), list(_offsets(at)), _PAGE_BYTES, None)


def _offsets(at: int) -> range:
    return range(at * BATCH * _PAGE_BYTES, (at + 1) * BATCH * _PAGE_BYTES, _PAGE_BYTES)


def _region(client: Bare, batches: int, token: bytes | None) -> int:
    # Twice the needed size: a server evicts ahead of need from a region that is nearly full.
    reply = client.ask(Code.REQUEST_ALLOC, AllocRequest(_INSTANCE, 2 * batches * BATCH * _PAGE_BYTES, token))
    if reply.handle is None:
        raise BenchFailed(f"no region: {reply.error}")
    region_id: int = reply.handle.region_id
    return region_id


def _drop(client: Bare, token: bytes, batches: Sequence[Sequence[str]]) -> None:
    """Delete all these keys, and with them the returned region."""
    keys = [key for batch in batches for key in batch]
    for start in range(0, len(keys), _AT_ONCE):
        reply = client.ask(Code.DROP, DropRequest(token, 0, 0, keys[start : start + _AT_ONCE]))
        if any(reply.answers):
            raise BenchFailed("registered keys could not be deleted")
