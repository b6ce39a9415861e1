"""Resource manager IPC, version 2: every message as the bytes it is on the wire, written by hand from the protocol."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru import BadFrame, BadMessage
from maru._wire import resource_manager as rm
from tests.support.wire_vectors import RM_HANDLE, RM_MAGIC, RM_REQUESTS, RM_RESPONSES


def vectors(rows):
    return pytest.mark.parametrize(
        ("rest", "message"), rows, ids=[f"{type(row[1]).__name__}-{len(row[0])}B" for row in rows]
    )


def split(frame):
    header = rm.read_rm_header(frame)
    assert header.length == len(frame) - rm.HEADER_BYTES
    return header.kind, frame[rm.HEADER_BYTES :]


@vectors(RM_REQUESTS)
def test_a_request_is_these_bytes_both_ways(rest, message):
    assert rm.encode_rm(message) == RM_MAGIC + rest
    assert rm.decode_rm_request(*split(RM_MAGIC + rest)) == message


@vectors(RM_RESPONSES)
def test_a_response_is_these_bytes_both_ways(rest, message):
    assert rm.encode_rm(message) == RM_MAGIC + rest
    assert rm.decode_rm_response(*split(RM_MAGIC + rest)) == message


def test_every_type_has_a_vector():
    assert {row[0][0] for row in RM_REQUESTS + RM_RESPONSES} == set(rm.Kind)


@vectors(RM_REQUESTS + RM_RESPONSES)
def test_a_body_that_is_cut_anywhere_or_too_long_is_refused(rest, message):
    decode = rm.decode_rm_request if (rest, message) in RM_REQUESTS else rm.decode_rm_response
    kind, body = split(RM_MAGIC + rest)
    assert decode(kind, memoryview(body)) == message
    for end in range(len(body)):
        with pytest.raises(BadMessage, match="exceed the body of"):
            decode(kind, body[:end])
    with pytest.raises(BadMessage, match="too many"):
        decode(kind, body + b"\0")


@vectors(RM_REQUESTS)
def test_a_request_is_no_response(rest, message):
    kind, body = split(RM_MAGIC + rest)
    with pytest.raises(BadMessage, match="is not a response"):
        rm.decode_rm_response(kind, body)


@vectors(RM_RESPONSES)
def test_a_response_is_no_request(rest, message):
    kind, body = split(RM_MAGIC + rest)
    with pytest.raises(BadMessage, match="is not a request"):
        rm.decode_rm_request(kind, body)


@pytest.mark.parametrize("kind", [0, 7, 8, 11, 254, 256, 65_535])
def test_an_unknown_type_is_a_bad_message(kind):
    with pytest.raises(BadMessage, match="is not a request"):
        rm.decode_rm_request(kind, b"")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        RM_MAGIC + b"\x05\x00\x00\x00\x00",
        bytes.fromhex("4d415255 0200 0500 00000000"),
        bytes.fromhex("5552414d 0100 0500 00000000"),
        bytes.fromhex("5552414d 0200 0500 01200000"),
        bytes.fromhex("5552414d 0200 0500 ffffffff"),
    ],
    ids=["empty", "short", "other end first", "version 1", "8193 bytes", "4 GiB"],
)
def test_an_unusable_header_is_a_bad_frame(header):
    with pytest.raises(BadFrame):
        rm.read_rm_header(header)


def test_a_body_may_have_8192_bytes_and_no_more():
    assert rm.read_rm_header(RM_MAGIC + bytes.fromhex("0500 00200000")) == (5, 8192)
    assert len(rm.encode_rm(rm.RmErrorResponse(-1, "x" * 8184))) == 12 + 8192
    with pytest.raises(ValueError, match="over 8192"):
        rm.encode_rm(rm.RmErrorResponse(-1, "x" * 8185))
    with pytest.raises(ValueError, match="over 8192"):
        rm.encode_rm(rm.RmStatsResponse((rm.RmPool("/p", 1, 0, 0, 0),) * 300))


@pytest.mark.parametrize("count", [2, 0xFFFFFFFF])
def test_a_number_of_pools_that_lies_ends_with_the_body(count):
    body = count.to_bytes(4, "little") + bytes(32)
    with pytest.raises(BadMessage, match=r"STATS_RESP: .* exceed the body of"):
        rm.decode_rm_response(rm.Kind.STATS_RESP, body)


@pytest.mark.parametrize(
    "message",
    [
        rm.RmAllocRequest(-1, "", "", 0),
        rm.RmAllocRequest(1 << 64, "", "", 0),
        rm.RmFreeResponse(1 << 31),
        rm.RmAccessRequest(RM_HANDLE, "x" * 65_536),
        rm.RmAccessRequest(rm.RmHandle(-1), ""),
    ],
)
def test_what_a_field_cannot_hold_is_not_sent(message):
    with pytest.raises(ValueError):
        rm.encode_rm(message)


u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
status = st.integers(-(2**31), 2**31 - 1)
text = st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
handles = st.builds(rm.RmHandle, u64, u64, u64, u64)
pools = st.builds(rm.RmPool, text, u32, u64, u64, u64)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.builds(rm.RmAllocRequest, u64, text, text, u64),
        st.builds(rm.RmFreeRequest, handles, text, u64),
        st.builds(rm.RmAccessRequest, handles, text),
    )
)
def test_any_request_comes_out_as_it_went_in(message):
    assert rm.decode_rm_request(*split(rm.encode_rm(message))) == message


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.builds(rm.RmAllocResponse, status, u32, handles, u64, text, text),
        st.builds(rm.RmFreeResponse, status),
        st.builds(rm.RmStatsResponse, st.lists(pools, max_size=4).map(tuple)),
        st.builds(rm.RmAccessResponse, status, text, u64, u64, text),
        st.builds(rm.RmErrorResponse, status, text),
    )
)
def test_any_response_comes_out_as_it_went_in(message):
    assert rm.decode_rm_response(*split(rm.encode_rm(message))) == message
