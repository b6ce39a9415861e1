"""A random program that forks at random points and checks that its parent has not noticed: KIND SEED STEPS are its arguments.

Two threads use a pool, a handler or an engine. Between its steps one of them forks, whatever the other is doing. The child uses
all that it has inherited, is refused each time, closes it, and writes over what memory is its own. Then every block that the
parent holds is compared.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HANG = 60
"""Seconds until a child counts as hanging."""


def told(kind: type[BaseException] | tuple[type[BaseException], ...], *calls: Callable[[], object]) -> None:
    """In a child: each of these raises that, and no answer comes."""
    for call in calls:
        try:
            answer = call()
        except kind:
            continue
        raise AssertionError(f"a forked child got {answer!r}")


def fork(mischief: Callable[[], None]) -> None:
    """Have a child do it, and see how it ends."""
    child = os.fork()
    if not child:
        signal.alarm(HANG)
        status = 1
        try:
            mischief()
            gc.collect()
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}"


class Pool:
    """Pinned chunks: of this process, or of a server's."""

    def __init__(self, make: Callable[[], Any], rng: random.Random) -> None:
        import torch

        from backends.pinned_pool import PoolForked

        self.torch, self.refusal, self.pool = torch, PoolForked, make()
        self.held: dict[int, Any] = {}
        self.lock = threading.Lock()

    def step(self, rng: random.Random) -> None:
        if len(self.held) > 8 or rng.random() < 0.4:
            with self.lock:
                _, block = self.held.popitem() if self.held else (0, None)
            if block is not None and rng.random() < 0.5:
                assert self.pool.free(block)
            return  # or it is merely dropped
        tag, n = rng.randrange(256), rng.randrange(1, 20_000)
        source = self.torch.full((n,), tag, dtype=self.torch.uint8)
        block = self.pool.alloc_same_pin_tensor(source)
        if block is not None:
            block.copy_(source)
            block.tag = tag
            with self.lock:
                self.held[id(block)] = block

    def check(self) -> None:
        chunks: list[int] = []
        with self.lock:
            for block in self.held.values():
                chunks += block.chunk_indices
                assert set(block.to("cpu").tolist()) == {block.tag}, block
        assert len(chunks) == len(set(chunks))
        self.pool.get_usage_info()

    def mischief(self) -> None:
        pool, blocks = self.pool, list(self.held.values())
        tensor = self.torch.zeros(5000, dtype=self.torch.uint8)
        told(self.refusal, lambda: pool.alloc_same_pin_tensor(tensor), pool.get_usage_info)
        for block in blocks[:3]:
            told(self.refusal, lambda: pool.free(block), block.to, lambda: block.copy_(tensor), block.as_tensor)  # noqa: B023
        pool.close()
        self.held.clear()

    def close(self) -> None:
        self.held.clear()
        assert self.pool.get_usage_info()["active_allocations"] == 0
        self.pool.close()


class Handler:
    """A blocking client of a page store."""

    def __init__(self, address: str, rng: random.Random) -> None:
        from maru import HandlerClosed
        from maru.blocking import MaruHandler

        self.refusal = HandlerClosed
        self.handler = MaruHandler(server_url=address, chunk_size_bytes=4096, pool_size=4 << 20, timeout_ms=60_000)
        self.handler.connect()
        self.stored: dict[str, bytes] = {}
        self.infos: dict[str, Any] = {}
        self.numbers = iter(range(1 << 30))

    def step(self, rng: random.Random) -> None:
        key = f"k{next(self.numbers)}"
        data = rng.randbytes(rng.randrange(1, 4096))
        if len(self.stored) < 200:
            [answer] = self.handler.batch_put([key], [data])
            assert answer, answer
            self.stored[key] = data
        known = rng.choice(list(self.stored))
        buffer = bytearray(4096)
        self.handler.batch_get_into([known], [buffer])
        assert bytes(buffer[: len(self.stored[known])]) == self.stored[known]
        if rng.random() < 0.3 and (info := self.handler.retrieve(known)) is not None:
            self.infos[known] = info

    def check(self) -> None:
        for key, info in list(self.infos.items()):
            assert bytes(info.view) == self.stored[key]
        for key, data in list(self.stored.items())[-5:]:
            buffer = bytearray(4096)
            self.handler.batch_get_into([key], [buffer])
            assert bytes(buffer[: len(data)]) == data
        assert self.handler.healthcheck()
        assert self.handler.statistics().counters.sessions_lost == 0

    def mischief(self) -> None:
        handler = self.handler
        told(
            self.refusal,
            lambda: handler.exists("k0"),
            lambda: handler.batch_put(["child"], [b"child"]),
            lambda: handler.retrieve("k0"),
            lambda: handler.delete("k0"),
            lambda: handler.begin.exists("k0"),
            lambda: handler.alloc(10),
            handler.connect,
        )
        handler.statistics()
        for info in list(self.infos.values()):
            info.release()
        handler.close()
        self.infos.clear()

    def close(self) -> None:
        for info in self.infos.values():
            info.release()
        self.infos.clear()
        for key in self.stored:
            self.handler.delete(key)
            assert not self.handler.exists(key)
        self.handler.close()


class Engine:
    """An engine in a thread of its own, over host memory and a directory."""

    def __init__(self, directory: str, rng: random.Random) -> None:
        from backends import PlaceClosed
        from backends.file import FileTier
        from backends.memory import MemoryTier
        from backends.testing import FakeTier
        from offload import block_key, from_thread

        self.from_thread, self.refusal = from_thread, (from_thread.EngineForked, PlaceClosed)
        self.source = FakeTier(64)
        self.keys = [block_key(bytes([n])) for n in range(64)]
        self.source.fill(self.keys)
        self.memory = MemoryTier(64 * 64, 64)
        self.disk = FileTier(directory, 64 * 1024, block_bytes=64, fingerprint="forks")
        self.engine = from_thread.open_engine(self.source, [self.memory, self.disk]).start()
        self.held: list[Any] = []

    def step(self, rng: random.Random) -> None:
        from offload import NO_WAIT, Status

        some = rng.sample(self.keys, rng.randrange(1, 12))
        ticket = self.engine.store(self.source.weak(some), precondition=NO_WAIT)
        if rng.random() < 0.5:
            assert ticket.result().status is Status.COMPLETE
        self.load(some)
        if len(self.held) > 3 or rng.random() < 0.5:
            with contextlib.suppress(IndexError):  # the other thread was faster
                self.held.pop().release()
        if rng.random() < 0.3:
            self.engine.poll()

    def load(self, keys: list[bytes]) -> None:
        from backends.abc import LOADED
        from backends.base.slots import PagesDestination
        from backends.testing import payload_of

        hit = self.engine.lookup(keys)
        buffers = [bytearray(64) for _ in range(len(hit))]
        loaded = self.engine.load(hit, PagesDestination.over(buffers))
        for key, outcome, buffer in zip(keys, loaded.outcomes, buffers, strict=False):
            assert outcome == LOADED, outcome
            assert bytes(buffer) == payload_of(key, 64)
        self.held.append(hit)

    def check(self) -> None:
        self.load(self.keys[:4])
        assert self.engine.statistics().engine is not None

    def mischief(self) -> None:
        from offload import NO_WAIT

        engine = self.engine
        told(
            self.refusal,
            lambda: engine.store(self.source.weak(self.keys[:1]), precondition=NO_WAIT),
            lambda: engine.lookup(self.keys[:1]),
            engine.statistics,
            engine.poll,
            engine.drain,
            engine.fileno,
        )
        # The memory of a tier is the child's own.
        for page in self.memory._pages.pages(range(64)):
            page[:] = bytes(64)
        for hit in self.held:
            hit.release()
        engine.close()
        engine._worker.close_at_exit()
        self.memory.close()
        self.disk.close()

    def close(self) -> None:
        for hit in self.held:
            hit.release()
        self.engine.drain()
        self.engine.close()
        self.memory.close()
        self.disk.close()


@contextlib.contextmanager
def subject(kind: str, rng: random.Random) -> Iterator[Any]:
    """What is used and forked with."""
    sys.path.insert(0, str(Path(__file__).parent))
    if kind == "pool":
        from backends.pinned_pool import PinnedMemoryPool

        yield Pool(lambda: PinnedMemoryPool(sys.modules["torch"].uint8, 1, chunk_size=4096, pin="none"), rng)
    elif kind == "server":
        from backends.pinned_pool import ServerPinnedMemoryPool
        from tests.support.pinned_pools import ServerProcess

        with ServerProcess() as server:
            shared = rng.choice([None, False])
            yield Pool(
                lambda: ServerPinnedMemoryPool(
                    sys.modules["torch"].uint8, 1, server=server.address, timeout=60.0, shared_memory=shared
                ),
                rng,
            )
    elif kind == "handler":
        from offload.testing.scenarios._page_store import PageStore

        store = PageStore(32 << 20)
        try:
            yield Handler(store.endpoint, rng)
        finally:
            wrong = store.end()
        assert not wrong, wrong
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield Engine(directory, rng)


def main(kind: str, seed: int, steps: int) -> None:
    """Play it; the last line says how often it forked."""
    rng = random.Random(f"{kind} {seed}")
    forks = 0
    with subject(kind, rng) as used:
        stop, failed = threading.Event(), list[BaseException]()

        def beside() -> None:
            own = random.Random(f"beside {kind} {seed}")
            try:
                while not stop.is_set():
                    used.step(own)
            except BaseException as exc:
                failed.append(exc)

        thread = threading.Thread(target=beside)
        used.step(rng)
        thread.start()
        try:
            for _ in range(steps):
                used.step(rng)
                if rng.random() < 0.3:
                    forks += 1
                    fork(used.mischief)
                    used.check()
        finally:
            stop.set()
            thread.join()
        for exc in failed:
            raise exc
        used.check()
        used.close()
    print(f"{forks} forks, and all is well")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
