"""An engine process for tests of the daemon: ``python -m tests.support.daemon_engine URL NAME STORES``.

It fills blocks with what follows from their keys, stores them, looks them up, loads them to other blocks, and compares. It
says one JSON object for each round, and ends when its standard input does. What is wrong ends it with an error.
"""

import json
import sys
import threading

from backends.testing import payload_of
from offload import NO_WAIT, from_thread
from offload.client import DaemonTier, SharedBlocks, SharedMemory

SIZE = 4096
BLOCKS = 64


def main(url: str, name: str, rounds: int) -> None:
    memory = SharedMemory(2 * BLOCKS * SIZE)
    cache = SharedBlocks(memory, SIZE)
    tier = DaemonTier(url, name=name)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with from_thread.open_engine(cache, {"daemon": tier}, policies=()) as engine:
        said = {"stored": 0, "loaded": 0, "unavailable": 0}
        for number in range(rounds):
            if ended.is_set():
                break
            one_round(engine, cache, number, name, said)
            print(json.dumps({"round": number, "sessions": tier.connection.sessions, **said}), flush=True)


def one_round(engine, cache, number: int, name: str, said: dict) -> None:
    keys = [b"%s %d %d" % (name.encode(), number, at) for at in range(BLOCKS)]
    for at, key in enumerate(keys):
        cache.write(at, payload_of(key, SIZE))
    future = engine.store(cache.external(range(BLOCKS), keys), NO_WAIT)
    result = future.result(60)
    said["stored"] += len(result.completed)
    with engine.lookup(keys, timeout=60) as hit:
        if hit.unavailable:
            said["unavailable"] += 1
        assert len(hit) <= BLOCKS
        for at in range(BLOCKS, 2 * BLOCKS):
            cache.write(at, bytes(SIZE))
        loaded = engine.load(hit, cache.into(range(BLOCKS, BLOCKS + len(hit))), timeout=60)
        for at in range(loaded.loaded):
            assert cache.read(BLOCKS + at) == payload_of(keys[at], SIZE), f"block {at} of round {number} is another one"
        said["loaded"] += loaded.loaded
        if result.error is None and not result.failed and not hit.unavailable and loaded.loaded == len(hit):
            assert len(hit) == BLOCKS, f"{len(hit)} of {BLOCKS} blocks were found in round {number}: {result}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
