"""The interfaces that users of a pipeline implement: policy, precondition, instrument.

A *policy* decides which blocks may leave. It is called once per container with all its keys, and names the rejected ones only.
A *precondition* says when the data is there. An *instrument* observes. Tiers are implemented against
:mod:`backends.abc`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, runtime_checkable

import attrs
import trio

from backends.abc import Key as Key

if TYPE_CHECKING:
    from array import array

    import offload
    from backends.abc import Destination

    from ._engine import LoadResult
    from ._pipeline.container import OffloadBatch, OffloadContainer
    from ._pipeline.pipeline import Pipeline

Reasons: TypeAlias = Mapping[Key, str]
"""A policy's answer: the rejected keys only, each with the reason in a word."""


@attrs.frozen
class Leased:
    """A policy's answer together with a lock that it took.

    The container owns the lock from then on and releases it when it settles, on every path.
    """

    reasons: Reasons
    """The rejected keys, each with the reason."""
    release: Callable[[], None]
    """Releases the lock. Called once, on the trio thread; must not block."""


Policy: TypeAlias = Callable[[Sequence[Key]], "Reasons | Leased"]
"""A policy that never waits: runs inline, without a task or a scope, in one call for all blocks of a container."""


class AsyncPolicy(ABC):
    """A policy that waits, because it asks a server or takes a lock, for example.

    ``policy_timeout`` bounds it for the whole container; cancelled there, it must not hold a lock.
    """

    @abstractmethod
    async def evaluate(self, keys: Sequence[Key]) -> Reasons | Leased:
        """Return the rejected ones of ``keys``, each with its reason."""

    def evaluate_nowait(self, keys: Sequence[Key]) -> Reasons | Leased | None:
        """Like :meth:`evaluate`, where it can be told without waiting: a container then needs no task. Optional.

        ``None`` where it cannot, which is always so unless a policy says otherwise. Never blocks.
        """
        return None


class Precondition(ABC):
    """A condition for reading a container's bytes: mostly that the forward pass which writes them is over.

    Hashable (as any object is): where waiting is ``passive``, containers whose preconditions are equal wait in one task.
    """

    @abstractmethod
    def is_set(self) -> bool:
        """Whether it is known to hold already. Never blocks. A load asks in the thread that calls it."""

    @abstractmethod
    async def wait(self) -> None:
        """Return once it holds; raise if it never will. When cancelled, leave nothing behind."""

    @property
    def passive(self) -> bool:
        """Whether waiting runs no code of the caller's, so that a cancelled container need not wait for that to end."""
        return False


class DeviceEvent(Protocol):
    """An event of a device, such as a ``torch.cuda.Event``: any object with these methods."""

    def query(self) -> bool:
        """Whether the event has happened. Never blocks."""

    def synchronize(self) -> object:
        """Block until it has happened. Never called here: the method identifies a device event."""


PreconditionLike: TypeAlias = Precondition | trio.Event | DeviceEvent | Callable[[], Awaitable[object]]
"""What ``precondition=`` takes: ``NO_WAIT``, a trio, thread or CUDA event, an async callable, or a Precondition."""


class Instrument(Protocol):
    """An observer with optional hooks: define the ones you want. None may block; one that raises is removed.

    Every hook is called synchronously on the trio thread. Hooks named after a stage are called when a container enters it.

    With an attribute ``in_any_thread`` that is true, an instrument (or a policy) says that it may also be called by a thread
    that stores through :mod:`offload.from_thread`, while the trio thread waits for events: never two at once, and outside of a
    trio run. Where one does not say so, such stores are made in the trio thread.
    """

    def admission(self, container: OffloadContainer) -> None:
        """The container was taken from the queue; its policies run next."""

    def awaiting(self, container: OffloadContainer) -> None:
        """Its policies have passed some of its blocks; its precondition is looked at next."""

    def batching(self, container: OffloadContainer) -> None:
        """Its precondition holds; it is ready for a batch."""

    def transfer(self, batch: OffloadBatch) -> None:
        """A slot owns the batch; room is reserved next."""

    def pre_claim(self, batch: OffloadBatch) -> None:
        """Room is reserved; the last sweep comes next."""

    def sweep_claim_gap(self, batch: OffloadBatch) -> None:
        """The batch was swept; the claims come next."""

    def post_claim(self, containers: Sequence[OffloadContainer]) -> None:
        """These containers are committed; nothing else ran since the first of them was. Announced once per batch."""

    def xfer_start(self, batch: OffloadBatch) -> None:
        """The copy starts."""

    def xfer_end(self, batch: OffloadBatch) -> None:
        """The copy is over, or counted as unproven; nothing is settled yet."""

    def settled(self, container: OffloadContainer) -> None:
        """The container is terminal: what it held is released (or quarantined), its status published, and no task told yet."""


HOOKS: Final[tuple[str, ...]] = tuple(name for name in vars(Instrument) if not name.startswith("_"))
"""The name of every hook, in the order in which a container meets them."""


class CallInstrument(Protocol):
    """An observer of what a user asks a pipeline for, beside the path that a container takes: the same object may be both."""

    def enqueued(self, container: OffloadContainer) -> None:
        """The pipeline has taken the container in; it is in no stage yet."""

    def cancel_requested(self, container: OffloadContainer) -> None:
        """Its cancellation is asked for, by its handle or its token; nothing has come of that yet. Not called after its end."""


CALLS: Final[tuple[str, ...]] = tuple(name for name in vars(CallInstrument) if not name.startswith("_"))
"""The hooks of :class:`CallInstrument`."""


# --- whether what is loaded is what was stored ---------------------------------------------------------------------------


@attrs.frozen
class Mismatch:
    """A block that was loaded, verified, and is not what its key stands for."""

    key: Key
    """Its name: withheld from now on, until it is stored anew."""
    tier: str
    """Where it was loaded from."""
    found_by: Literal["stored", "recomputed", "read again", "layout"]
    """What it was compared with: what its planes held when it was stored, what the engine has computed, what the tier gave
    when it was asked once more; or the pattern that :meth:`offload.Engine.check_layout` has written."""
    what: str
    """What is different, in words: ``8 of 24 planes are in each other's places: layer 0 kv 0 head 0 holds layer 0 kv 1 head
    0``."""


class EngineInstrument(Protocol):
    """An observer of an engine, beside those of its pipelines, with optional hooks. The same object may be both."""

    def looked_up(self, keys: Sequence[Key], hit: offload.Hit) -> None:
        """A lookup of these keys was answered, and what was found is pinned."""

    def loaded(self, hit: offload.Hit, result: LoadResult, seconds: float) -> None:
        """A load is over; it took so long, from when its precondition held."""

    def deleted(self, keys: Sequence[Key]) -> None:
        """These keys were deleted in all tiers that could be asked."""

    def mismatch(self, mismatch: Mismatch) -> None:
        """What was loaded is not what its key stands for. Called on the trio thread; may not block; removed when it raises."""


ENGINE_HOOKS: Final[tuple[str, ...]] = ("looked_up", "loaded", "deleted")
"""The hooks of :class:`EngineInstrument` that :meth:`offload.Engine.add_instrument` takes; ``mismatch`` is for those that are
given when the engine is opened."""


@runtime_checkable
class Watcher(Protocol):
    """An observer that adds its hooks itself, to each pipeline or engine that it is given to as one of the ``instruments``."""

    def watch(self, opened: Pipeline | offload.Engine) -> None:
        """Observe this, which was just opened. Called on the trio thread; may not block."""


class Recompute(Protocol):
    """Computes blocks once more, so that what was loaded can be compared with it: an engine hands it to ``open_engine``."""

    def __call__(
        self, keys: Sequence[Key], destination: Destination, positions: Sequence[int]
    ) -> Sequence[array[float] | None]:
        """The samples that these blocks should have, as the engine's own layout reads them (:mod:`backends.base.planes`).

        Called in a worker thread, while the load that it is asked for waits: ``keys`` lie at ``positions`` of
        ``destination``, and the blocks before them are at their places, so that one block can be computed by itself.

        Args:
            keys: what was loaded, some blocks of one load.
            destination: of that load.
            positions: of each key in there.

        Returns:
            One for each key; ``None`` for a block that is not computed now.
        """
        ...
