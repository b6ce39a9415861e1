"""Whatever comes in, the codecs answer with a message or one of two errors, and keep nothing of it."""

import gc
import itertools
import sys
from collections import Counter

import pytest

from maru import BadFrame, BadMessage
from maru import _wire as wire
from maru._wire import resource_manager as rm
from tests.support import wire_vectors
from tests.support.mutations import Mutations


def server_reads(received):
    header = wire.read_header(received)
    message = wire.decode_request(header.code, wire.body_of(received, header))
    # What was understood can be said again: no value came in that cannot go out.
    assert wire.request(header.code, 1, message)
    return message


def client_reads(received):
    header = wire.read_header(received)
    return wire.decode_reply(header.code, wire.body_of(received, header))


def resource_manager_reads(received):
    header = rm.read_rm_header(received)
    body = received[rm.HEADER_BYTES : rm.HEADER_BYTES + header.length]
    return rm.decode_rm_request(header.kind, body)


def published_client_reads(received):
    header = rm.read_rm_header(received)
    body = received[rm.HEADER_BYTES : rm.HEADER_BYTES + header.length]
    return rm.decode_rm_response(header.kind, body)


def mutations(seed):
    """What reads, and frames for it without end."""
    asked = [
        wire_vectors.frame(code, 1, body)
        for code, body, _ in [*wire_vectors.REQUESTS, *wire_vectors.OWN_REQUESTS_BEFORE]
    ]
    answered = [wire_vectors.frame(code | 0x80, 1, body) for code, body, _ in wire_vectors.REPLIES]
    answered += [wire.error_reply(code, 1, "no", "closed", 5) for code in wire.Code]
    rm_asked = [wire_vectors.RM_MAGIC + rest for rest, _ in wire_vectors.RM_REQUESTS]
    rm_answered = [wire_vectors.RM_MAGIC + rest for rest, _ in wire_vectors.RM_RESPONSES]
    at = {"length_at": slice(8, 12), "length_order": "little"}
    return [
        *[(server_reads, Mutations(asked, seed))] * 5,
        *[(client_reads, Mutations(answered, seed + 1))] * 3,
        (resource_manager_reads, Mutations(rm_asked, seed + 2, **at)),
        (published_client_reads, Mutations(rm_answered, seed + 3, **at)),
    ]


def run(seed, n):
    """Feed ``n`` frames and count what became of them."""
    became = Counter()
    for number, (read, frames) in enumerate(itertools.islice(itertools.cycle(mutations(seed)), n)):
        frame = next(frames)
        try:
            read(frame)
        except (BadFrame, BadMessage) as exc:
            became[read.__name__, type(exc).__name__] += 1
        except BaseException as exc:
            raise AssertionError(f"frame {number} of seed {seed}: {read.__name__}({frame.hex()})") from exc
        else:
            became[read.__name__, "read"] += 1
    return became


def assert_nothing_is_kept(seed, n):
    run(seed, 5_000)  # caches and interned strings
    gc.collect()
    before = sys.getallocatedblocks()
    became = run(seed, n)
    gc.collect()
    # A block per frame would be `n` of them.
    assert sys.getallocatedblocks() - before < 2_000
    for reader in (server_reads, client_reads, resource_manager_reads, published_client_reads):
        for end in ("read", "BadFrame", "BadMessage"):
            assert became[reader.__name__, end] > n / 200, f"{reader.__name__}: too few that end in {end}: {became}"


def test_the_same_seed_gives_the_same_frames():
    first, again, other = (Mutations([b"x" * 40, b"y" * 20], seed) for seed in (7, 7, 8))
    frames = [next(first) for _ in range(500)]
    assert frames == [next(again) for _ in range(500)]
    assert frames != [next(other) for _ in range(500)]


def test_a_hundred_thousand_mutated_frames_are_read_or_refused_and_nothing_of_them_is_kept():
    assert_nothing_is_kept(seed=20_260_701, n=100_000)


@pytest.mark.long
def test_five_million_mutated_frames_are_read_or_refused_and_nothing_of_them_is_kept():
    for seed in range(10):
        assert_nothing_is_kept(seed, n=500_000)
