"""What users of a pipeline implement: a policy, a precondition, an instrument.

A *policy* answers: may these blocks leave? Called once per container with all its keys, it names the rejected ones only.
A *precondition* answers: is the data there yet? An *instrument* watches. Places are implemented against
:mod:`backends.abc`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import attrs

from backends.abc import Key as Key

if TYPE_CHECKING:
    import trio

    from ._pipeline.container import OffloadBatch, OffloadContainer

Reasons: TypeAlias = Mapping[Key, str]
"""Why blocks are filtered: the rejected keys only, each with a word."""


@attrs.frozen
class Leased:
    """A policy's answer that comes with a lock it took.

    The container owns the lease from then on and gives it back when it settles, on every path.
    """

    reasons: Reasons
    """The rejected keys, as a plain answer."""
    release: Callable[[], None]
    """Gives the lock back. Called once, on the trio thread; must not block."""


Policy: TypeAlias = Callable[[Sequence[Key]], "Reasons | Leased"]
"""A policy that never waits: runs inline, without a task or a scope, in one call for all blocks of a container."""


class AsyncPolicy(ABC):
    """A policy that waits (asks a remote place, takes a lock).

    Bounded by ``policy_timeout`` for the whole container; cancelled there, it must have taken no lock or given it back.
    """

    @abstractmethod
    async def evaluate(self, keys: Sequence[Key]) -> Reasons | Leased:
        """The rejected ones of ``keys``, each with its reason."""


class Precondition(ABC):
    """Something that must hold before a container's bytes may be read: the forward pass that writes them is over.

    Hashable (as any object is): where waiting is ``passive``, containers whose preconditions are equal wait in one task.
    """

    @abstractmethod
    def is_set(self) -> bool:
        """Whether it holds already. Never blocks."""

    @abstractmethod
    async def wait(self) -> None:
        """Return once it holds; raise if it never will. Leaves nothing behind when cancelled."""

    @property
    def passive(self) -> bool:
        """Whether waiting runs no code of the caller's, so that a cancelled container need not wait for it to unwind."""
        return False


class DeviceEvent(Protocol):
    """An event of a device, such as a ``torch.cuda.Event``: recognised by these methods."""

    def query(self) -> bool:
        """Whether it has happened. Never blocks."""

    def synchronize(self) -> object:
        """Block until it has happened. Never called here: having the method is how a device event is recognised."""


PreconditionLike: TypeAlias = "Precondition | trio.Event | DeviceEvent | Callable[[], Awaitable[object]]"
"""What ``precondition=`` takes: ``NO_WAIT``, a trio, thread or CUDA event, an async callable, or a Precondition."""


class Instrument(Protocol):
    """An observer with optional hooks: define the ones you want. None may block; one that raises is removed.

    Every hook is called synchronously on the trio thread. Hooks named after a stage are called when a container enters it.
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
