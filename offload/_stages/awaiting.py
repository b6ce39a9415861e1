"""PreconditionAwaiter: is the forward pass done?

P6: a precondition is waited for together with the cancel token, whichever comes first; the gate decides when both come in
the same tick. Waiting takes no transfer slot. A precondition that holds already costs a call; one that does not gets a task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import trio

from .._config import PipelineConfig
from .._container import OffloadContainer
from .._errors import PreconditionFailed
from .._instruments import Hooks
from .._settling import Settlement
from .._waiting import Waiter
from ..abc import Precondition


@attrs.define(eq=False)
class Awaiting:
    """The second room."""

    config: PipelineConfig
    settlement: Settlement
    hooks: Hooks
    forward: Callable[[Sequence[OffloadContainer], float], None]
    """Where containers go from here, and the time."""
    waiting: int = 0
    """Containers whose precondition does not hold yet."""
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be the parent of those who wait, for ever."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def step(self, containers: Sequence[OffloadContainer], now: float) -> None:
        """Pass on those whose precondition holds, and have a task wait for each of the others."""
        if self.hooks.awaiting:
            for container in containers:
                self.hooks.fire("awaiting", container)
        ready = [container for container in containers if container.precondition is None or self._holds(container)]
        if ready:
            self.forward(ready, now)

    def _holds(self, container: OffloadContainer) -> bool:
        precondition = container.precondition
        assert precondition is not None and self._nursery is not None
        if not container.phase.walks_on:
            self.settlement.settle(container)
            return False
        try:
            holds, passive = precondition.is_set(), precondition.passive
        except Exception as error:
            self._fail(container, error)
            return False
        if not holds:
            waiter = Waiter(self.config.precondition_timeout, settle=self._withdrawn if passive else None)
            container.holder = waiter
            self.waiting += 1
            self._nursery.start_soon(self._wait, precondition, container, waiter)
        return holds

    async def _wait(self, precondition: Precondition, container: OffloadContainer, waiter: Waiter) -> None:
        held = False
        error: BaseException | None = None
        try:
            if container.walks_on:
                with waiter.scope:
                    await precondition.wait()
                    held = True
        except Exception as exc:
            error = exc
        except BaseException as exc:
            error = exc
            raise
        finally:
            # In a finally clause, since code behind the scope is skipped when an outer one is cancelled in the same tick.
            if not container.status.terminal:
                self.waiting -= 1
                container.holder = None
                if not container.walks_on:
                    self.settlement.settle(container)
                elif held:
                    self.forward([container], trio.current_time())
                else:
                    self._fail(
                        container, error or trio.TooSlowError(f"not within {self.config.precondition_timeout} s")
                    )

    def _withdrawn(self, container: OffloadContainer) -> None:
        self.waiting -= 1
        self.settlement.settle(container)

    def _fail(self, container: OffloadContainer, error: BaseException) -> None:
        failure = PreconditionFailed(f"the precondition did not hold: {error!r}")
        failure.__cause__ = error
        container.fail(failure)
        self.settlement.settle(container)
