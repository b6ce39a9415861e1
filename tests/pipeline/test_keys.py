import subprocess
import sys
from array import array
from itertools import accumulate, product
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload import BlockKey, block_key, prefix_keys

ALGORITHMS = ("blake2b", "sha256")
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
        "import offload; print(offload.block_key(b'x', salt='s').hex(), offload.prefix_keys(range(9), 4)[-1].hex(), "
        "*[offload.BlockKey(4, model='m', tenant='t', algorithm=a).keys(range(9))[-1].hex() for a in ('blake2b', 'sha256')])"
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
    spelt_out = [BlockKey(4, model="m", tenant="t", algorithm=algorithm).keys(range(9))[-1] for algorithm in ALGORITHMS]
    keys = [block_key(b"x", salt="s"), prefix_keys(range(9), 4)[-1], *spelt_out]
    assert printed == {" ".join(key.hex() for key in keys) + "\n"}


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


# --- spelt out ----------------------------------------------------------------------------------------------------

NAMING = BlockKey(2, model="m", dtype="bfloat16", layout="l", rank=1, tenant="t")


def test_the_encoding_of_what_is_spelt_out_is_pinned():
    assert [key.hex() for key in NAMING.keys(range(5))] == [
        "b3538f4f580be7e9d85ebe0eb8991ce2fb7317088cd3a4c0bd0a663e32e80339",
        "a36accc5e8efab0a8d1ebddbfa2e27f5a958c6df105f845c592424d119f59506",
    ]
    assert [key.hex() for key in attrs.evolve(NAMING, algorithm="sha256").keys(range(5))] == [
        "c192c33374c523592d099664e8ae2e105e1ff27402c3b435f778c32584f448dc",
        "fd2a75cded52a81a78d732ca583461c4977cffbd0e1379bafbab8ffde2b480a1",
    ]
    sha256 = "8147585c808f0a86b156e9dbd728f60fd2e9065326fdf2d732c8cd5dcb614b26"
    assert block_key(b"chunk 0", algorithm="sha256").hex() == sha256


def test_what_is_spelt_out_is_a_salt_of_the_keys():
    for algorithm in ALGORITHMS:
        naming = attrs.evolve(NAMING, algorithm=algorithm)
        assert naming.keys(range(7)) == prefix_keys(range(7), 2, salt=naming.salt, algorithm=algorithm)


@pytest.mark.parametrize(
    "other",
    [
        {"block_size": 4},
        {"model": "n"},
        {"dtype": "float16"},
        {"layout": "k"},
        {"rank": 2},
        {"tenant": "u"},
        {"algorithm": "sha256"},
        {"model": "", "dtype": "mbfloat16"},
        {"layout": "l1", "rank": 0},
        {"tenant": "", "layout": "lt"},
    ],
    ids=str,
)
def test_what_differs_in_any_field_has_no_key_in_common(other):
    assert not set(NAMING.keys(range(16))) & set(attrs.evolve(NAMING, **other).keys(range(16)))


@given(st.lists(TOKENS, max_size=6), st.integers(1, 5), st.sampled_from(ALGORITHMS))
def test_a_prefix_that_grows_has_the_keys_of_the_whole(parts, size, algorithm):
    naming = BlockKey(size, model="m", algorithm=algorithm)
    prefix = naming.prefix()
    new = [prefix.append(part) for part in parts]
    whole = [token for part in parts for token in part]
    assert prefix.keys == [key for keys in new for key in keys] == naming.keys(whole)
    assert len(prefix) == len(whole)
    assert naming.prefix(whole).keys == prefix.keys


def test_growing_takes_tokens_in_any_form_and_nothing_of_what_it_refuses():
    prefix = NAMING.prefix(b"\x01")
    with pytest.raises(TypeError):
        prefix.append([2, "three"])
    with pytest.raises(OverflowError):
        prefix.append([2, 2**63])
    assert len(prefix) == 1 and prefix.append(range(2, 4)) == NAMING.keys([1, 2, 3])
    assert repr(prefix) == "<3 tokens, 1 full blocks>"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"block_size": 0}, "block_size = 0: must be an integer, at least 1"),
        ({"block_size": True}, "block_size"),
        ({"rank": -1}, "rank = -1"),
        ({"rank": "0"}, "rank"),
        ({"model": 7}, "model = 7: must be a text"),
        ({"tenant": b"t"}, "tenant"),
        ({"layout": None}, "layout"),
        ({"algorithm": "md5"}, "algorithm = 'md5': must be one of blake2b, sha256"),
    ],
)
def test_a_field_that_cannot_be_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        attrs.evolve(NAMING, **fields)


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match="algorithm = 'md5'"):
        block_key(b"x", algorithm="md5")
    with pytest.raises(ValueError, match="algorithm = 'md5'"):
        prefix_keys([1], 1, algorithm="md5")
