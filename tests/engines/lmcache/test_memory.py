"""Memory objects: copied from and to where they lie, and never further than they reach."""

import pytest

from backends.abc import EVICTED
from backends.base.pages import new_pages
from offload.engines.lmcache._memory import MemoryObjects, ObjectPlaces, ObjectTooLarge, Span


def span(data, size=None, used=None):
    memory = bytearray(data)
    whole = Span.of(memoryview(memory))
    return memory, Span(whole.address, size or whole.size, used or whole.used, whole.owner)


def test_objects_as_large_as_a_page_are_copied_where_they_lie():
    source = MemoryObjects(4)
    _, one = span(b"abcd")
    _, two = span(b"efgh")
    blocks = source.lend([b"1", b"2"], [one, two])
    assert list(source.views(blocks.refs).addresses) == [one.address, two.address]
    assert [bytes(page) for page in source.views(blocks.refs)] == [b"abcd", b"efgh"]


def test_a_smaller_object_fills_its_page_with_zeros():
    source = MemoryObjects(4)
    blocks = source.lend([b"1"], [span(b"ab")[1]])
    assert source.views(blocks.refs) is None
    pages = new_pages(1, 4)
    pages[0][:] = b"xxxx"
    source.copy_out(blocks.refs, pages)
    assert bytes(pages[0]) == b"ab\0\0"


def test_padding_that_has_no_place_in_a_page_is_left_out():
    source = MemoryObjects(4)
    blocks = source.lend([b"1"], [span(b"abcdpppp", used=3)[1]])
    assert bytes(source.views(blocks.refs)[0]) == b"abc\0"


@pytest.mark.parametrize("page_bytes", [8, 16])
def test_padding_of_objects_is_cleared_before_it_is_stored(page_bytes: int):
    source = MemoryObjects(page_bytes)
    blocks = source.lend([b"1"], [span(b"abcother", used=3)[1]])
    pages = new_pages(1, page_bytes)
    source.copy_out(blocks.refs, pages)
    assert bytes(pages[0]) == b"abc".ljust(page_bytes, b"\0")


def test_an_object_that_does_not_fit_is_refused_by_the_name_of_the_knob():
    with pytest.raises(ObjectTooLarge, match="5 bytes does not fit a page of 4: set chunk_size_bytes"):
        MemoryObjects(4).lend([b"1"], [span(b"abcde")[1]])
    with pytest.raises(ObjectTooLarge):
        ObjectPlaces([span(b"abcde")[1]], 4)


def test_what_is_taken_back_is_gone():
    source = MemoryObjects(4)
    blocks = source.lend([b"1"], [span(b"abcd")[1]])
    assert len(source) == 1
    source.take_back(blocks)
    source.take_back(blocks)
    assert len(source) == 0


def test_nothing_is_found_by_key():
    assert MemoryObjects(4).upgrade([b"1", b"2"]) == [EVICTED] * 2


def test_a_page_is_written_no_further_than_its_object_reaches():
    memory, whole = span(b"abcdZZ")
    places = ObjectPlaces([Span(whole.address, 2, 2, whole.owner), span(b"....")[1]], 4)
    assert places.views() is None
    pages = new_pages(1, 4)
    pages[0][:] = b"1234"
    places.copy_in(0, pages)
    assert memory == b"12cdZZ"


def test_places_as_large_as_a_page_are_loaded_into_where_they_lie():
    memory, one = span(b"....")
    places = ObjectPlaces([one], 4)
    places.views()[0][:] = b"1234"
    assert memory == b"1234"
