"""The second stage, awaiting: containers wait for their preconditions.

A precondition is mostly the end of a forward pass.

P6: a precondition is awaited together with a cancellation, whichever comes first; the gate decides when both come in
the same tick. Waiting takes no transfer slot. A precondition that holds already costs a call. One that does not gets a
task, whose scope is the container's ``cancel_scope``. If waiting runs no code of the caller's, all containers that wait
for the same precondition share one task and park in its channel: a step of the model has one event and many containers,
and cancelling a task costs ten times as much as taking a container out of a channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from .._config import PipelineConfig
from .._errors import PreconditionFailed
from .._instruments import Hooks
from ..abc import Precondition
from .channel import CancellableChannel
from .container import OffloadContainer
from .containment import escaping_part
from .settlement import Settlement


class SharedWait:
    """One task's wait for a passive precondition.

    It waits on behalf of all containers parked in its channel.
    """

    __slots__ = ("channel", "precondition", "scope", "stage")

    def __init__(self, precondition: Precondition, stage: Awaiting) -> None:
        self.precondition = precondition
        self.stage = stage
        # In the order of their arrival, which is that of their deadlines.
        self.channel = CancellableChannel(self._withdrawn)
        self.scope = trio.CancelScope()

    def _withdrawn(self, container: OffloadContainer) -> None:
        self.stage.withdrawn(self, container)


@attrs.define(eq=False)
class Awaiting:
    """The second stage, which waits for preconditions."""

    config: PipelineConfig
    settlement: Settlement
    hooks: Hooks
    inbound: CancellableChannel
    outbound: CancellableChannel
    waiting: int = 0
    """Number of containers whose precondition does not hold yet."""
    _shared: dict[Precondition, SharedWait] = attrs.Factory(dict)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)

    async def run(self) -> None:
        """Receive admitted containers until cancelled.

        This task is the parent of the tasks that wait.
        """
        async with trio.open_nursery() as self._nursery:
            with self.inbound.stepped_by(self.step):
                await trio.sleep_forever()

    def step(self, containers: Sequence[OffloadContainer]) -> None:
        """Pass on the containers whose precondition holds.

        A task waits for each of the others.
        """
        if self.hooks.awaiting:
            for container in containers:
                self.hooks.fire("awaiting", container)
        ready = [container for container in containers if container.precondition is None or self._holds(container)]
        if ready:
            self.outbound.send(ready)

    def _holds(self, container: OffloadContainer) -> bool:
        precondition = container.precondition
        assert precondition is not None and self._nursery is not None
        if not container.phase.proceeds:
            self.settlement.settle(container)
            return False
        try:
            holds, passive = precondition.is_set(), precondition.passive
            hash(precondition)  # by which containers that wait for the same precondition are found
        except Exception as error:
            self._fail(container, error)
            return False
        if not holds:
            self.waiting += 1
            deadline = trio.current_time() + self.config.precondition_timeout
            if passive:
                self._join(precondition, container, deadline)
            else:
                # Before its task starts, so that a cancel in between is not lost: the scope is cancelled when it is entered.
                container.cancel_scope = scope = trio.CancelScope(deadline=deadline)
                self._nursery.start_soon(self._wait, precondition, container, scope)
        return holds

    # -- a wait that many share: it runs no code of the caller's -----------------------------------------------------------

    def _join(self, precondition: Precondition, container: OffloadContainer, deadline: float) -> None:
        wait = self._shared.get(precondition)
        if wait is None:
            wait = self._shared[precondition] = SharedWait(precondition, self)
            assert self._nursery is not None
            self._nursery.start_soon(self._wait_for_all, wait)
        container.deadline = deadline
        wait.channel.put(container)

    def withdrawn(self, wait: SharedWait, container: OffloadContainer) -> None:
        """Settle a container that left a shared wait because its gate closed.

        The wait ends if it was the last container.
        """
        self.waiting -= 1
        self.settlement.settle(container)
        if not wait.channel.parked:
            self._close(wait)
            wait.scope.cancel()

    def _close(self, wait: SharedWait) -> None:
        """Let no further container join a shared wait.

        The next container with the same precondition gets a new task.
        """
        if self._shared.get(wait.precondition) is wait:
            del self._shared[wait.precondition]

    async def _wait_for_all(self, wait: SharedWait) -> None:
        """Wait until the precondition holds, or no container waits for it."""
        parked = wait.channel.parked
        held = False
        error: BaseException | None = None
        try:
            while parked and not held:
                # One scope for the oldest deadline, not one for each container, which would cost fifty times as much.
                wait.scope = trio.CancelScope(deadline=next(iter(parked)).deadline)
                with wait.scope:
                    await wait.precondition.wait()
                    held = True
                if not held:
                    self._expire(wait)
        except Exception as exc:
            error = exc
        except BaseException as exc:
            error = exc
            if (leaving := escaping_part(exc)) is not None:
                raise leaving from leaving.__cause__
        finally:
            # In a finally clause, since code after the scope is skipped when an outer one is cancelled in the same
            # tick.
            self._close(wait)
            # All are taken out before any is passed on or failed: an observer of one may cancel another, which is then
            # in no channel, and settles when its turn comes.
            containers = []
            while parked:
                containers.append(wait.channel.pop())
            self.waiting -= len(containers)
            if held and containers:
                self.outbound.send(containers)
            elif not held:
                for container in containers:
                    self._fail(container, error or self._too_slow())

    def _expire(self, wait: SharedWait) -> None:
        """Fail the containers whose time is over.

        An observer of one may cancel another, or enqueue one that joins.
        """
        now = trio.current_time()
        parked = wait.channel.parked
        while parked and next(iter(parked)).deadline <= now:
            container = wait.channel.pop()
            self.waiting -= 1
            self._fail(container, self._too_slow())

    # -- a wait of its own: it runs code of the caller's ---------------------------------------------------------------

    async def _wait(self, precondition: Precondition, container: OffloadContainer, scope: trio.CancelScope) -> None:
        held = False
        error: BaseException | None = None
        try:
            if container.phase.proceeds:
                with scope:
                    await precondition.wait()
                    held = True
        except Exception as exc:
            error = exc
        except BaseException as exc:
            error = exc
            if (leaving := escaping_part(exc)) is not None:
                raise leaving from leaving.__cause__
        finally:
            # In a finally clause, since code after the scope is skipped when an outer one is cancelled in the same
            # tick.
            self.waiting -= 1
            container.cancel_scope = None
            if not container.phase.proceeds:
                self.settlement.settle(container)
            elif held:
                self.outbound.send([container])
            else:
                self._fail(container, error or self._too_slow())

    # ----------------------------------------------------------------------------------------------------------------

    def _too_slow(self) -> trio.TooSlowError:
        return trio.TooSlowError(f"not within {self.config.precondition_timeout} s")

    def _fail(self, container: OffloadContainer, error: BaseException) -> None:
        failure = PreconditionFailed(f"the precondition did not hold: {error!r}")
        failure.__cause__ = error
        container.fail(failure)
        self.settlement.settle(container)
