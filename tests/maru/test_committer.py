"""An answer leaves once what it says is written down, as durably as was asked for."""

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from maru import JournalFailed
from maru._server.committer import Committer


@attrs.define(eq=False)
class FakeJournal:
    """Takes records while it has room; a flush ends when it is told to."""

    full: bool = False
    lasting: bool = False
    written: list = attrs.field(factory=list)
    durable: int = 0
    flushes: int = 0
    gate: trio.Event | None = None

    def append(self, records):
        if self.full:
            raise JournalFailed("no space left", lasting=self.lasting)
        self.written += records

    async def sync(self):
        target = len(self.written)
        self.flushes += 1
        if self.gate is not None:
            await self.gate.wait()
        await trio.lowlevel.checkpoint()
        self.durable = max(self.durable, target)


@attrs.define(eq=False)
class Door:
    """Where answers leave, with what was durable then."""

    journal: FakeJournal
    left: list = attrs.field(factory=list)

    def send(self, answers):
        for _, frame in answers:
            self.left.append((frame, len(self.journal.written), self.journal.durable))

    @property
    def frames(self):
        return [frame for frame, _, _ in self.left]


def make(sync="never", journal=None):
    journal = FakeJournal() if journal is None else journal
    door = Door(journal)
    return journal, door, Committer(journal, sync, door.send)


def answer(frame):
    return [(b"peer", frame)]


async def test_an_answer_leaves_after_its_records_are_written():
    journal, door, committer = make()
    assert committer.commit([b"r1", b"r2"], answer("a"))
    assert journal.written == [b"r1", b"r2"]
    assert door.left == [("a", 2, 0)]
    assert committer.commit([], answer("b"))
    assert door.frames == ["a", "b"]
    assert committer.idle and committer.writable


async def test_without_a_journal_answers_leave_at_once():
    door = Door(FakeJournal())
    committer = Committer(None, "each", door.send)
    assert committer.commit([b"r1"], answer("a"))
    assert door.frames == ["a"]


async def test_what_cannot_be_written_keeps_all_answers_back_in_order(autojump_clock, caplog):
    journal, door, committer = make()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(committer.run)
        journal.full = True
        assert not committer.commit([b"r1"], answer("a"))
        assert not committer.commit([], answer("b"))
        assert not committer.commit([b"r2"], answer("c"))
        assert not committer.writable and not committer.idle
        assert committer.trouble == "no space left"
        await trio.sleep(10)
        assert door.frames == [] and journal.written == []
        journal.full = False
        await committer.wait_writable()
        assert committer.trouble == ""
        assert journal.written == [b"r1", b"r2"]
        assert door.frames == ["a", "b", "c"]
        await committer.wait_idle()
        nursery.cancel_scope.cancel()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]  # once each, not at each try


async def test_a_step_that_can_be_written_again_takes_along_what_could_not(autojump_clock):
    journal, door, committer = make()
    journal.full = True
    committer.commit([b"r1"], answer("a"))
    journal.full = False
    assert committer.commit([b"r2"], answer("b"))
    assert (journal.written, door.frames) == ([b"r1", b"r2"], ["a", "b"])


async def test_a_journal_that_takes_nothing_any_more_ends_it(autojump_clock):
    journal, door, committer = make()
    journal.full = journal.lasting = True
    with pytest.raises(BaseExceptionGroup) as group:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(committer.run)
            await wait_all_tasks_blocked()
            committer.commit([b"r1"], answer("a"))
            await trio.sleep_forever()
    assert group.group_contains(JournalFailed)
    assert door.frames == []


async def test_each_answer_waits_for_a_flush_that_others_share(autojump_clock):
    journal, door, committer = make("each", FakeJournal(gate=trio.Event()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(committer.run)
        committer.commit([b"r1"], answer("a"))
        await wait_all_tasks_blocked()
        committer.commit([b"r2"], answer("b"))
        committer.commit([b"r3"], answer("c"))
        committer.commit([], answer("read"))  # may tell of r3
        await wait_all_tasks_blocked()
        assert (door.frames, journal.flushes) == ([], 1)
        journal.gate.set()
        await committer.wait_idle()
        assert door.frames == ["a", "b", "c", "read"]
        assert all(durable >= needed for (_, _, durable), needed in zip(door.left, [1, 2, 3, 3], strict=True))
        assert journal.flushes == 2
        committer.commit([], answer("later"))
        assert door.frames[-1] == "later"  # nothing is under way: it need not wait
        nursery.cancel_scope.cancel()


async def test_once_a_second_it_is_flushed_and_nobody_waits(autojump_clock):
    journal, door, committer = make("second")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(committer.run)
        committer.commit([b"r1"], answer("a"))
        assert door.left == [("a", 1, 0)]
        await trio.sleep(3.5)
        assert (journal.flushes, journal.durable) == (3, 1)
        nursery.cancel_scope.cancel()


async def test_each_after_a_full_disk_is_flushed_once_it_is_written(autojump_clock):
    journal, door, committer = make("each")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(committer.run)
        journal.full = True
        committer.commit([b"r1"], answer("a"))
        await trio.sleep(1)
        journal.full = False
        await committer.wait_idle()
        assert door.left == [("a", 1, 1)]
        nursery.cancel_scope.cancel()


async def test_cancelling_while_a_flush_runs_lets_no_answer_out(autojump_clock):
    _, door, committer = make("each", FakeJournal(gate=trio.Event()))
    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(committer.run)
            committer.commit([b"r1"], answer("a"))
            await committer.wait_idle()
    assert door.frames == [] and not committer.idle


async def test_what_happened_is_published_behind_the_journal_and_before_any_answer(autojump_clock):
    journal, came = FakeJournal(full=True), []

    def note(what):
        return lambda *_: came.append((what, len(journal.written)))

    committer = Committer(journal, "never", note("sent"), note("published"))
    assert not committer.commit([b"r1"], answer("a"))
    assert came == []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(committer.run)
        await wait_all_tasks_blocked()
        journal.full = False
        await committer.wait_idle()
        nursery.cancel_scope.cancel()
    assert came == [("published", 1), ("sent", 1)]
    assert committer.commit([b"r2"], answer("b"))
    assert came[2:] == [("published", 2), ("sent", 2)]
