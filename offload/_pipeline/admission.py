"""The first stage, admission: the policies decide which blocks may leave.

It takes containers off the queue, a few per tick so that a cancel need not wait for a burst. In one step it calls the
policies once for all of a container's blocks, and marks those that passed as pending at the destination. Only an async
policy that cannot answer without waiting gets a task and a deadline; policies that have answered by then are not asked
again. The number of such tasks is limited, and the containers after them stay cancellable in the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import attrs
import trio

from backends.abc import Key

from .._config import PipelineConfig
from .._errors import PipelineClosed, PolicyFailed
from .._instruments import Hooks
from ..abc import AsyncPolicy, Leased, Policy, Reasons
from ..policies import NOTHING_REJECTED, AllOf, Evaluation, as_policy, begin, read_answer, timed
from .channel import CancellableChannel
from .container import OffloadContainer
from .containment import escaping_part
from .lifecycle import Status
from .settlement import Settlement

_NOTHING = NOTHING_REJECTED
_QUEUED = Status.QUEUED
_log = logging.getLogger("offload.pipeline")
_PER_TICK = 32
"""Most containers admitted in one tick.

The scheduler costs some 5 us a tick, and other tasks wait while a tick lasts.
"""
_PER_HURRIED_TICK = 2
"""Most containers admitted in a tick while a cancellation is awaited.

32 a tick would delay its confirmation by 200 us.
"""


@attrs.define(eq=False)
class Admission:
    """The first stage, which asks the policies."""

    policies: Sequence[Policy | AsyncPolicy]
    config: PipelineConfig
    settlement: Settlement
    hooks: Hooks
    inbound: CancellableChannel
    outbound: CancellableChannel
    waiting: int = 0
    """Number of containers whose policies are waiting."""
    errors: int = 0
    """Number of policies that raised."""
    timeouts: int = 0
    """Number of containers whose policies overran ``policy_timeout``."""
    blocked: int = 0
    """Number of answers of plain policies that took longer than that."""
    blocking: str = ""
    """The policy that gave the latest of these answers."""
    in_any_thread: bool = attrs.field(init=False)
    """Whether the policies answer at once, in any thread.

    That thread must have the pipeline to itself.
    """
    _mark: Callable[[Sequence[Key]], Collection[Key]] = attrs.field(init=False)
    _policy: Policy | None = attrs.field(init=False, default=None)
    _async_policy: AsyncPolicy | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._mark = self.settlement.marks.mark
        self.in_any_thread = all([getattr(policy, "in_any_thread", False) for policy in self.policies])
        policies = [
            timed(as_policy(policy), self.config.policy_timeout, self._held_the_loop) for policy in self.policies
        ]
        policy = policies[0] if len(policies) == 1 else AllOf(*policies) if policies else None
        if isinstance(policy, AsyncPolicy):
            self._async_policy = policy
        else:
            self._policy = policy

    def _held_the_loop(self, policy: Policy, seconds: float) -> None:
        """Count an answer of a plain policy that blocked the loop.

        No cancel, deadline or other pipeline ran meanwhile.
        """
        self.blocking = repr(policy)
        # Once: a policy that blocks does so for each container.
        level = logging.DEBUG if self.blocked else logging.WARNING
        self.blocked += 1
        _log.log(
            level,
            "the policy %s blocked the loop for %.3g s (policy_timeout = %g s); "
            "use offload.in_thread(policy) to call it in a thread",
            self.blocking,
            seconds,
            self.config.policy_timeout,
        )

    async def run(self) -> None:
        """Admit containers until cancelled."""
        if self._async_policy is not None:
            await self._run_waiting(self._async_policy)
        inbound = self.inbound
        while True:
            await inbound.wait_filled()
            passed = []
            for _ in range(_PER_TICK if not self.settlement.awaited_confirmations else _PER_HURRIED_TICK):
                if not inbound.parked:
                    break
                # One by one: code that runs in between may cancel containers that are still inside.
                container = inbound.pop()
                if self.step(container):
                    passed.append(container)
            if passed:
                self.outbound.send(passed)

    def step(self, container: OffloadContainer) -> bool:
        """Ask the policies that need not wait, and act on the answer.

        Returns whether the container goes on; otherwise it has settled.
        """
        if self.hooks.admission:
            self.hooks.fire("admission", container)
        answer: Reasons | Leased = _NOTHING
        if self._policy is not None and container.phase.proceeds:
            try:
                answer = self._policy(container.keys)
            except Exception as error:
                self._refuse(container, "error", error)
                return False
        return self._admit(container, answer)

    # -- policies that wait ----------------------------------------------------------------------------------------

    async def _run_waiting(self, policy: AsyncPolicy) -> None:
        permits = trio.Semaphore(self.config.max_waiting_policies)
        async with trio.open_nursery() as nursery:
            while True:
                # The permit first: in the channel a cancel takes the container out at once, so it leaves the channel
                # only with a permit.
                await permits.acquire()
                while not self.inbound.parked:
                    await self.inbound.wait_filled()
                container = self.inbound.pop()
                if self.hooks.admission:
                    self.hooks.fire("admission", container)
                begun = self._begin(policy, container)
                if begun is None:
                    permits.release()
                    continue
                # Before its task starts, so that a cancel in between is not lost: the scope is cancelled when it is entered.
                container.cancel_scope = trio.CancelScope(deadline=trio.current_time() + self.config.policy_timeout)
                self.waiting += 1
                nursery.start_soon(self._evaluate, begun, container, container.cancel_scope, permits)

    def _begin(self, policy: AsyncPolicy, container: OffloadContainer) -> Evaluation | None:
        """Ask a policy as far as it can answer without waiting.

        Returns the rest of the evaluation, or ``None`` if the policy has answered: then the container has gone on, or
        has settled.
        """
        try:
            answer = begin(policy, container.keys) if container.phase.proceeds else _NOTHING
        except Exception as error:
            self._refuse(container, "error", error)
            return None
        if isinstance(answer, Evaluation):
            return answer
        if self._admit(container, answer):
            self.outbound.send([container])
        return None

    async def _evaluate(
        self, begun: Evaluation, container: OffloadContainer, scope: trio.CancelScope, permits: trio.Semaphore
    ) -> None:
        answer: Reasons | Leased = _NOTHING
        error: BaseException | None = None
        leaving: BaseException | None = None
        try:
            if container.phase.proceeds:
                with scope:
                    answer = await begun.finish()
            else:
                begun.abandon()
        except Exception as exc:
            error = exc
        except BaseException as exc:
            error = exc
            leaving = escaping_part(exc)
            if leaving is not None:
                raise leaving from leaving.__cause__
        finally:
            # In a finally clause: code after the scope is skipped when an outer scope is cancelled in the same tick.
            self.waiting -= 1
            permits.release()
            container.cancel_scope = None
            if leaving is not None:  # not this policy's own: the pipeline is being torn down
                container.abandon(PipelineClosed(f"the pipeline ended while a policy waited: {error!r}"))
                self.settlement.settle(container)
            elif error is not None:
                self._refuse(container, "error", error)
            elif scope.cancelled_caught and container.phase.proceeds:
                late = trio.TooSlowError(f"policies took over {self.config.policy_timeout} s")
                self._refuse(container, "timeout", late)
            elif self._admit(container, answer):
                self.outbound.send([container])

    def ask_nowait(self, keys: Sequence[Key]) -> tuple[Reasons, Callable[[], None] | None] | None:
        """Return the policies' answer like :meth:`ask`, or ``None``.

        It is ``None`` if they cannot answer without waiting.
        """
        answer: Reasons | Leased | None = _NOTHING
        try:
            if self._policy is not None:
                answer = self._policy(keys)
            elif self._async_policy is not None:
                answer = self._async_policy.evaluate_nowait(keys)
            return None if answer is None else read_answer(answer)
        except Exception as error:
            return self._all_rejected(keys, error)

    async def ask(self, keys: Sequence[Key]) -> tuple[Reasons, Callable[[], None] | None]:
        """Ask the policies about blocks that do not pass this pipeline.

        See :meth:`Pipeline.ask_policies`. A policy that fails, or overruns its time, is counted, and has rejected all
        blocks, whatever the value of ``on_policy_error``: no container is there to fail. If this is cancelled, no lock
        is held.
        """
        told = self.ask_nowait(keys)
        if told is not None:
            return told
        assert self._async_policy is not None
        try:
            with trio.fail_after(self.config.policy_timeout):
                answer = await self._async_policy.evaluate(keys)
            return read_answer(answer)
        except Exception as error:
            return self._all_rejected(keys, error)

    def _all_rejected(self, keys: Sequence[Key], error: Exception) -> tuple[Reasons, None]:
        late = isinstance(error, trio.TooSlowError)
        self.timeouts += late
        self.errors += not late
        _log.warning("a policy could not be asked for %d blocks: %r", len(keys), error)
        return dict.fromkeys(keys, "timeout" if late else "error"), None

    # -- the decision ----------------------------------------------------------------------------------------------

    def _admit(self, container: OffloadContainer, answer: Reasons | Leased) -> bool:
        """Act on the policies' answer.

        Returns whether the container goes on; otherwise it has settled.
        """
        reasons: Reasons = _NOTHING
        if answer is not _NOTHING:
            try:
                reasons, lease = read_answer(answer)
                if lease is not None:
                    container.hold(lease)
                if reasons:
                    reasons = {key: reasons[key] for key in container.keys if key in reasons}
            except Exception as error:
                self._refuse(container, "error", error)
                return False
        if not container.phase.proceeds:
            self.settlement.settle(container)
            return False
        if reasons:
            container.filter(reasons)
        lost = self._mark(container.keys)
        if lost:
            container.filter({key: "pending" for key in container.keys if key in lost})
        container.evaluated = True
        if not container.keys:
            self.settlement.settle(container)
            return False
        container.marked = True
        if container.watch is None:
            container.status = _QUEUED  # as in move(), for the common case: it was EVALUATING
        else:
            container.move(_QUEUED)
        return True

    def _refuse(self, container: OffloadContainer, reason: str, error: BaseException) -> None:
        """Handle a policy that failed.

        Filter all blocks with that reason, or fail the container, as configured.
        """
        if reason == "timeout":
            self.timeouts += 1
        else:
            self.errors += 1
        if container.phase.proceeds:
            if self.config.on_policy_error == "fail":
                failure = PolicyFailed(f"{reason}: {error!r}")
                failure.__cause__ = error
                container.abandon(failure)
            else:
                container.filter(dict.fromkeys(container.keys, reason))
                container.evaluated = True
        self.settlement.settle(container)
