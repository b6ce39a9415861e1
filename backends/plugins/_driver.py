"""A driver of one plugin, which bounds the time of each operation.

It submits operations and collects their completions.

Rule 1. One task for each descriptor, and no other, waits for it (see :class:`Descriptor`); closing a descriptor wakes
        no task. So at the end the tasks are stopped first, and then the plugin is closed.
Rule 2. Wake up, reset, collect: a signal after the reset wakes the task again. A plugin that does not signal is polled
        every ``rescue_interval`` while an operation is outstanding; each answer found in this way is a *rescue*.
Rule 3. A caller waits until the deadline. If it leaves before the answer, its operation stays outstanding, with the
        memory it uses, and with the effects to be undone if the answer comes after all. An answer is either used or
        undone, never both.
Rule 4. A fault of a plugin does not affect other tiers. A plugin whose descriptor cannot be waited for any more is
        *broken*: all callers get an error at once, and so do later ones.
Rule 5. The task waits for a duplicate of the descriptor. So a plugin that closes its own meanwhile does not affect
        another file, which may get the same number at once.
Rule 6. One host waits for a descriptor. If two hosts had the same descriptor, each would take the other's answers.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import attrs
import trio

from maru.base.all_bytes import read_some
from maru.base.threads import start_thread

from .._errors import PlaceClosed
from ..abc import Key
from ..base.threads import run_in_thread
from ._config import HostConfig
from ._errors import NoAnswer, PluginFault
from ._operations import Completion, Correlation, Kind, Operation, Plugin

_Identity: TypeAlias = tuple[int, int, int]

_listened: set[_Identity] = set()
"""Descriptors that this process waits for."""


class Descriptor:
    """A descriptor of a plugin, until :meth:`close`.

    Args:
        fd: descriptor of the plugin.

    Raises:
        OSError: it is closed, or another host waits for it already.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._identity = _identity_of(fd)
        if self._identity in _listened:
            raise OSError(f"another host already waits for descriptor {fd}")
        self._mine = os.dup(fd)
        _listened.add(self._identity)

    async def wait(self) -> None:
        """Wait until the descriptor is readable."""
        await trio.lowlevel.wait_readable(self._mine)

    def check(self) -> None:
        """Raise :class:`OSError` if the plugin has closed the descriptor.

        It wakes no task any more then.
        """
        if _identity_of(self._fd) != self._identity:
            raise OSError(f"descriptor {self._fd} was closed, and now belongs to another file")

    def reset(self) -> bool:
        """Read the descriptor, so that it is not readable any more.

        Never blocks. Return whether there was anything to read.
        """
        poll = select.poll()
        poll.register(self._mine, select.POLLIN)
        if not poll.poll(0):
            return False
        with contextlib.suppress(OSError):
            read_some(self._mine, 4096)
        return True

    def close(self) -> None:
        """Stop waiting for the descriptor.

        Call this in the trio run that waited.
        """
        _listened.discard(self._identity)
        trio.lowlevel.notify_closing(self._mine)
        os.close(self._mine)


def _identity_of(fd: int) -> _Identity:
    """Return the identity of a descriptor's file.

    All eventfds have one inode, but separate ids.
    """
    behind = os.fstat(fd)
    with contextlib.suppress(OSError):  # not Linux
        for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
            name, _, number = line.partition(":")
            if name == "eventfd-id":
                return behind.st_dev, behind.st_ino, int(number)
    return behind.st_dev, behind.st_ino, -1 - fd


SLOW = 0.05
"""Seconds; a longer submit delays the trio thread and is counted."""


@attrs.define
class DriverCounts:
    """Faults of the plugin that did not make a caller fail."""

    rescues: int = 0
    """Answers found without a signal for a whole ``rescue_interval``."""
    empty_wakes: int = 0
    """Signals of the descriptor without an answer."""
    resets: int = 0
    """Empty wakes after which the driver had to reset the descriptor.

    The plugin had not done so.
    """
    raised: int = 0
    """Exceptions of the plugin while its completions were collected."""
    slow_submits: int = 0
    """Submits that delayed the trio thread."""
    failed_unlocks: int = 0
    """Exceptions of the plugin when keys were unlocked."""


class PluginDriver:
    """A driver that submits operations and collects completions.

    Attributes:
        plugin: the plugin.
        correlation: the outstanding operations.
        counts: faults of the plugin.
    """

    def __init__(self, plugin: Plugin, config: HostConfig) -> None:
        self.plugin: Plugin = plugin
        self.config: HostConfig = config
        self.correlation: Correlation = Correlation()
        self.counts: DriverCounts = DriverCounts()
        self._is_open = False
        self._was_open = False
        self._is_closed = False
        self._broken: str | None = None
        self._last_error: BaseException | None = None
        self._descriptors: dict[str, Descriptor] = {}
        self._waits: dict[str, trio.CancelScope] = {}
        self._waiting: dict[Operation, trio.Event] = {}
        self._quiet = trio.Event()
        self._submitted: deque[tuple[Operation, object, BaseException | None]] = (
            deque()
        )  # in threads, and not registered yet

    @property
    def is_open(self) -> bool:
        """Whether operations can be submitted, as far as the driver knows."""
        return self._is_open

    @property
    def was_open(self) -> bool:
        """Whether it was opened or closed; it cannot be opened again."""
        return self._was_open

    # --- opening and closing --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Collect completions while entered; then close the plugin.

        Each in bounded time.

        Raises:
            PluginTypeError: the plugin's descriptors make no sense.
            PluginFault: its ``close`` raised.
            NoAnswer: its ``close`` did not return. It goes on in a thread that is not awaited.
        """
        self._was_open = True
        error: BaseException | None = None
        try:
            try:
                channels = self.plugin.channels()
            except BaseException as exc:
                error = exc
                raise
            async with trio.open_nursery() as nursery:
                for channel, fd in channels.items():
                    nursery.start_soon(self._watch, channel, fd)
                self._is_open = True
                try:
                    yield
                except BaseException as exc:
                    error = exc  # the body's own: it is raised unchanged
                finally:
                    self._is_open = False
                    await self._end()
                    nursery.cancel_scope.cancel()
        finally:
            await self._close(error)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    async def _end(self) -> None:
        """Wait for answers that no caller awaits any more.

        Their locks must be released.
        """
        for operation in list(self._waiting):
            self._give_up(operation)
        if len(self.correlation) and self._broken is None:
            with trio.move_on_after(self.config.close_deadline, shield=True):
                await self._quiet.wait()

    async def _close(self, error: BaseException | None) -> None:
        self._is_closed = True
        failure: Exception | None = None
        with trio.CancelScope(shield=True), trio.move_on_after(self.config.close_deadline) as scope:
            try:
                await run_in_thread(self.plugin.close)
            except Exception as exc:
                failure = self._close_raised(exc)
        if scope.cancelled_caught:
            failure = self._close_hangs()
        if failure is not None:
            if error is None:
                raise failure
            error.add_note(str(failure))

    def close(self) -> None:
        """Close a plugin that was never opened.

        Waits for it in bounded time; for any thread.
        """
        if self._was_open:
            return
        self._was_open = self._is_closed = True
        came: list[Exception] = []

        def work() -> None:
            try:
                self.plugin.close()
            except Exception as exc:
                came.append(exc)

        thread = threading.Thread(target=work, name="offload-close", daemon=True)
        start_thread(thread)
        thread.join(self.config.close_deadline)
        if thread.is_alive():
            raise self._close_hangs()
        if came:
            raise self._close_raised(came.pop())

    def _close_raised(self, error: Exception) -> PluginFault:
        failure = PluginFault(f"{self.plugin.name}: close raised {error!r}")
        failure.__cause__ = error
        return failure

    def _close_hangs(self) -> NoAnswer:
        return NoAnswer(f"{self.plugin.name}: close did not return within {self.config.close_deadline:g} s")

    # --- asking ---------------------------------------------------------------------------------------------------

    async def ask(
        self,
        kind: Kind,
        keys: Sequence[Key],
        *,
        undo: Callable[[Operation], None] | None = None,
    ) -> list[bool]:
        """Run an operation without buffers. Return a bit for each key.

        See :meth:`operation` and :meth:`run`.
        """
        return await self.run(self.operation(kind, keys, undo=undo))

    def operation(
        self,
        kind: Kind,
        keys: Sequence[Key],
        *,
        touches: object = None,
        undo: Callable[[Operation], None] | None = None,
    ) -> Operation:
        """Make an operation. Nothing is submitted yet.

        Args:
            kind: the kind of operation.
            keys: its keys; not empty.
            touches: object that is kept alive until the operation is over.
            undo: called if the answer comes when it is not awaited any more.
        """
        operation = Operation(kind, self.plugin.channel_of(kind), keys, touches)
        operation.on_over = partial(self._on_over, undo)
        return operation

    async def run(self, operation: Operation, buffers: Sequence[memoryview] = ()) -> list[bool]:
        """Submit an operation, and wait for its answer. A checkpoint.

        Return a bit for each key.

        Cancelled or not answered in time, the operation stays outstanding, as ``may_go_on`` shows.

        Args:
            operation: submitted once.
            buffers: the memory to read or write, one for each key.

        Raises:
            NoAnswer: no answer within the deadline, or before the plugin broke down or was closed. It may go on.
            PluginFault: it failed as a whole, and is over; or it could not be submitted.
            PlaceClosed: the tier is not open.
        """
        self._check()
        await trio.lowlevel.checkpoint_if_cancelled()
        answered = trio.Event()
        self._waiting[operation] = answered
        try:
            with trio.CancelScope() as scope:
                scope.deadline = trio.current_time() + self.config.deadline
                await self._submit(operation, buffers)
                await answered.wait()
        except BaseException:
            self._give_up(operation)
            if operation.is_over and not operation.in_vain and operation.on_over is not None:
                # Answered and cancelled in the same tick: its answer is not used, so it is undone (rule 3).
                operation.on_over(operation)
            raise
        self._give_up(operation)
        if operation.fault is not None:
            raise operation.fault
        if operation.bits is None or operation.in_vain:
            raise self._no_answer(operation)
        return operation.bits

    def unlock(self, keys: Sequence[Key]) -> None:
        """Unlock keys that were found.

        An exception of the plugin is counted, since no caller could handle it.

        A closed plugin has released everything, and is not called.
        """
        if keys and not self._is_closed:
            try:
                self.plugin.unlock(keys)
            except Exception as exc:
                self.counts.failed_unlocks += 1
                self._last_error = exc

    def _check(self) -> None:
        if not self._is_open:
            raise PlaceClosed(f"{self.plugin.name} is not open: a plugin is used inside `async with`")
        if self._broken is not None:
            raise PluginFault(self._broken) from self._last_error
        most, unanswered = self.config.most_unanswered, len(self.correlation) - len(self._waiting)
        if unanswered >= most:
            raise PluginFault(f"{self.plugin.name}: {unanswered} operations are unanswered: most_unanswered is {most}")

    async def _submit(self, operation: Operation, buffers: Sequence[memoryview]) -> None:
        operation.started = True
        self.correlation.begin()
        self._limit_wait(operation.channel)
        if self.config.submit_in_thread:
            try:
                await run_in_thread(self._submit_in_thread, operation, buffers)
            except Exception as exc:  # no thread could be started
                self._register(operation, None, exc)
            self._register_submitted()
            if operation.may_go_on:
                self._collect(
                    operation.channel, woken=False, expected=True
                )  # it may have been signalled before its id was known
            return
        start = time.perf_counter()
        try:
            returned = self.plugin.submit(operation.kind, operation.keys, buffers)
        except Exception as exc:
            self._register(operation, None, exc)
        except BaseException:
            self.correlation.not_submitted()
            raise
        else:
            if time.perf_counter() - start > SLOW:
                self.counts.slow_submits += 1
            self._register(operation, returned, None)

    def _submit_in_thread(self, operation: Operation, buffers: Sequence[memoryview]) -> None:
        """Submit in a thread, which may be abandoned. Raise nothing.

        The trio thread registers the returned id.
        """
        try:
            returned = self.plugin.submit(operation.kind, operation.keys, buffers)
        except BaseException as exc:
            self._submitted.append((operation, None, exc))
        else:
            self._submitted.append((operation, returned, None))

    def _register_submitted(self) -> None:
        while self._submitted:
            self._register(*self._submitted.popleft())
        self._note_quiet()

    def _register(self, operation: Operation, returned: object, error: BaseException | None) -> None:
        """Handle the end of a submit.

        It has returned an id or another object, or has raised and started nothing. Without an id its completion cannot
        be recognised, so it is not waited for: it may go on for ever.
        """
        if error is not None:
            self.correlation.not_submitted()
            self._last_error = error
            operation.refuse(
                PluginFault(f"{self.plugin.name}: submitting {operation.kind.value} raised {error!r}"), error
            )
            return
        try:
            number = int(returned)  # type: ignore[call-overload]  # of a foreign plugin
        except Exception as exc:
            self.correlation.not_submitted()
            operation.fault = PluginFault(
                f"{self.plugin.name}: submitting {operation.kind.value} returned {returned!r}"
            )
            operation.fault.__cause__ = exc
        else:
            try:
                self.correlation.submitted(operation, number)
                return
            except PluginFault as fault:
                operation.fault = fault
        self._wake(operation)

    def _no_answer(self, operation: Operation) -> NoAnswer:
        why = (
            self._broken
            or (None if self._is_open else f"{self.plugin.name} was closed")
            or f"{self.plugin.name} did not answer within {self.config.deadline:g} s"
        )
        silence = NoAnswer(f"{why}, asked to {operation.kind.value} {len(operation.keys)} keys")
        silence.__cause__ = self._last_error
        return silence

    def _give_up(self, operation: Operation) -> None:
        operation.waited_for = False
        self._wake(operation)

    def _wake(self, operation: Operation) -> None:
        answered = self._waiting.pop(operation, None)
        if answered is not None:
            answered.set()

    def _on_over(self, undo: Callable[[Operation], None] | None, operation: Operation) -> None:
        if operation.waited_for:
            self._wake(operation)
        else:
            operation.in_vain = True
            if undo is not None:
                undo(operation)
        self._note_quiet()

    def _note_quiet(self) -> None:
        if not self._is_open and not len(self.correlation):
            self._quiet.set()

    # --- listening ------------------------------------------------------------------------------------------------

    def _limit_wait(self, channel: str) -> None:
        """Wait for the descriptor with a timeout from now on.

        An operation is outstanding.
        """
        scope = self._waits.get(channel)
        if scope is not None:
            scope.deadline = min(scope.deadline, trio.current_time() + self.config.rescue_interval)

    async def _watch(self, channel: str, fd: int) -> None:
        try:
            descriptor = self._descriptors[channel] = Descriptor(fd)
            try:
                while True:
                    with trio.CancelScope() as scope:
                        self._waits[channel] = scope
                        if len(self.correlation):
                            self._limit_wait(channel)
                        await descriptor.wait()
                    if scope.cancelled_caught:
                        descriptor.check()
                    if not self._collect(channel, woken=not scope.cancelled_caught):
                        await trio.sleep(self.config.rescue_interval)  # it raised: not again at once
            finally:
                descriptor.close()
        except (OSError, ValueError) as exc:
            self._last_error = exc
            self._break(f"{self.plugin.name}: its descriptor {fd} cannot be waited for ({channel}): {exc!r}")

    def _collect(self, channel: str, *, woken: bool, expected: bool = False) -> bool:
        """Collect the completed operations. Return whether the plugin allowed it.

        Args:
            channel: the descriptor's name.
            woken: whether its descriptor is readable.
            expected: the descriptor is not readable, which is no fault of the plugin here.
        """
        self._register_submitted()
        completions: list[Completion] = []
        answered = True
        try:
            if woken and not self.plugin.resets:
                self._descriptors[channel].reset()
            self.plugin.poll(channel, self.correlation.outstanding(channel), completions)
        except Exception as exc:
            self.counts.raised += 1
            self._last_error = exc
            answered = False
        matched = [self.correlation.completed(completion) for completion in completions]
        if not woken and not expected:
            self.counts.rescues += len(matched) - matched.count(None)
        elif woken and not completions and answered:
            self.counts.empty_wakes += 1
            if self._descriptors[channel].reset():
                self.counts.resets += 1
                # A signal before the reset does not wake again, so its answers are collected now.
                self._collect(channel, woken=False, expected=True)
        self._note_quiet()
        return answered or bool(completions)

    def _break(self, why: str) -> None:
        self._broken = why
        for operation in list(self._waiting):
            self._give_up(operation)
        self._quiet.set()
