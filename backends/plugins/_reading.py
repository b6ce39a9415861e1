"""Reading: what is there, holding it, and loading it.

Rule 1. The plugin writes into the host's memory, never into a destination: when a load ends, in whatever way, the
        destination is the caller's again, whatever the plugin still does.
Rule 2. A block is verified by the sum that was taken when it was stored through this host. One that was stored by somebody else
        has none here, and is counted as *unverified*.
Rule 3. What was found behind the first gap is of no use, and is unlocked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import takewhile

from maru.exception_groups import holds

from .._copying import load_pages, unequal
from .._errors import Unproven
from .._in_place import CopiesInPlace
from ..abc import LOADED, Destination, Failed, Key, Missed, Outcome
from ..pages import Pages, checksums
from ..threads import run_in_thread_to_the_end
from ._core import Core
from ._correlation import Kind, Operation
from ._staging import Run


class Reading:
    """The reads of one host.

    Args:
        core: the host.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._in_place = CopiesInPlace()
        self.loaded: int = 0
        self.unverified: int = 0
        self.missed: dict[str, int] = {"gone": 0, "damaged": 0}

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that can be found. Nothing is locked afterwards."""
        hidden = self._core.hidden
        asked = [key for key in dict.fromkeys(keys) if key not in hidden]
        if not asked:
            return set()
        bits = await self._core.present(asked)
        return {key for key, bit in zip(asked, bits, strict=True) if bit and key not in hidden}

    async def find_prefix(self, keys: Sequence[Key]) -> Sequence[Key]:
        """The longest prefix of ``keys`` that is there, locked where the plugin locks. No checkpoint behind the answer."""
        hidden = self._core.hidden
        asked = list(takewhile(lambda key: key not in hidden, keys))
        if not asked:
            return keys[:0]
        bits = await self._core.find(asked)
        n = 0
        while n < len(asked) and bits[n] and asked[n] not in hidden:
            n += 1
        self._core.line.unlock([key for key, bit in zip(asked[n:], bits[n:], strict=True) if bit])
        if n < len(asked) and not bits[n]:
            self._core.books.gone(asked[n : n + 1])
        return keys[:n]

    async def load(self, keys: Sequence[Key], destination: Destination, there: Pages | None) -> list[Outcome]:
        """Copy these to ``destination``, or to ``there`` if its places are host memory, position by position; verify them.

        Cancelled while the plugin is asked, it leaves at once; while the destination is written, once that is over.

        Raises:
            NoAnswer, PluginFault: nobody knows, or it failed as a whole. The destination was not touched.
            Unproven: the destination says so.
        """
        core = self._core
        outcomes: list[Outcome] = [Missed("gone") if key in core.hidden else LOADED for key in keys]
        asked = [at for at, outcome in enumerate(outcomes) if outcome is LOADED]
        if asked:
            names = [keys[at] for at in asked]
            run = core.staging.take(len(asked))
            bits = await self._get(names, run)
            try:
                await self._deliver(asked, names, bits, run.pages, destination, there, outcomes)
            except BaseException as error:
                if holds(error, Unproven):
                    run.quarantine()
                else:
                    run.give_back()
                raise
            run.give_back()
            core.books.gone(name for name, bit in zip(names, bits, strict=True) if not bit)
        for outcome in outcomes:
            if isinstance(outcome, Missed):
                self.missed[outcome.reason] += 1
        self.loaded += outcomes.count(LOADED)
        return outcomes

    async def sums_of(self, keys: Sequence[Key]) -> dict[Key, int]:
        """The checksums of what lies under these keys now, hidden or not, as far as anything does. Nothing stays locked.

        Raises:
            NoAnswer, PluginFault: nobody knows.
        """
        core = self._core
        bits = await core.find(keys)
        there = [key for key, bit in zip(keys, bits, strict=True) if bit]
        try:
            if not there:
                return {}
            run = core.staging.take(len(there))
            got = await self._get(there, run)
            try:
                sums = await run_in_thread_to_the_end(checksums, run.pages)
            finally:
                run.give_back()
        finally:
            core.line.unlock(there)
        return {key: value for key, bit, value in zip(there, got, sums, strict=True) if bit}

    async def _get(self, keys: Sequence[Key], run: Run) -> list[bool]:
        given_back = False

        def late(operation: Operation) -> None:
            nonlocal given_back
            given_back = True
            run.give_back()

        operation = self._core.line.question(Kind.GET, keys, touches=run, undo=late)
        try:
            return await self._core.line.answer(operation, run.buffers())
        except BaseException:
            if operation.may_go_on:
                run.quarantine()
            elif not given_back:
                run.give_back()
            raise

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
        """From the host's memory to the destination: runs of neighbours that have arrived."""
        core = self._core
        for at, bit in zip(asked, bits, strict=True):
            if not bit:
                outcomes[at] = Missed("gone")
        for first, last in _runs([at if bit else None for at, bit in zip(asked, bits, strict=True)]):
            part, start = here.part(first, last), asked[first]
            try:
                places = None if there is None else there.part(start, start + len(part))
                sums = await load_pages(part, destination, places, core.checksums, self._in_place, start=start)
            except Exception as exc:
                if holds(exc, Unproven):
                    raise
                outcomes[start : start + len(part)] = [Failed(exc)] * len(part)
                continue
            expected = [core.books.sums.get(key) if core.checksums else None for key in keys[first:last]]
            self.unverified += expected.count(None) * core.checksums
            for at in [] if sums is None else unequal(expected, sums):
                key, right = keys[first + at], expected[at]
                assert right is not None
                outcomes[start + at] = Missed("damaged")
                core.books.gone((key,))
                core.hidden.damaged(key, right)


def _runs(positions: Sequence[int | None]) -> list[tuple[int, int]]:
    """Stretches of this column, start and end, in which each position is the one before it and one more."""
    runs: list[tuple[int, int]] = []
    for at, position in enumerate(positions):
        if position is None:
            continue
        if runs and runs[-1][1] == at and positions[at - 1] == position - 1:
            runs[-1] = runs[-1][0], at + 1
        else:
            runs.append((at, at + 1))
    return runs
