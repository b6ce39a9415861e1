"""The blocks of a hit where they lie: a load verifies them there, and they are used as long as they are what they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.abc import ExternalBlocks
from backends.base.direct import PlacedLease
from backends.base.pages import Pages, checksums, new_pages
from offload import NO_WAIT, from_thread
from offload.client import SharedBlocks, SharedMemory
from offload.from_thread import BlocksInPlace
from tests.support.maru_processes import Server, eventually, temporary_pool

SIZE = 4096
KEYS = [f"key-{at}".encode() for at in range(8)]


class Lease(PlacedLease):
    """A hold whose server can be lost."""

    def __init__(self, whole: Pages) -> None:
        self._whole, self.lost = whole, False

    @property
    def pages(self) -> Pages:
        return self._whole

    def check(self) -> None:
        if self.lost:
            raise RuntimeError("the server was not heard")


def filled(n: int, size: int = SIZE) -> Pages:
    pages = new_pages(n, size)
    for at, page in enumerate(pages):
        page[:] = bytes([at + 1]) * size
    return pages


@pytest.mark.parametrize("size", [SIZE, 3 << 20])
def test_a_load_sums_pages_where_they_lie(size: int):
    whole = filled(3, size)
    blocks = BlocksInPlace([Lease(whole)], whole)
    assert (len(blocks), blocks.block_bytes, blocks.views()) == (3, size, None)
    assert blocks.copy_in_and_sum(0, whole) == checksums(whole)
    assert blocks.leading(3) == 3
    copy = new_pages(1, size)
    blocks.copy_out([2], copy)
    assert checksums(copy) == checksums(whole.part(2, 3))


def test_pages_that_are_not_those_of_the_hit_are_summed_and_not_kept():
    whole, other = filled(3), filled(3)
    blocks = BlocksInPlace([Lease(whole)], whole)
    blocks.copy_in(0, whole.part(0, 1))
    assert blocks.copy_in_and_sum(1, other.part(1, 2)) == checksums(other.part(1, 2))
    blocks.copy_in(2, whole.part(2, 3))
    assert (blocks.leading(3), blocks.leading(1)) == (1, 1)


def test_what_a_tier_has_lost_is_believed_only_if_it_is_what_it_was():
    whole = filled(3)
    lease = Lease(whole)
    blocks = BlocksInPlace([lease], whole)
    blocks.copy_in(0, whole)
    assert blocks.holds() and blocks.unchanged([0, 1, 2])
    lease.lost = True
    assert not blocks.holds() and blocks.unchanged([0, 1, 2])
    whole[1][7] ^= 1
    assert blocks.unchanged([0, 2]) and not blocks.unchanged([2, 1])


@pytest.fixture
def server() -> Iterator[Server]:
    with temporary_pool() as pool, Server(pool) as server:
        yield server


def test_a_hit_shows_its_pages_where_all_of_them_lie_in_this_process(server: Server, tmp_path: Path):
    cache = SharedBlocks(SharedMemory(8 * SIZE), SIZE)
    for at in range(8):
        cache.write(at, bytes([at + 1]) * SIZE)
    disk = {"type": "file", "directory": str(tmp_path), "capacity_bytes": "1 MiB"}
    with from_thread.open_engine(cache, {"disk": disk}) as engine:
        engine.store(ExternalBlocks(cache, KEYS[2:4], [2, 3]), NO_WAIT).result()
    tiers = {"maru": {"type": "maru", "server_url": server.ipc, "pool_size": "1M"}, "disk": disk}
    with from_thread.open_engine(cache, tiers) as engine:
        engine.store(ExternalBlocks(cache, KEYS[:2], [0, 1]), NO_WAIT).result()
        with engine.lookup(KEYS[:4]) as hit:
            assert [tier for tier, _ in hit.runs] == ["maru", "disk"]
            assert hit.in_place() is None, "a file is no memory"
        with engine.lookup(KEYS[:2]) as hit:
            blocks = hit.in_place()
            assert blocks is not None
            assert engine.load(hit, blocks).loaded == blocks.leading(2) == 2
            assert [bytes(page)[0] for page in blocks.pages] == [1, 2]
            assert blocks.unchanged([0, 1])
        assert eventually(lambda: not blocks.holds()), "it was released"
        with pytest.raises(ValueError, match="was released"):
            hit.in_place()
