"""Stores that wait for nothing: all stages in one step.

They take neither a task nor a channel. The calling thread has the pipeline to itself until the call returns: it is the
pipeline's trio thread, or a thread that acts in its place while that one waits for events
(:mod:`offload.from_thread._loop_lock`). So no trio task may be woken here, and none may be awaited:

Rule 1. A store begins only if nothing in it has to wait: its policies and instruments may be called in any thread, the
        refs of its blocks are known, the destination stores at once
        (:meth:`backends.base.direct.DirectTier.stores_at_once`), no chain follows, and no load goes before it.
Rule 2. A container that was admitted and then finds no room continues the ordinary way (:meth:`Pipeline.resume`): its
        policies have answered, and are not asked again.
Rule 3. The stages are the same functions that tasks call, with their hooks, marks and counts, in their order.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

import attrs

from backends.abc import Blocks, ExternalBlocks, RoomRequest, Unproven

from .._config import PipelineConfig
from .._health.breaker_tier import BreakerTier
from .._instruments import Hooks
from .admission import Admission
from .container import OffloadBatch, OffloadContainer
from .priority import LoadPriority
from .settlement import Settlement
from .slot import Slot
from .transfer import Transfer

_log = logging.getLogger("offload.pipeline")


@attrs.define(eq=False)
class AtOnce:
    """The stages of one pipeline, for containers that need not wait."""

    config: PipelineConfig
    settlement: Settlement
    hooks: Hooks
    admission: Admission
    transfer: Transfer
    load_priority: LoadPriority | None
    _slot: Slot = attrs.field(init=False)
    _destination: BreakerTier | None = attrs.field(init=False, default=None)
    """The destination, or ``None`` if such stores are impossible."""

    def __attrs_post_init__(self) -> None:
        self._slot = Slot(self.transfer)
        destination = self.transfer.destination
        alone = self.transfer.chain is None and self.admission.in_any_thread
        if alone and isinstance(destination, BreakerTier) and destination.may_store_at_once:
            destination.tell_time_by(self.transfer.clock)
            self._destination = destination

    @property
    def is_possible(self) -> bool:
        """Whether the pipeline can store at once at all."""
        return self._destination is not None

    def allows(self, blocks: Blocks) -> bool:
        """Return whether a store of these blocks need not wait: rule 1.

        Its precondition holds already.
        """
        destination, refs, source = self._destination, blocks.refs, blocks.source
        return (
            destination is not None
            and self.hooks.in_any_thread
            and isinstance(blocks, ExternalBlocks)
            and bool(refs)
            and (self.load_priority is None or self.load_priority.is_clear)
            and not self.settlement.draining
            and destination.stores_at_once(len(blocks.keys), source.block_bytes)
            and source.views(refs) is not None  # type: ignore[arg-type]  # None is false
        )

    def carry(self, container: OffloadContainer) -> bool:
        """Take an allowed container through all stages.

        Returns whether it has settled; it has not if there is no room, see rule 2.
        """
        if not self.admission.step(container):
            return True
        hooks = self.hooks
        for name, subscribed in (("awaiting", hooks.awaiting), ("batching", hooks.batching)):
            if subscribed:
                hooks.fire(name, container)
        batch = OffloadBatch([container], list(container.keys))
        request = RoomRequest(batch.keys, container.blocks.source.block_bytes, self.config.on_destination_full)
        try:
            assert self._destination is not None
            reservation = self._destination.reserve_nowait(request)
        except Exception:  # the ordinary way asks again, and distinguishes a full destination from a broken one
            return False
        _run(self._slot.carry_reserved(batch, reservation))
        return True


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that, by rule 1, waits for nothing.

    If it waits all the same, its copy counts as unproven.
    """
    try:
        coroutine.send(None)
        _log.error("a destination that stores at once has waited: its copy is quarantined")
        coroutine.throw(Unproven("it has waited where nothing waits"))
    except StopIteration:
        pass
    finally:
        coroutine.close()
