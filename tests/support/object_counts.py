"""What a process of ours holds in Python: counted in a thread of it, and told to a test that asks.

A leak of an object for each client is seen behind a few clients; the memory of a process tells of it only behind hundreds.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import socket
import sys
import threading
import time

OURS = ("maru.", "backends.", "offload.")
TABLES = (dict, set, frozenset, collections.deque)
PATIENCE = 60.0


def answer(path: str) -> None:
    """In a process: count for whoever connects to the socket at this path. A thread, as long as the process is there."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()

    def serve() -> None:
        while True:
            asking, _ = listening.accept()
            with asking:
                while not _loop_waits():
                    time.sleep(0.001)
                asking.sendall(json.dumps(count()).encode())

    threading.Thread(target=serve, daemon=True).start()


def _loop_waits() -> bool:
    """Whether the trio loop in the main thread waits for events: nothing is half done then."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_name == "get_events"


def count() -> dict[str, int]:
    """The objects of our classes by type, and the entries of all tables that they have."""
    gc.collect()
    counts: collections.Counter[str] = collections.Counter()
    tables: dict[int, object] = {}
    for one in gc.get_objects():
        kind = type(one)
        module = str(kind.__module__)  # of some foreign classes it is no text
        if module.startswith(OURS):
            counts[f"{module}.{kind.__qualname__}"] += 1
            # A table of values that hold nothing is not in the collector's list: it is found from what has it.
            named = getattr(one, "__dict__", {})
            held = [*named.values(), *gc.get_referents(one)]
            tables |= {id(part): part for part in held if part is not named and isinstance(part, TABLES)}
    counts["entries of tables"] = sum(len(table) for table in tables.values())  # type: ignore[arg-type]
    return dict(counts)


def ask(path: str) -> dict[str, int]:
    """Of the process that answers there."""
    deadline = time.monotonic() + PATIENCE
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"nobody answers at {path}"
        time.sleep(0.01)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(PATIENCE)
        asking.connect(path)
        with asking.makefile("rb") as answered:
            counts: dict[str, int] = json.load(answered)
            return counts


def ask_at_rest(path: str) -> dict[str, int]:
    """The same, once two in a row are equal: what serving a message takes is there for a moment only, or lacks for one."""
    deadline = time.monotonic() + PATIENCE
    before, counts = ask(path), ask(path)
    while counts != before:
        assert time.monotonic() < deadline, f"it is not at rest: {grown(before, counts)}"
        before, counts = counts, ask(path)
    return counts


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What there is more of."""
    return {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}
