"""Maru as the first level, for threads that know no trio."""

import threading

import pytest

from backends.abc import DUPLICATE, STORED, Deletion
from backends.maru.l1 import BlockingMaruL1, LayoutMismatch, NoLayout
from maru import HandlerClosed
from tests.support.maru_processes import Server, temporary_pool

KEYS = [bytes([at]) * 8 for at in range(4)]
BLOCK = 64 << 10


@pytest.fixture
def server():
    with temporary_pool() as pool, Server(pool) as running:
        yield running


def opened(server):
    return BlockingMaruL1(server_url=server.ipc, pool_size=2 << 20, timeout_ms=20_000)


def store(l1, keys=KEYS):
    reservation = l1.reserve_write(keys)
    for key, page in zip(reservation.keys, reservation.pages, strict=True):
        page[:] = key[:1] * len(page)
    return l1.commit(reservation)


def test_what_one_thread_has_stored_another_one_reads_where_it_lies(server):
    with opened(server) as l1, opened(server) as other:
        for one in (l1, other):
            one.register_kv_layout([(BLOCK,)], "uint8")
        assert store(l1) == [STORED] * 4
        seen = []

        def read():
            lease = other.reserve_read([*KEYS, b"no"])
            seen.extend(bytes(view[:2]) for view in lease.views)
            other.keep(lease, ())

        thread = threading.Thread(target=read)
        thread.start()
        thread.join(60)
        assert seen == [key[:1] * 2 for key in KEYS]
        assert store(other) == [DUPLICATE] * 4
        assert l1.delete(KEYS) == [Deletion.DELETED] * 4


def test_a_part_of_a_reservation_is_committed_and_the_rest_given_back(server):
    with opened(server) as l1:
        l1.register_kv_layout([(BLOCK,)], "uint8")
        reservation = l1.reserve_write(KEYS)
        part = l1.take(reservation, KEYS[:2])
        assert l1.commit(part) == [STORED] * 2
        l1.abort(reservation)
        lease = l1.reserve_read(KEYS)
        assert len(lease.keys) == 2
        assert set(l1.clear().values()) == {Deletion.PINNED}
        l1.keep(lease, ())
        assert set(l1.clear().values()) == {Deletion.DELETED}


def test_before_the_layout_nothing_is_there(server):
    with opened(server) as l1:
        assert l1.get_memory_usage() == (0, 0)
        assert l1.layout is None
        with pytest.raises(NoLayout):
            l1.reserve_write(KEYS)
        l1.register_kv_layout([(BLOCK,)], "uint8")
        with pytest.raises(LayoutMismatch):
            l1.register_kv_layout([(2 * BLOCK,)], "uint8")
        assert l1.get_memory_usage()[1] == 2 << 20
        assert l1.report_status().stored == 0


def test_after_the_end_every_call_raises(server):
    l1 = opened(server).start()
    l1.register_kv_layout([(BLOCK,)], "uint8")
    l1.close()
    l1.close()
    with pytest.raises(HandlerClosed):
        l1.reserve_write(KEYS)
    assert l1.get_memory_usage() == (0, 0)
