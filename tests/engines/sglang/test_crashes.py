"""An instance that is killed: after its lease it has left nothing behind but what it had stored."""

import os
import signal
import tempfile
import threading

import pytest
import torch

from tests.engines.sglang.backends import LayerFirstPool, extra_config, hashes, open_backend, tokens
from tests.support.maru_processes import Server, eventually, forge, temporary_pool

KEYS = hashes(8)
PAGES = tokens(*range(8))


def filled_pool():
    pool = LayerFirstPool(64)
    for page in range(64):
        pool.fill(page)
    return pool


def extra(server_url):
    tier = {"type": "maru", "server_url": server_url, "pool_size": "2MiB", "lease": 0.5, "timeout_ms": 20_000}
    return extra_config({"maru": tier}, lookup_timeout=20.0, store_timeout=60.0)


def run_until_killed(channel, server_url, round_):
    """In a child: store a prompt, then store and load others in two threads without end."""
    pool = filled_pool()
    with open_backend(pool, extra(server_url)) as backend:
        assert backend.batch_set_v1(KEYS, PAGES) == [True] * 8
        assert backend.batch_set_v1(hashes(8, f"{round_}"), PAGES) == [True] * 8
        threading.Thread(target=store_on, args=(backend, round_), daemon=True).start()
        threading.Thread(target=load_on, args=(backend,), daemon=True).start()
        os.write(channel, b"!")
        signal.pause()


def store_on(backend, round_):
    for at in range(1_000_000):
        backend.batch_set_v1(hashes(4, f"{round_} {at}"), tokens(8, 9, 10, 11))


def load_on(backend):
    while True:
        backend.batch_get_v1(KEYS, tokens(*range(16, 24)))


def crash(server, round_):
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as log:
        child = forge().start(f"{__name__}:run_until_killed", server.ipc, round_, channel=theirs, errors=log.fileno())
        os.close(theirs)
        told = os.read(ours, 1)
        log.seek(0)
        assert told == b"!", log.read().decode()
        child.kill()
    os.close(ours)


@pytest.mark.parametrize("crashes", [3, pytest.param(50, marks=pytest.mark.long)])
def test_crashes_leave_no_pin_and_take_no_room_and_leave_no_page_that_is_wrong(crashes):
    # Two regions have room: the third instance can store only if what the first one left is given back.
    capacity = ("--capacity-bytes", "4MiB", "--session-lease", "0.5")
    with temporary_pool() as directory, Server(directory, *capacity) as server:
        for round_ in range(crashes):
            crash(server, round_)
            eventually(lambda: server.facts()["pinned"] == 0)
        pool = filled_pool()
        with open_backend(pool, extra(server.ipc)) as backend:
            # What is found is what was stored, whoever was killed while he stored it.
            found = backend.batch_exists(KEYS)
            assert backend.batch_get_v1(KEYS, tokens(*range(32, 40))) == [True] * found + [False] * (8 - found)
            for page in range(found):
                assert torch.equal(pool.page(32 + page), pool.page(page))
            assert backend.batch_set_v1(hashes(8, "behind all"), PAGES) == [True] * 8
            assert backend.batch_exists(hashes(8, "behind all")) == 8
