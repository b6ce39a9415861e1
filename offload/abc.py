"""The interfaces that users of a pipeline implement: policy, precondition, instrument.

A *policy* decides which blocks a pipeline stores. It is called once per container (the blocks of one store) with all
its keys, and returns the rejected ones only. A *precondition* holds once the data of a container is written and may be
read. An *instrument* observes a pipeline or an engine. Tiers, the places between which blocks move, are implemented
against :mod:`backends.abc`.
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
"""A policy's answer: only the rejected keys, each with a one-word reason."""


@attrs.frozen
class Leased:
    """A policy's answer together with a lock that it took.

    The container owns the lock from then on and releases it when it settles, on every path.
    """

    reasons: Reasons
    """The rejected keys, each with the reason."""
    release: Callable[[], None]
    """The function that releases the lock.

    Called once, on the trio thread; must not block.
    """


Policy: TypeAlias = Callable[[Sequence[Key]], "Reasons | Leased"]
"""A policy that never waits.

It runs inline, without a task or a scope, in one call for all blocks of a container.
"""


class AsyncPolicy(ABC):
    """A policy that waits for a server or a lock, for example.

    ``policy_timeout`` bounds it for the whole container. If it is cancelled at that time, it must not hold a lock.
    """

    @abstractmethod
    async def evaluate(self, keys: Sequence[Key]) -> Reasons | Leased:
        """Return the rejected ones of ``keys``, each with its reason."""

    def evaluate_nowait(self, keys: Sequence[Key]) -> Reasons | Leased | None:
        """Return the answer of :meth:`evaluate` if it is known without waiting.

        Optional: with an answer, a container needs no task. Never blocks.

        Returns:
            ``None`` if the answer is not known, which is the default.
        """
        return None


class Precondition(ABC):
    """A condition for reading a container's bytes.

    Mostly it is the end of the forward pass that writes them. A precondition is hashable, as any object is: if waiting
    is ``passive``, containers whose preconditions are equal wait in one task.
    """

    @abstractmethod
    def is_set(self) -> bool:
        """Return whether the condition is known to hold already.

        Never blocks. A load calls it in the thread that loads.
        """

    @abstractmethod
    async def wait(self) -> None:
        """Return once the condition holds; raise if it never will.

        If cancelled, leave nothing behind.
        """

    @property
    def passive(self) -> bool:
        """Whether waiting runs none of the caller's code.

        A container that is cancelled then need not wait for such code to end.
        """
        return False


class DeviceEvent(Protocol):
    """An event of a device, such as a ``torch.cuda.Event``.

    Any object with these methods is one.
    """

    def query(self) -> bool:
        """Return whether the event has happened. Never blocks."""

    def synchronize(self) -> object:
        """Block until the event has happened.

        Never called by this package: the method identifies a device event.
        """


PreconditionLike: TypeAlias = Precondition | trio.Event | DeviceEvent | Callable[[], Awaitable[object]]
"""The argument ``precondition=``.

``NO_WAIT``, a trio, thread or CUDA event, an async callable, or a Precondition.
"""


class Instrument(Protocol):
    """An observer of a pipeline with optional hooks.

    Define the hooks that you want. None may block; an instrument that raises is removed.

    Every hook is called synchronously on the trio thread. Hooks named after a stage are called when a container enters
    it.

    An instrument or a policy whose attribute ``in_any_thread`` is true may also be called by a thread that stores
    through :mod:`offload.from_thread`, while the trio thread waits for events: never two at once, and outside of a trio
    run. Without the attribute, such stores are made in the trio thread.
    """

    def admission(self, container: OffloadContainer) -> None:
        """Handle a container taken from the queue; its policies run next."""

    def awaiting(self, container: OffloadContainer) -> None:
        """Handle a container whose policies have passed some of its blocks.

        Its precondition is checked next.
        """

    def batching(self, container: OffloadContainer) -> None:
        """Handle a container whose precondition holds: it is ready for a batch."""

    def transfer(self, batch: OffloadBatch) -> None:
        """Handle a batch that a slot owns; room is reserved next."""

    def pre_claim(self, batch: OffloadBatch) -> None:
        """Handle a batch whose room is reserved; the last sweep comes next."""

    def sweep_claim_gap(self, batch: OffloadBatch) -> None:
        """Handle a batch that was swept; the claims come next."""

    def post_claim(self, containers: Sequence[OffloadContainer]) -> None:
        """Handle the containers of a batch, which are now committed.

        Nothing else ran since the first of them was committed. Called once per batch.
        """

    def xfer_start(self, batch: OffloadBatch) -> None:
        """Handle a batch whose copy starts."""

    def xfer_end(self, batch: OffloadBatch) -> None:
        """Handle a batch whose copy is over, or counted as unproven.

        Nothing is settled yet.
        """

    def settled(self, container: OffloadContainer) -> None:
        """Handle a container in its terminal state.

        Its resources are released (or quarantined) and its status is published, but no task has been notified yet.
        """


HOOKS: Final[tuple[str, ...]] = tuple(name for name in vars(Instrument) if not name.startswith("_"))
"""The name of every hook, in the order of a container's path."""


class CallInstrument(Protocol):
    """An observer of the calls that a user makes to a pipeline.

    The same object may also be an :class:`Instrument`.
    """

    def enqueued(self, container: OffloadContainer) -> None:
        """Handle a container taken in, which is in no stage yet."""

    def cancel_requested(self, container: OffloadContainer) -> None:
        """Handle a request to cancel a container, from its handle or token.

        The request has had no effect yet. Not called after the container's end.
        """


CALLS: Final[tuple[str, ...]] = tuple(name for name in vars(CallInstrument) if not name.startswith("_"))
"""The hooks of :class:`CallInstrument`."""


# --- whether loaded blocks are the stored ones
# ---------------------------------------------------------------------------


@attrs.frozen
class Mismatch:
    """A loaded and verified block that differs from its key's content."""

    key: Key
    """The block's key: withheld from now on, until it is stored again."""
    tier: str
    """The name of the tier from which the block was loaded."""
    found_by: Literal["stored", "recomputed", "read again", "layout"]
    """The block's reference in the comparison.

    ``stored``: its planes when it was stored; ``recomputed``: the planes that the engine has computed; ``read again``:
    the tier's second answer; ``layout``: the pattern that :meth:`offload.Engine.check_layout` has written.
    """
    what: str
    """The difference in words.

    For example ``8 of 24 planes are swapped: layer 0 kv 0 head 0 holds layer 0 kv 1 head 0``.
    """


class EngineInstrument(Protocol):
    """An observer of an engine, with optional hooks.

    The same object may also observe the engine's pipelines, as an :class:`Instrument`.
    """

    def looked_up(self, keys: Sequence[Key], hit: offload.Hit) -> None:
        """Handle a lookup of these keys, whose found blocks are pinned."""

    def loaded(self, hit: offload.Hit, result: LoadResult, seconds: float) -> None:
        """Handle a finished load, and the seconds since its precondition held."""

    def deleted(self, keys: Sequence[Key]) -> None:
        """Handle keys that were deleted in all reachable tiers."""

    def mismatch(self, mismatch: Mismatch) -> None:
        """Handle a loaded block that differs from its key's content.

        Called on the trio thread; may not block; an instrument that raises is removed.
        """


ENGINE_HOOKS: Final[tuple[str, ...]] = ("looked_up", "loaded", "deleted")
"""The hooks that :meth:`offload.Engine.add_instrument` takes.

``mismatch`` is called only for instruments that are given when the engine is opened.
"""


@runtime_checkable
class Watcher(Protocol):
    """An observer that adds its hooks itself.

    It adds them to each pipeline or engine that it is given to as one of the ``instruments``.
    """

    def watch(self, opened: Pipeline | offload.Engine) -> None:
        """Observe a pipeline or engine that was just opened.

        Called on the trio thread; may not block.
        """


class Recompute(Protocol):
    """A function that computes blocks again, for comparison with loaded ones.

    It is passed to ``open_engine``.
    """

    def __call__(
        self, keys: Sequence[Key], destination: Destination, positions: Sequence[int]
    ) -> Sequence[array[float] | None]:
        """Return the correct samples of these blocks, one for each key.

        The samples are those that the engine's own layout reads (:mod:`backends.base.planes`).

        Called in a worker thread, while the load that needs the samples waits: ``keys`` lie at ``positions`` of
        ``destination``, and the blocks before them are at their places, so that one block can be computed by itself.

        Args:
            keys: some loaded blocks of one load.
            destination: the destination of that load.
            positions: the position of each key in the destination.

        Returns:
            One for each key; ``None`` for a block that is not computed now.
        """
        ...
