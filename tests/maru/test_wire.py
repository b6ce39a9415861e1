"""Every message as the bytes it is on the wire, written by hand from the protocol, and what a header may say."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru import BadFrame, BadMessage
from maru import _wire as wire
from maru._wire import Code
from tests.support.wire_vectors import (
    EPOCH,
    EPOCH_BYTES,
    EXTENDED_REPLIES,
    EXTENDED_REQUESTS,
    HANDLE,
    HANDLE_BYTES,
    MIB,
    OWN_REPLIES,
    OWN_REQUESTS,
    OWN_REQUESTS_BEFORE,
    REPLIES,
    REQUESTS,
    SUM,
    SUM_BYTES,
    TOKEN,
    V1_PUBLISHED_REPLIES,
    V1_REPLIES,
    V1_REQUESTS,
    frame,
)


def vectors(rows):
    return pytest.mark.parametrize(
        ("code", "body", "message"), rows, ids=[f"{row[0].name}-{len(row[1])}B" for row in rows]
    )


def read_request(received):
    header = wire.read_header(received)
    return wire.decode_request(header.code, wire.body_of(received, header))


def read_reply(received):
    header = wire.read_header(received)
    return wire.decode_reply(header.code, wire.body_of(received, header))


# --- vectors ----------------------------------------------------------------------------------------------------------


@vectors(REQUESTS)
def test_a_request_is_these_bytes_both_ways(code, body, message):
    on_the_wire = frame(code, 1, body)
    assert wire.request(code, 1, message) == on_the_wire
    assert read_request(on_the_wire) == message


@vectors(OWN_REQUESTS_BEFORE)
def test_a_request_of_ours_that_says_less_than_today_is_read(code, body, message):
    assert read_request(frame(code, 1, body)) == message


@vectors(V1_REPLIES + EXTENDED_REPLIES + OWN_REPLIES)
def test_a_reply_is_these_bytes_both_ways(code, body, message):
    on_the_wire = frame(code | 0x80, 0xFFFFFFFF, body, flags=4)
    assert wire.reply(code, 0xFFFFFFFF, message, flags=4) == on_the_wire
    assert read_reply(on_the_wire) == message


@vectors(V1_PUBLISHED_REPLIES)
def test_a_published_reply_that_says_less_than_ours_is_read(code, body, message):
    assert read_reply(frame(code | 0x80, 1, body)) == message


def test_every_code_has_a_vector_in_both_directions():
    assert {row[0] for row in V1_REQUESTS} | {row[0] for row in OWN_REQUESTS} == set(Code) == set(wire.MESSAGES)
    assert {row[0] for row in V1_REPLIES + V1_PUBLISHED_REPLIES} == wire.V1_CODES
    assert {row[0] for row in OWN_REPLIES} == wire.OWN_CODES == set(range(0x40, 0x4C))


def test_lookup_replies_are_spliced_from_entries_encoded_once():
    hit = wire.lookup_entry(wire.handle_bytes(HANDLE), 1 << 20, 1 << 20, 42, SUM)
    fields = b"\xa5found\xc3\xa6handle" + HANDLE_BYTES + b"\xa9kv_offset" + MIB + b"\xa9kv_length" + MIB
    fields += b"\xaageneration\x2a\xa8checksum" + SUM_BYTES
    assert hit == b"\x86" + fields
    found = wire.lookup_reply(5, EPOCH, hit, flags=2)
    assert found == frame(0x91, 5, b"\x87\xa5epoch" + EPOCH_BYTES + fields, flags=2)
    assert read_reply(found) == wire.LookupReply(True, HANDLE, 1 << 20, 1 << 20, 42, SUM, EPOCH)
    assert wire.lookup_reply(5, EPOCH, wire.MISS) == frame(0x91, 5, b"\x82\xa5epoch" + EPOCH_BYTES + b"\xa5found\xc2")

    both = wire.batch_lookup_reply(6, EPOCH, [hit, wire.MISS])
    assert both == frame(
        0xA1, 6, b"\x82\xa5epoch" + EPOCH_BYTES + b"\xa7entries\xdc\x00\x02" + hit + b"\x81\xa5found\xc2"
    )
    assert read_reply(both) == wire.BatchLookupReply(
        [wire.LookupReply(True, HANDLE, 1 << 20, 1 << 20, 42, SUM), wire.LookupReply(False)], EPOCH
    )


def test_an_unknown_checksum_is_sent_as_nil():
    entry = wire.lookup_entry(wire.handle_bytes(HANDLE), 0, 1, 42, None)
    assert entry.endswith(b"\xa8checksum\xc0")
    assert read_reply(wire.lookup_reply(1, EPOCH, entry)).checksum is None


@pytest.mark.parametrize("n", [0, 1, 15, 16, 300, wire.MAX_KEYS])
def test_a_spliced_batch_may_have_any_number_of_entries(n):
    entries = [wire.lookup_entry(wire.handle_bytes(HANDLE), i, 1, i, i) for i in range(n)]
    reply = read_reply(wire.batch_lookup_reply(1, EPOCH, entries))
    assert [entry.kv_offset for entry in reply.entries] == list(range(n))


def test_what_has_no_bytes_is_refused_before_it_is_sent():
    with pytest.raises(ValueError, match="surrogates"):
        wire.request(Code.LOOKUP_KV, 1, wire.KeyRequest("\ud800"))
    with pytest.raises(OverflowError):
        wire.request(Code.REGISTER_KV, 1, wire.RegisterRequest("k", 1 << 64, 0, 1))


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_is_these_bytes():
    assert wire.error_reply(Code.PIN_KV, 9, "no") == frame(0x94, 9, b"\x81\xa5error\xa2no")
    assert wire.error_reply(Code.STORE, 9, "no", "fenced", EPOCH, 1) == frame(
        0xC0, 9, b"\x83\xa5error\xa2no\xa4code\xa6fenced\xa5epoch" + EPOCH_BYTES, flags=1
    )


def test_the_answer_to_an_unusable_header_has_type_0x80_and_sequence_0():
    assert wire.error_reply(0, 0, "no").startswith(bytes.fromhex("cf00 01 80 00 000000 00000000"))


@pytest.mark.parametrize("code", Code)
def test_an_error_is_told_from_every_reply(code):
    assert read_reply(wire.error_reply(code, 1, "no", "closed", 5)) == wire.ErrorReply("no", "closed", 5)
    assert read_reply(frame(code | 0x80, 1, b"\x82\xa5error\xa2no\xa3foo\xc0")) == wire.ErrorReply("no")


@vectors(REPLIES)
def test_no_reply_is_taken_for_an_error(code, body, message):
    assert not isinstance(read_reply(frame(code | 0x80, 1, body)), wire.ErrorReply)


def test_a_handshake_that_was_refused_with_success_false_is_an_error():
    body = b"\x83\xa7success\xc2\xaarm_address\xa0\xa5error\xa2no"
    assert read_reply(frame(0xFE, 1, body)) == wire.ErrorReply("no")


@pytest.mark.parametrize("code", Code)
def test_a_success_never_has_an_error_not_even_an_empty_one(code):
    replies = [message for answered, _, message in REPLIES if answered == code and getattr(message, "success", True)]
    for message in replies:
        sent = msgspec.msgpack.decode(wire.reply(code, 1, message)[16:])
        assert "error" not in sent


def test_codes_from_0xf0_on_carry_the_reply_bit_already():
    assert wire.reply(Code.HEARTBEAT, 3, wire.HeartbeatReply())[3] == 0xF1
    assert wire.reply(Code.LOOKUP_KV, 3, wire.LookupReply(False))[3] == 0x91


@pytest.mark.parametrize("code", [0x00, 0x02, 0x05, 0x16, 0x25, 0x3F, 0x4C, 0x70, 0x80, 0x90, 0xC0, 0xF4, 0xFD])
def test_an_unknown_code_is_a_bad_message_and_no_bad_frame(code):
    with pytest.raises(BadMessage, match="unknown code"):
        read_request(frame(code, 1, b"\x80"))
    if code not in (0x90, 0xC0):  # replies to REGISTER_KV and STORE
        with pytest.raises(BadMessage, match="unknown code"):
            read_reply(frame(code, 1, b"\x80"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x80",
        b"\x81\xa3key\x07",
        b"\x81\xa3key\xc4\x02k1",
        b"\x81\xa3key",
        b"\x81\x01\x02",
        b"\x81\xa3key\xa2\xff\xfe",
        b"\x81\xa3key\xa2k1\xc0",
        b"\x81\xa3key\xda\x04\x01" + b"k" * 1025,
        b"\x82\xa3key\xa2k1\xa1x" + b"\x91" * 100_000 + b"\xc0",
        b"\x93\xc4\x10" + TOKEN + b"\x05\xa2k1",
    ],
    ids=["empty", "nil", "no key", "int", "bin", "cut", "int key", "utf-8", "more", "long", "deep", "array"],
)
def test_a_bad_body_is_a_bad_message_that_names_its_code(body):
    with pytest.raises(BadMessage, match=r"^LOOKUP_KV: ") as caught:
        read_request(frame(Code.LOOKUP_KV, 1, body))
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize("lie", [b"\xdd\xff\xff\xff\xff", b"\xdd\x00\xff\xff\xff", b"\xdc\x20\x01"])
@pytest.mark.parametrize(
    ("code", "before"), [(0x24, b"\x81\xa4keys"), (0x20, b"\x81\xa7entries"), (0xF2, b"\x81\xa7entries")]
)
def test_a_list_that_says_it_is_longer_than_allowed_is_refused(code, before, lie):
    padding = b"\xc0" * 0x10000  # so that it is not found out by the frame's length alone
    with pytest.raises(BadMessage, match="array"):
        read_request(frame(code, 1, before + lie + padding))


def test_the_largest_batch_fits_into_a_frame_and_one_more_key_is_refused():
    entry = wire.RegisterRequest("k" * wire.MAX_KEY_BYTES, (1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1)
    largest = wire.request(Code.BATCH_REGISTER_KV, 1, wire.BatchRegisterRequest([entry] * wire.MAX_KEYS))
    assert len(largest) < wire.MAX_FRAME_BYTES
    assert len(read_request(largest).entries) == wire.MAX_KEYS
    with pytest.raises(BadMessage, match="8192"):
        read_request(wire.request(Code.BATCH_REGISTER_KV, 1, wire.BatchRegisterRequest([entry] * (wire.MAX_KEYS + 1))))


def test_columns_of_different_lengths_are_refused():
    good = [TOKEN, 5, 3, [7], ["a"], [0], [1], [1]]
    assert read_request(frame(Code.STORE, 1, msgspec.msgpack.encode(good)))
    for column in range(3, 8):
        bad = [*good[:column], [*good[column], *good[column]], *good[column + 1 :]]
        with pytest.raises(BadMessage, match="different lengths"):
            read_request(frame(Code.STORE, 1, msgspec.msgpack.encode(bad)))
    with pytest.raises(BadMessage, match="different lengths"):
        read_request(frame(Code.RESOLVE, 1, msgspec.msgpack.encode([TOKEN, 5, 3, [7], []])))
    for keys, counts in ((["a"], []), ([], [1]), (["a"], [1, 1])):
        with pytest.raises(BadMessage, match="different lengths"):
            read_request(frame(Code.PINS, 1, msgspec.msgpack.encode([TOKEN, 5, 3, keys, counts, True])))
    place = wire.place(7, 0, 1, 42, None)
    for found, places in (([5], place), (1, place), ([5, 9], place * 2), (0, b"")):
        assert read_reply(frame(0xC1, 1, msgspec.msgpack.encode([EPOCH, None, found, places])))
    for found, places in (
        ([], place),
        (2, place),
        ([5], b""),
        (1, place + b"x"),
        (0, b"x"),
        (1, place[:-1]),
    ):
        with pytest.raises(BadMessage, match="different lengths"):
            read_reply(frame(0xC1, 1, msgspec.msgpack.encode([EPOCH, None, found, places])))
    for column in range(1, 4):
        returns = [9, [7], [0], [1]]
        returns[column] = []
        with pytest.raises(BadMessage, match="different lengths"):
            read_reply(frame(0xC7, 1, msgspec.msgpack.encode([EPOCH, returns])))


def test_where_a_key_lies_comes_out_as_it_went_in():
    known, unknown = (7, 1 << 40, 1 << 20, 42, 2**64 - 1), (2**64 - 1, 0, (1 << 63) - 1, 43, None)
    columns = wire.FindReply(EPOCH, None, 2, wire.place(*known) + wire.place(*unknown)).columns()
    assert list(zip(*columns, strict=True)) == [known, unknown]
    assert wire.FindReply(EPOCH, None, 1, wire.place(*known)).columns() == tuple((value,) for value in known)
    assert wire.FindReply(EPOCH, None, [], b"").columns() == ((), (), (), (), ())


@pytest.mark.parametrize("token", [b"", b"short", TOKEN + b"0"])
def test_a_session_token_has_sixteen_bytes(token):
    with pytest.raises(BadMessage, match="length"):
        read_request(frame(Code.BEAT, 1, msgspec.msgpack.encode([token, 0])))
    with pytest.raises(BadMessage, match="length"):
        read_request(frame(Code.LIST_ALLOCATIONS, 1, msgspec.msgpack.encode({"session": token})))


# --- what may differ --------------------------------------------------------------------------------------------------


@vectors(V1_REQUESTS + EXTENDED_REQUESTS)
def test_unknown_keys_of_a_request_are_ignored(code, body, message):
    extra = {"zz": [1, {"deep": None}], "version": 9, **msgspec.msgpack.decode(body), "epoch_of_tomorrow": b"x"}
    assert read_request(frame(code, 1, msgspec.msgpack.encode(extra))) == message


@vectors(V1_REPLIES + V1_PUBLISHED_REPLIES + EXTENDED_REPLIES)
def test_unknown_keys_of_a_reply_are_ignored(code, body, message):
    extra = {"zz": [1, {"deep": None}], **msgspec.msgpack.decode(body), "tomorrow": b"x"}
    assert read_reply(frame(code | 0x80, 1, msgspec.msgpack.encode(extra))) == message


@vectors([row for row in OWN_REQUESTS if row[0] != Code.DESCRIBE])
def test_later_fields_of_our_own_request_are_ignored(code, body, message):
    more = [*msgspec.msgpack.decode(body), None, {"a": [1]}]
    assert read_request(frame(code, 1, msgspec.msgpack.encode(more))) == message


@vectors([row for row in OWN_REPLIES if row[0] != Code.DESCRIBE])
def test_later_fields_of_our_own_reply_are_ignored(code, body, message):
    more = [*msgspec.msgpack.decode(body), None, {"a": [1]}]
    assert read_reply(frame(code | 0x80, 1, msgspec.msgpack.encode(more))) == message


@vectors(V1_REPLIES + EXTENDED_REPLIES)
def test_what_published_clients_read_is_there_whatever_we_add(code, body, message):
    theirs = next(msgspec.msgpack.decode(row[1]) for row in V1_REPLIES + V1_PUBLISHED_REPLIES if row[0] == code)
    ours = msgspec.msgpack.decode(wire.reply(code, 1, message)[16:])
    assert theirs.keys() <= ours.keys() or "error" in ours


def test_wider_encodings_than_needed_are_read():
    body = (
        b"\xde\x00\x04\xd9\x03key\xda\x00\x02k1\xd9\x09region_id\xcf\x00\x00\x00\x00\x00\x00\x00\x07"
        b"\xd9\x09kv_offset\xd3\x00\x00\x00\x00\x00\x10\x00\x00\xdb\x00\x00\x00\x09kv_length\xd2\x00\x10\x00\x00"
    )
    assert read_request(frame(0x10, 1, body)) == wire.RegisterRequest("k1", 7, 1 << 20, 1 << 20)


@pytest.mark.parametrize("version", ["0.1.0", 3, -1, 1 << 63, 0.5, True, None, b"0.1", ""])
def test_the_client_version_is_any_scalar(version):
    received = read_request(frame(0xFE, 1, msgspec.msgpack.encode({"client_version": version})))
    assert received.version == version
    assert type(received.version) is type(version)


@pytest.mark.parametrize("version", [[], {}, [1], {"a": 1}, msgspec.msgpack.Ext(3, b"x")])
def test_a_client_version_that_is_no_scalar_is_refused(version):
    with pytest.raises(BadMessage, match="is not a scalar"):
        read_request(frame(0xFE, 1, msgspec.msgpack.encode({"client_version": version})))


# --- the header -------------------------------------------------------------------------------------------------------

HEADER = bytes.fromhex("cf00 01 11 05 000000 00000102 00000001")


def test_a_header_is_these_bytes():
    assert wire.read_header(HEADER + b"\x80") == wire.Header(code=0x11, flags=5, sequence=258, length=1)
    assert wire.frame_of(0x11, 258, b"\x80", 5) == HEADER + b"\x80"
    assert [(flag.name, flag.value) for flag in wire.Flag] == [
        ("BATCH", 1),
        ("COMPRESSED", 2),
        ("URGENT", 4),
        ("NO_REPLY", 8),
    ]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_behind_the_payload_are_ignored(kind):
    received = kind(HEADER + b"\x80" + b"anything")
    header = wire.read_header(received)
    assert bytes(wire.body_of(received, header)) == b"\x80"


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        HEADER[:15],
        b"\xce" + HEADER[1:] + b"\x80",
        HEADER[:1] + b"\x01" + HEADER[2:] + b"\x80",
        HEADER[:2] + b"\x02" + HEADER[3:] + b"\x80",
        HEADER,
        HEADER[:12] + b"\xff\xff\xff\xff" + b"\x80" * 9,
        HEADER[:12] + b"\x00\x00\x00\x02" + b"\x80",
    ],
    ids=["empty", "short", "magic", "magic 2", "version", "no body", "huge", "one too long"],
)
def test_an_unusable_header_is_a_bad_frame(bad):
    with pytest.raises(BadFrame):
        wire.read_header(bad)


def test_reserved_bytes_are_not_read():
    assert wire.read_header(HEADER[:5] + b"\x01\x02\x03" + HEADER[8:] + b"\x80").sequence == 258


@given(
    code=st.integers(0, 255),
    flags=st.integers(0, 255),
    sequence=st.integers(0, 2**32 - 1),
    body=st.binary(),
    more=st.binary(),
)
def test_every_frame_is_read_as_it_was_written(code, flags, sequence, body, more):
    received = wire.frame_of(code, sequence, body, flags) + more
    header = wire.read_header(received)
    assert header == (code, flags, sequence, len(body))
    assert wire.body_of(received, header) == body


# --- round trips ------------------------------------------------------------------------------------------------------

keys = st.text(max_size=20)
integers = st.integers(-(2**63), 2**64 - 1)
tokens = st.binary(min_size=16, max_size=16)


def strategy_of(kind):
    """Any value of a type, as msgspec describes it."""
    match kind:
        case msgspec.inspect.StrType():
            return keys
        case msgspec.inspect.IntType(ge=None):
            return integers
        case msgspec.inspect.IntType(ge=least):
            return st.integers(least, 2**64 - 1)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.BytesType(min_length=None):
            return st.binary(max_size=40)
        case msgspec.inspect.BytesType():
            return tokens
        case msgspec.inspect.RawType():
            return st.one_of(st.none(), keys, integers, st.binary(max_size=5)).map(wire.raw_scalar)
        case msgspec.inspect.ListType():
            return st.lists(strategy_of(kind.item_type), max_size=3)
        case msgspec.inspect.DictType():
            return st.dictionaries(keys, strategy_of(kind.value_type), max_size=2)
        case msgspec.inspect.UnionType():
            return st.one_of(*map(strategy_of, kind.types))
        case msgspec.inspect.Metadata():
            return strategy_of(kind.type)
        case msgspec.inspect.StructType() if kind.array_like:
            return columns_of(kind)
        case msgspec.inspect.StructType():
            return st.builds(kind.cls, **{field.name: strategy_of(field.type) for field in kind.fields})
    raise AssertionError(kind)


@st.composite
def columns_of(draw, kind):
    """An array message, whose lists are equally long."""
    n = draw(st.integers(0, 4))
    if kind.cls is wire.FindReply:
        found = draw(st.just(n) | st.lists(integers, min_size=n, max_size=n))
        returns = draw(strategy_of(kind.fields[1].type))
        return wire.FindReply(EPOCH, returns, found, draw(st.binary(min_size=40 * n, max_size=40 * n)))

    def sized(inner):
        match inner:
            case msgspec.inspect.ListType():
                return st.lists(strategy_of(inner.item_type), min_size=n, max_size=n)
            case msgspec.inspect.UnionType():
                return st.one_of(*map(sized, inner.types))
            case _:
                return strategy_of(inner)

    return kind.cls(*[draw(sized(field.type)) for field in kind.fields])


def any_message(of):
    pairs = [(code, strategy_of(msgspec.inspect.type_info(kinds[of]))) for code, kinds in wire.MESSAGES.items()]
    return st.sampled_from(pairs).flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1]))


@settings(max_examples=400, deadline=None)
@given(any_message(0), st.integers(0, 2**32 - 1))
def test_any_request_comes_out_as_it_went_in(pair, sequence):
    code, message = pair
    on_the_wire = wire.request(code, sequence, message)
    assert read_request(on_the_wire + b"more") == message
    assert wire.read_header(on_the_wire).sequence == sequence


@settings(max_examples=400, deadline=None)
@given(any_message(1))
def test_any_reply_comes_out_as_it_went_in(pair):
    code, message = pair
    assert read_reply(wire.reply(code, 7, message)) == message
    assert read_reply(wire.reply(code, 7, msgspec.msgpack.encode(message))) == message
