"""The buffers that blocks outside of host memory pass through: pinned, kept for later copies, and never used by two at once."""

import gc

import pytest

from backends.base import copying as _copying
from backends.base.copying import BOUNCE_BYTES, Bounce
from maru.base.memory.pinning import spans
from tests.support.cuda_process import process_with_cuda


@pytest.fixture(autouse=True)
def _no_spare():
    _copying._spare.clear()
    yield
    _copying._spare.clear()


def test_a_buffer_is_pinned_once_and_used_again():
    with process_with_cuda() as cuda:
        first = Bounce().portion(4, 1 << 20)
        address = first.addresses[0]
        assert spans(address, BOUNCE_BYTES) == [(address, address + BOUNCE_BYTES)]
        del first
        again = Bounce().portion(100, 1 << 10)
        assert again.addresses[0] == address and cuda.calls.count("cuMemHostRegister_v2") == 1
        del again
        _copying._spare.clear()


def test_a_buffer_from_before_cuda_was_used_is_pinned_when_it_is_used_again():
    before = Bounce().portion(4, 1 << 20).addresses[0]
    with process_with_cuda():
        again = Bounce().portion(4, 1 << 20)
        assert again.addresses[0] == before and spans(before, BOUNCE_BYTES)
        del again
        _copying._spare.clear()


def test_a_buffer_with_a_page_in_use_is_not_given_to_another_copy():
    bounce = Bounce()
    page = bounce.portion(4, 1 << 20)[3]
    del bounce
    gc.collect()
    other = Bounce().portion(8, 1 << 20)
    page[:] = b"p" * (1 << 20)
    for each in other:
        each[:] = b"o" * (1 << 20)
    assert bytes(page) == b"p" * (1 << 20)


def test_a_buffer_outlives_its_user_in_a_cycle_of_garbage():
    pages = Bounce().portion(1, 4096)
    address = pages.addresses[0]
    cycle = [pages]
    cycle.append(cycle)
    del pages, cycle
    gc.collect()
    again = Bounce().portion(1, 4096)
    assert again.addresses[0] == address
    again[0][:] = b"x" * 4096


def test_a_few_buffers_are_kept():
    several = [Bounce().portion(1, 4096) for _ in range(7)]
    assert len({pages.addresses[0] for pages in several}) == 7
    del several
    assert len(_copying._spare) == _copying._KEPT


def test_larger_blocks_are_staged_alone():
    pages = Bounce().portion(3, BOUNCE_BYTES + 1)
    assert (len(pages), pages.page_bytes) == (1, BOUNCE_BYTES + 1)
    del pages
    assert not _copying._spare
