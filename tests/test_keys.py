import subprocess
import sys
from array import array
from itertools import accumulate, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload import block_key, prefix_keys

TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)


def encoded(tokens):
    return b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)


def test_a_key_is_32_bytes_and_depends_on_content_parent_and_salt():
    keys = [
        block_key(content, parent=parent, salt=salt)
        for content, parent, salt in product([b"", b"a", b"b"], [b"", block_key(b"p")], ["", "tenant"])
    ]
    assert {len(key) for key in keys} == {32}
    assert len(set(keys)) == len(keys)


def test_the_encoding_is_pinned_since_keys_outlive_the_process():
    assert block_key(b"chunk 0").hex() == "75107fe068150ef1dfebf650b86ede015d080bffa1104afe614d98465994b2d9"
    assert (
        block_key(b"chunk 1", parent=block_key(b"chunk 0"), salt="tenant").hex()
        == "8bbb659e38ea04164da973735a9ed24a6fd3ab5774ba6451efb2be6330cce7b0"
    )
    assert (
        prefix_keys(range(4), 2, salt="tenant")[1].hex()
        == "bf77755b380a1b280ef136a9bc70ead01e496904dfa789a99dc1e0fdcefcd19e"
    )


@given(st.binary(max_size=6), st.data())
def test_no_two_divisions_of_the_same_bytes_share_a_key(joined, data):
    def divided(name):
        first = data.draw(st.integers(0, len(joined)), label=name)
        second = data.draw(st.integers(first, len(joined)), label=name)
        return joined[:first], joined[first:second], joined[second:]

    one, other = divided("one"), divided("other")
    keys = {block_key(content, parent=parent, salt=salt) for salt, parent, content in (one, other)}
    assert len(keys) == len({one, other})


def test_a_text_and_its_utf8_bytes_are_the_same_salt():
    assert block_key(b"x", salt="mandant ü") == block_key(b"x", salt="mandant ü".encode())


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_content_may_be_any_buffer(form):
    assert block_key(form(b"content")) == block_key(b"content")


@given(TOKENS, st.integers(1, 7))
def test_prefix_keys_are_block_keys_chained_over_the_full_blocks(tokens, size):
    full = len(tokens) // size
    contents = [encoded(tokens[i * size : (i + 1) * size]) for i in range(full)]
    chain = accumulate(contents, lambda parent, content: block_key(content, parent=parent, salt="s"), initial=b"")
    assert prefix_keys(tokens, size, salt="s") == list(chain)[1:]


@given(TOKENS, st.integers(1, 5), st.integers(0, 8))
def test_going_on_from_the_last_key_equals_starting_over(tokens, size, blocks):
    whole = prefix_keys(tokens, size)
    start = prefix_keys(tokens[: blocks * size], size)
    rest = prefix_keys(tokens[len(start) * size :], size, parent=start[-1] if start else b"")
    assert start + rest == whole


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_two_sequences_share_the_keys_of_their_common_full_blocks_only(one, other, size):
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    ours, theirs = prefix_keys(one, size), prefix_keys(other, size)
    common = shared // size
    assert ours[:common] == theirs[:common]
    assert not set(ours[common:]) & set(theirs[common:])


def test_the_form_of_the_tokens_makes_no_difference():
    tokens = list(range(40))
    keys = prefix_keys(tokens, 16)
    for form in (
        tuple,
        bytes,
        bytearray,
        iter,
        lambda t: range(len(t)),
        lambda t: array("i", t),
        lambda t: array("q", t),
    ):
        assert prefix_keys(form(tokens), 16) == keys
    assert prefix_keys(memoryview(array("H", tokens)), 16) == keys


def test_block_sizes_do_not_share_keys():
    assert not set(prefix_keys(range(64), 16)) & set(prefix_keys(range(64), 32))


def test_keys_are_equal_in_every_process():
    program = (
        "import offload; print(offload.block_key(b'x', salt='s').hex(), offload.prefix_keys(range(9), 4)[-1].hex())"
    )
    root = Path(offload.__file__).parent.parent
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{block_key(b'x', salt='s').hex()} {prefix_keys(range(9), 4)[-1].hex()}\n"}


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_size_below_one_is_refused(size):
    with pytest.raises(ValueError, match="block_size"):
        prefix_keys([1, 2], size)


@pytest.mark.parametrize("token", [1.5, "a", None, b"x"])
def test_a_token_that_is_no_integer_is_refused(token):
    with pytest.raises(TypeError):
        prefix_keys([token], 1)


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1])
def test_a_token_beyond_64_bits_is_refused(token):
    with pytest.raises(OverflowError):
        prefix_keys([token], 1)


@pytest.mark.parametrize("arguments", [{"content": "text"}, {"content": b"", "parent": "text"}, {"content": 3}])
def test_content_and_parent_must_be_bytes(arguments):
    with pytest.raises(TypeError):
        block_key(**arguments)
