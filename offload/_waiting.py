"""Waiting on behalf of a container, so that it can be cancelled meanwhile.

A trio scope can be entered once, so a container does not carry one through the stages: each stage that waits for it opens a
fresh one, and the container knows who holds it. The container's phase stays the truth; the scope is only the wake-up.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from ._container import OffloadContainer


@attrs.define(eq=False)
class Waiter:
    """The hand that holds a container while a task of its own waits for it."""

    timeout: float
    """How long the task may wait, in seconds."""
    settle: Callable[[OffloadContainer], None] | None
    """Given where waiting runs nobody's code: then a withdrawn container settles at once, and the task finds it gone.
    Otherwise the task settles it, as soon as what it runs has unwound."""
    scope: trio.CancelScope = attrs.field(init=False)
    """What the task waits in."""

    def __attrs_post_init__(self) -> None:
        self.scope = trio.CancelScope(deadline=trio.current_time() + self.timeout)

    def withdraw(self, container: OffloadContainer) -> None:
        """Wake the task, or settle the container now."""
        self.scope.cancel()
        if self.settle is not None:
            container.holder = None
            self.settle(container)
