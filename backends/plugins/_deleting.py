"""Deleting: by request, and what is condemned.

A plugin that deletes by an operation says of each key whether it did. One that deletes by a call says nothing: so it is asked
before and after, and what is still there was locked by somebody. An unlock may take a moment to arrive there, so a key that is
still there is tried again, a few times.

What was found damaged may have been deleted and stored anew meanwhile, by another process. So it is read once more right
before, a few at a time: what is what was stored by then, stays. What is stored anew behind that goes, and costs a miss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import trio

from ..abc import Deletion, Key
from ..threads import run_in_thread
from ._core import Core
from ._correlation import Kind, Operation
from ._errors import NoAnswer, PluginFault
from ._peer import Peer

_AT_A_TIME = 16
"""So many that were found damaged are read once more at a time: who is about to store waits for that."""

_AGAIN = (0.001, 0.005, 0.02, 0.05, 0.1)
"""Seconds before each further try."""


class Deleting:
    """The deletions of one host.

    Args:
        core: the host.
        sums_of: says what lies under some keys now.
        deletes: whether its plugin can.
        by_call: whether it does by a call.
    """

    def __init__(
        self,
        core: Core,
        sums_of: Callable[[Sequence[Key]], Awaitable[Mapping[Key, int]]],
        *,
        deletes: bool,
        by_call: bool,
    ) -> None:
        self._core = core
        self._sums_of = sums_of
        self._deletes = deletes
        self._by_call = by_call
        self._left: set[_Call] = set()
        self.deleted: int = 0

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Forget these keys. What a lease of this process holds, or a store writes, is ``PINNED``.

        Raises:
            NoAnswer, PluginFault: nobody knows which are gone.
        """
        core = self._core
        answers = [Deletion.MISSING if key in core.hidden.condemned else Deletion.DELETED for key in keys]
        for at, key in enumerate(keys):
            if core.books.is_leased(key) or not core.hidden.is_free(key):
                answers[at] = Deletion.PINNED
        asked = [at for at, answer in enumerate(answers) if answer is Deletion.DELETED]
        if asked:
            names = [keys[at] for at in asked]
            for at, answer in zip(asked, await self._delete(names), strict=True):
                answers[at] = answer
        self.deleted += answers.count(Deletion.DELETED)
        return answers

    async def bury(self, mine: AbstractSet[Key]) -> None:
        """Delete what is condemned, as far as nobody holds it and the plugin answers. No checkpoint if there is none.

        Args:
            mine: keys that the caller is about to write: to be deleted first, since some plugins keep what they have.
        """
        core = self._core
        if not self._deletes:
            return
        keys = self._to_bury(mine)
        if keys:
            with contextlib.suppress(NoAnswer, PluginFault):
                if core.hidden.right:
                    known = await self._look_again([key for key in keys if key in core.hidden.right][:_AT_A_TIME])
                    keys = [key for key in self._to_bury(mine) if key in known or key not in core.hidden.right]
                    if not keys:
                        return
                gone = [answer is Deletion.DELETED for answer in await self._drop(keys)]
                if not all(gone):  # "not deleted" may be "not there", or not
                    there = await core.present(keys)
                    gone = [not is_there for is_there in there]
                core.hidden.buried(keys, gone)

    def _to_bury(self, mine: AbstractSet[Key]) -> list[Key]:
        core, free = self._core, self._core.hidden.is_free
        return [key for key in core.hidden.condemned if (key in mine or free(key)) and not core.books.is_leased(key)]

    async def _look_again(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Read these, which were found damaged, and acquit what is right by now. Returns the others; none if nobody knows."""
        if not keys:
            return frozenset()
        hidden = self._core.hidden
        try:
            found = await self._sums_of(keys)
        except (NoAnswer, PluginFault):
            return frozenset()
        right = [key for key in keys if key in hidden.right and found.get(key) == hidden.right[key]]
        hidden.stored(right)
        return {*keys}.difference(right)

    async def _delete(self, keys: Sequence[Key]) -> list[Deletion]:
        if not self._deletes:
            there = await self._core.present(keys)
            return [Deletion.UNAVAILABLE if is_there else Deletion.MISSING for is_there in there]
        answers = await self._drop(keys)
        self._core.books.gone(key for key, answer in zip(keys, answers, strict=True) if answer is not Deletion.PINNED)
        return answers

    async def _drop(self, keys: Sequence[Key]) -> list[Deletion]:
        deleting = self._core.hidden.deleting
        deleting.update(keys)
        try:
            if self._by_call:
                return await self._drop_by_call(keys)
            bits = await self._core.line.ask(Kind.DELETE, keys, undo=self._late)
            return [Deletion.DELETED if bit else Deletion.MISSING for bit in bits]
        finally:
            deleting.difference_update(keys)

    def _late(self, operation: Operation) -> None:
        """Nobody waited for it, and yet they are gone."""
        self._core.books.gone(key for key, bit in zip(operation.keys, operation.bits or (), strict=False) if bit)

    async def _drop_by_call(self, keys: Sequence[Key]) -> list[Deletion]:
        answers = [
            Deletion.PINNED if is_there else Deletion.MISSING  # until it is gone
            for is_there in await self._core.present(keys)
        ]
        for pause in (0.0, *_AGAIN):
            left = [at for at, answer in enumerate(answers) if answer is Deletion.PINNED]
            if not left:
                break
            if pause:
                await trio.sleep(pause)
            await self._call([keys[at] for at in left])
            for at, is_there in zip(left, await self._core.present([keys[at] for at in left]), strict=True):
                if not is_there:
                    answers[at] = Deletion.DELETED
        return answers

    async def _call(self, keys: Sequence[Key]) -> None:
        line, call = self._core.line, _Call()
        most = line.config.most_unanswered
        self._left = {left for left in self._left if not left.is_over}
        if len(self._left) >= most:
            raise PluginFault(f"{self._core.name}: {most} deletes have not returned: most_unanswered is {most}")
        with trio.move_on_after(line.config.deadline) as scope:
            try:
                await run_in_thread(call.run, line.peer, keys)
            except Exception as exc:
                raise PluginFault(f"{self._core.name}: delete raised {exc!r}") from exc
            except BaseException:
                self._left.add(call)
                raise
        if scope.cancelled_caught:
            raise NoAnswer(f"{self._core.name}: delete did not return within {line.config.deadline:g} s")


class _Call:
    """A delete in a thread that nobody may wait for any more."""

    def __init__(self) -> None:
        self.is_over = False

    def run(self, peer: Peer, keys: Sequence[Key]) -> None:
        try:
            peer.delete(keys)
        finally:
            self.is_over = True
