"""Planes are read by the names of their axes, and told apart within a tolerance."""

from __future__ import annotations

from array import array

import pytest
import torch

from backends.base.planes import SAMPLES, TensorPlanes, difference
from backends.device import DeviceTier

SHAPE = (2, 6, 8, 4, 16)  # keys and values, blocks, tokens, heads, head_dim
AXES = {"kv": 0, "head": 3}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int8]
ALL_MOVED = "8 of 8 planes are swapped: layer 0 kv 0 head 0 holds"


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


def planes_of(*layers: torch.Tensor, axes: dict[str, int] = AXES) -> TensorPlanes:
    return TensorPlanes({f"layer {at}": layer for at, layer in enumerate(layers)}, block_axis=1, plane_axes=axes)


def test_a_plane_has_the_name_of_its_tensor_and_of_its_place_on_each_axis() -> None:
    planes = planes_of(torch.zeros(SHAPE), torch.zeros(SHAPE))
    assert len(planes.plane_names) == 16
    assert planes.plane_names[0] == "layer 0 kv 0 head 0"
    assert planes.plane_names[-1] == "layer 1 kv 1 head 3"


def test_samples_are_numbers_of_their_own_plane() -> None:
    layer = torch.zeros(SHAPE)
    for kv in range(2):
        for head in range(4):
            layer[kv, :, :, head] = 10 * kv + head
    (samples,) = planes_of(layer).samples([3])
    assert list(samples) == [float(10 * kv + head) for kv in range(2) for head in range(4) for _ in range(SAMPLES)]


def test_a_block_is_one_plane_where_no_axis_tells_them_apart() -> None:
    planes = TensorPlanes({"cache": torch.arange(48.0).view(3, 16)})
    assert planes.plane_names == ("cache",)
    assert [list(samples) for samples in planes.samples([0, 2])] == [
        [1, 3, 5, 7, 9, 11, 13, 15],
        [33, 35, 37, 39, 41, 43, 45, 47],
    ]


def test_a_slice_of_a_packed_axis_is_a_tensor_of_its_own() -> None:
    packed = torch.randn(6, 4, 8, 32)  # blocks, heads, tokens, keys before values
    planes = TensorPlanes({"keys": packed[..., :16], "values": packed[..., 16:]}, plane_axes={"head": 1})
    (before,) = planes.samples([1])
    packed[1] = packed[1].roll(16, -1)
    (after,) = planes.samples([1])
    assert difference(planes.plane_names, before, after) == (
        "8 of 8 planes are swapped: keys head 0 holds values head 0"
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pattern_is_another_one_in_each_plane_and_each_block(dtype: torch.dtype) -> None:
    planes = planes_of(torch.zeros(SHAPE).to(dtype))
    expected = planes.fill([4, 2], "seed")
    found = planes.samples([4, 2])
    assert found == expected
    assert len({tuple(found[0][at : at + SAMPLES]) for at in range(0, len(found[0]), SAMPLES)}) == 8
    assert difference(planes.plane_names, found[0], found[1])
    planes.clear([4])
    assert set(planes.samples([4])[0]) == {0.0}


def test_a_pattern_follows_from_names_and_not_from_where_planes_lie() -> None:
    ours, theirs = torch.zeros(SHAPE), torch.zeros(SHAPE).permute(3, 1, 2, 0, 4).contiguous()
    (one,) = planes_of(ours).fill([1], "seed")
    (other,) = planes_of(theirs, axes={"kv": 3, "head": 0}).fill([5], "seed")
    assert one == other
    assert torch.equal(ours[:, 1], theirs[:, 5].permute(2, 1, 0, 3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda block: block, None),
        (
            lambda block: block.flip(0),
            "8 of 8 planes are swapped: layer 0 kv 0 head 0 holds layer 0 kv 1 head 0",
        ),
        (
            lambda block: block.roll(1, 2),
            "8 of 8 planes are swapped: layer 0 kv 0 head 0 holds layer 0 kv 0 head 3",
        ),
        (lambda block: block[:, :, [1, 0, 2, 3]], "4 of 8 planes are swapped"),
        (lambda block: torch.randn(block.shape), "8 of 8 planes are wrong, the first of them layer 0 kv 0 head 0"),
        (lambda block: block * (1 + 0.02 * torch.randn(block.shape)), None),
        (lambda block: block.to(torch.float8_e4m3fn).float(), None),
    ],
    ids=["same", "keys for values", "heads", "two heads", "another one", "other last bits", "fp8 and back"],
)
def test_what_is_different_is_said(change, says) -> None:
    layer = torch.randn(SHAPE)
    planes = planes_of(layer)
    (before,) = planes.samples([2])
    layer[:, 2] = change(layer[:, 2]).clone()
    (after,) = planes.samples([2])
    what = difference(planes.plane_names, before, after)
    assert what is None if says is None else what is not None and what.startswith(says)


def test_numbers_that_are_none_are_compared_as_such() -> None:
    nan, inf = float("nan"), float("inf")
    one, other = array("f", [1, nan, 3, inf]), array("f", [1, 2, 3, inf])
    assert difference(["plane"], one, array("f", one)) is None
    assert difference(["plane"], one, array("f", [1.01, nan, 3, inf])) is None
    assert difference(["plane"], one, other)


def test_samples_of_another_layout_are_different() -> None:
    assert difference(["a", "b"], array("f", [1] * 16), array("f", [1] * 8)) == "8 samples in place of 16"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tensors": {}}, "empty"),
        ({"tensors": {"a": torch.zeros(0, 4)}}, "holds no blocks"),
        ({"tensors": {"a": torch.zeros(3, 4)}, "plane_axes": {"head": 2}}, "are not all axes of a, which has 2"),
        ({"tensors": {"a": torch.zeros(3, 4)}, "plane_axes": {"head": 0}}, "must be different"),
    ],
)
def test_axes_that_cannot_be_are_refused(arguments, says) -> None:
    with pytest.raises(ValueError, match=says):
        TensorPlanes(**arguments)


def test_a_tier_reads_its_blocks_and_its_places_by_the_same_planes() -> None:
    layer = torch.randn(SHAPE)
    tier = DeviceTier([layer], block_axis=1, plane_axes=AXES)
    assert tier.plane_samples([5, 1]) == tier.into([1, 5]).plane_samples([1, 0])
    assert tier.plane_names == planes_of(layer).plane_names


def test_a_tier_that_was_not_told_of_planes_has_none() -> None:
    tier = DeviceTier([torch.zeros(SHAPE)], block_axis=1)
    assert tier.plane_names == ()
    with pytest.raises(ValueError, match="plane_axes"):
        tier.canary(0)
