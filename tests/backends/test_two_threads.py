"""A large load is copied and summed in two threads; what comes of it is the same as in one."""

import random
import threading

import attrs
import pytest

from backends import _copying
from backends._copying import deliver
from backends.pages import Pages, checksums, new_pages
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


def test_what_a_destination_raises_is_raised_and_both_threads_have_ended(threshold):
    before = threading.active_count()
    with pytest.raises(OSError, match="full"):
        deliver(filled(4), Places(new_pages(4, SIZE), OSError("full")), 0, None, True)
    assert threading.active_count() == before


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
