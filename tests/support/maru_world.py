"""A server in memory and clients without threads: the pure halves of both, joined by a wire that loses what it is told to.

What the wire does to one call (the *fate* of it): ``None`` it works; ``unsent`` it never leaves; ``lost`` the request is lost;
``cut`` the request is done and its answer is lost; ``late`` the same, and the answer can be delivered later; ``delayed`` the
request arrives later, when the world says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import attrs
import msgspec
import trio

from maru import CannotMap, MaruConfig, MaruHandler, NoAnswer, ServerConfig, ServerRefused
from maru._client.copying import copy, copy_and_sum
from maru._client.operations import Alone, BoardPins, Call, ClientState, Identify, Map, MapIndex, Work, load, put
from maru._client.operations import effects as effects
from maru._directory import Directory
from maru._directory.limits import Limits
from maru._index import BOARD_BYTES, Boards, BoardWriter, IndexReader, TenantIndexes, bytes_for, header_of_board
from maru._index.layout import AT_RETIRED
from maru._server.service import Service
from maru._wire import HEADER_BYTES, Code, ErrorReply, decode_reply, read_header, request
from maru._wire.capability import verify
from maru._wire.frames import frame_of
from maru.base.peers import Listener

PAGE = 64
SECRET = b"s" * 32
OURS = Listener(frozenset({os.geteuid()}), is_private=True)
"""Who listens, where nothing is said: a process of this user, at a Unix socket that nobody else can have put there."""


@attrs.frozen
class FakeSpan:
    """A region's memory, which is a bytearray."""

    memory: bytearray
    writable: bool

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @property
    def length(self) -> int:
        return len(self.memory)

    @property
    def owner(self) -> bytearray:
        return self.memory

    def view(self, offset: int, length: int) -> memoryview:
        view = memoryview(self.memory)[offset : offset + length]
        return view if self.writable else view.toreadonly()


class World:
    """The server's side: a service over a directory, and memory that outlives both."""

    def __init__(self, capacity_regions: int = 8, **config: object):
        self.now = 1000.0
        self.config = ServerConfig(**{"high_watermark": 1.0, "low_watermark": 1.0, **config})
        self.capacity = capacity_regions
        self.memory: dict[int, bytearray] = {}
        self.lengths: dict[int, int] = {}
        self._regions = itertools.count(1)
        self._tokens = itertools.count(1)
        self._epochs = itertools.count(1)
        self.delayed: list[Callable[[], None]] = []
        self.shared: dict[str, mmap.mmap] = {}
        self.indexes = TenantIndexes()
        self.boards = Boards(self.indexes, lambda: None)
        self.start(Directory(self._limits()))

    def _limits(self) -> Limits:
        return Limits(high_watermark=self.config.high_watermark, low_watermark=self.config.low_watermark)

    def start(self, directory: Directory, *, begins_anew: bool = False) -> None:
        self.service = Service(
            self.config,
            directory,
            epoch=next(self._epochs),
            secret=SECRET,
            new_token=lambda: next(self._tokens).to_bytes(16, "big"),
            totals=lambda: (1 << 30, 1 << 30),
            anew_until=self.now + self.config.max_lease if begins_anew else -math.inf,
        )
        self.service.descriptors = "somewhere"
        self.retire()
        self.indexes = TenantIndexes()
        self.boards = Boards(self.indexes, lambda: None)
        for region_id, length in directory.regions():
            self.service.place(region_id, 0, length)

    def restart(self, *, forgets: bool = False) -> None:
        """Kill -9. What was acknowledged is there again, unless it forgets everything."""
        if forgets:
            directory = Directory(self._limits())
            self.memory.clear()
        else:
            directory = Directory.load(self.service.directory.dump(), self._limits())
            directory.restart(self.now)
        self.start(directory, begins_anew=forgets)

    def retire(self) -> None:
        """What a server does before anything else with the indexes that the one before has left."""
        for memory in self.shared.values():
            memory[8 * AT_RETIRED] = 1
        self.shared.clear()

    def index(self, token: bytes, wanted: MapIndex) -> tuple[IndexReader, BoardPins | None]:
        """The shared index for this session, made if need be, and its board."""
        directory = self.service.directory
        tenant = directory.tenant_of(token)
        if tenant is None:
            raise ServerRefused("there is no such session", "refused")
        if tenant not in self.shared:
            self.shared[tenant] = memory = mmap.mmap(-1, bytes_for(64))
            directory.watch_locations(self.indexes)
            self.indexes.open(tenant, memory, self.service.epoch, 1)
            self.indexes.fill(tenant, directory.locate(directory.list_keys()))
            self.indexes.end_filling(tenant)
        reader = IndexReader(self.shared[tenant])
        if not wanted.with_board:
            return reader, None
        board = mmap.mmap(-1, BOARD_BYTES)
        board[: len(header_of_board())] = header_of_board()
        session = directory.session_of(token)
        self.boards.open(session, tenant, board)
        directory.heed(self.boards)
        return reader, BoardPins(BoardWriter(board), threading.Lock(), wanted.era, wanted.counters)

    def arrive(self, identity: bytes, frame: bytes) -> bytes | None:
        """A request arrives, and is answered at once."""
        service = self.service
        service.expire(self.now)
        answer = service.handle(identity, frame, self.now)
        for ticket, size in service.take_allocations():
            if len(self.memory) >= self.capacity and service.make_room(size, self.now):
                self._sweep()
            if len(self.memory) < self.capacity:
                region_id = next(self._regions)
                self.memory[region_id] = bytearray(size)
                told = service.allocated(ticket, region_id, 0, size, self.now)
            else:
                told = service.not_allocated(ticket, "the pool is full")
            if told is not None:
                answer = told[1]
        service.trim(self.now)
        service.take_records()
        self.indexes.publish()
        self._sweep()
        return answer

    def _sweep(self) -> None:
        for region_id in self.service.take_dropped():
            self.memory.pop(region_id, None)

    def late_requests(self) -> None:
        """What was delayed arrives."""
        while self.delayed:
            self.delayed.pop(0)()


class Client:
    """A face without threads: runs an operation to its end at once."""

    def __init__(self, world: World | PublishedWorld, name: str = "a", **config: object):
        self.world = world
        self.identity = name.encode()
        # Most of what is asked here is what is sent. Over an index nothing would be.
        defaults = {
            "pool_size": 8 * PAGE,
            "chunk_size_bytes": PAGE,
            "eager_map": False,
            "checksums": True,
            "index": "off",
        }
        self.s = ClientState(MaruConfig(**{**defaults, **config}), name, lambda: world.now)
        self.listener = OURS
        self.sequences = itertools.count(1)
        self.fates: list[str | None] = []
        self.fate: Callable[[Call], str | None] = lambda call: self.fates.pop(0) if self.fates else None
        self.error: Callable[[], BaseException] = lambda: NoAnswer("no answer")
        self.late: list[Callable[[], None]] = []
        self.calls: list[int] = []
        self.busy = False

    def run(self, operation):
        """What it returns or raises."""
        value, error = None, None
        while True:
            try:
                effect = operation.send(value) if error is None else operation.throw(error)
            except StopIteration as stop:
                return stop.value
            value, error = None, None
            try:
                value = self.perform(effect)
            except BaseException as exc:
                error = exc

    def perform(self, effect: effects.Effect):
        if isinstance(effect, Call):
            if effect.is_awaited:
                return self.call(effect)
            with contextlib.suppress(NoAnswer, ServerRefused):
                self.call(effect)
            return None
        if isinstance(effect, Map):
            return self.map(effect)
        if isinstance(effect, MapIndex):
            return self.world.index(self.s.token, effect)
        if isinstance(effect, Identify):
            return self.listener
        if isinstance(effect, Work):
            return effect.do()
        assert isinstance(effect, Alone)
        return self.run(effect.operation())

    def call(self, call: Call):
        fate = self.fate(call)
        if fate == "unsent":
            raise self.error()
        self.calls.append(call.code)
        if call.sending is not None:
            call.sending()
        call.sent_at = sent_at = self.world.now
        frame = request(call.code, next(self.sequences), call.message)
        if fate in ("lost", "delayed", "cut", "late"):
            self.s.gave_up(call)
        if fate == "lost":
            raise self.error()
        if fate == "delayed":
            self.world.delayed.append(partial(self._arrive_late, call, frame))
            raise self.error()
        answer = self.world.arrive(self.identity, frame)
        if answer is None and isinstance(self.world, PublishedWorld):
            raise self.error()
        reply = self._decode(call, answer)
        if fate == "cut":
            raise self.error()
        if fate == "late":
            self.late.append(partial(self.s.heard_late, call, reply))
            raise self.error()
        self.s.heard(call, reply, sent_at)
        if isinstance(reply, ErrorReply):
            raise ServerRefused(reply.error, reply.code)
        return reply

    def _arrive_late(self, call: Call, frame: bytes) -> None:
        self.s.heard_late(call, self._decode(call, self.world.arrive(self.identity, frame)))

    def _decode(self, call: Call, frame: bytes | None):
        assert frame is not None, f"code {call.code:#x} was not answered"
        header = read_header(frame)
        return decode_reply(call.code, frame[HEADER_BYTES : HEADER_BYTES + header.length])

    def map(self, effect: Map) -> FakeSpan:
        if isinstance(self.world, PublishedWorld):
            assert effect.handle.auth_token == 7
            return FakeSpan(self.world.memory[effect.region_id], effect.write)
        assert effect.capability is not None
        epoch = self.world.service.epoch
        where = (effect.region_id, effect.offset, effect.length, effect.write, epoch, self.s.token)
        assert verify(SECRET, effect.capability, *where)
        return FakeSpan(self.world.memory[effect.region_id], effect.write)

    # what a handler does, without its face

    def put(self, keys, values):
        buffers = [(ctypes.c_char * len(value)).from_buffer_copy(value) for value in values]
        at, sizes = [ctypes.addressof(buffer) for buffer in buffers], [len(value) for value in values]

        def copying(to, with_sums):
            n = len(to)
            return (copy_and_sum if with_sums else copy)(to, at[:n], sizes[:n])

        return self.run(put(self.s, list(keys), sizes, copying))

    def get(self, keys, size=PAGE):
        buffers = [(ctypes.c_char * size)() for _ in keys]
        got = {}

        def copying(positions, at, sizes, with_sums):
            got.update(zip(positions, sizes, strict=True))
            to = [ctypes.addressof(buffers[position]) for position in positions]
            return (copy_and_sum if with_sums else copy)(to, at, sizes)

        answers = self.run(load(self.s, list(keys), [size] * len(keys), copying))
        return [bytes(buffers[at])[: got[at]] if answer else answer for at, answer in enumerate(answers)]


class PublishedWorld:
    """A published server over three dicts: no session, no epoch, no code of ours, nothing checked."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.memory: dict[int, bytearray] = {}
        self.handles: dict[int, dict[str, int]] = {}
        self.owners: dict[int, str] = {}
        self.keys: dict[str, tuple[int, int, int]] = {}
        self.pins: Counter[str] = Counter()
        self.asked: list[int] = []
        self.delayed: list[Callable[[], None]] = []

    def arrive(self, identity: bytes, frame: bytes) -> bytes | None:
        header = read_header(frame)
        body = msgspec.msgpack.decode(frame[HEADER_BYTES:])
        self.asked.append(header.code)
        answer = self._answer(Code(header.code), **body) if isinstance(body, dict) else None
        if answer is None:  # answered with sequence 0, which nobody can tell from no answer
            return None
        return frame_of(header.code | 0x80, header.sequence, msgspec.msgpack.encode(answer), 0)

    def late_requests(self) -> None:
        while self.delayed:
            self.delayed.pop(0)()

    def _answer(self, code, *, instance_id="", size=0, region_id=0, key="", keys=(), entries=(), **others):
        match code:
            case Code.HANDSHAKE:
                return {"success": True, "rm_address": "127.0.0.1:1"}
            case Code.REQUEST_ALLOC:
                number = len(self.owners) + 1
                self.memory[number], self.owners[number] = bytearray(size), instance_id
                self.handles[number] = {"region_id": number, "offset": 0, "length": size, "auth_token": 7}
                return {"success": True, "handle": self.handles[number]}
            case Code.RETURN_ALLOC:
                return {"success": self.handles.pop(region_id, None) is not None}
            case Code.LIST_ALLOCATIONS:
                excluded = others.get("exclude_instance_id")
                listed = [handle for number, handle in self.handles.items() if self.owners[number] != excluded]
                return {"success": True, "allocations": listed}
            case Code.BATCH_REGISTER_KV:
                return {"success": True, "results": [self._register(**entry) for entry in entries]}
            case Code.BATCH_LOOKUP_KV:
                return {"entries": [self._lookup(key) for key in keys]}
            case Code.EXISTS_KV:
                return {"exists": key in self.keys}
            case Code.BATCH_EXISTS_KV:
                return {"results": [key in self.keys for key in keys]}
            case Code.DELETE_KV:
                return {"success": not self.pins[key] and self.keys.pop(key, None) is not None}
            case Code.BATCH_PIN_KV:
                there = list(itertools.takewhile(self.keys.__contains__, keys))
                self.pins.update(there)
                return {"results": [at < len(there) for at in range(len(keys))]}
            case Code.BATCH_UNPIN_KV:
                return {"results": [self._unpin(key) for key in keys]}
            case Code.HEARTBEAT:
                return {}
        return None

    def _register(self, key, region_id, kv_offset, kv_length):
        is_new = key not in self.keys
        if is_new:
            self.keys[key] = region_id, kv_offset, kv_length
        return is_new

    def _unpin(self, key):
        pinned = self.pins[key] > 0
        self.pins[key] -= pinned
        return pinned

    def _lookup(self, key):
        if key not in self.keys:
            return {"found": False}
        region_id, offset, length = self.keys[key]
        return {"found": True, "handle": self.handles[region_id], "kv_offset": offset, "kv_length": length}


class FakeExpected:
    """Something that is to come, as a socket's `expect` gives it."""

    def __init__(self) -> None:
        self.done = False
        self._value = self._error = None
        self._came = trio.Event()

    def deliver(self, value) -> None:
        if not self.done:
            self.done, self._value = True, value
            self._came.set()

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self.done, self._error = True, error
            self._came.set()

    async def wait(self):
        await self._came.wait()
        if self._error is not None:
            raise self._error
        return self._value


class FakeSocket:
    """A socket to a world, with latency, in virtual time. What is told to be lost is lost."""

    def __init__(self, world: World, name: str, on_messages, nursery: trio.Nursery):
        self.world, self.identity = world, name.encode()
        self.latency = 0.001
        self.fate: Callable[[int], str | None] = lambda code: None
        self.full = False
        self.sent = 0
        self.waiting: set[FakeExpected] = set()
        self.closed = False
        self._on_messages, self._nursery = on_messages, nursery

    def send_nowait(self, frames) -> bool:
        if self.closed:
            raise trio.ClosedResourceError
        if self.full:
            raise trio.WouldBlock
        self.sent += 1
        self._nursery.start_soon(self._deliver, frames[-1])
        return True

    async def send(self, frames) -> bool:
        while self.full:  # noqa: ASYNC110
            await trio.sleep(0.001)
        await trio.lowlevel.checkpoint()
        return self.send_nowait(frames)

    def expect(self) -> FakeExpected:
        expected = FakeExpected()
        self.waiting.add(expected)
        return expected

    async def aclose(self) -> None:
        self.closed = True
        for expected in self.waiting:
            expected.fail(trio.ClosedResourceError())
        await trio.lowlevel.checkpoint()

    async def _deliver(self, frame: bytes) -> None:
        with trio.CancelScope(shield=True):  # what is on its way arrives, whatever becomes of who sent it
            await self._travel(frame)

    async def _travel(self, frame: bytes) -> None:
        fate = self.fate(read_header(frame).code)
        await trio.sleep(self.latency * (1000 if fate == "delayed" else 1))
        if fate == "lost" or self.closed:
            return
        answer = self.world.arrive(self.identity, frame)
        await trio.sleep(self.latency * (1000 if fate == "late" else 1))
        if fate != "cut" and not self.closed:
            self._on_messages([[b"", answer]])


class Joined:
    """A trio handler over a world: ``async with Joined(world, "a") as handler``. Its socket is ``.socket``."""

    def __init__(self, world: World, name: str = "a", **config: object):
        defaults = {
            "pool_size": 8 * PAGE,
            "chunk_size_bytes": PAGE,
            "eager_map": False,
            "instance_id": name,
            "index": "off",
        }
        self.handler = MaruHandler(MaruConfig(**{**defaults, **config}))
        self.handler._open_socket = self._open
        self.handler._state.clock = trio.current_time
        self.handler._driver.map = self._map
        self.handler._driver.identify = self._identify
        self.world = world
        self.name = name
        self.socket: FakeSocket | None = None

    async def __aenter__(self) -> MaruHandler:
        return await self.handler.__aenter__()

    async def __aexit__(self, *exc):
        return await self.handler.__aexit__(*exc)

    @contextlib.asynccontextmanager
    async def _open(self, on_messages):
        async with trio.open_nursery() as nursery:
            self.socket = FakeSocket(self.world, self.name, on_messages, nursery)
            try:
                yield self.socket
            finally:
                await self.socket.aclose()
                nursery.cancel_scope.cancel()

    async def _identify(self) -> Listener:
        await trio.lowlevel.checkpoint()
        return OURS

    async def _map(self, effect: Map | MapIndex) -> FakeSpan | tuple[IndexReader, BoardPins | None]:
        await trio.sleep(0.001)
        if isinstance(effect, MapIndex):
            return self.world.index(self.handler._state.token, effect)
        if effect.region_id not in self.world.memory:
            raise CannotMap(f"region {effect.region_id} is gone")
        return FakeSpan(self.world.memory[effect.region_id], effect.write)
