"""The ring of a flight recorder, and what can be read of one: whole, wrapped, torn, cut short, of another version, damaged."""

import errno
import os
import random
import struct
from itertools import pairwise

import pytest

from offload import ConfigError
from offload._recorder.layout import FRAME, HEAD, MOST_BYTES, SEGMENT, SEGMENT_BYTES, SEGMENTS_AT
from offload._recorder.recording import Recording, read_ring, to_bytes
from offload._recorder.records import Enqueued, KeyHasher, Noted, encode
from offload.recorder import (
    FlightRecorder,
    IncidentError,
    NotARecording,
    RecorderBusy,
    RecordingTruncated,
    RecordingVersion,
)

HASHER = KeyHasher()
LEAST_BYTES = 1 << 20


def empty(path=None, ring_bytes=LEAST_BYTES):
    """The ring of a recorder that observes nothing."""
    return FlightRecorder(path, ring_bytes=ring_bytes, clock=lambda: 0.0)._ring


def ring_with(n, path=None, ring_bytes=LEAST_BYTES):
    ring = empty(path, ring_bytes)
    ring.describe(b"{}")
    for number in range(1, n + 1):
        ring.append(number / 8, encode(Noted("rule", f"number {number}")))
    return ring


def image(ring):
    return bytes(ring.memory)


def texts(recording):
    return [entry.record.text for entry in recording.entries]


def test_what_was_written_is_read_in_order():
    recording = read_ring(image(ring_with(5)))
    assert texts(recording) == [f"number {n}" for n in range(1, 6)]
    assert [entry.number for entry in recording.entries] == [1, 2, 3, 4, 5]
    assert [entry.at for entry in recording.entries] == [n / 8 for n in range(1, 6)]
    assert (recording.forgotten, recording.lost, recording.torn) == (0, 0, False)
    assert recording.pid == os.getpid()


def test_an_empty_ring_is_a_recording_without_records():
    recording = read_ring(image(ring_with(0)))
    assert (recording.entries, recording.seconds) == ((), 0.0)


def test_a_full_ring_forgets_the_oldest_and_keeps_all_others():
    written = 60_000
    recording = read_ring(image(ring_with(written)))
    numbers = [entry.number for entry in recording.entries]
    assert numbers[-1] == written
    assert recording.forgotten == numbers[0] - 1 > 0
    assert all(later == earlier + 1 for earlier, later in pairwise(numbers))
    assert (recording.lost, recording.torn) == (0, False)
    assert len(numbers) * (FRAME.size + 20) > LEAST_BYTES - 2 * SEGMENT_BYTES


def test_a_record_that_was_cut_off_is_not_read_and_is_told_of():
    ring = ring_with(3)
    at = ring._at
    ring.append(1.0, encode(Noted("rule", "the last")))
    ring.memory[at + FRAME.size + 3 : at + FRAME.size + 6] = b"\0\0\0"
    recording = read_ring(image(ring))
    assert texts(recording) == ["number 1", "number 2", "number 3"]
    assert recording.torn


def test_a_record_whose_frame_was_not_written_yet_was_never_there():
    ring = ring_with(3)
    at = ring._at
    ring.append(1.0, encode(Noted("rule", "the last")))
    ring.memory[at : at + FRAME.size] = bytes(FRAME.size)
    recording = read_ring(image(ring))
    assert (len(recording.entries), recording.torn) == (3, False)


def test_records_behind_a_damaged_one_are_lost_to_the_end_of_its_segment_and_are_counted():
    ring = ring_with(8_000)
    whole = read_ring(image(ring))
    assert not whole.lost
    ring.memory[SEGMENTS_AT + 100] ^= 1
    damaged = read_ring(image(ring))
    assert damaged.lost + damaged.forgotten + len(damaged.entries) == 8_000
    assert damaged.entries[-1].number == 8_000


def test_of_the_two_descriptions_the_newer_whole_one_counts():
    ring = ring_with(1)
    ring.describe(b'{"version": "new"}')
    assert read_ring(image(ring)).description.version == "new"
    at = image(ring).index(b'{"version": "new"}')
    ring.memory[at] ^= 1
    assert read_ring(image(ring)).description.version == ""


def test_a_description_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="are allowed"):
        ring_with(0).describe(bytes(200_000))


@pytest.mark.parametrize("ring_bytes", [0, LEAST_BYTES - 1, MOST_BYTES + 1])
def test_a_ring_has_a_least_and_a_most_size(ring_bytes):
    with pytest.raises(ConfigError, match="ring_bytes"):
        empty(None, ring_bytes)


# --- files ----------------------------------------------------------------------------------------------------------------


def test_a_file_is_read_while_it_is_written(tmp_path):
    ring = ring_with(2, tmp_path / "ring")
    assert len(read_ring((tmp_path / "ring").read_bytes()).entries) == 2
    ring.append(1.0, encode(Noted("rule", "more")))
    assert texts(read_ring((tmp_path / "ring").read_bytes()))[-1] == "more"
    assert os.stat(tmp_path / "ring").st_mode & 0o077 == 0
    ring.close()


def test_the_file_of_a_process_that_has_ended_is_kept(tmp_path):
    ring_with(2, tmp_path / "ring").close()
    ring = ring_with(1, tmp_path / "ring")
    assert len(read_ring((tmp_path / "ring.before").read_bytes()).entries) == 2
    assert len(read_ring((tmp_path / "ring").read_bytes()).entries) == 1
    ring.close()


def test_a_descriptor_is_closed_once(tmp_path, monkeypatch):
    ring_with(2, tmp_path / "ring").close()
    real_open, real_close, closed, opened = os.open, os.close, [], []

    def refused_at_the_second(path, *args, **more):
        opened.append(path)
        if opened.count(tmp_path / "ring") == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_open(path, *args, **more)

    def close(fd):
        closed.append(fd)
        real_close(fd)

    monkeypatch.setattr(os, "open", refused_at_the_second)
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(OSError, match="No space left"):
        ring_with(1, tmp_path / "ring")
    assert len(closed) == len(set(closed)) == 1


def test_two_recorders_do_not_share_a_file(tmp_path):
    ring = ring_with(1, tmp_path / "ring")
    with pytest.raises(RecorderBusy, match="use a different file"):
        empty(tmp_path / "ring")
    ring.close()


def test_a_saved_recording_is_what_the_ring_had_and_no_larger_than_it_needs():
    recording = read_ring(image(ring_with(30_000)))
    saved = to_bytes(recording)
    assert read_ring(saved) == recording
    assert len(to_bytes(read_ring(image(ring_with(3))))) == SEGMENTS_AT + SEGMENT_BYTES


# --- what is no recording -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 10_000, bytes(1 << 20)])
def test_something_else_is_no_recording(data):
    with pytest.raises(NotARecording):
        read_ring(data)


def test_another_version_is_refused_with_both_numbers():
    data = bytearray(image(ring_with(1)))
    struct.pack_into("<I", data, 8, 7)
    with pytest.raises(RecordingVersion, match=r"version 7 .* reads 1"):
        read_ring(data)


@pytest.mark.parametrize("kept", [HEAD.size, 4096, SEGMENTS_AT, -1])
def test_a_file_without_its_end_is_refused(kept):
    with pytest.raises(RecordingTruncated, match="copy it once more"):
        read_ring(image(ring_with(1))[:kept])


def test_a_recording_that_does_not_say_what_it_is_about_is_refused():
    data = bytearray(image(ring_with(1)))
    data[4096:SEGMENTS_AT] = bytes(SEGMENTS_AT - 4096)
    with pytest.raises(NotARecording, match="it has no description"):
        read_ring(data)


def test_whatever_is_damaged_reading_ends_in_a_recording_or_a_typed_error():
    rng = random.Random(7)
    ring = empty()
    ring.describe(b'{"version": "1", "tiers": [], "pipelines": []}')
    for number in range(400):
        keys = [b"%d" % one for one in range(number % 9)]
        ring.append(number, encode(Enqueued(0, number, "weak", len(keys), 0, HASHER.column(keys))))
    sound = image(ring)
    used = SEGMENTS_AT + 30_000
    for _ in range(600):
        data = bytearray(sound)
        for _ in range(rng.choice((1, 1, 3, 50))):
            at = rng.choice((rng.randrange(60), rng.randrange(4096, 4300), rng.randrange(SEGMENTS_AT, used)))
            data[at : at + rng.choice((1, 1, 8))] = rng.randbytes(rng.choice((1, 1, 8)))
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            recording = read_ring(data)
        except IncidentError:
            continue
        assert isinstance(recording, Recording)
        numbers = [entry.number for entry in recording.entries]
        assert numbers == sorted(set(numbers))


def test_a_record_with_a_good_checksum_that_makes_no_sense_is_counted_as_lost():
    ring = ring_with(2)
    ring.append(1.0, b"\x93\x01\x02\x03")
    ring.append(float("nan"), encode(Noted("rule", "at no time")))
    ring.append(2.0, encode(Noted("rule", "good")))
    recording = read_ring(image(ring))
    assert texts(recording) == ["number 1", "number 2", "good"]
    assert recording.lost == 2


def test_an_old_segment_shows_nothing_under_a_new_number():
    """What a segment has from its time before is not read behind the records that are written over it."""
    ring = ring_with(40_000)
    recording = read_ring(image(ring))
    assert SEGMENT.size and [entry.record.text for entry in recording.entries] == [
        f"number {entry.number}" for entry in recording.entries
    ]


# --- hashes ---------------------------------------------------------------------------------------------------------------


def test_keys_are_hashed_with_a_secret_of_the_recording():
    keys = [b"a", b"b"]
    one, other = KeyHasher(), KeyHasher()
    assert one.column(keys) == one.column(keys) != other.column(keys)
    assert len(one.column(keys)) == 16


def test_a_fixed_hash_seed_is_no_secret(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    hasher = KeyHasher()
    assert not hasher._secret
    assert hasher.column([b"a"]) == hasher.column([b"a"]) != KeyHasher().column([b"a"])


def test_a_column_is_bounded():
    assert len(HASHER.column([b"%d" % n for n in range(5_000)])) == 2_048 * 8
