"""What routers are told of the tiers of an instance, in vLLM's hashes."""

from __future__ import annotations

import threading

from backends.memory import MemoryTier
from maru.kv_events import KeyWatcher
from offload import from_thread
from offload.engines.vllm._key_events import KeyEvent, KeyEvents

KEYS = [b"key-0", b"key-1", b"key-2"]
HASHES = [b"hash-0", b"hash-1", b"hash-2"]


def new() -> KeyEvents:
    return KeyEvents(threading.Lock())


def told(events: KeyEvents) -> list[tuple[str, str, list[bytes]]]:
    return [("came" if event.stored else "went", event.medium, event.hashes) for event in events.take()]


def test_what_is_stored_is_told_when_it_has_arrived_and_when_it_goes():
    events = new()
    host = events.watcher("host")
    events.storing(KEYS, HASHES)
    assert told(events) == []
    host.stored(KEYS[:2])
    events.settled(KEYS)
    host.stored(KEYS[2:])  # the store of this one has ended without it: nobody knows its hash
    host.removed(KEYS[:1])
    assert told(events) == [("came", "host", HASHES[:2]), ("went", "host", HASHES[:1])]


def test_two_stores_of_a_key_are_told_once_it_arrives():
    events = new()
    host = events.watcher("host")
    events.storing(KEYS, HASHES)
    events.storing(KEYS[:2], HASHES[:2])
    events.settled(KEYS[:2])  # filtered: the other store has them
    host.stored(KEYS)
    events.settled(KEYS)
    assert told(events) == [("came", "host", HASHES)]


def test_each_tier_is_told_by_its_name():
    events = new()
    events.storing(KEYS[:1], HASHES[:1])
    events.watcher("host").stored(KEYS[:1])
    events.watcher("disk").stored(KEYS[:1])
    events.watcher("host").removed(KEYS[:1])
    assert told(events) == [("came", "host", HASHES[:1]), ("came", "disk", HASHES[:1]), ("went", "host", HASHES[:1])]


def test_what_a_tier_held_before_is_told_when_it_is_loaded():
    events = new()
    disk = events.watcher("disk")
    disk.stored(KEYS)
    disk.removed(KEYS[2:])
    assert told(events) == []
    events.found(KEYS, HASHES)
    events.found(KEYS, HASHES)
    assert told(events) == [("came", "disk", HASHES[:2])]
    disk.removed(KEYS[:1])
    assert told(events) == [("went", "disk", HASHES[:1])]


def test_a_reset_takes_back_what_was_told_and_nothing_is_told_of_it_afterwards():
    events = new()
    host = events.watcher("host")
    events.storing(KEYS, HASHES)
    host.stored(KEYS[:2])
    events.take()
    events.reset()
    assert told(events) == [("went", "host", HASHES[:2])]
    host.stored(KEYS[2:])
    host.removed(KEYS)
    assert told(events) == []


def test_nothing_is_remembered_of_what_is_gone():
    events = new()
    host = events.watcher("host")
    for at in range(1_000):
        key = f"key-{at}".encode()
        events.storing([key], [key])
        if at % 3:
            host.stored([key])
        events.settled([key])
        host.removed([key])
    assert not events._hashes and not events._media


def test_an_engine_tells_of_the_tiers_that_keep_books():
    source, host = MemoryTier(1 << 16, 1 << 10), MemoryTier(1 << 16, 1 << 10)
    seen: dict[str, list[tuple[str, list[bytes]]]] = {}

    class Watcher:
        def __init__(self, name: str) -> None:
            self.seen = seen.setdefault(name, [])

        def stored(self, keys) -> None:
            self.seen.append(("stored", list(keys)))

        def removed(self, keys) -> None:
            self.seen.append(("removed", list(keys)))

    def watch(name: str) -> KeyWatcher[bytes]:
        return Watcher(name)

    host.put(KEYS[0], bytes(1 << 10))
    with from_thread.open_engine(source, {"host": host}) as engine:
        assert engine.watch_keys(watch) == ["host"]
        engine.call(host.put, KEYS[1], bytes(1 << 10))
        engine.delete(KEYS[:1])
    assert seen == {"host": [("stored", KEYS[:1]), ("stored", KEYS[1:2]), ("removed", KEYS[:1])]}


def test_events_of_one_kind_are_one_event():
    events = new()
    events.storing(KEYS, HASHES)
    for key in KEYS:
        events.came("host", [key])
    assert events.take() == [KeyEvent("host", HASHES, True)]
