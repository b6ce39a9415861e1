"""Clients of both faces, and a published one, that store what their keys say: used in this process, or in one of their own.

What is stored under a key is a function of the key (:func:`maru_processes.payload`), so whoever loads it can say whether it
is right without knowing who stored it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import attrs
import trio

from maru import MaruError
from maru import MaruHandler as TrioHandler
from maru._client import operations as operations
from maru._client.operations import Call
from maru.blocking import MaruHandler as BlockingHandler
from tests.support import maru_processes, published_clients
from tests.support.maru_processes import act, payload
from tests.support.maru_rounds import Rounds
from tests.support.published import PublishedClient, PublishedRmClient
from tests.support.published_wire import TIMEOUT, Ask

PAGE = 256 << 10
"""Eight pages fill the smallest region there is."""
PAGES = 8
REGION = PAGE * PAGES
SIZE = 1000
"""Of what is stored, unless a test says otherwise."""
FACES = ("trio", "blocking")

SILENCE = 0.08
"""Seconds that a call waits for an answer that will not come. Everything else waits patiently: see :meth:`Client.impatient`."""

DEFAULTS: dict[str, Any] = {"pool_size": REGION, "chunk_size_bytes": PAGE, "auto_expand": False}


def knobs_of(url: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """What a client is opened with. Unless told otherwise it waits for an answer as long as a test waits for anything."""
    return {**DEFAULTS, "timeout_ms": round(maru_processes.PATIENCE * 1e3), "server_url": url, **knobs}


@contextlib.asynccontextmanager
async def impatient(handler: TrioHandler, seconds: float = SILENCE, *codes: int) -> AsyncIterator[None]:
    """A trio handler's calls wait no longer than this while the block lasts: those that nobody will answer.

    A handler that is opened with so short a timeout is impatient with its handshake, too, and a busy machine fails that.

    Args:
        handler: an open one.
        seconds: how long.
        codes: of the calls that nobody will answer, if others are made in the block.
    """
    with waits(handler, seconds, *codes):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handler._driver.keep_time)  # that which runs sleeps, for as long as waits were before
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()


@contextlib.contextmanager
def waits(handler: TrioHandler | BlockingHandler, timeout: float = SILENCE, *codes: int) -> Iterator[None]:
    """The same for a blocking handler."""
    driver: Any = handler._driver
    begins = "_begin" if isinstance(handler, TrioHandler) else "_call"
    before, config, begin = driver.timeout, driver.state.config, getattr(driver, begins)

    def begin_patiently(call: Call) -> Any:
        if call.code not in codes and call.patience is None:
            call.patience = before
        return begin(call)

    driver.timeout = timeout
    if codes:
        setattr(driver, begins, begin_patiently)
    else:
        driver.state.config = attrs.evolve(config, timeout_ms=round(timeout * 1e3))
    try:
        yield
    finally:
        driver.timeout, driver.state.config = before, config
        if codes:
            delattr(driver, begins)


def be_patient(handler: TrioHandler | BlockingHandler, timeout: float = 30.0) -> None:
    """From now on it waits so long: one that was opened in vain, so far, and shall not be once there is somebody."""
    handler.config = handler._state.config = attrs.evolve(handler.config, timeout_ms=round(timeout * 1e3))
    handler._driver.timeout = timeout


class Client(ABC):
    """What both faces do, synchronously, in a test's words."""

    def __init__(self) -> None:
        self.held: dict[str, list[Any]] = {}
        """What :meth:`hold` holds, by key."""

    @abstractmethod
    def call(self, name: str, *arguments: Any) -> Any:
        """One method of the handler."""

    @abstractmethod
    def release(self, info: Any) -> None:
        """Let go of one that was found."""

    @abstractmethod
    def impatient(self, timeout: float = SILENCE, *codes: int) -> contextlib.AbstractContextManager[None]:
        """Calls (with these codes) wait no longer than this for as long as the block lasts: those that nobody will answer."""

    @abstractmethod
    def close(self) -> None:
        """Say farewell."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- bytes ----------------------------------------------------------------------------------------------------

    def put(self, keys: Iterable[str], size: int = SIZE) -> list[str]:
        """What became of each."""
        keys = list(keys)
        return [answer.name for answer in self.call("batch_put", keys, [payload(key, size) for key in keys])]

    def fill(self, keys: Sequence[str], size: int = SIZE) -> list[Any]:
        """Pages with what belongs under these keys, not stored yet."""
        handles = self.call("batch_alloc", len(keys), size)
        assert handles is not None, "no room"
        for key, handle in zip(keys, handles, strict=True):
            handle.buf[:] = payload(key, size)
        return handles

    def get(self, keys: Iterable[str], size: int = SIZE) -> list[str]:
        """Of each: ``right``, ``missing``, ``damaged``, or whose bytes these are."""
        keys = list(keys)
        buffers = [bytearray(size) for _ in keys]
        answers = self.call("batch_get_into", keys, buffers)
        return [
            ("right" if buffer == payload(key, size) else f"WRONG bytes under {key}") if answer else answer.name.lower()
            for key, answer, buffer in zip(keys, answers, buffers, strict=True)
        ]

    # --- views ----------------------------------------------------------------------------------------------------

    def hold(self, *keys: str) -> list[bool]:
        """Retrieve, and keep what came; which were found."""
        found = self.call("batch_retrieve", list(keys))
        for key, info in zip(keys, found, strict=True):
            if info is not None:
                self.held.setdefault(key, []).append((info, info.view))
        return [info is not None for info in found]

    def looks(self, key: str) -> str:
        """The view that is held: ``right``, ``lost`` (and it says so), or what else it shows."""
        info, view = self.held[key][-1]
        is_right = bytes(view) == payload(key, len(view))
        with contextlib.suppress(MaruError):
            info.check()
            return "right" if is_right else f"WRONG bytes in a view of {key}"
        return "lost"

    def let_go(self, *keys: str) -> None:
        for key in keys:
            info, _ = self.held[key].pop()
            self.release(info)

    # --- until it is killed ---------------------------------------------------------------------------------------

    def toil(self, name: str, seed: int, others: list[str], notes: str) -> None:
        """Store, delete, reserve, hold and pin without end; what is acknowledged is noted in a file, in the order of events.

        ``+key`` stands there once it is stored, ``-key`` before it is asked to be deleted. It uses less pages than it has, so
        that nothing of its own goes unless somebody else needs room.

        Args:
            name: what its keys begin with.
            seed: of its choices.
            others: who else is at work, in processes of their own.
            notes: the file.
        """
        dice = random.Random(seed)
        stored: list[str] = []
        reserved: list[Any] = []
        pinned: list[str] = []
        numbers = itertools.count()
        with open(notes, "ab", buffering=0) as file:
            while True:
                what = dice.randrange(7)
                if what < 2 and len(stored) + len(reserved) < PAGES - 3:
                    key = f"{name}/{next(numbers)}"
                    if what and reserved:  # filled before, and registered now
                        handle = reserved.pop()
                        handle.buf[:] = payload(key, handle.size)
                        [answer] = self.call("batch_store", [key], [handle])
                        is_new = answer.name == "NEW"
                    else:
                        is_new = self.put([key]) == ["NEW"]
                    if is_new:
                        stored.append(key)
                        file.write(b"+%s\n" % key.encode())
                elif what == 2 and len(stored) > 2:
                    key = stored.pop(dice.randrange(len(stored)))
                    file.write(b"-%s\n" % key.encode())
                    if self.delete([key]) == ["PINNED"]:
                        stored.append(key)
                        file.write(b"+%s\n" % key.encode())
                elif what == 3 and len(reserved) < 2:
                    reserved += self.fill([f"{name} was here"])
                elif what == 4:
                    wanted = [f"{dice.choice(others)}/{dice.randrange(12)}" for _ in range(3)]
                    for key in (key for key, found in zip(wanted, self.hold(*wanted), strict=True) if found):
                        assert self.looks(key) == "right", self.looks(key)
                elif what == 5 and sum(map(len, self.held.values())) > 6:
                    self.let_go(dice.choice([key for key, views in self.held.items() if views]))
                elif what == 6:
                    key = dice.choice([*stored, "pinned"])
                    if pinned and len(pinned) > 3:
                        self.unpin(pinned.pop())
                    elif self.pin(key) == [True]:
                        pinned.append(key)

    # --- how long it takes ----------------------------------------------------------------------------------------

    def go_round(self, times: int, server: int) -> list[tuple[float, float]]:
        """Store, look, and delete, so often: how long each round took (see :class:`maru_rounds.Rounds`)."""
        with Rounds(server) as rounds:
            for number in range(times):
                with rounds.one():
                    key = f"round {number}"
                    assert self.put([key]) == ["NEW"]
                    assert self.get([key]) == ["right"]
                    assert self.delete([key]) == ["DELETED"]
            return rounds.took

    def sessions_lost(self) -> int:
        """How often it had to begin anew."""
        return self.handler.statistics().counters.sessions_lost

    # --- the rest -------------------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str]) -> list[str]:
        return [answer.name for answer in self.call("batch_delete", list(keys))]

    def pin(self, *keys: str) -> list[bool]:
        return self.call("batch_pin", list(keys))

    def unpin(self, *keys: str) -> list[bool]:
        return self.call("batch_unpin", list(keys))

    def exist(self, *keys: str) -> list[bool]:
        return self.call("batch_exists", list(keys))

    @abstractmethod
    def beat(self) -> None:
        """A sign of life, now, and what follows each. With its answer comes whatever was lost on the way."""

    def pages(self) -> Any:
        return self.handler.statistics().pages

    def pid(self) -> int:
        return os.getpid()

    def scribble(self, key: str) -> None:
        """Write into what is held, past all that Python forbids: as broken C code would."""
        info, view = self.held[key][-1]
        ctypes.memset(info.address, 0xEE, len(view))

    def assign(self, key: str) -> None:
        """Write into what is held, as any code might."""
        self.held[key][-1][1][0] = 0

    def protect(self, key: str) -> None:
        """Make what is held writable: by ``mprotect``, which the descriptor's rights do not allow."""
        info, view = self.held[key][-1]
        start = info.address & -4096
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if libc.mprotect(start, len(view) + info.address - start, 3):
            raise OSError(ctypes.get_errno(), "mprotect")

    def address(self, key: str) -> int:
        """Of the first byte of what is held."""
        return self.held[key][-1][0].address

    def peek(self, key: str) -> str:
        """What the view shows, in hexadecimal digits."""
        return bytes(self.held[key][-1][1]).hex()

    handler: Any


class BlockingClient(Client):
    """The blocking face."""

    def __init__(self, url: str, **knobs: Any):
        super().__init__()
        self.handler = BlockingHandler(**knobs_of(url, knobs))
        try:
            self.handler.connect()
        except BaseException:
            self.handler.close()
            raise

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self.handler, name)(*arguments)

    def release(self, info: Any) -> None:
        info.release()

    def impatient(self, timeout: float = SILENCE, *codes: int) -> contextlib.AbstractContextManager[None]:
        return waits(self.handler, timeout, *codes)

    def beat(self) -> None:
        driver = self.handler._driver
        driver.run(operations.beat(driver.state))
        driver.run(operations.restore(driver.state))

    def close(self) -> None:
        self.handler.close()


class TrioClient(Client):
    """The trio face, in a trio run of its own thread."""

    def __init__(self, url: str, **knobs: Any):
        super().__init__()
        self._config = knobs_of(url, knobs)
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._stop: trio.Event
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery
        self._thread = threading.Thread(target=self._run, name="trio client", daemon=True)
        self._thread.start()
        assert self._opened.wait(maru_processes.PATIENCE), "it does not connect"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as exc:
            self._failure = exc
        finally:
            self._opened.set()

    async def _main(self) -> None:
        self._stop, self._token = trio.Event(), trio.lowlevel.current_trio_token()
        async with TrioHandler(**self._config) as self.handler, trio.open_nursery() as self._nursery:
            self._opened.set()
            await self._stop.wait()
            self._nursery.cancel_scope.cancel()

    def call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self.handler, name)
        if name == "free":
            return trio.from_thread.run_sync(method, *arguments, trio_token=self._token)
        return trio.from_thread.run(method, *arguments, trio_token=self._token)

    def release(self, info: Any) -> None:
        trio.from_thread.run_sync(info.release, trio_token=self._token)

    @contextlib.contextmanager
    def impatient(self, timeout: float = SILENCE, *codes: int) -> Iterator[None]:
        scope, waiting = trio.CancelScope(), waits(self.handler, timeout, *codes)

        async def keep_time() -> None:
            with scope:
                await self.handler._driver.keep_time()

        def begin() -> None:
            waiting.__enter__()
            self._nursery.start_soon(keep_time)

        def end() -> None:
            waiting.__exit__(None, None, None)
            scope.cancel()

        trio.from_thread.run_sync(begin, trio_token=self._token)
        try:
            yield
        finally:
            with contextlib.suppress(trio.RunFinishedError):
                trio.from_thread.run_sync(end, trio_token=self._token)

    def beat(self) -> None:
        driver = self.handler._driver
        for renew in (operations.beat, operations.restore):
            trio.from_thread.run(driver.run, renew(driver.state), trio_token=self._token)

    def close(self) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._stop.set)
        self._thread.join(maru_processes.PATIENCE)
        assert not self._thread.is_alive(), "the trio client does not close"
        if self._failure is not None:
            raise self._failure


def client(face: str, url: str, **knobs: Any) -> Client:
    """A client of this face, connected."""
    return (TrioClient if face == "trio" else BlockingClient)(url, **knobs)


# --- a published client -------------------------------------------------------------------------------------------


class PublishedOwner:
    """A published client that owns a region, chooses pages in it, and reads: naively, as those do. One thread."""

    def __init__(self, url: str, instance_id: str, page: int = PAGE, region: int = REGION, timeout: float = TIMEOUT):
        self.instance_id, self._page = instance_id, page
        self._client = PublishedClient(url, timeout=timeout)
        self._rms: list[PublishedRmClient] = []
        self._maps: dict[int, Any] = {}
        self.handle: dict[str, int] = {}
        self.free: list[int] = []
        try:
            self.rm_address = self._client.ask(Ask.HANDSHAKE)["rm_address"]
            if region:
                self.handle = self._client.ask(Ask.REQUEST_ALLOC, instance_id=instance_id, size=region)["handle"]
                self.free = list(range(0, self.handle["length"] - page + 1, page))[::-1]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PublishedOwner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()
        for rm in self._rms:
            rm.close()

    def ask(self, code: int, **body: Any) -> dict[str, Any]:
        return self._client.ask(code, **body)

    def impatient(self, timeout: float = SILENCE) -> contextlib.AbstractContextManager[None]:
        """It waits no longer than this for an answer while the block lasts."""
        return published_clients.impatient(self._client, timeout)

    def map(self, handle: dict[str, int]) -> Any:
        if handle["region_id"] not in self._maps:
            rm = PublishedRmClient(self.rm_address)
            self._rms.append(rm)
            self._maps[handle["region_id"]] = rm.map(handle)
        return self._maps[handle["region_id"]]

    def put(self, key: str, size: int = SIZE) -> bool:
        """Two round trips, as theirs; whether it is new. A page is free again if not."""
        if self.ask(Ask.EXISTS_KV, key=key)["exists"]:
            return False
        offset = self.free.pop()
        self.map(self.handle)[offset : offset + size] = payload(key, size)
        entry = {"region_id": self.handle["region_id"], "kv_offset": offset, "kv_length": size}
        answer = self.ask(Ask.REGISTER_KV, key=key, **entry)
        assert answer["success"], answer
        if not answer["is_new"]:
            self.free.append(offset)
        return answer["is_new"]

    def pin(self, key: str) -> bool:
        return self.ask(Ask.PIN_KV, key=key)["exists"]

    def get(self, keys: Iterable[str]) -> list[str]:
        """Of each: ``right``, ``missing``, or whose bytes these are."""
        keys = list(keys)
        entries = self.ask(Ask.BATCH_LOOKUP_KV, keys=keys)["entries"]
        return [self._look(key, entry) for key, entry in zip(keys, entries, strict=True)]

    def _look(self, key: str, entry: dict[str, Any]) -> str:
        if not entry["found"]:
            return "missing"
        at, length = entry["kv_offset"], entry["kv_length"]
        found = self.map(entry["handle"])[at : at + length]
        return "right" if found == payload(key, length) else f"WRONG bytes under {key}"


# --- in a process of its own --------------------------------------------------------------------------------------


def be(channel: int, face: str, url: str, knobs: dict[str, Any]) -> None:
    """A client of this face, for :class:`maru_processes.Actor`."""
    with client(face, url, **knobs) as actor:
        act(channel, actor)


def be_published(channel: int, url: str, instance_id: str) -> None:
    """A published client that owns a region."""
    with PublishedOwner(url, instance_id) as actor:
        act(channel, actor)


BE = f"{__name__}:be"
BE_PUBLISHED = f"{__name__}:be_published"
