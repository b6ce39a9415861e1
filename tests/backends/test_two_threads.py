"""A large load is copied and summed in two threads; what comes of it is the same as in one."""

import random
import threading

import attrs
import pytest

from backends import _copying
from backends import pages as pages_module
from backends._copying import deliver
from backends.pages import Pages, checksums, copy_and_sum, new_pages
from backends.threads import run_beside

SIZE = 256


@attrs.define(eq=False)
class Places:
    """A destination that is no host memory, and says in which thread it was written to."""

    into: Pages
    error: Exception | None = None
    threads: list[str] = attrs.Factory(list)

    def copy_in(self, start: int, pages: Pages) -> None:
        self.threads.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        for at, page in enumerate(pages):
            self.into[start + at][:] = page


class SummingPlaces(Places):
    """Such a destination that sums what it copies."""

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        self.copy_in(start, pages)
        return checksums(pages)


def filled(n: int) -> Pages:
    pages, rng = new_pages(n, SIZE), random.Random(n)
    for page in pages:
        page[:] = rng.randbytes(SIZE)
    return pages


@pytest.fixture(params=[0, 1 << 30], ids=["two threads", "one thread"])
def threshold(request, monkeypatch):
    monkeypatch.setattr(_copying, "BESIDE_BYTES", request.param)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("in_host_memory", [True, False])
def test_all_of_it_arrives_with_its_checksums(threshold, n, summed, in_host_memory):
    source, into = filled(n), new_pages(n, SIZE)
    places = Places(into)
    sums = deliver(source, places, 0, into if in_host_memory else None, summed)
    assert sums == (checksums(source) if summed else None)
    assert [bytes(page) for page in into] == [bytes(page) for page in source]
    assert len(places.threads) == (not in_host_memory)  # a destination is written to by one thread at a time


def test_a_destination_that_sums_what_it_copies_is_not_read_again_for_it(threshold, monkeypatch):
    def read_again(pages: Pages) -> list[int]:
        raise AssertionError("read again")

    monkeypatch.setattr(_copying, "checksums", read_again)
    source, places = filled(4), SummingPlaces(new_pages(4, SIZE))
    assert deliver(source, places, 0, None, True) == checksums(source)
    assert deliver(source, places, 0, None, False) is None
    assert [bytes(page) for page in places.into] == [bytes(page) for page in source]


@pytest.mark.parametrize("places", [Places, SummingPlaces])
def test_what_a_destination_raises_is_raised_and_both_threads_have_ended(threshold, places):
    before = threading.active_count()
    with pytest.raises(OSError, match="full"):
        deliver(filled(4), places(new_pages(4, SIZE), OSError("full")), 0, None, True)
    assert threading.active_count() == before


@pytest.mark.parametrize("more", [0, 77])
def test_a_page_that_is_copied_part_by_part_has_the_checksum_of_the_whole(more, monkeypatch):
    monkeypatch.setattr(pages_module, "WARM_BYTES", 100)
    source, into = new_pages(2, 300 + more), new_pages(2, 300 + more)
    for page in source:
        page[:] = random.Random(more).randbytes(300 + more)
    assert copy_and_sum(into, source) == checksums(source)
    assert [bytes(page) for page in into] == [bytes(page) for page in source]
    with pytest.raises(ValueError, match="cannot copy"):
        copy_and_sum(new_pages(2, 300 + more - 1), source)


def test_what_the_second_thread_raises_is_raised_where_its_result_is_asked_for():
    def fail() -> None:
        raise OSError("beside")

    with pytest.raises(OSError, match="beside"), run_beside(fail) as result:
        result()


def test_at_the_exit_the_second_thread_has_ended():
    gate, order = threading.Event(), []

    def wait() -> None:
        gate.wait(10)
        order.append("ended")

    with pytest.raises(KeyError), run_beside(wait):
        gate.set()
        raise KeyError
    assert order == ["ended"]
