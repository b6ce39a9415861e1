"""A policy that blocks, called in a thread.

So the loop goes on meanwhile, and ``policy_timeout`` applies. There is one call at a time, as on the trio thread, so a
policy need not be thread-safe. A call that times out is abandoned: its thread ends by itself, a lock that the policy
takes until then is released, and the policy is not called again before that. So a policy that hangs costs one thread.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Sequence

import trio

from backends.abc import Key
from backends.base.threads import run_in_thread

from .abc import AsyncPolicy, Leased, Policy, Reasons

_log = logging.getLogger("offload.pipeline")


class ThreadedPolicy(AsyncPolicy):
    """A policy that is called in a thread. Made by :func:`offload.in_thread`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._permit = trio.Semaphore(1)

    def __repr__(self) -> str:
        return f"in_thread({self._policy!r})"

    async def evaluate(self, keys: Sequence[Key]) -> Reasons | Leased:
        """Return the policy's answer.

        If cancelled, it returns at once; a lock that the policy takes afterwards is released.
        """
        await self._permit.acquire()
        call = _Call(self._policy, keys, self._permit)
        try:
            answer = await run_in_thread(call.run)
        except BaseException:
            call.leave()
            raise
        self._permit.release()
        return answer


class _State(enum.Enum):
    NEW, RUNNING, OVER = range(3)


class _Call:
    """One call of the policy.

    Its states are shared by the trio thread and the policy's thread.
    """

    def __init__(self, policy: Policy, keys: Sequence[Key], permit: trio.Semaphore) -> None:
        self._policy = policy
        self._keys = keys
        self._permit = permit
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()
        self._state = _State.NEW
        self._left = False
        self._answer: Reasons | Leased | None = None

    def run(self) -> Reasons | Leased:
        """Call the policy, in its thread.

        An abandoned call releases its lock, on the trio thread.
        """
        if self._move(_State.RUNNING):
            return {}
        try:
            self._answer = answer = self._policy(self._keys)
            return answer
        finally:
            if self._move(_State.OVER):
                try:
                    self._token.run_sync_soon(self._clean_up)
                except trio.RunFinishedError:  # the run is over: no other call waits for this one
                    self._give_back()

    def _move(self, state: _State) -> bool:
        """Move to this state, and return whether the call was abandoned.

        Called in the policy's thread.
        """
        with self._lock:
            if not self._left or state is _State.OVER:
                self._state = state
            return self._left

    def leave(self) -> None:
        """Abandon the call, on the trio thread."""
        with self._lock:
            self._left = True
            running = self._state is _State.RUNNING
        if not running:
            self._clean_up()

    def _clean_up(self) -> None:
        self._give_back()
        self._permit.release()

    def _give_back(self) -> None:
        answer, self._answer = self._answer, None
        if isinstance(answer, Leased):
            try:
                answer.release()
            except Exception:
                _log.exception("the lock of %r could not be released", self._policy)
