"""The longest step of a page store's server: every message at its largest, with many keys and sessions, in processor time.

    python -m tests.support.longest_step --keys 1000000 --sessions 1000

The messages are those of the wire tables: one that has no largest form here is an error. The server runs in this thread with
all that it has (index, board, journal, KV events), its client in another one. A step is the time of a task between two waits;
collections of garbage in it are reported apart. So is the filling: CPython moves a growing table in one go, which with a
million keys is a step of some 60 ms, once in each doubling.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import trio

from maru import ServerConfig, open_server
from maru._directory import Directory
from maru._directory.changes import Changes
from maru._server.garbage import short_collections
from maru._wire import (
    KEYS_AT_ONCE,
    MAX_KEYS,
    MAX_NAME_LENGTH,
    MESSAGES,
    AllocRequest,
    BatchRegisterRequest,
    BeatRequest,
    CloseRequest,
    Code,
    DescribeRequest,
    DropRequest,
    ErrorReply,
    FindRequest,
    HandshakeRequest,
    KeyRequest,
    KeysRequest,
    ListKeysRequest,
    ListRequest,
    PinsRequest,
    ReclaimRequest,
    RegionRequest,
    RegisterRequest,
    ReportEntry,
    ReportRequest,
    ResolveRequest,
    ReturnRequest,
    StoreRequest,
    UnpinRequest,
    body_of,
    decode_reply,
    read_header,
    request,
)
from maru.blocking import MaruHandler
from maru.transport import ChannelConnection
from tests.support.maru_processes import PATIENCE, temporary_pool

GOAL: Final = 20e-3
"""Seconds of the processor for the longest step, where a checkpoint takes ``CHECKPOINT``; elsewhere in proportion."""
CHECKPOINT: Final = 2.5e-6
REGION: Final = 4 << 20


@attrs.define(eq=False)
class Steps(trio.abc.Instrument):
    """The longest step of the thread that it is made in, and the most keys that a step has handed to the directory."""

    longest: dict[str, float] = attrs.field(factory=dict)
    collections: dict[str, float] = attrs.field(factory=dict)
    """The longest collection of garbage in a step."""
    keys: dict[str, int] = attrs.field(factory=dict)
    label: str = "(filling)"
    _began: int = 0
    _collecting: int = 0
    _collected: int = 0
    _handed: int = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._collected = self._handed = 0
        self._began = time.thread_time_ns()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took = (time.thread_time_ns() - self._began - self._collected) / 1e9
        label = self.label
        self.longest[label] = max(self.longest.get(label, 0.0), took)
        self.keys[label] = max(self.keys.get(label, 0), self._handed)

    def on_collection(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time_ns()
        else:
            took = time.thread_time_ns() - self._collecting
            self._collected += took
            self.collections[self.label] = max(self.collections.get(self.label, 0.0), took / 1e9)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the keys that are handed to the directory in a step."""
        places: list[tuple[type, str, Callable[[tuple], int]]] = [
            (Directory, "register", lambda args: len(args[2].keys)),
            *[(Directory, name, lambda args: len(args[2])) for name in ("find", "pin", "unpin", "delete", "settle_pins")],
            (Directory, "exists", lambda args: len(args[1])),
            (Directory, "resolve", lambda args: len(args[3])),
            (Changes, "remove", lambda args: len(args[1])),
        ]  # fmt: skip

        def counted(method: Callable[..., Any], size: Callable[[tuple], int]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._handed += size(args)
                return method(*args, **kwargs)

            return call

        before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        for owner, name, size in places:
            setattr(owner, name, counted(getattr(owner, name), size))
        try:
            yield
        finally:
            for owner, name, method in before:
                setattr(owner, name, method)


@attrs.define(eq=False)
class Stage:
    """A server that holds much, and who asks it."""

    steps: Steps
    connection: ChannelConnection
    many: int
    """Keys that it holds of the session that asks, under ``k0`` and on."""
    token: bytes = b""
    region: int = 0
    more: int = 0
    """Another region of that session, empty."""
    other: bytes = b""
    """A session with as many keys."""
    theirs: int = 0
    """A region of a published connection: this one."""
    sequences: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))

    def ask(self, code: int, message: Any = None) -> Any:
        sequence, end = next(self.sequences), time.perf_counter() + 5 * PATIENCE
        assert self.connection.send_by(request(code, sequence, message), end)
        while True:
            frame = self.connection.receive_by(end)
            assert frame is not None, f"no answer to {Code(code).name}"
            header = read_header(frame)
            if header.sequence == sequence:
                return decode_reply(header.code, body_of(frame, header))

    def session(self, name: str, keys: int = 0) -> tuple[bytes, int]:
        """A further session with so many keys of one byte in a region of its own."""
        token = self.ask(
            Code.HANDSHAKE, HandshakeRequest(instance_id=name, extensions=1, tenant="", lease=3600.0)
        ).session
        if not keys:
            return token, 0
        region = self.ask(Code.REQUEST_ALLOC, AllocRequest(name, REGION, session=token)).handle.region_id
        for first in range(0, keys, KEYS_AT_ONCE):
            some = range(first, min(first + KEYS_AT_ONCE, keys))
            names = [f"{name}{at}" for at in some]
            stored = self.ask(Code.STORE, StoreRequest(token, 0, 1 + first, region, names, list(some), 1, None))
            assert not any(stored.statuses)
        return token, region

    def held(self, first: int = 0) -> list[str]:
        """Keys that are there."""
        return [f"k{at % self.many}" for at in range(first, first + MAX_KEYS)]


def long(prefix: str) -> list[str]:
    """Names as long as they may be."""
    return [f"{prefix}{at}".ljust(1024, ".") for at in range(MAX_KEYS)]


PAGES: Final = list(range(MAX_KEYS))
NAME: Final = "n" * MAX_NAME_LENGTH


def largest(s: Stage) -> dict[int, list[Any]]:
    """Every message at its largest, in an order in which one brings what the next one needs."""
    t, half = s.token, s.many // 2
    report = ReportRequest([ReportEntry(f"{at % 64}{NAME}"[:256], f"{at}{NAME}"[:256], "hit", at, 1.0) for at in PAGES])
    entries = [RegisterRequest(key, s.theirs, at, 1) for at, key in enumerate(long("r"))]
    return {
        Code.HANDSHAKE: [HandshakeRequest(instance_id=NAME, extensions=1, tenant=NAME, lease=3600.0)],
        Code.STORE: [
            StoreRequest(t, 0, 1 << 40, [s.more] * MAX_KEYS, long("s"), PAGES, [1] * MAX_KEYS, [2**64 - 1] * MAX_KEYS, PAGES),
            StoreRequest(t, 0, 2 << 40, s.more, long("s"), PAGES, 1, None),  # duplicates
        ],
        Code.BATCH_REGISTER_KV: [BatchRegisterRequest(entries), BatchRegisterRequest(entries)],
        Code.REGISTER_KV: [RegisterRequest("x" * 1024, s.theirs, MAX_KEYS, 1)],
        Code.LOOKUP_KV: [KeyRequest("x" * 1024)],
        Code.EXISTS_KV: [KeyRequest("x" * 1024)],
        Code.PIN_KV: [KeyRequest("x" * 1024)],
        Code.UNPIN_KV: [KeyRequest("x" * 1024)],
        Code.BATCH_LOOKUP_KV: [KeysRequest(long("s")), KeysRequest(s.held(half))],
        Code.BATCH_EXISTS_KV: [KeysRequest(long("s")), KeysRequest(long("missing"))],
        Code.BATCH_PIN_KV: [KeysRequest(long("r"))],
        Code.BATCH_UNPIN_KV: [KeysRequest(long("r"))],
        Code.FIND: [
            FindRequest(t, 0, s.held(), True, False),
            FindRequest(t, 0, long("s"), False, True),
            FindRequest(t, 0, long("missing"), False, False),
        ],
        Code.RECLAIM: [ReclaimRequest(t, 0, 1, s.many // 4)],
        Code.PINS: [PinsRequest(t, 0, 1, s.held(), [1] * MAX_KEYS, is_last) for is_last in (False, True)],
        Code.UNPIN: [UnpinRequest(t, 0, s.held(), 1)],
        Code.DROP: [DropRequest(t, 0, 2, long("s"))],
        Code.RESOLVE: [ResolveRequest(t, 0, 3 << 40, [s.more] * MAX_KEYS, PAGES)],
        Code.BEAT: [BeatRequest(t, 0, 0), BeatRequest(t, 1 << 40, 0)],
        Code.DELETE_KV: [KeyRequest("x" * 1024)],
        Code.LIST_KEYS: [ListKeysRequest(t, 0, "", 0), ListKeysRequest(t, 0, "", 1024)],
        Code.REGION: [RegionRequest(t, 0, s.region, True)],
        Code.DESCRIBE: [DescribeRequest(f"k{half}")],
        Code.LIST_ALLOCATIONS: [ListRequest(session=t)],
        Code.REPORT_STATS: [report],
        Code.GET_STATS: [None],
        Code.GET_USAGE: [None],
        Code.SHUTDOWN: [None],
        Code.HEARTBEAT: [None],
        Code.RETURN_ALLOC: [ReturnRequest("a", s.region, session=t)],
        Code.CLOSE: [CloseRequest(t, 0), CloseRequest(s.other, 0)],
        # Behind the others: now regions are abandoned, and go for it.
        Code.REQUEST_ALLOC: [AllocRequest(NAME, 5 * REGION), AllocRequest(NAME, 1 << 40)],
    }  # fmt: skip


def play(steps: Steps, path: str, url: str, keys: int, sessions: int) -> dict[str, list[str]]:
    """Ask everything; the errors that were answered, by message."""
    errors: dict[str, list[str]] = {}
    connection = ChannelConnection(f"{path}/channel.sock")
    with MaruHandler(server_url=url, pool_size=0) as reader:
        reader.exists("x")  # so there are an index and a board
        s = Stage(steps, connection, keys // 2)
        published: ChannelConnection | None = None
        try:
            for at in range(sessions - 3):
                s.session(f"s{at}")
            s.other, _ = s.session("o", keys - keys // 2)
            s.token, s.region = s.session("k", s.many)
            s.more = s.ask(Code.REQUEST_ALLOC, AllocRequest("k", REGION, session=s.token)).handle.region_id
            published = ChannelConnection(f"{path}/channel.sock")  # only now: a silent one is not kept for long
            theirs = Stage(steps, published, 0)
            s.theirs = theirs.ask(Code.REQUEST_ALLOC, AllocRequest("p", REGION)).handle.region_id
            for first in range(MAX_KEYS, s.many // 2, MAX_KEYS):
                s.ask(Code.FIND, FindRequest(s.token, 0, s.held(first), True, False))
            table = largest(s)
            assert table.keys() == MESSAGES.keys(), f"without a largest form: {set(MESSAGES) ^ set(table)}"
            by_published = {
                Code.BATCH_REGISTER_KV,
                Code.REGISTER_KV,
                Code.DELETE_KV,
                Code.BATCH_PIN_KV,
                Code.BATCH_UNPIN_KV,
            }
            for code, messages in table.items():
                name = Code(code).name
                for message in messages:
                    steps.label = name
                    reply = (theirs if code in by_published else s).ask(code, message)
                    if isinstance(reply, ErrorReply):
                        errors.setdefault(name, []).append(reply.code)
                    time.sleep(0.12)  # what it leaves to do is its own
            steps.label = "(leaving)"
        finally:
            connection.close()
            if published is not None:
                published.close()
    return errors


async def _serve(steps: Steps, pool: str, keys: int, sessions: int) -> dict[str, list[str]]:
    config = ServerConfig(
        host="", rm_address="", pool_path=pool, capacity_bytes=6 * REGION, max_lease=3600.0, kv_events="ipc",
        max_sessions=max(128, 8 * sessions), lease_grace=0.0, v1_read_grace=0.0,
    )  # fmt: skip
    async with open_server(config) as server:
        gc.callbacks.append(steps.on_collection)
        try:
            path = server.endpoints[-1].removeprefix("ipc://").rpartition("/")[0]
            with short_collections(time.monotonic):  # as the command does
                return await trio.to_thread.run_sync(play, steps, path, server.endpoints[-1], keys, sessions)
        finally:
            gc.callbacks.remove(steps.on_collection)
            gc.unfreeze()


def measure(keys: int, sessions: int) -> tuple[Steps, dict[str, list[str]]]:
    """Steps by message, and the errors that were answered."""
    steps = Steps()
    with temporary_pool() as pool, steps.counting():
        return steps, trio.run(_serve, steps, str(pool), keys, sessions, instruments=[steps])


def checkpoint_time() -> float:
    """Seconds of the processor for a checkpoint, here and now."""

    async def run() -> float:
        began = time.thread_time()
        for _ in range(4_000):
            await trio.lowlevel.checkpoint()
        return (time.thread_time() - began) / 4_000

    return statistics.median(trio.run(run) for _ in range(9))


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each message; 1 if a step is longer than it may be."""
    parser = argparse.ArgumentParser(description="Measure the longest step of a page store's server.")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--sessions", type=int, default=1_000)
    options = parser.parse_args(arguments)
    most = GOAL * max(1.0, checkpoint_time() / CHECKPOINT)
    steps, errors = measure(options.keys, options.sessions)
    print(f"{'message':20}{'longest step':>16}{'garbage':>12}{'keys':>8}")
    for name, longest in sorted(steps.longest.items(), key=lambda one: -one[1]):
        garbage = steps.collections.get(name, 0.0)
        said = " ".join(errors.get(name, ()))
        print(f"{name:20}{longest * 1e3:13.1f} ms{garbage * 1e3:9.1f} ms{steps.keys[name]:8} {said}")
    names = {Code(code).name for code in MESSAGES}
    late = [name for name, longest in steps.longest.items() if name in names and longest > most]
    print(f"at most {most * 1e3:.1f} ms here; longer: {', '.join(late) or 'none'}")
    return bool(late)


if __name__ == "__main__":
    sys.exit(main())
