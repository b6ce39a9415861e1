"""The protocol: one table, bounded types, versions."""

import random

import msgspec
import pytest

from offload.daemon import _messages as messages
from offload.daemon._messages import (
    ANSWER_TO,
    MAX_KEYS,
    MESSAGES,
    BadFrame,
    Hello,
    Lookup,
    Refused,
    Release,
    Store,
    cut_all,
    decode_answer,
    decode_request,
    encode,
    negotiate,
    packed,
    unpacked,
)

SAMPLES = [
    Hello(1, 1, 1, "engine", b"secret", b""),
    messages.Status(2),
    messages.RegisterKVCache(3, [messages.TensorLayout(1, 0, 2, [2, 64, 16], [1024, 16, 1], 1)]),
    messages.UnregisterKVCache(4, 1),
    Store(5, 1, [b"a", b"b"], packed([1, 2]), waits=True, cancel_token=7, depths=packed([0, 1])),
    messages.Signal(6, 5),
    messages.Cancel(7, [5], 7),
    Lookup(8, [b"a"], 1.0),
    messages.Exists(9, [b"a"]),
    messages.Load(10, 1, 1, packed([3])),
    Release(11, [1, 2]),
    messages.Delete(12, [b"a"], 1.0),
    messages.PageStore(15, 4096),
    messages.ReserveWrite(16, [b"a", b"b"]),
    messages.Commit(17, 1, bytes([messages.Fate.STORED, messages.Fate.GIVEN_UP])),
    messages.Explain(13, [b"a"]),
    messages.Stats(14),
]


def test_every_request_has_a_code_a_name_and_an_answer_of_its_own():
    assert len({kind.code for kind in MESSAGES}) == len({kind.name for kind in MESSAGES}) == len(MESSAGES)
    assert {type(sample) for sample in SAMPLES} == set(ANSWER_TO)
    for kind in MESSAGES:
        assert kind.answer.__struct_config__.tag > 128 > kind.code > 0
        assert kind.purpose.endswith(".")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_request_comes_as_it_was_sent(sample):
    assert decode_request(encode(sample)) == sample


@pytest.mark.parametrize("text", ["x", "\u20ac", "\U0001f600"])
@pytest.mark.parametrize("n", [0, 1, MAX_KEYS // 2, MAX_KEYS])
def test_all_reasons_of_an_answer_fit_into_a_frame(text, n):
    missed, failed = ([(at, text * 5_000) for at in range(many)] for many in (n, MAX_KEYS - n))
    answer = messages.Loaded(1, 1, 0, cut_all(missed, len(failed)), cut_all(failed, len(missed)), False)
    assert decode_answer(encode(answer)) == answer
    assert all(len(why) >= 256 // 4 for _, why in answer.missed + answer.failed)


def test_few_reasons_are_as_long_as_one():
    assert cut_all([(3, "x" * 5_000)]) == [(3, "x" * 1_000)]


def test_a_text_that_is_no_text_is_escaped():
    answer = Refused(1, 1, "unavailable", messages.cut(OSError("no such file: \udc80")))
    assert decode_answer(encode(answer)).text == r"no such file: \udc80"


def test_a_field_that_a_later_version_adds_is_ignored():
    frame = msgspec.msgpack.encode([2, 7, 0, "news"])
    assert decode_request(frame) == messages.Status(7)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([99, 1]),
        msgspec.msgpack.encode([2, -1]),
        msgspec.msgpack.encode([2, 1 << 32]),
        msgspec.msgpack.encode([8, 1, ["text"], 1.0]),
        msgspec.msgpack.encode([8, 1, [b"x" * 441], 1.0]),
        msgspec.msgpack.encode([8, 1, [b"x"] * (MAX_KEYS + 1), 1.0]),
        msgspec.msgpack.encode([8, 1, [b"x"], -1.0]),
        msgspec.msgpack.encode([8, 1, [b"x"], float("nan")]),
        b"\x91" * 100_000,
        bytes(messages.MAX_FRAME_BYTES + 1),
    ],
)
def test_what_is_no_request_is_refused(bad):
    with pytest.raises(BadFrame):
        decode_request(bad)


def test_mutated_frames_decode_to_messages_within_their_bounds_or_not_at_all():
    rng = random.Random(15)
    frames = [encode(sample) for sample in SAMPLES]
    decoded = 0
    for _ in range(5_000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            assert (
                type(decode_request(bytes(frame[: rng.choice((len(frame), rng.randint(1, len(frame))))]))) in ANSWER_TO
            )
            decoded += 1
        except BadFrame:
            pass
    assert decoded > 100  # the mutations reach past the decoder


def test_what_an_engine_of_the_version_before_sends_is_still_a_message():
    assert decode_request(msgspec.msgpack.encode([2, 7])) == messages.Status(7, read_blocks=0)


def test_each_message_came_in_a_version_that_is_spoken():
    assert {kind.name for kind in MESSAGES if kind.since == 2} == {"page_store", "reserve_write", "commit"}
    assert all(1 <= kind.since <= messages.VERSION for kind in MESSAGES)


def test_the_newest_version_that_both_speak_is_taken_and_others_are_none():
    assert negotiate(1, 1) == 1
    assert negotiate(1, 99) == messages.VERSION
    assert negotiate(messages.VERSION + 1, 99) is None
    assert negotiate(0, messages.OLDEST - 1) is None


def test_a_refusal_is_an_answer_to_anything_with_the_numbers_of_both():
    refused = Refused(1, 2, "version", "no")
    assert decode_answer(encode(refused)) == refused
    assert (refused.oldest, refused.newest) == (messages.OLDEST, messages.VERSION)


def test_numbers_of_blocks_are_columns_of_four_bytes():
    assert unpacked(packed([0, 5, (1 << 32) - 1])) == [0, 5, (1 << 32) - 1]
    with pytest.raises(BadFrame):
        unpacked(b"abc")
