"""The check of a layout: a pattern is stored and loaded again.

It is made before the first request, and the planes of the pattern have to come back. Two layouts of one shape (keys
before or after values, one order of heads or another) store the same bytes, and load them into each other's planes: no
checksum differs, and no shape. So a pattern that is different in each plane is written into a free block, stored,
loaded into the cleared block, and read by the names of the planes (:mod:`backends.base.planes`). That is done twice:

* under a key of this check alone. It finds a place that writes otherwise than it reads;
* under the key of this layout's name, which is the same in all processes. The first process stores it; later ones load
  the pattern of another process, and find out whether it means the same planes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from backends.abc import LOADED, Blocks, Canary, Deletion, Key, Unproven
from backends.base.planes import difference
from backends.base.threads import run_in_thread_to_the_end
from maru.exception_groups import holds

from .._errors import DrainUnproven, LayoutCheckFailed, OffloadError
from .._keys import block_key
from .._pipeline.lifecycle import Status
from ..abc import Mismatch, Precondition
from ..preconditions import NO_WAIT
from .loading import wait_for
from .shadow import MISMATCH

if TYPE_CHECKING:
    from .engine import Engine

_NAME = b"layout check"


@attrs.frozen
class LayoutCheck:
    """The result of the check of a layout.

    A layout that is wrong raises :class:`offload.LayoutCheckFailed`.
    """

    round_trip: bool
    """Whether this engine's pattern came back plane by plane."""
    shared: bool
    """Whether the pattern stored under the layout's name came back, too.

    This engine or another process stored it.
    """
    inconclusive: str = ""
    """The reason why one of them was not checked to the end.

    No tier answered, or none has taken the block.
    """


@attrs.define(eq=False)
class LayoutChecker:
    """One check of a layout.

    ``canary`` owns a free block of the engine, which is overwritten, and holds zeros after the check.
    """

    engine: Engine
    canary: Canary
    layout: str
    """The name of the layout."""
    precondition: Precondition
    """Condition that the device's earlier work on the block is done."""
    reason: str = ""

    async def run(self) -> LayoutCheck:
        """Check both ways.

        Raises:
            LayoutCheckFailed: planes came back as other ones.
        """
        await wait_for(self.precondition)
        async with _on_error(self._clear):
            round_trip = await self._round_trip()
            common = self._key(_NAME)
            shared = await self._comes_back(common) or (round_trip and await self._share(common))
        await self._clear()
        return LayoutCheck(round_trip, shared, "" if round_trip and shared else self.reason)

    async def _clear(self) -> None:
        with trio.CancelScope(shield=True):
            await run_in_thread_to_the_end(self.canary.clear)

    def _key(self, name: bytes) -> Key:
        # Digits: a tier may take keys for texts, and name its pages by them.
        return block_key(name, salt=self.layout).hex().encode()

    async def _round_trip(self) -> bool:
        """Store, load and delete the pattern under a key of its own."""
        own = self._key(_NAME + os.urandom(16))
        forget = partial(self._forget, own)
        async with _on_error(forget):
            back = await self._store(own) and await self._comes_back(own)
        await forget()
        return back

    async def _share(self, key: Key) -> bool:
        """Store the pattern for other processes; forget it unless it comes back."""
        if not await self._store(key):
            return False
        async with _on_error(partial(self._forget, key)):
            return await self._comes_back(key)

    async def _store(self, key: Key) -> bool:
        """Write the pattern and store it; return whether it has arrived."""
        blocks, _ = await self._write(key)
        try:
            handle = await self.engine.store(blocks, NO_WAIT)
            try:
                result = await handle.wait()
            except trio.Cancelled:
                with trio.CancelScope(shield=True):  # until then the block may be read
                    await handle.cancel()
                raise
        except DrainUnproven:
            raise
        except OffloadError as error:
            self.reason = f"not stored: {error}"
            return False
        if result.status is Status.COMPLETE and key in result.completed:
            return True
        if isinstance(result.error, DrainUnproven):
            raise result.error
        self.reason = (
            f"not stored: {result.error or {**result.filtered, **result.failed}.get(key, result.status.value)}"
        )
        return False

    async def _write(self, key: Key) -> tuple[Blocks, array[float]]:
        """Write the pattern; return the block, and the pattern's samples.

        In a thread, since it waits for a device.
        """
        return await run_in_thread_to_the_end(self.canary.write, key, self.layout)

    async def _comes_back(self, key: Key) -> bool:
        """Load the block, and compare its planes with the pattern.

        Returns False if the block is not there.
        """
        _, expected = await self._write(key)
        destination = await run_in_thread_to_the_end(self.canary.clear)
        async with await self.engine.lookup([key]) as hit:
            # The canary's writes are over when it returns.
            result = await self.engine.load(hit, destination, precondition=NO_WAIT, promote=False)
            outcomes = result.outcomes
            tier = hit.runs[0][0] if len(hit) else ""
            silent = ", ".join(hit.unavailable)
        # The shadow check may have been faster: a block that it found wrong has arrived all the same.
        if not outcomes or outcomes[0] not in (LOADED, MISMATCH):
            self.reason = f"no answer from {silent}" if silent else self.reason or "not found after it was stored"
            return False
        (found,) = await run_in_thread_to_the_end(destination.plane_samples, [0])
        what = difference(destination.plane_names, expected, found or array("f"))
        if what is not None:
            self.engine._announce(Mismatch(key, tier, "layout", what))
            raise LayoutCheckFailed(
                f"a block stored in layout {self.layout or 'without a name'} was read wrong from {tier}: {what}"
            )
        return True

    async def _forget(self, key: Key) -> None:
        answers = await self.engine.delete([key], within=1.0)
        if answers != [Deletion.MISSING] and answers != [Deletion.DELETED]:
            self.reason = self.reason or f"the block of the check was not deleted: {answers[0].value}"


@asynccontextmanager
async def _on_error(cleanup: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Clean up after an error, which remains the error.

    Not after a copy without a proven end, which may still use the block. One of the cleanup is the only error that replaces
    another one.
    """
    try:
        yield
    except BaseException as error:
        if not holds(error, (Unproven, DrainUnproven)):
            with trio.CancelScope(shield=True):
                try:
                    await cleanup()
                except Exception as second:
                    if holds(second, (Unproven, DrainUnproven)):
                        raise
        raise
