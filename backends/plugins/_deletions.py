"""Deletions of one host, by request and of hidden keys.

Rule 1. A plugin that deletes by an operation reports for each key whether it did. One that deletes by a call reports
        nothing: so it is asked before and after, and a key that is still there was locked. An unlock may take a moment
        to arrive there, so a key that is still there is tried again, a few times.
Rule 2. A damaged block may have been deleted and stored again meanwhile, by another process. So it is read once more
        right before it is purged, a few blocks at a time: a block that is right by then stays. A block that is stored
        after that is deleted, and costs a miss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import trio

from ..abc import Deletion, Key
from ..base.threads import run_in_thread
from ._errors import NoAnswer, PluginFault
from ._host_state import HostState
from ._operations import Kind, Operation, Plugin

_AT_A_TIME = 16
"""Number of damaged blocks that are read again at a time.

A caller that is about to store waits for that.
"""

_AGAIN = (0.001, 0.005, 0.02, 0.05, 0.1)
"""Seconds before each further try."""


class Deleter:
    """The deletions of one host.

    Args:
        state: the state of the host.
        sums_of: returns the checksums of the blocks under some keys.
        deletes: whether its plugin can delete.
        by_call: whether it deletes by a call.
    """

    def __init__(
        self,
        state: HostState,
        sums_of: Callable[[Sequence[Key]], Awaitable[Mapping[Key, int]]],
        *,
        deletes: bool,
        by_call: bool,
    ) -> None:
        self._state = state
        self._sums_of = sums_of
        self._deletes = deletes
        self._by_call = by_call
        self._left: set[_Call] = set()
        self.deleted: int = 0

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys.

        A key that a lease of this process holds, or a store writes, is ``PINNED``.

        Raises:
            NoAnswer, PluginFault: it is unknown which are gone.
        """
        state = self._state
        answers = [Deletion.MISSING if key in state.tombstones.to_purge else Deletion.DELETED for key in keys]
        for at, key in enumerate(keys):
            if state.registry.is_leased(key) or not state.tombstones.is_idle(key):
                answers[at] = Deletion.PINNED
        asked = [at for at, answer in enumerate(answers) if answer is Deletion.DELETED]
        if asked:
            names = [keys[at] for at in asked]
            for at, answer in zip(asked, await self._delete(names), strict=True):
                answers[at] = answer
        self.deleted += answers.count(Deletion.DELETED)
        return answers

    async def purge(self, mine: AbstractSet[Key]) -> None:
        """Delete the keys to be purged that are not held.

        Keys of a plugin that does not answer stay to be purged.

        No checkpoint if there are none.

        Args:
            mine: keys that the caller is about to write: deleted first, since some plugins do not overwrite.
        """
        state = self._state
        if not self._deletes:
            return
        keys = self._to_purge(mine)
        if keys:
            with contextlib.suppress(NoAnswer, PluginFault):
                if state.tombstones.expected_sums:
                    known = await self._look_again(
                        [key for key in keys if key in state.tombstones.expected_sums][:_AT_A_TIME]
                    )
                    keys = [
                        key for key in self._to_purge(mine) if key in known or key not in state.tombstones.expected_sums
                    ]
                    if not keys:
                        return
                gone = [answer is Deletion.DELETED for answer in await self._drop(keys)]
                if not all(gone):  # "not deleted" may be "not there", or not
                    there = await state.present(keys)
                    gone = [not is_there for is_there in there]
                state.tombstones.note_purged(keys, gone)

    def _to_purge(self, mine: AbstractSet[Key]) -> list[Key]:
        state, free = self._state, self._state.tombstones.is_idle
        return [
            key for key in state.tombstones.to_purge if (key in mine or free(key)) and not state.registry.is_leased(key)
        ]

    async def _look_again(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Read damaged blocks again, and clear those that are right by now.

        Return the others; none without an answer.
        """
        if not keys:
            return frozenset()
        tombstones = self._state.tombstones
        try:
            found = await self._sums_of(keys)
        except (NoAnswer, PluginFault):
            return frozenset()
        right = [
            key for key in keys if key in tombstones.expected_sums and found.get(key) == tombstones.expected_sums[key]
        ]
        tombstones.clear(right)
        return {*keys}.difference(right)

    async def _delete(self, keys: Sequence[Key]) -> list[Deletion]:
        if not self._deletes:
            there = await self._state.present(keys)
            return [Deletion.UNAVAILABLE if is_there else Deletion.MISSING for is_there in there]
        answers = await self._drop(keys)
        self._state.registry.note_gone(
            key for key, answer in zip(keys, answers, strict=True) if answer is not Deletion.PINNED
        )
        return answers

    async def _drop(self, keys: Sequence[Key]) -> list[Deletion]:
        deleting = self._state.tombstones.deleting
        deleting.update(keys)
        try:
            if self._by_call:
                return await self._drop_by_call(keys)
            bits = await self._state.driver.ask(Kind.DELETE, keys, undo=self._late)
            return [Deletion.DELETED if bit else Deletion.MISSING for bit in bits]
        finally:
            deleting.difference_update(keys)

    def _late(self, operation: Operation) -> None:
        """Remove the keys that a late deletion has deleted.

        No task waited for it any more.
        """
        self._state.registry.note_gone(
            key for key, bit in zip(operation.keys, operation.bits or (), strict=False) if bit
        )

    async def _drop_by_call(self, keys: Sequence[Key]) -> list[Deletion]:
        answers = [
            Deletion.PINNED if is_there else Deletion.MISSING  # until it is gone
            for is_there in await self._state.present(keys)
        ]
        for pause in (0.0, *_AGAIN):
            left = [at for at, answer in enumerate(answers) if answer is Deletion.PINNED]
            if not left:
                break
            if pause:
                await trio.sleep(pause)
            await self._call([keys[at] for at in left])
            for at, is_there in zip(left, await self._state.present([keys[at] for at in left]), strict=True):
                if not is_there:
                    answers[at] = Deletion.DELETED
        return answers

    async def _call(self, keys: Sequence[Key]) -> None:
        driver, call = self._state.driver, _Call()
        most = driver.config.most_unanswered
        self._left = {left for left in self._left if not left.is_over}
        if len(self._left) >= most:
            raise PluginFault(f"{self._state.name}: {most} deletes have not returned: most_unanswered is {most}")
        with trio.move_on_after(driver.config.deadline) as scope:
            try:
                await run_in_thread(call.run, driver.plugin, keys)
            except Exception as exc:
                raise PluginFault(f"{self._state.name}: delete raised {exc!r}") from exc
            except BaseException:
                self._left.add(call)
                raise
        if scope.cancelled_caught:
            raise NoAnswer(f"{self._state.name}: delete did not return within {driver.config.deadline:g} s")


class _Call:
    """A delete in a thread that may be abandoned."""

    def __init__(self) -> None:
        self.is_over = False

    def run(self, plugin: Plugin, keys: Sequence[Key]) -> None:
        try:
            plugin.delete(keys)
        finally:
            self.is_over = True
