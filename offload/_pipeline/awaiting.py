"""PreconditionAwaiter: is the forward pass done?

P6: a precondition is waited for together with the cancel token, whichever comes first; the gate decides when both come in
the same tick. Waiting takes no transfer slot. A precondition that holds already costs a call. One that does not gets a task;
where waiting runs nobody's code, one task keeps vigil for all containers that wait for the same: a step of the model has one
event and many containers, and cancelling a task costs ten times what taking a container out of a table does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs
import trio

from .._config import PipelineConfig
from .._errors import PreconditionFailed
from .._instruments import Hooks
from ..abc import Precondition
from .container import OffloadContainer
from .containment import what_leaves
from .settlement import Settlement
from .waiting import Waiter


@attrs.define(eq=False)
class _Vigil:
    """Holds the containers that wait for one passive precondition."""

    precondition: Precondition
    withdrawn: Callable[[_Vigil, OffloadContainer], None]
    """Told of a container that is parked here no longer, since its gate has closed."""
    parked: OrderedDict[OffloadContainer, float] = attrs.Factory(OrderedDict)
    """Who waits, and until when: in the order in which they came, which is that of their deadlines."""
    scope: trio.CancelScope = attrs.Factory(trio.CancelScope)
    """What the task waits in."""

    def withdraw(self, container: OffloadContainer) -> None:
        """Take it out; it settles now."""
        del self.parked[container]
        container.holder = None
        self.withdrawn(self, container)


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
    _vigils: dict[Precondition, _Vigil] = attrs.Factory(dict)
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
            hash(precondition)  # by which those who wait for the same are found
        except Exception as error:
            self._fail(container, error)
            return False
        if not holds:
            self.waiting += 1
            if passive:
                self._park(precondition, container)
            else:
                container.holder = waiter = Waiter(self.config.precondition_timeout)
                self._nursery.start_soon(self._wait, precondition, container, waiter)
        return holds

    # -- waiting that runs nobody's code -----------------------------------------------------------------------------

    def _park(self, precondition: Precondition, container: OffloadContainer) -> None:
        vigil = self._vigils.get(precondition)
        if vigil is None:
            vigil = self._vigils[precondition] = _Vigil(precondition, self._withdrawn)
            assert self._nursery is not None
            self._nursery.start_soon(self._keep, vigil)
        container.holder = vigil
        vigil.parked[container] = trio.current_time() + self.config.precondition_timeout

    def _withdrawn(self, vigil: _Vigil, container: OffloadContainer) -> None:
        self.waiting -= 1
        self.settlement.settle(container)
        if not vigil.parked:
            self._end(vigil)
            vigil.scope.cancel()

    def _end(self, vigil: _Vigil) -> None:
        """Nobody joins it any more."""
        if self._vigils.get(vigil.precondition) is vigil:
            del self._vigils[vigil.precondition]

    async def _keep(self, vigil: _Vigil) -> None:
        """Wait until the precondition holds, or nobody waits for it any more."""
        held = False
        error: BaseException | None = None
        try:
            while vigil.parked and not held:
                vigil.scope = trio.CancelScope(deadline=next(iter(vigil.parked.values())))
                with vigil.scope:
                    await vigil.precondition.wait()
                    held = True
                if not held:
                    self._expire(vigil)
        except Exception as exc:
            error = exc
        except BaseException as exc:
            error = exc
            if (leaving := what_leaves(exc)) is not None:
                raise leaving from leaving.__cause__
        finally:
            # In a finally clause, since code behind the scope is skipped when an outer one is cancelled in the same tick.
            self._end(vigil)
            containers = list(vigil.parked)
            vigil.parked.clear()
            self.waiting -= len(containers)
            for container in containers:
                container.holder = None
            if held and containers:
                self.forward(containers, trio.current_time())
            elif not held:
                for container in containers:
                    self._fail(container, error or self._too_slow())

    def _expire(self, vigil: _Vigil) -> None:
        """Fail those whose time is over. An observer of one may cancel another, or enqueue one that joins."""
        now = trio.current_time()
        while vigil.parked:
            container, deadline = next(iter(vigil.parked.items()))
            if deadline > now:
                return
            del vigil.parked[container]
            container.holder = None
            self.waiting -= 1
            self._fail(container, self._too_slow())

    # -- waiting in code of the caller's -----------------------------------------------------------------------------

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
            if (leaving := what_leaves(exc)) is not None:
                raise leaving from leaving.__cause__
        finally:
            # In a finally clause, since code behind the scope is skipped when an outer one is cancelled in the same tick.
            self.waiting -= 1
            container.holder = None
            if not container.walks_on:
                self.settlement.settle(container)
            elif held:
                self.forward([container], trio.current_time())
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
