"""How the tensors of a block lie in its page."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.maru.l1._layout import ITEM_BYTES, PAGE_STEP_BYTES, layout_of


@given(st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=4), st.sampled_from(sorted(ITEM_BYTES))), min_size=1))
def test_tensors_follow_each_other_aligned_and_without_overlap(tensors):
    shapes, dtypes = zip(*tensors, strict=True)
    layout = layout_of(shapes, dtypes)
    for place, (shape, dtype) in zip(layout.tensors, tensors, strict=True):
        assert place.shape == tuple(shape) and place.dtype == dtype
        assert place.nbytes == math.prod(shape) * ITEM_BYTES[dtype]
        assert place.offset % ITEM_BYTES[dtype] == 0
    for before, behind in itertools.pairwise(layout.tensors):
        gap = behind.offset - (before.offset + before.nbytes)
        assert 0 <= gap < ITEM_BYTES[behind.dtype]
    assert layout.tensors[0].offset == 0
    assert layout.block_bytes <= layout.page_bytes < layout.block_bytes + PAGE_STEP_BYTES
    assert layout.page_bytes % PAGE_STEP_BYTES == 0


def test_dtypes_have_one_name_wherever_they_come_from():
    numpy = pytest.importorskip("numpy", reason="needs the torch extra")
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    plain = layout_of([(4, 4)], "float16")
    for dtype in (torch.float16, numpy.float16, numpy.dtype("float16"), ["float16"], "torch.float16", (torch.float16,)):
        assert layout_of([(4, 4)], dtype) == plain
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size


@pytest.mark.parametrize(
    ("shapes", "dtypes", "more", "text"),
    [
        ([], "float16", {}, "at least one tensor"),
        ([(2,)], ["float16", "int8"], {}, "1 shapes and 2 dtypes"),
        ([(2, 0)], "float16", {}, "has no bytes"),
        ([(-2, -2)], "float16", {}, "has no bytes"),
        ([(2,)], "complex64", {}, "is not a dtype of a KV cache"),
        ([(2,)], object(), {}, "is not a dtype"),
        ([(2,)], "float16", {"full_chunk_size_bytes": 5}, "full_chunk_size_bytes is 5, but these tensors have 4 bytes"),
    ],
)
def test_what_is_no_layout_is_refused(shapes, dtypes, more, text):
    with pytest.raises(ValueError, match=text):
        layout_of(shapes, dtypes, **more)


def test_it_says_what_it_is():
    layout = layout_of([(2, 16), ()], ["bfloat16", "int64"], fmt="NHD", chunk_size_in_tokens=16)
    assert str(layout) == "bfloat16[2, 16], int64[] (NHD), 16 tokens: 72 bytes"
