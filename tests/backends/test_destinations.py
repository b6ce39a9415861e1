"""Destinations in front of another one: no ability is lost on the way."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from backends.abc import Destination
from backends.base.forwarding import ForwardingDestination
from backends.base.pages import Pages, checksums, new_pages
from backends.memory import MemoryTier
from offload import NO_WAIT, EngineConfig, open_engine

SIZE = 8


class Able(Destination):
    """A destination that can do everything; it notes positions."""

    on_device = sums_pages = is_readable = True
    block_bytes = SIZE
    plane_names = ("plane",)

    def __init__(self) -> None:
        self.place = object()
        self.seen: list[object] = []

    def __len__(self) -> int:
        return 6

    def views(self) -> Pages | None:
        return None

    def numbered(self) -> tuple[object, Sequence[int]]:
        return self.place, range(10, 16)

    def copy_in(self, start: int, pages: Pages) -> None:
        self.seen.append(("in", start))

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        self.seen.append(("sum", start))
        return [1] * len(pages)

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        self.seen.append(("out", list(positions)))

    def plane_samples(self, positions: Sequence[int]) -> list[array[float] | None]:
        self.seen.append(("samples", list(positions)))
        return [None] * len(positions)


class Summing(Able):
    """A destination with the abilities of ``Able`` that also sums the pages it copies."""

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        super().copy_in_and_sum(start, pages)
        return checksums(pages)

    def numbered(self) -> tuple[object, Sequence[int]]:
        return None, ()


def test_each_member_of_a_destination_is_forwarded() -> None:
    members = {name for name, member in vars(Destination).items() if callable(member) or isinstance(member, property)}
    assert members - vars(ForwardingDestination).keys() == set()


def test_a_forwarding_destination_has_the_abilities_of_the_inner_one() -> None:
    inner = Able()
    front, pages = ForwardingDestination(inner), new_pages(2, SIZE)
    assert (len(front), front.block_bytes, front.on_device, front.sums_pages, front.is_readable) == (
        6,
        8,
        True,
        True,
        True,
    )
    assert (front.plane_names, front.views(), front.numbered()) == (("plane",), None, (inner.place, range(10, 16)))
    front.copy_in(1, pages)
    assert front.copy_in_and_sum(2, pages) == [1, 1]
    front.copy_out([3], pages)
    assert front.plane_samples([4]) == [None]
    assert inner.seen == [("in", 1), ("sum", 2), ("out", [3]), ("samples", [4])]


async def test_parts_of_a_load_are_summed_at_their_places() -> None:
    keys = [b"%d" % at for at in range(6)]
    tiers = {"fast": MemoryTier(6 * SIZE, SIZE), "slow": MemoryTier(6 * SIZE, SIZE)}
    for at, key in enumerate(keys):
        tiers["fast" if at < 2 else "slow"].put(key, bytes(SIZE))
    destination = Summing()
    async with (
        open_engine(MemoryTier(SIZE, SIZE), EngineConfig(tiers=tiers, chain=False)) as engine,
        await engine.lookup(keys) as hit,
    ):
        assert (await engine.load(hit, destination, precondition=NO_WAIT)).loaded == 6
    assert destination.seen == [("sum", 0), ("sum", 2)]
