"""Stores and reads of one host.

A store waits for another store of the same key, purges to make room, asks for present keys, copies into staging, and
sets.

Rule 1. First writer wins. A connector's *set* overwrites, so present keys are asked for first, and no key is set twice
        at once.
Rule 2. The plugin reads and writes staging buffers only: when a store or a load ends, in whatever way, the source and
        the destination are the caller's again, even if the plugin goes on.
Rule 3. A failed *set* of a plugin that does not report which keys failed fails them all. Blocks that it may have left
        behind are purged.
Rule 4. A *set* without an answer is unproven: its keys are in doubt, hidden and refused, and its buffer is in
        quarantine, until the plugin does answer, which may be never.
Rule 5. A block is verified by the sum that was taken when it was stored through this host. One that was stored
        elsewhere has none here, and is counted as *unverified*. A plugin reports that it has read, not how much. So if
        no sum would find it, the end of a buffer is marked before a read, and a block that leaves the mark is missed,
        *short*; and blocks that another process has stored are read into cleared memory: no block ends in another
        tenant's bytes.
Rule 6. Blocks that were found after the first gap are useless, and are unlocked at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import takewhile

import trio

from maru.exception_groups import holds

from .._errors import Unproven
from ..abc import DUPLICATE, LOADED, STORED, Destination, Failed, Key, Missed, Outcome, Rejected, Source
from ..base.copying import StoreCopy, load_pages, unequal
from ..base.in_place import PORTION_BYTES, CopiesInPlace
from ..base.pages import Pages, checksums
from ..base.threads import run_in_thread, run_in_thread_to_the_end
from ._errors import NoAnswer, PluginFault
from ._host_state import HostState, StagingBuffer
from ._operations import Kind, Operation

IN_DOUBT = Rejected("in doubt")
"""Outcome of a block whose earlier store may still go on."""


class Writer:
    """The stores of one host.

    Args:
        state: the state of the host.
        purge: deletes the keys to be purged, as far as that works.
    """

    def __init__(self, state: HostState, purge: Callable[[AbstractSet[Key]], Awaitable[None]]) -> None:
        self._state = state
        self._purge = purge
        self._in_place = CopiesInPlace()
        self.stored: int = 0
        self.duplicates: int = 0

    async def store(self, keys: Sequence[Key], source: Source, refs: Sequence[int]) -> list[Outcome]:
        """Store these blocks. Return one outcome for each.

        See the rules above.

        Raises:
            NoAnswer: the plugin did not report which keys it has. Nothing was stored.
            PluginFault: likewise.
            Unproven: it did not report that it has stored them.
        """
        tombstones = self._state.tombstones
        while (busy := next((tombstones.writing[key] for key in keys if key in tombstones.writing), None)) is not None:
            assert isinstance(busy, trio.Event)
            await busy.wait()
        # No checkpoint between here and `writing.update`: two stores of one key would both find it free.
        outcomes: list[Outcome] = [IN_DOUBT if key in tombstones.in_doubt else STORED for key in keys]
        free = [at for at, outcome in enumerate(outcomes) if outcome is STORED]
        if not free:
            return outcomes
        over = trio.Event()
        tombstones.writing.update(dict.fromkeys([keys[at] for at in free], over))
        try:
            await self._store(free, keys, source, refs, outcomes)
        finally:
            for at in free:
                del tombstones.writing[keys[at]]
            over.set()
        self.stored += outcomes.count(STORED)
        self.duplicates += outcomes.count(DUPLICATE)
        return outcomes

    async def _store(
        self, free: list[int], keys: Sequence[Key], source: Source, refs: Sequence[int], outcomes: list[Outcome]
    ) -> None:
        state = self._state
        await self._purge({keys[at] for at in free})
        there = await state.present([keys[at] for at in free])
        new: list[int] = []
        for at, is_there in zip(free, there, strict=True):
            if is_there and keys[at] not in state.tombstones.to_purge:
                outcomes[at] = DUPLICATE
            else:
                new.append(at)
        if not new:
            return
        buffer = state.staging.take(len(new))
        copy = StoreCopy(source, [keys[at] for at in new], [refs[at] for at in new], summed=state.checksums)
        failed = await self._fill(buffer, copy)
        for row, error in failed.items():
            outcomes[new[row]] = Failed(error)
        rows = [row for row in range(len(new)) if row not in failed]
        if not rows:
            buffer.give_back()
            return
        new = [new[row] for row in rows]
        names = [keys[at] for at in new]
        try:
            bits = await self._set(names, buffer, rows)
        except PluginFault as fault:
            state.tombstones.note_bad(names)
            for at in new:
                outcomes[at] = Failed(fault)
            return
        good = [key for key, bit in zip(names, bits, strict=True) if bit]
        state.tombstones.clear(good)
        state.tombstones.note_bad(key for key, bit in zip(names, bits, strict=True) if not bit)
        if state.checksums:
            state.registry.sums.update(
                (key, copy.sums[row]) for key, row, bit in zip(names, rows, bits, strict=True) if bit
            )
        for at, bit in zip(new, bits, strict=True):
            if not bit:
                outcomes[at] = Failed(PluginFault(f"{state.name} did not store {keys[at].hex()}"))

    async def _fill(self, buffer: StagingBuffer, copy: StoreCopy) -> dict[int, Exception]:
        """Copy blocks of a source. Return the errors of failed blocks.

        Cancelled, it returns at once, even with a thread at work.
        """
        filling = _Filling()
        try:
            return await copy.into(buffer.pages, self._in_place, filling.off_thread)
        except BaseException as error:
            if holds(error, Unproven):
                buffer.quarantine()
            elif isinstance(error, Exception):
                buffer.give_back()
            else:
                # Cancelled: the copy thread may still write, and marks its own end, before or after `abandoned` is set.
                # So its end is checked once more after that.
                buffer.quarantine(lambda: filling.is_over)
                filling.abandoned = buffer
                if filling.is_over:
                    buffer.give_back()
            raise

    async def _set(self, keys: Sequence[Key], buffer: StagingBuffer, rows: Sequence[int]) -> list[bool]:
        state = self._state
        given_back = False

        def late(operation: Operation) -> None:
            nonlocal given_back
            given_back = True
            buffer.give_back()
            state.tombstones.in_doubt.difference_update(keys)
            if operation.started:
                state.tombstones.note_bad(key for key, bit in zip(keys, operation.bits or (), strict=False) if not bit)

        operation = state.driver.operation(Kind.SET, keys, touches=buffer, undo=late)
        try:
            bits = await state.driver.run(operation, buffer.buffers(rows))
        except BaseException as exc:
            if operation.may_go_on:
                buffer.quarantine()
                state.tombstones.in_doubt.update(keys)
                if isinstance(exc, NoAnswer):
                    raise Unproven(f"{exc}: it may still be storing") from exc
            elif not given_back:
                buffer.give_back()
            raise
        buffer.give_back()
        return bits


class _Filling:
    """A copy in a thread that may be abandoned."""

    def __init__(self) -> None:
        self.is_over = True
        self.abandoned: StagingBuffer | None = None

    async def off_thread(self, fn: Callable[..., object], *args: object) -> object:
        """Run a copy; cancelled, return at once.

        Cancelled before it began, none is under way.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self.is_over = False
        return await run_in_thread(self._run, fn, *args)

    def _run(self, fn: Callable[..., object], *args: object) -> object:
        try:
            return fn(*args)
        finally:
            self.is_over = True
            if self.abandoned is not None:
                self.abandoned.free()


class Reader:
    """The reads of one host.

    Args:
        state: the state of the host.
    """

    def __init__(self, state: HostState) -> None:
        self._state = state
        self._in_place = CopiesInPlace()
        self.loaded: int = 0
        self.unverified: int = 0
        self.missed: dict[str, int] = {"gone": 0, "damaged": 0, "short": 0}

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that can be found. Nothing stays locked."""
        tombstones = self._state.tombstones
        asked = [key for key in dict.fromkeys(keys) if key not in tombstones]
        if not asked:
            return set()
        bits = await self._state.present(asked)
        return {key for key, bit in zip(asked, bits, strict=True) if bit and key not in tombstones}

    async def find_prefix(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Return the longest present prefix of ``keys``, locked if possible.

        No checkpoint after the answer.
        """
        tombstones = self._state.tombstones
        asked = list(takewhile(lambda key: key not in tombstones, keys))
        if not asked:
            return keys[:0]
        asked_at = self._state.registry.registrations
        bits = await self._state.find(asked)
        n = 0
        while n < len(asked) and bits[n] and asked[n] not in tombstones:
            n += 1
        self._state.driver.unlock([key for key, bit in zip(asked[n:], bits[n:], strict=True) if bit])
        if n < len(asked) and not bits[n]:
            self._state.registry.note_gone_by(asked[n : n + 1], asked_at)
        return keys[:n]

    async def load(self, keys: Sequence[Key], destination: Destination, there: Pages | None) -> list[Outcome]:
        """Copy blocks to a destination, position by position, and verify them.

        They are copied to ``there`` if the destination's places are host memory. Cancelled while the plugin is asked,
        it returns at once; while the destination is written, once that is over.

        Raises:
            NoAnswer, PluginFault: there was no answer, or it failed as a whole. The destination was not touched.
            Unproven: the destination raised it.
        """
        state = self._state
        outcomes: list[Outcome] = [Missed("gone") if key in state.tombstones else LOADED for key in keys]
        asked = [at for at, outcome in enumerate(outcomes) if outcome is LOADED]
        if asked:
            names = [keys[at] for at in asked]
            buffer = state.staging.take(len(asked))
            asked_at = state.registry.registrations
            bits = await self._get(names, buffer)
            short = [at for at in buffer.unfinished() if bits[at]]
            read = [bit and at not in short for at, bit in enumerate(bits)]
            try:
                await self._deliver(asked, names, read, buffer.pages, destination, there, outcomes)
            except BaseException as error:
                if holds(error, Unproven):
                    buffer.quarantine()
                else:
                    buffer.give_back()
                raise
            buffer.give_back()
            for at in short:
                outcomes[asked[at]] = Missed("short")
                self._hide(names[at])
            gone = [name for name, is_read in zip(names, read, strict=True) if not is_read]
            state.registry.note_gone_by(gone, asked_at)
        for outcome in outcomes:
            if isinstance(outcome, Missed):
                self.missed[outcome.reason] += 1
        self.loaded += outcomes.count(LOADED)
        return outcomes

    async def sums_of(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Return the checksums of the blocks under these keys now.

        Hidden or not; a key without a block is left out. Nothing stays locked.

        Raises:
            NoAnswer, PluginFault: there was no answer.
        """
        state = self._state
        bits = await state.find(keys)
        there = [key for key, bit in zip(keys, bits, strict=True) if bit]
        try:
            if not there:
                return {}
            buffer = state.staging.take(len(there))
            got = await self._get(there, buffer)
            try:
                sums = await run_in_thread_to_the_end(checksums, buffer.pages)
            finally:
                buffer.give_back()
        finally:
            state.driver.unlock(there)
        return {key: value for key, bit, value in zip(there, got, sums, strict=True) if bit}

    async def _get(self, keys: Sequence[Key], buffer: StagingBuffer) -> list[bool]:
        given_back = False

        def late(operation: Operation) -> None:
            nonlocal given_back
            given_back = True
            buffer.give_back()

        strangers = self._state.registry.strangers(keys)
        try:
            await self._clear(buffer, strangers)
        except BaseException:
            buffer.give_back()
            raise
        buffer.mark(strangers if self._state.checksums else range(len(keys)))
        operation = self._state.driver.operation(Kind.GET, keys, touches=buffer, undo=late)
        try:
            return await self._state.driver.run(operation, buffer.buffers())
        except BaseException:
            if operation.may_go_on:
                buffer.quarantine()
            elif not given_back:
                buffer.give_back()
            raise

    async def _clear(self, buffer: StagingBuffer, positions: Sequence[int]) -> None:
        if len(positions) * self._state.block_bytes <= PORTION_BYTES:
            buffer.clear(positions)
        else:
            await run_in_thread_to_the_end(buffer.clear, positions)

    async def _deliver(
        self,
        asked: Sequence[int],
        keys: Sequence[Key],
        bits: Sequence[bool],
        here: Pages,
        destination: Destination,
        there: Pages | None,
        outcomes: list[Outcome],
    ) -> None:
        """Copy neighbouring blocks that arrived from staging to the destination."""
        state = self._state
        for at, bit in zip(asked, bits, strict=True):
            if not bit:
                outcomes[at] = Missed("gone")
        for first, last in _runs([at if bit else None for at, bit in zip(asked, bits, strict=True)]):
            part, start = here.part(first, last), asked[first]
            try:
                places = None if there is None else there.part(start, start + len(part))
                sums = await load_pages(part, destination, places, state.checksums, self._in_place, start=start)
            except Exception as exc:
                if holds(exc, Unproven):
                    raise
                outcomes[start : start + len(part)] = [Failed(exc)] * len(part)
                continue
            expected = [state.registry.sums.get(key) if state.checksums else None for key in keys[first:last]]
            self.unverified += expected.count(None) * state.checksums
            for at in [] if sums is None else unequal(expected, sums):
                outcomes[start + at] = Missed("damaged")
                self._hide(keys[first + at])
                state.registry.note_gone((keys[first + at],))

    def _hide(self, key: Key) -> None:
        """Have a bad block deleted, unless its bytes are right by then."""
        right = self._state.registry.sums.get(key)
        if right is None:
            self._state.tombstones.note_bad((key,))
        else:
            self._state.tombstones.note_damaged(key, right)


def _runs(positions: Sequence[int | None]) -> list[tuple[int, int]]:
    """Return the start and end of runs of consecutive positions."""
    runs: list[tuple[int, int]] = []
    for at, position in enumerate(positions):
        if position is None:
            continue
        if runs and runs[-1][1] == at and positions[at - 1] == position - 1:
            runs[-1] = runs[-1][0], at + 1
        else:
            runs.append((at, at + 1))
    return runs
