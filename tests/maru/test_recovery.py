"""What a restart finds again: all of it, or what may be believed, and it says what is lost."""

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

import maru._journal.compaction as compaction_module
import maru._journal.compactor as compactor_module
import maru._journal.recovery as recovery_module
import maru._journal.replay as replay_module
from maru import BadMessage, ForeignJournal, JournalFailed, PoolUnusable
from maru._directory.records import Fenced, SessionEnded, encode
from maru._journal import segments as segments_module
from maru._journal.compaction import Outcome, compact
from maru._journal.compactor import keep_compacted, run_compaction, write_from_memory
from maru._journal.journal import Journal
from maru._journal.recovery import Trust, recover, trust_in, unverified
from maru._journal.registrations import recorded_columns
from maru._journal.segments import HEADER_BYTES, Header, frame, list_files, pack_header, read_frames, write_snapshot
from maru._wire import BatchRegisterRequest, Code, KeyRequest, RegisterRequest, StoreRequest

POOL, BOOT, NEXT_BOOT = b"pool-of-16-bytes", b"boot-of-16-bytes", b"the-boot-after-.."
NEXT_BOOT = NEXT_BOOT[:16]
PAGE = 64
PAGES = 8
FAR = 1 << 32

_body = msgspec.msgpack.encode


def store(attempt, entries):
    """A STORE of (key, region, page) under one attempt, as code and body."""
    keys, regions, offsets = (
        [key for key, _, _ in entries],
        [r for _, r, _ in entries],
        [p * PAGE for _, _, p in entries],
    )
    checksums = [xxh3_64_intdigest(content(key)) for key in keys]
    return Code.STORE, _body(StoreRequest(b"t" * 16, 0, attempt, regions, keys, offsets, PAGE, checksums))


def batch_register(entries):
    return Code.BATCH_REGISTER_KV, _body(
        BatchRegisterRequest([RegisterRequest(key, region, page * PAGE, PAGE) for key, region, page in entries])
    )


def content(key):
    return key.encode().ljust(PAGE, b".")


class Server:
    """A directory with its journal, as a server keeps them: records are written before anything is answered."""

    def __init__(self, path, boot=BOOT, **options):
        self.path, self.boot, self.options = str(path), boot, options
        os.makedirs(path, exist_ok=True)
        self.now, self.region_id, self.attempt = 0.0, 0, 0
        self.journal = None
        self.start()

    def start(self, **how):
        """Start it, after a kill if it runs."""
        if self.journal is not None:
            self.journal.close()
        self.recovered = recover(self.path, pool_id=POOL, boot_id=self.boot, **how)
        self.directory = self.recovered.directory
        self.directory.restart(self.now)
        self.journal = Journal(self.path, self.recovered.tail, pool_id=POOL, boot_id=self.boot, **self.options)
        self.tell_all_are_back()
        return self.recovered

    def tell_all_are_back(self):
        for session in self.directory.dump().sessions:
            self.directory.attach(session.number, self.now)

    def write(self):
        records = self.directory.take_records()
        self.journal.append([encode(record) for record in records])
        self.directory.take_dropped()
        return len(records)

    def open(self, token, instance="a"):
        number = self.directory.open_session(token.ljust(16, b"."), instance, "", 10.0, self.now)
        self.write()
        return number

    def region(self, by, **how):
        self.region_id += 1
        self.directory.add_region(by, self.region_id, PAGE * PAGES, **how)
        self.write()
        return self.region_id

    def store(self, by, *entries):
        self.attempt += 1
        code, body = store(self.attempt, entries)
        answer = self.directory.register(by, recorded_columns(code, body), self.now, source=(code, body))
        self.write()
        return answer

    def image(self):
        return self.directory.dump()


def image_of(path, boot=BOOT, **how):
    return recover(path, pool_id=POOL, boot_id=boot, **how).directory.dump()


def small_history(path, **options):
    """Two sessions, one of them over; keys of both; a few segments. The server, still running."""
    server = Server(path, **{"segment_bytes": 150, **options})
    gone, here = server.open(b"gone"), server.open(b"here", "b")
    orphan, region = server.region(gone), server.region(here)
    server.store(gone, *[(f"orphan-{i}", orphan, i) for i in range(4)])
    server.directory.end_session(gone, server.now)
    server.write()
    for i in range(6):
        server.store(here, (f"key-{i}", region, i))
    server.directory.delete(here, ["key-1"], server.now)
    server.write()
    server.here, server.its_region, server.orphan = here, region, orphan
    return server


# --- what a registration is on the wire ---------------------------------------------------------------------------


def test_a_recorded_request_says_the_same_columns_as_it_did_when_it_came():
    entries = [("k1", 1, 0), ("k2", 2, 3)]
    columns = recorded_columns(*store(7, entries))
    assert (columns.keys, columns.regions, columns.offsets) == (["k1", "k2"], [1, 2], [0, 3 * PAGE])
    assert (columns.lengths, columns.attempt) == (PAGE, 7)
    columns = recorded_columns(*batch_register(entries))
    assert (columns.keys, columns.regions, columns.offsets, columns.lengths) == (
        ["k1", "k2"],
        [1, 2],
        [0, 3 * PAGE],
        [PAGE, PAGE],
    )
    assert (columns.checksums, columns.attempt) == (None, 0)
    single = recorded_columns(Code.REGISTER_KV, _body(RegisterRequest("k", 3, 5, 7)))
    assert (single.keys, single.regions, single.offsets, single.lengths) == (["k"], 3, [5], 7)
    with pytest.raises(BadMessage):
        recorded_columns(Code.REGISTER_KV, b"\xc1")
    with pytest.raises(BadMessage, match="is not a registering request"):
        recorded_columns(Code.LOOKUP_KV, _body(KeyRequest("k")))


# --- replayed is lived --------------------------------------------------------------------------------------------


class History:
    """Does what it is told to a server; whatever cannot be done at that point is left out."""

    def __init__(self, path):
        self.server = Server(path, segment_bytes=400)
        self.sessions, self.regions, self.keys = [], {}, 0
        self.connections = []

    @property
    def directory(self):
        return self.server.directory

    def do(self, what, a, b):
        getattr(self, what)(a, b)
        self.server.now += 0.5
        self.server.write()

    def _session(self, a):
        living = [number for number in self.sessions if number in {s.number for s in self.server.image().sessions}]
        return living[a % len(living)] if living else None

    def _owned(self, number):
        return [region.region_id for region in self.server.image().regions if region.session == number]

    def open_session(self, a, b):
        self.keys += 1
        self.sessions.append(self.server.open(b"%d" % self.keys, f"instance-{a % 2}"))

    def add_region(self, a, b):
        if (number := self._session(a)) is not None:
            self.server.region(number)

    def connect(self, a, b):
        self.connections.append(self.directory.connect())
        self.server.region(self.connections[-1], instance_id=f"published-{a % 2}")

    def disconnect(self, a, b):
        if self.connections:
            self.directory.disconnect(self.connections.pop(a % len(self.connections)), self.server.now)

    def store(self, a, b):
        """Some keys anew, some again, two in one place."""
        number = self._session(a)
        regions = self._owned(number) if number is not None else []
        if regions:
            entries = [
                (f"key-{(a * 3 + i * b) % 40}", regions[i * b % len(regions)], (a + i) % PAGES)
                for i in range(b % 5 + 1)
            ]
            self.server.store(number, *entries)

    def publish(self, a, b):
        if self.connections:
            connection = self.connections[a % len(self.connections)]
            regions = [one.region_id for one in self.server.image().regions if one.published and one.session]
            if regions:
                entries = [(f"key-{a * i % 40}", regions[b % len(regions)], (b + i) % PAGES) for i in range(b % 3 + 1)]
                code, body = batch_register(entries)
                columns = recorded_columns(code, body)
                self.directory.register(connection, columns, self.server.now, source=(code, body), whole=True)

    def delete(self, a, b):
        if (number := self._session(a)) is not None:
            keys = self.server.image().keys
            self.directory.delete(number, keys[b % 7 :: a % 5 + 2] or ["none"], self.server.now)

    def pin(self, a, b):
        if (number := self._session(a)) is not None:
            self.directory.pin(number, [f"key-{b % 40}"])

    def reclaim(self, a, b):
        if (number := self._session(a)) is not None:
            self.directory.reclaim(number, b % 4, self.server.now)

    def resolve(self, a, b):
        number = self._session(a)
        if number is not None and self._owned(number):
            self.directory.resolve(
                number, b % (self.server.attempt + 3) + 1, self._owned(number)[:1], [b % PAGES * PAGE]
            )

    def acknowledge(self, a, b):
        if (number := self._session(a)) is not None:
            pending = self.directory.pending(number, self.server.now, resend=True)
            if pending is not None:
                self.directory.acknowledge(number, pending.first_number + b % len(pending.offsets))

    def give_back(self, a, b):
        number = self._session(a)
        if number is not None and self._owned(number):
            self.directory.give_back_region(number, self._owned(number)[b % len(self._owned(number))])

    def drop_region(self, a, b):
        regions = self.server.image().regions
        if regions and b % 4 == 0:
            self.directory.drop_region(regions[a % len(regions)].region_id)

    def make_room(self, a, b):
        self.directory.make_room(PAGE * PAGES, self.server.now)

    def forget(self, a, b):
        self.directory.forget([f"key-{a % 40}"])

    def end_session(self, a, b):
        if (number := self._session(a)) is not None:
            self.directory.end_session(number, self.server.now)

    def expire(self, a, b):
        self.server.now += a % 8
        self.directory.expire(self.server.now)
        if b % 8 == 0:
            self.server.now += 20

    def compact(self, a, b):
        assert compact(self.server.path) is Outcome.DONE

    def restart(self, a, b):
        before = self.server.image()
        recovered = self.server.start()
        assert (recovered.trust, recovered.lost, recovered.cut_bytes) == (Trust.ALL, (), 0)
        assert self.server.image() == before
        self.connections.clear()


STEPS = [name for name in vars(History) if not name.startswith("_") and name not in ("do", "directory")]
steps = st.tuples(
    st.sampled_from(STEPS + ["store"] * 8 + ["publish", "add_region", "delete", "acknowledge"] * 2),
    st.integers(0, 99),
    st.integers(0, 99),
)


def live_and_restart(path, history):
    lived = History(path)
    lived.open_session(0, 0)
    lived.add_region(0, 0)
    for what, a, b in history:
        lived.do(what, a, b)
    lived.restart(0, 0)
    lived.compact(0, 0)
    lived.restart(0, 0)
    lived.server.journal.close()


@given(st.lists(steps, min_size=10, max_size=60))
@settings(max_examples=100, deadline=None)
def test_what_is_replayed_is_what_was_lived(tmp_path_factory, history):
    path = tmp_path_factory.mktemp("pool", numbered=True)
    try:
        live_and_restart(path, history)
    finally:
        shutil.rmtree(path)


@pytest.mark.long
@given(st.lists(steps, min_size=40, max_size=200))
@settings(max_examples=500, deadline=None)
def test_what_is_replayed_is_what_was_lived_for_long(tmp_path_factory, history):
    path = tmp_path_factory.mktemp("pool", numbered=True)
    try:
        live_and_restart(path, history)
    finally:
        shutil.rmtree(path)


def test_an_empty_directory_is_a_new_pool(tmp_path):
    recovered = recover(tmp_path)
    assert (len(recovered.directory), recovered.tail, recovered.trust) == (0, (1, 0), Trust.ALL)
    assert len(recovered.pool_id) == 16
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(JournalFailed, match="cannot be recovered"):
        recover(tmp_path / "nowhere", pool_id=POOL, boot_id=BOOT)


def test_a_restart_writes_nothing_and_the_journal_goes_on(tmp_path):
    server = small_history(tmp_path)
    before = server.image()
    files = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    for _ in range(3):  # a server that is started and killed again leaves nothing behind
        assert server.start().records > 0
        assert server.image() == before
        assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == files
    server.store(server.here, ("another", server.its_region, 7))
    assert image_of(tmp_path) == server.image() != before


def test_without_a_pool_id_it_is_that_of_the_files(tmp_path):
    small_history(tmp_path)
    assert recover(tmp_path, boot_id=BOOT).pool_id == POOL
    compact(str(tmp_path))
    assert recover(tmp_path, boot_id=BOOT).pool_id == POOL


# --- torn ---------------------------------------------------------------------------------------------------------


def test_a_kill_at_any_byte_of_the_last_write_loses_only_what_was_never_answered(tmp_path):
    server = small_history(tmp_path / "pool", segment_bytes=1 << 20)
    before = server.image()
    whole = (tmp_path / "pool/journal.1").stat().st_size
    server.store(server.here, ("the-last", server.its_region, 7))
    after = server.image()
    data = (tmp_path / "pool/journal.1").read_bytes()
    for cut in range(whole, len(data) + 1):
        (tmp_path / "pool/journal.1").write_bytes(data[:cut])
        recovered = recover(tmp_path / "pool", pool_id=POOL, boot_id=BOOT)
        assert recovered.directory.dump() == (after if cut == len(data) else before), cut
        assert (recovered.trust, recovered.lost) == (Trust.ALL, ())
        assert recovered.cut_bytes == (0 if cut == len(data) else cut - whole)
        assert recovered.tail == (2, len(data) if cut == len(data) else whole)


def test_what_was_torn_stays_cut_when_the_journal_has_gone_on(tmp_path):
    server = small_history(tmp_path, segment_bytes=1 << 20)
    with open(tmp_path / "journal.1", "ab") as file:
        file.write(b"\x09\x00\x00")
    assert server.start().cut_bytes == 3
    server.store(server.here, ("another", server.its_region, 7))
    assert server.start().cut_bytes == 0
    assert image_of(tmp_path) == server.image()
    server.store(server.here, ("one more", server.its_region, 1))
    assert compact(str(tmp_path)) is Outcome.DONE
    assert image_of(tmp_path) == server.image()


def test_what_lies_behind_the_end_of_a_closed_segment_is_none_of_it(tmp_path):
    # A write that failed and could not be cut off: its first record is whole, and nobody was told that it is there.
    server = small_history(tmp_path, segment_bytes=300)
    before = server.image()
    [first, *_] = list_files(server.path).segments
    with open(tmp_path / f"journal.{first}", "ab") as file:
        file.write(frame([encode(SessionEnded(server.here))]) + b"\x09")
    assert (server.start().lost, server.image()) == ((), before)
    assert compact(server.path) is Outcome.DONE
    assert image_of(tmp_path) == before


@pytest.mark.parametrize("size", [0, 1, 20, HEADER_BYTES - 1])
def test_a_segment_that_was_being_begun_is_swept(tmp_path, size):
    server = small_history(tmp_path)
    last = list_files(str(tmp_path)).segments[-1]
    header = pack_header("journal", Header(POOL, BOOT, last + 1, (tmp_path / f"journal.{last}").stat().st_size, 0))
    (tmp_path / f"journal.{last + 1}").write_bytes(header[:size])
    before = server.image()
    assert server.start().tail.number == last + 1
    assert server.image() == before
    server.store(server.here, ("another", server.its_region, 7))
    assert list_files(str(tmp_path)).segments[-1] == last + 1
    assert image_of(tmp_path) == server.image()


@pytest.mark.parametrize("size", [0, HEADER_BYTES - 1])
def test_what_a_start_could_not_sweep_is_removed_with_the_first_record(tmp_path, monkeypatch, size):
    server = small_history(tmp_path)
    left = tmp_path / f"journal.{server.journal.statistics().segment + 1}"
    left.write_bytes(bytes(size))

    def refuse(path):
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        server.start()
        with pytest.raises(JournalFailed, match="full"):
            server.journal.append([encode(SessionEnded(server.here))])
    server.open(b"later")
    assert image_of(tmp_path) == server.image()


def test_a_segment_that_was_begun_is_never_replaced(tmp_path):
    server = small_history(tmp_path)
    server.start()
    there = tmp_path / f"journal.{server.journal.statistics().segment}"
    there.write_bytes(bytes(HEADER_BYTES))
    with pytest.raises(JournalFailed, match="exists"):
        server.open(b"new")
    assert there.read_bytes() == bytes(HEADER_BYTES)


# --- damaged ------------------------------------------------------------------------------------------------------


def orphans_of(server):
    return [key for key in server.image().keys if key.startswith("orphan")]


def flip(path, at=-5):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("which", [2, 4, -1])
def test_a_flipped_bit_costs_what_followed_and_never_the_start(tmp_path, which, caplog):
    server = small_history(tmp_path)
    generation = server.image().generation
    segments = list_files(str(tmp_path)).segments
    assert len(segments) > 5
    damaged = segments[which]
    flip(tmp_path / f"journal.{damaged}")
    recovered = server.start()
    # Deletions may be among what is lost. An owner who lives may have written its pages anew, and may go on.
    assert recovered.trust is Trust.ORPHANS
    assert sorted(server.image().keys) == [f"orphan-{i}" for i in range(4)]
    assert server.image().sessions == []
    assert [region.region_id for region in server.image().regions] == [server.orphan]
    [finding] = recovered.lost
    assert f"journal.{damaged} is damaged at byte" in finding and finding in caplog.text
    assert server.image().generation >= generation + FAR // 2
    # It is settled: the next start finds nothing lost.
    image = server.image()
    assert (server.start().trust, server.image()) == (Trust.ALL, image)
    assert sorted(os.listdir(tmp_path)) == sorted(
        [f"lost.journal.{n}" for n in segments] + [f"snapshot.{segments[-1] + 1}"]
    )
    number = server.open(b"new")
    server.store(number, ("key-1", server.region(number), 0))
    assert image_of(tmp_path) == server.image()


def test_a_published_orphan_is_given_up_since_its_owner_may_have_come_back(tmp_path):
    server = Server(tmp_path, segment_bytes=150)
    connection = server.directory.connect()
    region = server.region(connection, instance_id="p")
    code, body = batch_register([("published", region, 0)])
    server.directory.register(connection, recorded_columns(code, body), 0.0, source=(code, body))
    server.write()
    server.directory.disconnect(connection, server.now)
    server.now += 1000
    server.directory.expire(server.now)
    server.write()
    assert [one.session for one in server.image().regions] == [0]
    ours = server.open(b"ours")
    mine = server.region(ours)
    server.store(ours, ("mine", mine, 0))
    server.directory.end_session(ours, server.now)
    server.write()
    again = server.open(b"again")
    server.region(again)
    server.store(again, ("lost", 3, 0))
    assert sorted(server.image().keys) == ["lost", "mine", "published"]
    flip(tmp_path / f"journal.{list_files(server.path).segments[-1]}")
    assert server.start().trust is Trust.ORPHANS
    assert server.image().keys == ["mine"]


def test_every_flipped_bit_of_a_history_gives_only_what_was_true(tmp_path):
    server = small_history(tmp_path / "pool")
    true = located(server.directory)
    chance = random.Random(3)
    for name in sorted(os.listdir(tmp_path / "pool")):
        data = (tmp_path / "pool" / name).read_bytes()
        for at in chance.sample(range(len(data)), 10):
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            shutil.copytree(tmp_path / "pool", tmp_path / "copy")
            flip(tmp_path / "copy" / name, at)
            recovered = recover(tmp_path / "copy", pool_id=POOL, boot_id=BOOT)
            assert recovered.lost and recovered.trust is Trust.ORPHANS
            for key, location in located(recovered.directory).items():
                assert location == true[key]


def located(directory):
    """Where each key lies. (It counts as a use.)"""
    keys = directory.dump().keys
    return dict(zip(keys, directory.find(0, keys, 0.0), strict=True))


def test_a_missing_segment_is_said(tmp_path):
    server = small_history(tmp_path)
    os.unlink(tmp_path / "journal.4")
    recovered = server.start()
    assert "journal.4 is missing" in recovered.lost[0]
    assert recovered.trust is Trust.ORPHANS
    assert server.start().lost == ()


def test_a_closed_segment_without_its_end_is_said_even_if_it_ends_at_a_record(tmp_path):
    server = small_history(tmp_path, segment_bytes=300)
    path = tmp_path / "journal.2"
    ends = read_frames(memoryview(path.read_bytes())).ends
    assert len(ends) > 1
    os.truncate(path, ends[-2])
    [finding] = server.start().lost
    assert "journal.2 ends at byte" in finding


def test_a_damaged_header_is_said_and_a_segment_behind_a_gap_says_nothing_of_the_one_before_it(tmp_path):
    server = small_history(tmp_path)
    flip(tmp_path / "journal.3", 30)
    [finding] = server.start().lost
    assert "the header of" in finding and "journal.3" in finding


def test_a_record_that_is_whole_and_cannot_be_applied_costs_what_follows(tmp_path, caplog):
    server = small_history(tmp_path)
    server.journal.append([encode(Fenced(99, 1))])  # nobody has this number
    server.store(server.here, ("after", server.its_region, 7))
    recovered = server.start()
    [finding] = recovered.lost
    assert "cannot be applied" in finding
    assert sorted(server.image().keys) == [f"orphan-{i}" for i in range(4)]
    assert server.start().lost == ()
    server.journal.append([b"\xc1 no record"])
    assert "cannot be applied" in server.start().lost[0]


@pytest.mark.parametrize(
    "refusal",
    [MemoryError(), RecursionError("too deep"), OSError(24, "no descriptor")],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("place", ["decode", "Directory", "list_files"])
def test_what_the_environment_refuses_fails_the_start_and_is_no_loss(tmp_path, monkeypatch, capsys, refusal, place):
    server = small_history(tmp_path)
    if place == "Directory":
        compact(server.path)
    before, files = server.image(), {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}

    def refuse(*args, **kwargs):
        raise refusal

    with monkeypatch.context() as patch:
        patch.setattr(os, "nice", lambda by: 0)
        if place == "Directory":
            patch.setattr(replay_module.Directory, "load", refuse)
        else:
            patch.setattr(replay_module, place, refuse)
        with pytest.raises(
            JournalFailed,
            match=f"{re.escape(str(refusal)) or 'no memory'}.*Nothing was discarded: fix the cause, and start the server again",
        ):
            server.start()
        if place == "decode":
            assert compaction_module.main([server.path]) is Outcome.FAILED  # and no snapshot from memory replaces it
            assert (str(refusal) or "no memory") in capsys.readouterr().err
            os.unlink(tmp_path / "compaction.lock")
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == files
    assert (server.start().lost, server.image()) == ((), before)


def test_only_the_latest_of_what_was_set_aside_is_kept(tmp_path):
    server = small_history(tmp_path)
    for _ in range(2):
        number = server.open(b"new")
        server.store(number, ("key-9", server.region(number), 0))
        flip(tmp_path / f"journal.{list_files(str(tmp_path)).segments[-1]}")
        assert server.start().lost
        lost = [name for name in os.listdir(tmp_path) if name.startswith("lost.")]
    assert lost and "lost.journal.1" not in lost


def test_what_others_have_named_like_it_is_left_alone(tmp_path):
    server = small_history(tmp_path)
    names = [
        "lost.and-found.txt",
        "lost.journal.",
        "lost.journal.1.gz",
        "lost.journal.01",
        "lost.snapshot.x",
        "journal.1.bak",
    ]
    for name in names:
        (tmp_path / name).write_text("an operator's")
    for _ in range(2):
        server.region(server.open(b"new"))
        flip(tmp_path / f"journal.{list_files(server.path).segments[-1]}")
        assert server.start().lost
    assert {(tmp_path / name).read_text() for name in names} == {"an operator's"}


def test_a_damaged_snapshot_is_no_loss_while_what_it_replaced_is_there(tmp_path, caplog):
    server = small_history(tmp_path / "pool")
    before = server.image()
    shutil.copytree(tmp_path / "pool", tmp_path / "old")
    compact(server.path)
    [snapshot] = list_files(server.path).snapshots
    for name in os.listdir(tmp_path / "old"):
        shutil.copy(tmp_path / "old" / name, tmp_path / "pool" / name)
    flip(tmp_path / f"pool/snapshot.{snapshot}")
    assert (server.start().trust, server.image()) == (Trust.ALL, before)
    assert "nothing is lost" in caplog.text
    assert compact(server.path) is Outcome.DONE  # and it is written anew
    assert len(os.listdir(tmp_path / "pool")) == 3
    assert image_of(tmp_path / "pool") == before


@pytest.mark.parametrize("how", ["flipped", "cut", "of another shape", "empty", "inconsistent"])
def test_a_snapshot_that_is_lost_is_said_and_does_not_brick_the_start(tmp_path, how):
    server = small_history(tmp_path)
    compact(server.path)
    [number] = list_files(server.path).snapshots
    path = tmp_path / f"snapshot.{number}"
    if how == "flipped":
        flip(path)
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "empty":
        os.truncate(path, 0)
    else:
        image = server.image()
        image.regions.clear()
        body = b"\x90" if how == "of another shape" else _body(image)
        write_snapshot(server.path, Header(POOL, BOOT, number, 0, 0), body, server=False)
    recovered = server.start()
    assert recovered.trust is Trust.ORPHANS
    assert any(f"snapshot.{number}" in finding for finding in recovered.lost)
    assert server.image().keys == []
    assert server.image().generation >= FAR
    assert server.start().lost == ()


# --- another version, another pool --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["journal", "snapshot"])
@pytest.mark.parametrize("version", [0, 2])
def test_another_version_is_refused_and_nothing_is_touched(tmp_path, monkeypatch, kind, version):
    server = small_history(tmp_path)
    monkeypatch.setattr(segments_module, "FORMAT_VERSION", version)
    number = list_files(server.path).segments[-1] + 1
    (tmp_path / f"{kind}.{number}").write_bytes(pack_header(kind, Header(POOL, BOOT, number, 0, 0)))
    monkeypatch.undo()
    files = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    with pytest.raises(ForeignJournal, match=f"format {version}"):
        recover(tmp_path, pool_id=POOL, boot_id=BOOT)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == files


def test_another_pool_is_refused(tmp_path):
    small_history(tmp_path)
    with pytest.raises(ForeignJournal, match="belongs to the pool"):
        recover(tmp_path, pool_id=b"x" * 16, boot_id=BOOT)


# --- another boot -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("same_boot", "lost", "trust"),
    [
        (True, False, Trust.ALL),
        (True, True, Trust.ORPHANS),
        (False, False, Trust.PAGES_THAT_VERIFY),
        (False, True, Trust.PAGES_THAT_VERIFY),
    ],
)
def test_what_is_believed(same_boot, lost, trust):
    assert trust_in(same_boot=same_boot, lost=lost) is trust


def memory_of(server):
    """The pages, as they were written."""
    regions = {}
    for key, at in located(server.directory).items():
        region = regions.setdefault(at.region_id, bytearray(PAGE * PAGES))
        region[at.offset : at.offset + PAGE] = content(key)
    return regions


def test_a_key_verifies_if_its_page_holds_what_was_stored_and_somebody_has_said_what(tmp_path):
    server = small_history(tmp_path)
    connection = server.directory.connect()
    published = server.region(connection, instance_id="p")
    code, body = batch_register([("unsaid", published, 0)])
    server.directory.register(connection, recorded_columns(code, body), 0.0, source=(code, body))
    memory = memory_of(server)
    found = located(server.directory)
    assert unverified(found.items(), lambda region_id: memoryview(memory[region_id])) == ["unsaid"]
    memory[server.its_region][0] ^= 1  # the first byte of key-0
    assert unverified(found.items(), lambda region_id: memoryview(memory[region_id])) == ["key-0", "unsaid"]
    short = {region_id: memory[region_id][: 2 * PAGE + 1] for region_id in memory}
    bad = unverified(found.items(), lambda region_id: memoryview(short[region_id]))
    assert found.keys() - set(bad) == {"orphan-0", "orphan-1"}
    assert unverified(found.items(), lambda region_id: None) == list(found)


def test_after_a_reboot_what_verifies_is_kept_in_regions_that_nobody_owns(tmp_path):
    server = small_history(tmp_path)
    memory = memory_of(server)
    memory[server.its_region][0] ^= 1
    keys, generation = server.image().keys, server.image().generation
    server.boot = NEXT_BOOT
    recovered = server.start(region=lambda region_id: memoryview(memory[region_id]))
    assert (recovered.trust, recovered.lost, recovered.forgotten_keys) == (Trust.PAGES_THAT_VERIFY, (), 1)
    assert sorted(server.image().keys) == sorted(set(keys) - {"key-0"})
    assert server.image().sessions == []
    assert {region.session for region in server.image().regions} == {0}
    assert server.image().generation == generation + FAR
    assert [name for name in os.listdir(tmp_path) if not name.startswith("snapshot")] == []
    # Settled: in the same boot it is not asked again, even by a server that wrote nothing since.
    image = server.image()
    assert (server.start().trust, server.image()) == (Trust.ALL, image)


def test_after_a_reboot_nothing_is_kept_of_a_pool_that_does_not_survive_one(tmp_path):
    server = small_history(tmp_path)
    server.boot = NEXT_BOOT
    assert server.start().forgotten_keys == 9
    assert (server.image().keys, server.image().regions) == ([], [])


def test_a_server_that_dies_while_it_verifies_begins_again(tmp_path):
    server = small_history(tmp_path)
    server.boot = NEXT_BOOT

    def die(region_id):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.start(region=die)
    memory = memory_of(server)
    recovered = server.start(region=lambda region_id: memoryview(memory[region_id]))
    assert (recovered.trust, recovered.forgotten_keys) == (Trust.PAGES_THAT_VERIFY, 0)


def test_a_start_that_cannot_look_at_the_pages_gives_none_of_them_up(tmp_path):
    server = small_history(tmp_path)
    server.boot = NEXT_BOOT
    keys, files = server.image().keys, sorted(os.listdir(tmp_path))

    def refuse(region_id):
        raise PoolUnusable("no address space")

    with pytest.raises(PoolUnusable):
        server.start(region=refuse)
    assert sorted(os.listdir(tmp_path)) == files
    memory = memory_of(server)
    server.start(region=lambda region_id: memoryview(memory[region_id]))
    assert sorted(server.image().keys) == sorted(keys)


def test_a_compaction_after_a_reboot_does_not_vouch_for_the_pages(tmp_path):
    server = small_history(tmp_path)
    compact(server.path)
    server.boot = NEXT_BOOT
    assert server.start().trust is Trust.PAGES_THAT_VERIFY


def test_a_pool_that_lost_its_memory_is_verified_in_the_same_boot_too(tmp_path):
    server = small_history(tmp_path)
    assert server.start(suspect=True).trust is Trust.PAGES_THAT_VERIFY


def test_a_reboot_that_took_the_end_of_the_journal_keeps_what_verifies_of_the_rest(tmp_path):
    server = small_history(tmp_path)
    memory = memory_of(server)
    flip(tmp_path / "journal.6")
    server.boot = NEXT_BOOT
    recovered = server.start(region=lambda region_id: memoryview(memory[region_id]))
    assert recovered.trust is Trust.PAGES_THAT_VERIFY and recovered.lost
    assert {f"orphan-{i}" for i in range(4)} <= set(server.image().keys)
    assert [name for name in os.listdir(tmp_path) if name.startswith("lost.")]


def test_what_cannot_be_settled_is_an_error_and_is_settled_later(tmp_path, monkeypatch):
    server = small_history(tmp_path)
    flip(tmp_path / "journal.4")

    def fail(*args, **kwargs):
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(recovery_module, "write_snapshot", fail)
        with pytest.raises(JournalFailed, match="full"):
            server.start()
    recovered = server.start()
    assert recovered.trust is Trust.ORPHANS and "journal.4" in recovered.lost[0]


def test_a_server_killed_while_it_settles_is_settled_by_the_next(tmp_path):
    server = small_history(tmp_path / "pool")
    flip(tmp_path / "pool/journal.4")
    shutil.copytree(tmp_path / "pool", tmp_path / "before")
    server.start()
    settled = server.image()
    [snapshot] = list_files(server.path).snapshots
    # before the snapshot has its name
    shutil.copytree(tmp_path / "before", tmp_path / "half")
    shutil.copy(tmp_path / f"pool/snapshot.{snapshot}", tmp_path / f"half/snapshot.{snapshot}.server.tmp")
    assert image_of(tmp_path / "half") == settled
    assert not [name for name in os.listdir(tmp_path / "half") if name.endswith(".tmp")]
    # after that, before the damaged files are set aside: in any state of that
    for moved in range(snapshot):
        shutil.rmtree(tmp_path / "half")
        shutil.copytree(tmp_path / "before", tmp_path / "half")
        shutil.copy(tmp_path / f"pool/snapshot.{snapshot}", tmp_path / f"half/snapshot.{snapshot}")
        for number in range(1, moved):
            os.rename(tmp_path / f"half/journal.{number}", tmp_path / f"half/lost.journal.{number}")
        recovered = recover(tmp_path / "half", pool_id=POOL, boot_id=BOOT)
        assert (recovered.trust, recovered.directory.dump()) == (Trust.ALL, settled)


# --- compaction ---------------------------------------------------------------------------------------------------


def test_a_compaction_leaves_a_snapshot_and_the_live_segment(tmp_path):
    server = small_history(tmp_path)
    before, live = server.image(), list_files(server.path).segments[-1]
    live_bytes = (tmp_path / f"journal.{live}").read_bytes()
    assert compact(server.path) is Outcome.DONE
    assert sorted(os.listdir(tmp_path)) == ["compaction.lock", f"journal.{live}", f"snapshot.{live}"]
    assert (tmp_path / f"journal.{live}").read_bytes() == live_bytes
    recovered = recover(tmp_path, pool_id=POOL, boot_id=BOOT)
    assert (recovered.directory.dump(), recovered.snapshot) == (before, live)
    snapshot = (tmp_path / f"snapshot.{live}").read_bytes()
    assert compact(server.path) is Outcome.DONE  # nothing to do
    assert (tmp_path / f"snapshot.{live}").read_bytes() == snapshot
    for i in range(20):
        server.store(server.here, (f"more-{i}", server.its_region, i % PAGES))
    assert compact(server.path) is Outcome.DONE
    assert image_of(tmp_path) == server.image()


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1])
def test_a_segment_is_folded_only_behind_one_that_was_begun(tmp_path, size):
    server = small_history(tmp_path)
    live = server.journal.statistics().segment
    header = pack_header("journal", Header(POOL, BOOT, live + 1, 0, 0))
    (tmp_path / f"journal.{live + 1}").write_bytes(header[:size])  # neither begun nor removed, or not yet
    assert compact(server.path) is Outcome.DONE
    assert list_files(server.path)[:2] == ([live, live + 1], [live])
    server.journal.append([encode(SessionEnded(server.here))])  # it goes on in the live one
    recovered = recover(tmp_path, pool_id=POOL, boot_id=BOOT)
    assert (recovered.directory.dump().sessions, recovered.lost) == ([], ())


def test_a_compaction_in_the_middle_of_a_new_segment_folds_none_that_is_written(tmp_path):
    full = False

    def write(fd, data):
        if full and len(data) == HEADER_BYTES:
            assert compact(server.path) is Outcome.DONE
            raise OSError(28, "full")
        return os.write(fd, data)

    server = small_history(tmp_path, write=write)
    full = True
    for i in range(6):
        server.store(server.here, (f"more-{i}", server.its_region, i))
    server.directory.delete(server.here, ["key-0"], server.now)
    server.write()
    assert not server.journal.is_lost()
    assert image_of(tmp_path) == server.image()


def test_what_is_closed_by_no_header_is_not_folded(tmp_path):
    server = small_history(tmp_path)
    live = server.journal.statistics().segment

    def step(name):
        if name == "replay":
            os.truncate(tmp_path / f"journal.{live}", HEADER_BYTES - 1)

    assert compact(server.path, step) is Outcome.DAMAGED
    assert list_files(server.path).snapshots == []


def test_there_is_nothing_to_compact_in_an_empty_directory(tmp_path):
    assert compact(str(tmp_path)) is Outcome.DONE
    assert os.listdir(tmp_path) == ["compaction.lock"]


def test_every_legal_combination_of_snapshots_and_segments_is_the_same_directory(tmp_path):
    server = small_history(tmp_path / "pool", segment_bytes=250)
    before = server.image()
    segments = list_files(server.path).segments
    assert segments == [1, 2, 3, 4]
    snapshots = {}
    for number in segments[1:]:
        replayed = replay_module.replay(server.path, POOL, before=number)
        snapshots[number] = _body(replayed.directory.dump())
    tried = 0
    for newest in [0, *snapshots]:
        lower = [("journal", n) for n in segments if n < newest] + [("snapshot", n) for n in snapshots if n < newest]
        for left in itertools.chain.from_iterable(itertools.combinations(lower, n) for n in range(len(lower) + 1)):
            tried += 1
            path = tmp_path / str(tried)
            path.mkdir()
            for kind, number in [*left, *[("journal", n) for n in segments if n >= newest]]:
                if kind == "journal":
                    os.link(tmp_path / f"pool/journal.{number}", path / f"journal.{number}")
                else:
                    write_snapshot(str(path), Header(POOL, BOOT, number, 0, 0), snapshots[number], server=False)
            if newest:
                write_snapshot(str(path), Header(POOL, BOOT, newest, 0, 0), snapshots[newest], server=False)
            (path / "snapshot.9.tmp").write_bytes(b"left over")
            recovered = recover(path, pool_id=POOL, boot_id=BOOT)
            assert (recovered.directory.dump(), recovered.lost, recovered.snapshot) == (before, (), newest)
            assert not (path / "snapshot.9.tmp").exists()
            assert compact(str(path)) is Outcome.DONE
            assert sorted(os.listdir(path)) == ["compaction.lock", "journal.4", "snapshot.4"]
            assert image_of(path) == before
    assert tried == 1 + 2 + 8 + 32


def test_a_compaction_killed_at_any_step_leaves_a_directory_that_is_whole(tmp_path):
    server = small_history(tmp_path / "0")
    compact(server.path)
    for i in range(8):
        server.store(server.here, (f"more-{i}", server.its_region, i))
    before = server.image()
    program = """
import os, shutil, signal, sys
from maru._journal.compaction import compact
base, count = sys.argv[1], 0
def step(name):
    global count
    if count == at:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
at, status = 0, signal.SIGKILL
while status == signal.SIGKILL:
    shutil.copytree(f"{base}/0", f"{base}/{at + 1}")
    child = os.fork()
    if not child:
        os._exit(compact(f"{base}/{at + 1}", step))
    _, status = os.waitpid(child, 0)
    at += 1
sys.exit(status)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    killed = len(os.listdir(tmp_path)) - 2  # the last one lived, and the first is the original
    assert killed >= 12
    shapes = set()
    for at in range(1, killed + 1):
        path = tmp_path / str(at)
        shapes.add(tuple(sorted(os.listdir(path))))
        assert image_of(path) == before
        assert not list_files(str(path)).leftovers
        assert compact(str(path)) is Outcome.DONE
        assert image_of(path) == before
        assert len(os.listdir(path)) == 3
    assert len(shapes) >= 6  # as it was, with a temporary file, with both snapshots, and less and less of the old
    assert sorted(os.listdir(tmp_path / str(killed + 1))) == sorted(os.listdir(path))


def test_two_compactions_never_run_at_once(tmp_path):
    server = small_history(tmp_path)
    reached, go = threading.Event(), threading.Event()
    outcomes = []

    def step(name):
        if name == "rename":
            reached.set()
            go.wait()

    first = threading.Thread(target=lambda: outcomes.append(compact(server.path, step)))
    first.start()
    try:
        reached.wait()
        files = sorted(os.listdir(tmp_path))
        assert compact(server.path) is Outcome.BUSY
        done = subprocess.run([sys.executable, "-m", "maru._journal.compaction", server.path], capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (Outcome.BUSY, b"", b"")
        image_of(tmp_path)  # and a start neither waits for it nor sweeps its file
        assert sorted(os.listdir(tmp_path)) == files
    finally:
        go.set()
        first.join()
    assert outcomes == [Outcome.DONE]
    assert image_of(tmp_path) == server.image()


def test_a_compaction_that_a_restart_overtakes_touches_nothing_that_counts(tmp_path):
    server = small_history(tmp_path)

    def step(name):
        if name == "replay":
            flip(tmp_path / "journal.2")
            assert server.start().lost

    assert compact(server.path, step) is Outcome.DAMAGED
    settled = server.image()
    assert (server.start().lost, server.image()) == ((), settled)
    shutil.copy(tmp_path / "lost.journal.1", tmp_path / "journal.1")  # the server was killed before it set this aside
    files = sorted(os.listdir(tmp_path))
    assert compact(server.path) is Outcome.DONE
    assert sorted(os.listdir(tmp_path)) == files
    assert (server.start().lost, server.image()) == ((), settled)


def test_a_compaction_sweeps_what_others_left_but_not_what_the_server_is_writing(tmp_path):
    server = small_history(tmp_path)
    (tmp_path / "snapshot.3.tmp").touch()
    (tmp_path / "snapshot.99.server.tmp").touch()
    compact(server.path)
    assert not (tmp_path / "snapshot.3.tmp").exists()
    assert (tmp_path / "snapshot.99.server.tmp").exists()
    server.start()
    assert not (tmp_path / "snapshot.99.server.tmp").exists()


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_start_that_a_compaction_overtakes_looks_again(tmp_path, monkeypatch, after):
    server = small_history(tmp_path)
    before = server.image()
    calls = itertools.count()
    read = replay_module._Replay._read

    def read_late(self, path):
        if next(calls) == after:
            assert compact(server.path) is Outcome.DONE
        return read(self, path)

    monkeypatch.setattr(replay_module._Replay, "_read", read_late)
    recovered = recover(tmp_path, pool_id=POOL, boot_id=BOOT)
    assert (recovered.directory.dump(), recovered.lost) == (before, ())
    assert recovered.snapshot > 0


def test_what_cannot_be_read_is_not_compacted(tmp_path, capsys):
    server = small_history(tmp_path)
    flip(tmp_path / "journal.3")
    files = set(os.listdir(tmp_path))
    assert compact(server.path) is Outcome.DAMAGED
    assert "journal.3 is damaged" in capsys.readouterr().err
    assert set(os.listdir(tmp_path)) == files | {"compaction.lock"}


def test_a_compaction_that_cannot_write_leaves_all_as_it_was(tmp_path, monkeypatch, capsys):
    server = small_history(tmp_path)
    files = set(os.listdir(tmp_path))

    def fail(*args, **kwargs):
        raise OSError(28, "full")

    monkeypatch.setattr(os, "nice", lambda by: 0)
    with monkeypatch.context() as patch:
        patch.setattr(compaction_module, "write_snapshot", fail)
        assert compaction_module.main([server.path]) is Outcome.FAILED
    assert "full" in capsys.readouterr().err
    assert set(os.listdir(tmp_path)) == files | {"compaction.lock"}
    assert compaction_module.main([]) is Outcome.FAILED
    assert "usage" in capsys.readouterr().err
    flip(tmp_path / "journal.1", 10)
    (tmp_path / "journal.1").write_bytes(b"\x8bmarujn\n" + (tmp_path / "journal.2").read_bytes()[8:])
    assert compaction_module.main([server.path]) is Outcome.DAMAGED


# --- beside the server --------------------------------------------------------------------------------------------


async def test_the_server_goes_on_while_a_process_compacts(tmp_path):
    server = small_history(tmp_path)
    for i in range(30):
        server.store(server.here, (f"more-{i}", server.its_region, i % PAGES))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(keep_compacted, server.journal, server.directory)
            i = 0
            while not list_files(server.path).snapshots:
                i += 1
                server.store(server.here, (f"later-{i}", server.its_region, i % PAGES))
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
    assert i > 1
    assert image_of(tmp_path) == server.image()


async def test_cancelling_kills_the_process_at_once(tmp_path):
    small_history(tmp_path)
    os.unlink(tmp_path / "journal.1")
    os.mkfifo(tmp_path / "journal.1")  # whoever reads it waits
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_compaction, str(tmp_path))
            pipe = await trio.to_thread.run_sync(os.open, tmp_path / "journal.1", os.O_WRONLY)
            # Should nobody kill it, this ends the wait, and fails the write below.
            deadline = threading.Timer(30, os.close, [pipe])
            deadline.start()
            nursery.cancel_scope.cancel()
    deadline.cancel()
    with pytest.raises(BrokenPipeError):
        os.write(pipe, b"there is nobody to read this")
    os.close(pipe)


def holder_of(lock):
    inode = lock.stat().st_ino
    with open("/proc/locks") as locks:
        [pid] = [int(line.split()[4]) for line in locks if f":{inode} " in line]
    return pid


async def test_a_process_that_is_killed_by_others_has_failed(tmp_path):
    os.mkfifo(tmp_path / "journal.1")
    (tmp_path / "journal.2").touch()
    outcomes = []

    async def run():
        outcomes.append(await run_compaction(str(tmp_path)))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            pipe = await trio.to_thread.run_sync(os.open, tmp_path / "journal.1", os.O_WRONLY)
            os.kill(holder_of(tmp_path / "compaction.lock"), signal.SIGKILL)
    os.close(pipe)
    assert outcomes == [Outcome.FAILED]


async def test_what_a_compaction_finds_damaged_the_server_writes_from_memory(tmp_path, caplog):
    server = small_history(tmp_path)
    for i in range(30):
        server.store(server.here, (f"more-{i}", server.its_region, i % PAGES))
    assert server.journal.compaction_due
    flip(tmp_path / "journal.3")
    before = server.image()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_compacted, server.journal, server.directory)
            while server.journal.statistics().closed_segments:  # noqa: ASYNC110 - a process of the system ends it
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert "snapshot from memory" in caplog.text and "journal.3 is damaged" in caplog.text
    recovered = recover(tmp_path, pool_id=POOL, boot_id=BOOT)
    assert (recovered.directory.dump(), recovered.lost) == (before, ())


async def test_a_snapshot_in_slices_and_what_comes_meanwhile_are_the_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("maru._directory.image.LOOKS_AT_ONCE", 2)
    server = small_history(tmp_path, segment_bytes=200)
    for path in tmp_path.glob("journal.*"):
        path.unlink()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_from_memory, server.journal, server.directory)
        for i in range(12):
            await trio.lowlevel.checkpoint()
            server.store(server.here, (f"more-{i}", server.its_region, i % PAGES))
            server.directory.delete(server.here, [f"more-{i - 2}"], server.now)
            server.write()
            if i == 6:
                server.region(server.open(b"late"))
    recovered = recover(tmp_path, pool_id=POOL, boot_id=BOOT)
    assert (recovered.directory.dump(), recovered.lost) == (server.image(), ())


async def test_no_snapshot_is_taken_of_a_directory_that_is_ahead_of_its_journal(tmp_path, monkeypatch, autojump_clock):
    full = False

    def write(fd, data):
        if full:
            raise OSError(28, "full")
        return os.write(fd, data)

    server = small_history(tmp_path, write=write)
    for i in range(30):
        server.store(server.here, (f"more-{i}", server.its_region, i % PAGES))
    flip(tmp_path / "journal.3")

    async def fake(path):
        return Outcome.DAMAGED

    monkeypatch.setattr(compactor_module, "run_compaction", fake)
    full = True
    server.directory.delete(server.here, ["more-29"], server.now)
    records = [encode(record) for record in server.directory.take_records()]
    with pytest.raises(JournalFailed):
        server.journal.append(records)
    assert server.journal.behind
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_compacted, server.journal, server.directory)
        await trio.sleep(25)
        assert list_files(server.path).snapshots == []
        full = False
        server.journal.append(records)
        server.directory.delete(server.here, ["more-28"], server.now)  # not taken by the server yet
        await trio.sleep(10)
        assert list_files(server.path).snapshots == []
        server.write()
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert len(list_files(server.path).snapshots) == 1
    recovered = recover(tmp_path, pool_id=POOL, boot_id=BOOT)
    assert (recovered.directory.dump(), recovered.lost) == (server.image(), ())


@pytest.mark.parametrize(
    ("refusal", "text"), [(OSError(11, "no process"), "no process"), (MemoryError(), "no memory is left")]
)
async def test_the_task_survives_a_compaction_that_fails_and_ends_with_the_journal(
    tmp_path, monkeypatch, caplog, autojump_clock, refusal, text
):
    server = small_history(tmp_path)
    for i in range(30):
        server.store(server.here, (f"more-{i}", server.its_region, i % PAGES))
    outcomes = [refusal, Outcome.FAILED, Outcome.BUSY, Outcome.DONE]
    asked = []

    async def fake(path):
        asked.append(trio.current_time())
        await trio.sleep(1)
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome is Outcome.DONE:
            compact(path)
        return outcome

    monkeypatch.setattr(compactor_module, "run_compaction", fake)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_compacted, server.journal, server.directory)
        await trio.sleep(100)
        assert outcomes == []
        assert [b - a for a, b in itertools.pairwise(asked)] == [11.0, 11.0, 11.0]
        assert not server.journal.compaction_due
        server.journal.close()
    assert text in caplog.text


async def test_compaction_for_waiting_records_does_not_rest(tmp_path, monkeypatch, autojump_clock):
    server = small_history(tmp_path)
    asked = []

    async def fake(path):
        asked.append(trio.current_time())
        await trio.sleep(10)
        return Outcome.DONE

    monkeypatch.setattr(compactor_module, "run_compaction", fake)
    monkeypatch.setattr(type(server.journal), "compaction_due", True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_compacted, server.journal, server.directory)
        await trio.sleep(20)
        server.journal._pressed = True
        server.journal._surveyed.unpark_all()
        await trio.sleep(11)
        server.journal.close()
        nursery.cancel_scope.cancel()
    assert asked[:2] == pytest.approx([asked[0], asked[0] + 20], abs=0.5)


# --- killed again and again ---------------------------------------------------------------------------------------

_WRITER = """
import os, sys
sys.path.insert(0, sys.argv[2])
from tests.maru.test_recovery import Server
server = Server(sys.argv[1], segment_bytes=2000)
recovered = server.recovered
assert not recovered.lost, recovered.lost
image = server.image()
number = server.directory.session_of(b"w" * 16) or server.open(b"w" * 16)
# region ids are never reused: the pool persists their counter, and here it is what is known
server.region_id = max([region.region_id for region in image.regions], default=0) + 1
region = server.region(number)
print("ready", *image.keys, flush=True)
i = len(image.keys)
while True:
    key = f"{os.getpid()}-{i}"
    server.store(number, (key, region, i % 8))
    print(key, flush=True)
    i += 1
    if i % 8 == 0:
        region = server.region(number)
"""


def kill_cycles(pool, cycles):
    """Keys that were acknowledged, over so many lives of a server."""
    acknowledged = set()
    chance = random.Random(1)
    for cycle in range(cycles):
        command = [sys.executable, "-c", _WRITER, str(pool), str(Path(__file__).parents[1] / "support")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            ready, *found = process.stdout.readline().split()
            assert ready == "ready"
            assert acknowledged <= set(found), "an acknowledged key is lost"
            acknowledged = set(found)
            compaction = None
            if cycle % 2:
                compaction = subprocess.Popen([sys.executable, "-m", "maru._journal.compaction", str(pool)])
            for _ in range(chance.randrange(40)):
                acknowledged.add(process.stdout.readline().strip())
            process.kill()
            acknowledged.update(process.stdout.read().split())  # a line is one write: there is no half of one
            if compaction is not None:
                if chance.random() < 0.5:
                    compaction.kill()
                compaction.wait()
    return acknowledged


def test_no_acknowledged_key_is_lost_when_server_and_compaction_are_killed(tmp_path):
    acknowledged = kill_cycles(tmp_path, 4)
    assert acknowledged <= set(image_of(tmp_path).keys)


@pytest.mark.long
def test_no_acknowledged_key_is_lost_however_often_server_and_compaction_are_killed(tmp_path):
    acknowledged = kill_cycles(tmp_path, 60)
    assert len(acknowledged) > 300
    assert acknowledged <= set(image_of(tmp_path).keys)


# --- long ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_half_a_million_keys_come_back_from_the_journal_and_from_a_snapshot(tmp_path):
    server = Server(tmp_path, segment_bytes=1 << 20)
    number = server.open(b"many")
    n = 500_000
    regions = []
    for _ in range(n // 5000):
        server.region_id += 1
        server.directory.add_region(number, server.region_id, PAGE * 5000)
        regions.append(server.region_id)
    server.write()
    for i in range(0, n, 50):
        server.store(number, *[(f"llama/{k:040}", regions[k // 5000], k % 5000) for k in range(i, i + 50)])
    before = server.image()
    assert len(before.keys) == n
    recovered = recover(tmp_path, pool_id=POOL, boot_id=BOOT)
    assert recovered.records >= n // 50 and recovered.directory.dump() == before
    assert compact(server.path) is Outcome.DONE
    recovered = recover(tmp_path, pool_id=POOL, boot_id=BOOT)
    assert recovered.snapshot > 10 and recovered.directory.dump() == before
