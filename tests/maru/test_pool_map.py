"""The map of a pool: the cells of a region add up to its keys, whoever comes and goes while it is drawn."""

from __future__ import annotations

import tempfile

import pytest
import trio

import maru
from maru import PoolMap, ServerConfig, open_server
from maru._directory import Columns, Directory

PAGE = 16


def directory_of(*instances: str, pages: int = 8) -> Directory:
    """A directory in which each instance has a region: 1, 2, ..."""
    directory = Directory()
    for number, instance in enumerate(instances, 1):
        session = directory.open_session(number.to_bytes(16, "big"), instance, "", 10.0, 0.0)
        directory.add_region(session, number, pages * PAGE)
    return directory


def store(directory: Directory, region: int, keys: str, first: int = 0) -> None:
    columns = Columns(region, list(keys), [(first + at) * PAGE for at in range(len(keys))], PAGE, None, 1)
    assert directory.register(region, columns, 0.0, source=(0x40, b""))


def drawn(directory: Directory, cells: int = 8, piece: int = 100) -> PoolMap:
    drawing = directory.map_pool(cells, piece)
    while True:
        try:
            next(drawing)
        except StopIteration as end:
            return end.value


def test_a_region_says_whose_it_is_and_which_of_its_pages_are_taken() -> None:
    directory = directory_of("a", "b")
    store(directory, 1, "xyz", first=2)
    first, second = drawn(directory).regions
    assert (first.owner, first.state, first.published, first.length) == ("a", "owned", False, 8 * PAGE)
    assert first.used == [0, 0, 1, 1, 1, 0, 0, 0]
    assert (second.owner, second.used) == ("b", [0] * 8)
    assert drawn(directory).entries == 3


def test_what_was_stored_last_is_the_youngest_in_the_pool_and_what_was_first_the_oldest() -> None:
    directory = directory_of("a", "b")
    store(directory, 1, "x")
    store(directory, 2, "y")
    store(directory, 1, "z", first=1)
    first, second = drawn(directory).regions
    assert (first.age[:2], second.age[0]) == ([1.0, 0.0], 0.5)


@pytest.mark.parametrize("cells", [1, 3, 5, 8, 1000])
def test_the_cells_of_a_region_add_up_to_its_keys(cells: int) -> None:
    directory = directory_of("a")
    store(directory, 1, "vwxyz", first=1)
    (region,) = drawn(directory, cells).regions
    assert len(region.used) <= cells
    sizes = [min(region.cell_bytes, region.length - at * region.cell_bytes) for at in range(len(region.used))]
    taken = sum(share * size for share, size in zip(region.used, sizes, strict=True))
    assert taken == pytest.approx(5 * PAGE, abs=0.01 * PAGE)


def test_keys_and_regions_may_go_while_it_is_drawn() -> None:
    directory = directory_of("a", "b")
    store(directory, 1, "wxyz")
    store(directory, 2, "uv")
    drawing = directory.map_pool(8, 1)
    next(drawing)
    directory.delete(1, ["x"], 0.0)
    directory.end_session(2, 0.0)
    *_, last = _drawn_on(drawing)
    assert last.entries == 5
    assert sum(last.regions[0].used) == 3


def _drawn_on(drawing):
    end = yield from drawing
    yield end


async def test_a_server_draws_its_pool_and_answers_meanwhile() -> None:
    with tempfile.TemporaryDirectory() as pool:
        config = ServerConfig(pool_path=pool, capacity_bytes="64 MiB")
        async with (
            open_server(config) as server,
            maru.MaruHandler(
                server_url=server.endpoints[0], pool_size="8 MiB", chunk_size_bytes=1 << 12, instance_id="engine"
            ) as handler,
        ):
            await handler.batch_put([f"{number}" for number in range(600)], [b"bytes"] * 600)
            drawn: list[PoolMap] = []

            async def draw() -> None:
                drawn.append(await server.map_pool(cells=4))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(draw)
                assert await handler.healthcheck()
            (region,) = drawn[0].regions
            assert (drawn[0].entries, region.owner) == (600, "engine")


async def test_a_map_that_is_cancelled_leaves_the_server_as_it_was() -> None:
    with tempfile.TemporaryDirectory() as pool:
        async with open_server(ServerConfig(pool_path=pool, capacity_bytes="64 MiB")) as server:
            with trio.CancelScope() as scope:
                scope.cancel()
                await server.map_pool()
            assert scope.cancelled_caught
            assert (await server.map_pool()).entries == 0
