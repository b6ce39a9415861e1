"""Waiting on behalf of a container, so that it can be cancelled meanwhile.

A trio scope can be entered once, so a container does not carry one through the stages: each stage that waits for it opens a
fresh one, and the container knows who holds it. The container's phase stays the truth; the scope is only the wake-up.
"""

from __future__ import annotations

import attrs
import trio

from .container import OffloadContainer


@attrs.define(eq=False)
class Waiter:
    """The hand that holds a container while a task of its own runs the caller's code on its behalf.

    A container that is withdrawn wakes the task, which settles it as soon as what it runs has unwound.
    """

    timeout: float
    """How long the task may wait, in seconds."""
    scope: trio.CancelScope = attrs.field(init=False)
    """What the task waits in."""

    def __attrs_post_init__(self) -> None:
        self.scope = trio.CancelScope(deadline=trio.current_time() + self.timeout)

    def withdraw(self, container: OffloadContainer) -> None:
        """Wake the task."""
        self.scope.cancel()
