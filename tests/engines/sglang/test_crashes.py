"""An instance that is killed: after its lease it has left nothing behind but what it had stored."""

import threading

import torch

from tests.engines.crashes import LEASE, a_few_and_fifty, crash_often, page_store, wait_to_be_killed
from tests.engines.sglang.backends import LayerFirstPool, extra_config, hashes, open_backend, tokens

KEYS = hashes(8)
PAGES = tokens(*range(8))


def filled_pool():
    pool = LayerFirstPool(64)
    for page in range(64):
        pool.fill(page)
    return pool


def extra(server_url):
    tier = {"type": "maru", "server_url": server_url, "pool_size": "2MiB", "lease": LEASE, "timeout_ms": 20_000}
    return extra_config({"maru": tier}, lookup_timeout=20.0, store_timeout=60.0)


def run_until_killed(channel, server_url, round_):
    """In a child: store a prompt, then store and load others in two threads without end."""
    pool = filled_pool()
    with open_backend(pool, extra(server_url)) as backend:
        assert backend.batch_set_v1(KEYS, PAGES) == [True] * 8
        assert backend.batch_set_v1(hashes(8, f"{round_}"), PAGES) == [True] * 8
        threading.Thread(target=store_on, args=(backend, round_), daemon=True).start()
        threading.Thread(target=load_on, args=(backend,), daemon=True).start()
        wait_to_be_killed(channel)


def store_on(backend, round_):
    for at in range(1_000_000):
        backend.batch_set_v1(hashes(4, f"{round_} {at}"), tokens(8, 9, 10, 11))


def load_on(backend):
    while True:
        backend.batch_get_v1(KEYS, tokens(*range(16, 24)))


@a_few_and_fifty
def test_crashes_leave_no_pin_and_take_no_room_and_leave_no_page_that_is_wrong(crashes):
    # Two regions have room: the third instance can store only if what the first one left is given back.
    with page_store("--capacity-bytes", "4MiB") as server:
        crash_often(server, crashes, f"{__name__}:run_until_killed")
        pool = filled_pool()
        with open_backend(pool, extra(server.ipc)) as backend:
            # What is found is what was stored, whoever was killed while he stored it.
            found = backend.batch_exists(KEYS)
            assert backend.batch_get_v1(KEYS, tokens(*range(32, 40))) == [True] * found + [False] * (8 - found)
            for page in range(found):
                assert torch.equal(pool.page(32 + page), pool.page(page))
            assert backend.batch_set_v1(hashes(8, "behind all"), PAGES) == [True] * 8
            assert backend.batch_exists(hashes(8, "behind all")) == 8
