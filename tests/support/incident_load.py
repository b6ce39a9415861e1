"""A process under load, with a fault planted in it, whose flight recorder is read once it was killed.

    python -m tests.support.incident_load FAULT PLACE DRIVER RING SEED      (FAULT may be ``nothing``)

Blocks go from memory to PLACE (``memory``, ``file``) through a real engine, stored by DRIVER: tasks (``trio``) or threads
(``threads``). Some stores are cancelled, some wait for events, some copies fail, some blocks leave the source before they are
copied. A ledger judges each step. At the first violation it is noted in the recorder, and the process kills itself, by
SIGKILL, in the middle of everything. Exit without a violation: 0.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import trio

import offload
from backends.abc import LOADED, Deletion, Unproven
from backends.base.pages import new_pages
from backends.base.slots import PagesDestination
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.testing import payload_of
from offload import Pipeline, from_thread
from offload._pipeline.marks import place_of
from offload.recorder import FlightRecorder
from offload.testing.scenarios._invariants import source_of, wrong_end
from offload.testing.scenarios._ledger import Ledger

from . import incident_faults
from .planted import ForGood

BLOCK_BYTES = 64
KEYS = [b"key %d" % number for number in range(160)]
ROOM = 96
"""Blocks of the destination: fewer than there are keys, so that it evicts."""
SECONDS = 6.0
LATE = 0.5
"""Seconds that a batch may wait for its flush interval of 2 ms, where that is looked at."""


class _Kill:
    """Notes the first violation, and ends this process as nothing that could be cleaned up after."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder = recorder

    def __call__(self, rule: str, text: str) -> None:
        self.recorder.note(rule)
        print(f"{rule}: {text}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class LiveLedger(Ledger):
    """The ledger of the harness over real tiers: what it can see while it runs, and what no model is needed for."""

    def __init__(self, kill: _Kill, planted: incident_faults.LiveFault) -> None:
        super().__init__()
        self.kill = kill
        self.late = planted.late
        self.patience = planted.patience
        self.cancelled: set[object] = set()

    def watch(self, opened: Any) -> None:
        for pipeline in [opened] if isinstance(opened, Pipeline) else opened.pipelines:
            super().watch(pipeline)
            pipeline.add_instrument(_Cancels(self))

    def wrong(self, text: str) -> None:
        rule, _, rest = text.partition(":")
        self.kill(rule, rest)

    def saw(self, pipeline: Pipeline, hook: str, subject: Any) -> None:
        super().saw(pipeline, hook, subject)
        self.log.clear()  # the whole of it is for what is judged in virtual time
        self.events.clear()
        if hook == "settled":
            self._cause(subject)
            self.histories_settled(subject)
        elif hook == "transfer" and self.late:
            late = [one for one in subject.containers if trio.current_time() - one.ready_at > LATE]
            if late and pipeline.statistics().in_transfer == 0:
                self.kill("I9", f"{late[0]!r} was ready long before its batch left")
        elif hook == "xfer_start":
            for one in subject.containers:
                if one.precondition is not None and not one.precondition.is_set():
                    self.kill("bytes", f"{one!r} is copied, and what it waits for does not hold")

    def histories_settled(self, container: Any) -> None:
        for text in wrong_end(self.histories[container]):
            self.wrong(text)
        del self.histories[container]

    def _cause(self, container: Any) -> None:
        if container.status is offload.Status.CANCELLED and container not in self.cancelled:
            self.kill("I9", f"{container!r} was cancelled by nobody")
        history = self.histories[container]
        if isinstance(container.error, offload.TransferFailed) and not history.copied:
            self.kill("I9", f"{container!r} failed before it was copied: {container.error!r}")
        unproven = [error for error in container.failed.values() if isinstance(error.__cause__, Unproven)]
        if unproven and not isinstance(unproven[0], offload.DrainUnproven):
            self.kill("I9", f"the copy of {container!r} is taken for over: {unproven[0]!r}")

    def at_rest(self, pipeline: Pipeline) -> None:
        """What is held when nothing is inside."""
        statistics = pipeline.statistics()
        if statistics.used_blocks or statistics.inside:
            self.kill("I1", f"{statistics.used_blocks} blocks of the budget, {statistics.inside} containers inside")
        if statistics.quarantined:
            return
        for tier in (source_of(pipeline), place_of(pipeline.destination)):
            pool = tier.pool.statistics()
            if pool.held or pool.staged:
                self.kill("I1", f"{tier!r}: {pool.held} held, {pool.staged} staged")


class _Cancels:
    def __init__(self, ledger: LiveLedger) -> None:
        self.ledger = ledger

    def cancel_requested(self, container: Any) -> None:
        self.ledger.cancelled.add(container)


class _Flaky:
    """Copies that fail now and then, whose end is unknown, or that never end."""

    rng: random.Random
    inline_bytes = -1
    copying = 0
    hangs = False

    async def write(self, source: Any, refs: Any, keys: Sequence[bytes], slots: list[int]) -> Mapping[int, Exception]:
        chance = self.rng.random()
        if chance < 0.02:
            raise OSError("a copy that fails")
        if chance < 0.03:
            raise _Unknown("nobody knows how this ended")
        if self.hangs and chance < 0.06:
            await trio.sleep_forever()
        failures = dict(await super().write(source, refs, keys, slots))  # type: ignore[misc]
        if chance > 0.95:
            failures[0] = OSError("one block fails")
        return failures


class _Unknown(Unproven, OSError):
    pass


class FlakyMemory(_Flaky, MemoryTier):
    name = "host"


class FlakyFile(_Flaky, FileTier):
    name = "host"


def main(fault: str, place: str, driver: str, ring: str, seed: int) -> None:
    logging.disable(logging.CRITICAL)
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        planted = incident_faults.FAULTS.get(fault, incident_faults.NOTHING)
        planted.patch(ForGood())
        source = MemoryTier(len(KEYS) * BLOCK_BYTES, BLOCK_BYTES, pin_memory=False, populate=False)
        source.name, source.copying = "device", 0  # type: ignore[attr-defined]
        for key in KEYS:
            source.put(key, payload_of(key, BLOCK_BYTES))
        room = ROOM * BLOCK_BYTES if planted.evicts else 4 * len(KEYS) * BLOCK_BYTES
        host: Any = (
            FlakyMemory(room, BLOCK_BYTES, pin_memory=False, populate=False)
            if place == "memory"
            else FlakyFile(directory, room, block_bytes=BLOCK_BYTES)
        )
        host.rng, host.hangs = random.Random(seed + 1), planted.hangs
        recorder = FlightRecorder(ring, most_share=1.0)
        kill = _Kill(recorder)
        ledger = LiveLedger(kill, planted)
        options: dict[str, Any] = {
            "config": offload.PipelineConfig(
                batch_config=offload.BatchConfig(max_batch_size=16, min_batch_size=4, flush_interval=0.002),
                on_destination_full="evict",
                max_concurrent_transfers=2,
                budget_blocks=256,
                transfer_timeout=0.5 if planted.hangs else 60.0,
            ),
            "policies": (),
            "breaker": offload.BreakerConfig(max_faults=1_000),
            "instruments": [recorder, ledger],
            "shadow_check": 0,
        }
        if driver == "trio":
            trio.run(_with_tasks, source, host, options, ledger, rng, planted)
        else:
            _with_threads(source, host, options, ledger, rng)


# --- tasks ----------------------------------------------------------------------------------------------------------------


async def _with_tasks(source: Any, host: Any, options: Any, ledger: Any, rng: random.Random, planted: Any) -> None:
    async with offload.open_engine(source, [host], **options) as engine:
        until = trio.current_time() + SECONDS
        pipeline = engine.pipelines[0]
        while trio.current_time() < until:
            with trio.move_on_after(ledger.patience) as scope:
                async with trio.open_nursery() as nursery:
                    for number in range(6):
                        nursery.start_soon(_produce, engine, source, ledger, random.Random(rng.random()), number)
                    nursery.start_soon(_read, engine, ledger, random.Random(rng.random()))
            if scope.cancelled_caught:
                ledger.kill("hang", f"{pipeline.statistics().inside} containers are inside")
            with trio.move_on_after(ledger.patience) as scope:
                await engine.drain()
            if scope.cancelled_caught:
                ledger.kill("hang", f"{pipeline.statistics().inside} containers are inside")
            ledger.at_rest(pipeline)
            for entry in pipeline.quarantine:
                entry.release()
            if planted.closes:
                break
        if planted.closes:
            for _ in range(40):
                await _store(engine, source, ledger, rng)
    if planted.closes:
        return


async def _produce(engine: Any, source: Any, ledger: Any, rng: random.Random, number: int) -> None:
    for _ in range(60):
        handles = [await _store(engine, source, ledger, rng) for _ in range(rng.choice((1, 1, 2, 6)))]
        if rng.random() < 0.3:
            await trio.sleep(rng.random() * 0.004)
        for handle in handles:
            if rng.random() < 0.25:
                handle.request_cancel()
        if rng.random() < 0.2:
            _evict(source, rng)
        for handle in handles:
            await handle.wait()


async def _store(engine: Any, source: Any, ledger: Any, rng: random.Random) -> Any:
    start = rng.randrange(len(KEYS) - 8)
    keys = KEYS[start : start + rng.choice((1, 2, 4, 4, 7))]
    for key in keys:
        source.put(key, payload_of(key, BLOCK_BYTES))
    if rng.random() < 0.4:
        blocks = source.strong(keys)
        ledger.strong[:] = [one for one in ledger.strong if one.refs]
        ledger.strong.append(blocks)
    else:
        blocks = source.weak(keys)
    precondition: Any = offload.NO_WAIT
    if rng.random() < 0.4:
        precondition = _events(engine, rng)
    return await engine.store(blocks, precondition)


_EVENT: list[trio.Event] = []


def _events(engine: Any, rng: random.Random) -> trio.Event:
    """An event that several stores share, and that is set a little later."""
    if not _EVENT or _EVENT[0].is_set() or rng.random() < 0.3:
        event = trio.Event()
        _EVENT[:] = [event]
        trio.lowlevel.spawn_system_task(_set_later, event, rng.random() * 0.004)
    return _EVENT[0]


async def _set_later(event: trio.Event, seconds: float) -> None:
    await trio.sleep(seconds)
    event.set()


def _evict(source: Any, rng: random.Random) -> None:
    keys = rng.sample(KEYS, 12)
    assert Deletion.UNAVAILABLE not in source.pool.delete(keys)


async def _read(engine: Any, ledger: Any, rng: random.Random) -> None:
    for _ in range(60):
        start = rng.randrange(len(KEYS) - 6)
        async with await engine.lookup(KEYS[start : start + 6]) as hit:
            for _ in range(2):
                n = len(hit.keys)
                pages = new_pages(n, BLOCK_BYTES)
                result = await engine.load(hit, PagesDestination(pages)) if n else None
                for at in range(result.loaded if result is not None else 0):
                    if bytes(pages[at]) != payload_of(hit.keys[at], BLOCK_BYTES):
                        ledger.kill("bytes", f"{hit.keys[at]!r} is not what was stored")
                for at in range(result.loaded if result is not None else n, n):
                    if result is None or result.outcomes[at] != LOADED:
                        ledger.kill("model", f"{hit.keys[at]!r} is held, and cannot be loaded")
                await trio.sleep(0.003)


# --- threads --------------------------------------------------------------------------------------------------------------


def _with_threads(source: Any, host: Any, options: Any, ledger: Any, rng: random.Random) -> None:
    with from_thread.open_engine(source, [host], timeout=ledger.patience, **options) as engine:
        threads = [
            threading.Thread(target=_drive, args=(engine, source, ledger, random.Random(rng.random())))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _drive(engine: Any, source: Any, ledger: Any, rng: random.Random) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        futures = []
        for _ in range(rng.choice((1, 2, 6))):
            start = rng.randrange(len(KEYS) - 8)
            keys = KEYS[start : start + rng.choice((1, 2, 4, 4, 7))]
            event = from_thread.Event() if rng.random() < 0.4 else None
            try:
                futures.append((engine.store(source.weak(keys), offload.NO_WAIT if event is None else event), event))
            except offload.PipelineFull:
                break
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.004)
        for future, event in futures:
            if event is not None:
                event.set()
            if rng.random() < 0.25:
                future.request_cancel()
        for future, _ in futures:
            try:
                future.result(ledger.patience)
            except from_thread.WaitTimeout:
                ledger.kill("hang", "a store has not ended")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
