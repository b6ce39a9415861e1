"""Where buffers lie, and copies between columns of addresses."""

import array
import ctypes
import mmap

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from maru._client import copying
from maru._client.copying import Places, copy, copy_and_sum, sums


def test_buffers_of_any_kind_are_found_and_let_go_of():
    writable = [bytearray(b"abc"), array.array("I", [1, 2]), mmap.mmap(-1, 4096), (ctypes.c_char * 5)()]
    with Places(writable, write=True) as places:
        assert places.sizes == [3, 8, 4096, 5]
        assert ctypes.string_at(places.addresses[0], 3) == b"abc"
        with pytest.raises(BufferError):
            writable[0].append(1)
    writable[0].append(1)
    read_only = [b"abc", memoryview(b"abcdef")[2:5], memoryview(bytearray(8)).toreadonly(), b""]
    with Places(read_only, write=False) as places:
        assert places.sizes == [3, 3, 8, 0]
        assert ctypes.string_at(places.addresses[1], 3) == b"cde"
    places.close()


@pytest.mark.parametrize(
    ("buffer", "write", "error"),
    [
        (b"abc", True, BufferError),
        (memoryview(b"abcdef")[::2], False, BufferError),
        (3, False, TypeError),
        ("abc", False, TypeError),
        (None, True, TypeError),
    ],
)
def test_what_is_no_buffer_is_refused_and_the_others_are_let_go_of(buffer, write, error):
    first = bytearray(4)
    with pytest.raises(error):
        Places([first, buffer], write=write)
    first.append(1)


def test_only_tensors_in_one_run_on_the_cpu_are_taken():
    torch = pytest.importorskip("torch")
    with Places([torch.arange(4, dtype=torch.int64)], write=True) as places:
        assert places.sizes == [32]
        assert ctypes.string_at(places.addresses[0], 16) == (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(3, device="meta")):
        with pytest.raises(ValueError, match="on the CPU"):
            Places([tensor], write=False)


sizes = st.lists(st.integers(0, 40), max_size=12)


@given(sizes=sizes, order=st.randoms(), adjacent=st.booleans())
def test_every_byte_arrives_where_it_should_and_no_other_is_touched(sizes, order, adjacent):
    source = bytes(range(1, 256)) * 2
    memory = bytearray(sum(sizes) + 2 * len(sizes) + 1)
    base_to, base_at = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (memory, bytearray(source)))
    keep = bytearray(source)
    base_at = ctypes.addressof(ctypes.c_char.from_buffer(keep))
    places, offset = [], 0
    for size in sizes:
        places.append(offset)
        offset += size + (0 if adjacent else 2)
    jobs = list(zip(places, sizes, strict=True))
    order.shuffle(jobs)
    at = [0]
    for _, size in jobs:
        at.append(at[-1] + size)
    expected = bytearray(memory)
    for (place, size), start in zip(jobs, at, strict=False):
        expected[place : place + size] = source[start : start + size]
    columns = [base_to + place for place, _ in jobs], [base_at + start for start in at[:-1]], [size for _, size in jobs]
    copy(*columns)
    assert memory == expected
    memory[:] = bytes(len(memory))
    told = copy_and_sum(*columns)
    assert memory == expected
    assert told == [xxhash.xxh3_64_intdigest(source[a : a + size]) for a, (_, size) in zip(at, jobs, strict=False)]
    assert told == sums(columns[0], columns[2])


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 32, 100])
def test_the_sum_of_a_page_in_portions_is_that_of_the_whole(monkeypatch, size):
    monkeypatch.setattr(copying, "_WARM_BYTES", 16)
    source, memory = bytearray(range(1, size + 1)), bytearray(size + 2)
    to, at = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (memory, source or bytearray(1)))
    # Between two small ones, which go together.
    assert copy_and_sum([to, to + 1, to], [at, at, at], [min(size, 1), size, 0]) == [
        xxhash.xxh3_64_intdigest(source[:1]),
        xxhash.xxh3_64_intdigest(source),
        xxhash.xxh3_64_intdigest(b""),
    ]
    assert memory[1:] == source + b"\0"


def test_neighbours_on_both_sides_are_one_copy(monkeypatch):
    copies = []
    monkeypatch.setattr(copying, "_memmove", lambda to, at, size: copies.append((to, at, size)))
    copy([100, 110, 120, 130], [500, 510, 520, 540], [10, 10, 10, 10])
    assert copies == [(100, 500, 30), (130, 540, 10)]
    copies.clear()
    copy(range(0, 4096, 64), range(9000, 9000 + 4096, 64), [64] * 64)
    assert copies == [(0, 9000, 4096)]
