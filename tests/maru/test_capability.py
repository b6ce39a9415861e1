"""Tokens and capabilities: what is refused, and what they are made of."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru._wire.capability import CAPABILITY_BYTES, auth_token, issue, verify, verify_auth_token

SECRET = bytes(range(32))
RIGHT = {
    "region_id": 7,
    "offset": 0,
    "length": 1 << 21,
    "writable": False,
    "epoch": 0xABCDEF,
    "session": b"0123456789abcdef",
}
u64 = st.integers(0, 2**64 - 1)


def hmac_sha256(key, text):
    """RFC 2104, spelled out."""
    key = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in key) + text).digest()
    return hashlib.sha256(bytes(b ^ 0x5C for b in key) + inner).digest()


def test_a_token_is_the_first_eight_bytes_of_a_hmac_over_region_and_length():
    mac = hmac_sha256(SECRET, struct.pack("<QQ", 7, 1 << 21))
    assert auth_token(SECRET, 7, 1 << 21) == int.from_bytes(mac[:8], "little")


def test_a_token_is_the_same_in_every_process():
    assert auth_token(SECRET, 7, 1 << 21) == 0x140E625E3328FD9A  # computed with openssl


def test_a_token_is_good_for_its_region_and_length_only():
    token = auth_token(SECRET, 7, 1 << 21)
    assert verify_auth_token(SECRET, 7, 1 << 21, token)
    assert not verify_auth_token(SECRET, 8, 1 << 21, token)
    assert not verify_auth_token(SECRET, 7, 1 << 22, token)
    assert not verify_auth_token(bytes(32), 7, 1 << 21, token)
    assert not verify_auth_token(SECRET, 7, 1 << 21, token ^ 1)


@pytest.mark.parametrize(("region_id", "token"), [(-1, 0), (1 << 64, 0), (7, -1), (7, 1 << 64)])
def test_numbers_that_no_token_can_have_are_refused(region_id, token):
    assert not verify_auth_token(SECRET, region_id, 1, token)


def test_a_capability_is_a_hmac_over_everything_it_is_bound_to():
    text = b"maru capability1" + struct.pack("<QQQBQ", 7, 0, 1 << 21, 0, 0xABCDEF) + b"0123456789abcdef"
    assert issue(SECRET, **RIGHT) == hmac_sha256(SECRET, text)
    assert len(issue(SECRET, **RIGHT)) == CAPABILITY_BYTES


def test_a_capability_is_accepted_for_what_it_was_issued_for():
    assert verify(SECRET, issue(SECRET, **RIGHT), **RIGHT)
    assert verify(SECRET, issue(SECRET, **RIGHT | {"writable": True}), **RIGHT | {"writable": True})


@pytest.mark.parametrize(
    "other",
    [
        {"region_id": 8},
        {"offset": 4096},
        {"length": 1 << 22},
        {"writable": True},
        {"epoch": 0xABCDF0},
        {"session": b"0123456789abcdeF"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_capability_of_another_region_span_right_epoch_or_client_is_refused(other):
    assert not verify(SECRET, issue(SECRET, **RIGHT | other), **RIGHT)
    assert not verify(SECRET, issue(SECRET, **RIGHT), **RIGHT | other)


def test_a_capability_of_another_pool_is_refused():
    assert not verify(SECRET, issue(bytes(32), **RIGHT), **RIGHT)


@pytest.mark.parametrize("end", [0, 8, 31])
def test_a_part_of_a_capability_is_refused(end):
    assert not verify(SECRET, issue(SECRET, **RIGHT)[:end], **RIGHT)


def test_a_capability_with_a_bit_changed_or_bytes_added_is_refused():
    capability = issue(SECRET, **RIGHT)
    for bit in range(8 * CAPABILITY_BYTES):
        changed = (int.from_bytes(capability) ^ (1 << bit)).to_bytes(CAPABILITY_BYTES)
        assert not verify(SECRET, changed, **RIGHT)
    assert not verify(SECRET, capability + b"\0", **RIGHT)


@pytest.mark.parametrize(
    "impossible",
    [{"region_id": -1}, {"offset": -1}, {"length": 1 << 64}, {"epoch": -1}, {"session": b""}, {"session": bytes(17)}],
)
def test_what_could_never_have_been_issued_is_refused(impossible):
    assert not verify(SECRET, issue(SECRET, **RIGHT), **RIGHT | impossible)


@pytest.mark.parametrize("session", [b"", bytes(15), bytes(17)])
def test_a_capability_is_issued_to_a_whole_session_only(session):
    # struct would pad or cut it, and two sessions would share their capabilities.
    with pytest.raises(ValueError, match="16 bytes"):
        issue(SECRET, **RIGHT | {"session": session})


rights = st.fixed_dictionaries(
    {
        "region_id": u64,
        "offset": u64,
        "length": u64,
        "writable": st.booleans(),
        "epoch": u64,
        "session": st.binary(min_size=16, max_size=16),
    }
)


@given(rights, rights)
def test_two_rights_have_the_same_capability_only_if_they_are_the_same(one, other):
    assert verify(SECRET, issue(SECRET, **one), **other) == (one == other)
    assert verify(SECRET, issue(SECRET, **one), **one)
