"""Huge pages: made of shared and private memory where the kernel can, and missed quietly where it cannot."""

import errno
import os

import pytest

from maru.base.memory import huge_pages
from maru.base.memory import memory as memory_module
from maru.base.memory.huge_pages import HUGE_BYTES, make_huge, reserve_huge, why_no_huge_pages
from maru.base.memory.memory import PAGE_BYTES, Memory

needs_them = pytest.mark.skipif(bool(why_no_huge_pages()), reason="a kernel that makes no huge pages when told to")
LENGTH = 4 * HUGE_BYTES + PAGE_BYTES


def memfd(length=LENGTH):
    fd = os.memfd_create("huge")
    os.ftruncate(fd, length)
    return fd


def smaps(memory, *names):
    """Bytes of a mapping under these names."""
    found, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            first, _, rest = line.partition(" ")
            if "-" in first:
                start, stop = (int(end, 16) for end in first.split("-"))
                inside = start < memory.address + memory.length and memory.address < stop
            elif inside and first.rstrip(":") in names:
                found += int(rest.split()[0]) * 1024
    return found


@pytest.fixture(autouse=True)
def _uncounted(monkeypatch):
    monkeypatch.setattr(huge_pages, "_counted", huge_pages.HugePageStatistics())


@pytest.fixture(params=["shared", "private"])
def memory(request):
    if request.param == "private":
        yield Memory.private(LENGTH)
        return
    fd = memfd()
    yield Memory(fd, 0, LENGTH, write=True)
    os.close(fd)


@needs_them
def test_whole_huge_pages_are_made_and_contents_stay(memory):
    view = memory.buffer()
    view[5:HUGE_BYTES:PAGE_BYTES] = b"x" * (HUGE_BYTES // PAGE_BYTES)
    assert make_huge(memory) == 4 * HUGE_BYTES
    assert smaps(memory, "ShmemPmdMapped", "AnonHugePages") >= 4 * HUGE_BYTES
    assert view[5] == view[HUGE_BYTES - PAGE_BYTES + 5] == ord("x") and not view[6]
    statistics = huge_pages.statistics()
    assert (statistics.huge_bytes, statistics.small_bytes, statistics.why_not) == (4 * HUGE_BYTES, 0, "")
    assert memory.populate()


@needs_them
def test_only_the_part_is_made_huge(memory):
    assert make_huge(memory, PAGE_BYTES, 3 * HUGE_BYTES) == 2 * HUGE_BYTES
    assert smaps(memory, "Rss") == 2 * HUGE_BYTES


@needs_them
def test_a_reserved_file_is_in_huge_pages_for_all_that_map_it():
    fd = os.memfd_create("huge")
    reserve_huge(fd, 0, LENGTH)
    status = os.fstat(fd)
    assert status.st_size == LENGTH and status.st_blocks * 512 >= LENGTH
    reader = Memory(fd, 0, LENGTH, write=False)
    os.close(fd)
    assert reader.populate()
    assert smaps(reader, "ShmemPmdMapped") == 4 * HUGE_BYTES


@pytest.mark.parametrize("offset", [0, PAGE_BYTES, HUGE_BYTES, HUGE_BYTES + 3 * PAGE_BYTES])
@pytest.mark.parametrize("length", [PAGE_BYTES, HUGE_BYTES, HUGE_BYTES + PAGE_BYTES, 3 * HUGE_BYTES - 1])
def test_addresses_are_congruent_to_offsets_and_nothing_else_is_mapped(offset, length):
    fd = memfd(6 * HUGE_BYTES)
    os.pwrite(fd, b"here", offset)
    before = mapped_bytes()
    memory = Memory(fd, offset, length, write=False)
    os.close(fd)
    assert bytes(memory.buffer()[:4]) == b"here"
    if length >= HUGE_BYTES:
        assert memory.address % HUGE_BYTES == offset % HUGE_BYTES
    whole = -(-length // PAGE_BYTES) * PAGE_BYTES
    assert mapped_bytes() - before == whole
    del memory
    assert mapped_bytes() == before


def mapped_bytes():
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:huge" in line or "---p" in line:
                start, stop = (int(end, 16) for end in line.split()[0].split("-"))
                total += stop - start
    return total


def test_a_mapping_that_fails_leaves_no_reservation():
    before = mapped_bytes()
    fd = os.open("/dev/null", os.O_RDWR)
    with pytest.raises(memory_module.CannotMap):
        Memory(fd, 0, 4 * HUGE_BYTES, write=True)
    os.close(fd)
    assert mapped_bytes() == before


def advising(answers, calls):
    """A kernel that answers calls for a huge page so, in turn, and then makes them."""

    def advise(address, length, advice):
        if advice != 25:
            return 0
        calls.append(address)
        return answers.pop(0) if answers else 0

    return advise


def test_a_page_that_is_busy_is_counted_and_left(monkeypatch):
    calls = []
    monkeypatch.setattr(huge_pages, "advise", advising([0, errno.EAGAIN], calls))
    memory = Memory.private(LENGTH)
    assert make_huge(memory) == 3 * HUGE_BYTES
    assert calls == [memory.address + at * HUGE_BYTES for at in range(4)]
    statistics = huge_pages.statistics()
    assert (statistics.huge_bytes, statistics.small_bytes) == (3 * HUGE_BYTES, HUGE_BYTES)
    assert "unavailable" in statistics.why_not


def test_a_kernel_that_makes_none_is_asked_once(monkeypatch):
    calls = []
    monkeypatch.setattr(huge_pages, "advise", advising([errno.EINVAL] * 9, calls))
    assert make_huge(Memory.private(LENGTH)) == 0
    assert len(calls) == 1 and "Linux 6.1" in huge_pages.statistics().why_not
    assert "Linux 6.1" in why_no_huge_pages()


def test_fragmented_memory_is_given_up(monkeypatch):
    calls = []
    monkeypatch.setattr(huge_pages, "advise", advising([errno.ENOMEM] * 99, calls))
    make_huge(Memory.private(64 * HUGE_BYTES))
    assert len(calls) == 32 and "fragmented" in huge_pages.statistics().why_not


def test_missing_memory_is_left_to_the_reservation(monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "advise", lambda *_: errno.EFAULT)
    fd = memfd(0)
    reserve_huge(fd, 0, LENGTH)
    assert os.fstat(fd).st_blocks * 512 >= LENGTH
    os.close(fd)
    path = tmp_path / "on a disk, maybe"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    monkeypatch.undo()
    reserve_huge(fd, 0, LENGTH)
    assert os.fstat(fd).st_size == LENGTH
    os.close(fd)


def test_a_kernel_that_says_again_for_ever_is_not_asked_for_ever(monkeypatch):
    monkeypatch.setattr(memory_module, "advise", lambda *_: errno.EAGAIN)
    assert memory_module.madvise(0, PAGE_BYTES, 0) == errno.EAGAIN
