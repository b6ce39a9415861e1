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
from typing import TYPE_CHECKING

import attrs
import trio

from backends.abc import LOADED, Blocks, Canary, Deletion, Key
from backends.base.planes import difference
from backends.base.threads import run_in_thread_to_the_end

from .._errors import DrainUnproven, LayoutCheckFailed, OffloadError
from .._keys import block_key
from .._pipeline.lifecycle import Status
from ..abc import Mismatch
from ..preconditions import NO_WAIT
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
    reason: str = ""

    async def run(self) -> LayoutCheck:
        """Check both ways.

        Raises:
            LayoutCheckFailed: planes came back as other ones.
        """
        try:
            round_trip = await self._round_trip()
            common = self._key(_NAME)
            shared = await self._comes_back(common)
            if not shared and round_trip:
                shared = await self._store(common) and await self._comes_back(common)
        finally:
            with trio.CancelScope(shield=True):
                await run_in_thread_to_the_end(self.canary.clear)
        return LayoutCheck(round_trip, shared, "" if round_trip and shared else self.reason)

    def _key(self, name: bytes) -> Key:
        # Digits: a tier may take keys for texts, and name its pages by them.
        return block_key(name, salt=self.layout).hex().encode()

    async def _round_trip(self) -> bool:
        """Store, load and delete the pattern under a key of its own."""
        own = self._key(_NAME + os.urandom(16))
        try:
            return await self._store(own) and await self._comes_back(own)
        finally:
            await self._forget(own)

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
                f"a block stored in layout {self.layout or 'without a name'} comes back from {tier}: {what}"
            )
        return True

    async def _forget(self, key: Key) -> None:
        answers = await self.engine.delete([key], within=1.0)
        if answers != [Deletion.MISSING] and answers != [Deletion.DELETED]:
            self.reason = self.reason or f"the block of the check stays: {answers[0].value}"
