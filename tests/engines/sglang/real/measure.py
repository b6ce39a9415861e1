"""What the backend costs: batch_set_v1 and batch_get_v1 beside memmove in one run, over SGLang's own pool.

    nox -s sglang -- measure

A share is the time of memmove divided by that of the call: 1.0 is as fast as copying. Medians of rounds that take turns, so
that a machine that is busy for a while slows all of them alike. Each round stores under new names.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from tests.engines.sglang.backends import extra_config, hashes, open_backend, tokens
from tests.support.maru_processes import Server, temporary_pool

PAGES = 32
PAGE_TOKENS = 64
LAYERS, HEADS, HEAD_DIM = 32, 8, 64
PAGE_BYTES = 2 * LAYERS * PAGE_TOKENS * HEADS * HEAD_DIM * 2  # 4 MiB
ROUNDS = 15
LAYOUTS = ("page_first", "layer_first")


def pool_of(layout: str) -> MHATokenToKVPoolHost:
    """Pages to store, and as many places to load into."""
    common = {"page_size": PAGE_TOKENS, "device": "cpu"}
    device = MHATokenToKVPool(
        2 * PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        enable_memory_saver=False,
        **common,
    )
    host = MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        host_to_device_ratio=(2 * PAGES) / 2,
        host_size=0,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=LAYERS - 1,
        **common,
    )
    host.kv_buffer.random_(0, 100)
    return host


@contextmanager
def backends(pool: Any) -> Iterator[dict[str, Any]]:
    """What is measured, by name."""
    with temporary_pool() as directory, Server(directory, "--capacity-bytes", "1GiB") as server, ExitStack() as stack:
        made: dict[str, Any] = {}
        for checksums in (False, True):
            said = "checksums on" if checksums else "checksums off"
            host = {"type": "memory", "capacity_bytes": "320MiB", "checksums": checksums}
            maru = {"type": "maru", "server_url": server.ipc, "pool_size": "320MiB", "checksums": checksums}
            for name, tier in (("memory tier", host), ("page store", maru)):
                extra = extra_config({"tier": tier}, tenant=f"{name}, {said}")
                made[f"{name}, {said}"] = stack.enter_context(open_backend(pool, extra))
        yield made


def timed(function: Callable[..., object], *args: object) -> float:
    began = time.perf_counter()
    function(*args)
    return time.perf_counter() - began


def shares(layout: str) -> None:
    """32 pages of 4 MiB."""
    pool = pool_of(layout)
    stored = tokens(*range(PAGES), page_size=PAGE_TOKENS)
    places = tokens(*range(PAGES, 2 * PAGES), page_size=PAGE_TOKENS)
    times: dict[tuple[str, str], list[float]] = {}

    scratch = torch.empty(PAGES * PAGE_BYTES, dtype=torch.uint8).random_()
    target = torch.zeros_like(scratch)

    def memmove() -> None:
        for at in range(PAGES):
            ctypes.memmove(target.data_ptr() + at * PAGE_BYTES, scratch.data_ptr() + at * PAGE_BYTES, PAGE_BYTES)

    with backends(pool) as made:
        for round_ in range(ROUNDS + 1):
            measured = {("memmove", ""): timed(memmove)}
            for name, backend in made.items():
                keys = hashes(PAGES, f"{name} {round_}")
                measured[name, "set"] = timed(backend.batch_set_v1, keys, stored)
                assert backend.batch_exists(keys) == PAGES
                measured[name, "get"] = timed(backend.batch_get_v1, keys, places)
            if round_:  # the first warms up
                for what, seconds in measured.items():
                    times.setdefault(what, []).append(seconds)
        faults = {name: backend.report_status()["failures"] for name, backend in made.items()}
    assert not any(faults.values()), faults
    base = statistics.median(times.pop(("memmove", "")))
    runs = len(pool.get_page_buffer_meta(stored[:PAGE_TOKENS])[0])
    speed = PAGES * PAGE_BYTES / base / 1e9
    print(
        f"\n{PAGES} pages of {PAGE_BYTES >> 20} MiB, {layout}, {runs} runs a page; memmove {speed:.1f} GB/s; shares of it:"
    )
    for name in made:
        set_, get = (base / statistics.median(times[name, what]) for what in ("set", "get"))
        print(f"  {name:28} set {set_:.2f}   get {get:.2f}")


def main() -> None:
    """Print a table for each layout."""
    for layout in LAYOUTS:
        shares(layout)


if __name__ == "__main__":
    main()
