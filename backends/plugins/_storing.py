"""Storing: what a transfer does once it has room.

    wait for who writes the same key -> delete what makes room -> ask what is there -> copy into the host's memory -> set

Rule 1. First writer wins. A connector's *set* overwrites, so what is there is asked first, and no key is set twice at once.
Rule 2. The plugin reads the host's memory, never the source: when a store ends, in whatever way, the source is free.
Rule 3. A failed *set* of a plugin that does not say which keys failed fails them all. What it may have left behind is
        condemned.
Rule 4. A *set* without an answer is unproven: its keys are in limbo, hidden and refused, and its memory is in quarantine, until
        the plugin does answer, which may be never.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet

import trio

from maru.exception_groups import holds

from .._copying import StoreCopy
from .._errors import Unproven
from .._in_place import CopiesInPlace
from ..abc import DUPLICATE, STORED, Failed, Key, Outcome, Rejected, Source
from ..threads import run_in_thread
from ._core import Core
from ._correlation import Kind, Operation
from ._errors import NoAnswer, PluginFault
from ._staging import Run

IN_LIMBO = Rejected("in limbo")
"""An earlier store of the same key may still go on."""


class Storing:
    """The stores of one host.

    Args:
        core: the host.
        bury: deletes what is condemned, as far as that works.
    """

    def __init__(self, core: Core, bury: Callable[[AbstractSet[Key]], Awaitable[None]]) -> None:
        self._core = core
        self._bury = bury
        self._in_place = CopiesInPlace()
        self.stored: int = 0
        self.duplicates: int = 0

    async def store(self, keys: Sequence[Key], source: Source, refs: Sequence[int]) -> list[Outcome]:
        """Store these. One outcome for each; see the rules above.

        Raises:
            NoAnswer: the plugin did not say what it has. Nothing was stored.
            PluginFault: the same.
            Unproven: it did not say that it has stored them.
        """
        hidden = self._core.hidden
        while (busy := next((hidden.writing[key] for key in keys if key in hidden.writing), None)) is not None:
            assert isinstance(busy, trio.Event)
            await busy.wait()
        outcomes: list[Outcome] = [IN_LIMBO if key in hidden.limbo else STORED for key in keys]
        free = [at for at, outcome in enumerate(outcomes) if outcome is STORED]
        if not free:
            return outcomes
        over = trio.Event()
        hidden.writing.update(dict.fromkeys([keys[at] for at in free], over))
        try:
            await self._store(free, keys, source, refs, outcomes)
        finally:
            for at in free:
                del hidden.writing[keys[at]]
            over.set()
        self.stored += outcomes.count(STORED)
        self.duplicates += outcomes.count(DUPLICATE)
        return outcomes

    async def _store(
        self, free: list[int], keys: Sequence[Key], source: Source, refs: Sequence[int], outcomes: list[Outcome]
    ) -> None:
        core = self._core
        await self._bury({keys[at] for at in free})
        there = await core.present([keys[at] for at in free])
        new: list[int] = []
        for at, is_there in zip(free, there, strict=True):
            if is_there and keys[at] not in core.hidden.condemned:
                outcomes[at] = DUPLICATE
            else:
                new.append(at)
        if not new:
            return
        run = core.staging.take(len(new))
        copy = StoreCopy(source, [keys[at] for at in new], [refs[at] for at in new], summed=core.checksums)
        failed = await self._fill(run, copy)
        for row, error in failed.items():
            outcomes[new[row]] = Failed(error)
        rows = [row for row in range(len(new)) if row not in failed]
        if not rows:
            run.give_back()
            return
        new = [new[row] for row in rows]
        names = [keys[at] for at in new]
        try:
            bits = await self._set(names, run, rows)
        except PluginFault as fault:
            core.hidden.bad(names)
            for at in new:
                outcomes[at] = Failed(fault)
            return
        good = [key for key, bit in zip(names, bits, strict=True) if bit]
        core.hidden.stored(good)
        core.hidden.bad(key for key, bit in zip(names, bits, strict=True) if not bit)
        if core.checksums:
            core.books.sums.update(
                (key, copy.sums[row]) for key, row, bit in zip(names, rows, bits, strict=True) if bit
            )
        for at, bit in zip(new, bits, strict=True):
            if not bit:
                outcomes[at] = Failed(PluginFault(f"{core.name} did not store {keys[at].hex()}"))

    async def _fill(self, run: Run, copy: StoreCopy) -> dict[int, Exception]:
        """Copy blocks of a source; what must not be stored. Cancelled, it leaves at once, whatever a thread does."""
        filling = _Filling()
        try:
            return await copy.into(run.pages, self._in_place, filling.off_thread)
        except BaseException as error:
            if holds(error, Unproven):
                run.quarantine()
            elif isinstance(error, Exception):
                run.give_back()
            else:
                run.quarantine(lambda: filling.is_over)
                filling.lost = run
                if filling.is_over:  # meanwhile, or since nothing was under way
                    run.give_back()
            raise

    async def _set(self, keys: Sequence[Key], run: Run, rows: Sequence[int]) -> list[bool]:
        core = self._core
        given_back = False

        def late(operation: Operation) -> None:
            nonlocal given_back
            given_back = True
            run.give_back()
            core.hidden.limbo.difference_update(keys)
            if operation.started:
                core.hidden.bad(key for key, bit in zip(keys, operation.bits or (), strict=False) if not bit)

        operation = core.line.question(Kind.SET, keys, touches=run, undo=late)
        try:
            bits = await core.line.answer(operation, run.buffers(rows))
        except BaseException as exc:
            if operation.may_go_on:
                run.quarantine()
                core.hidden.limbo.update(keys)
                if isinstance(exc, NoAnswer):
                    raise Unproven(f"{exc}: it may be storing still") from exc
            elif not given_back:
                run.give_back()
            raise
        run.give_back()
        return bits


class _Filling:
    """A copy in a thread that nobody may wait for any more."""

    def __init__(self) -> None:
        self.is_over = True
        self.lost: Run | None = None

    async def off_thread(self, fn: Callable[..., object], *args: object) -> object:
        """Run a copy; cancelled, leave at once. Cancelled before it began, none is under way."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.is_over = False
        return await run_in_thread(self._run, fn, *args)

    def _run(self, fn: Callable[..., object], *args: object) -> object:
        try:
            return fn(*args)
        finally:
            self.is_over = True
            if self.lost is not None:
                self.lost.free()
