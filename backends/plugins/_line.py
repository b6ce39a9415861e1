"""The line to one plugin: questions go out, answers come back, each in bounded time.

Rule 1. One task for each descriptor, and nobody else, waits for it (see :class:`Descriptor`); closing one wakes nobody. So in
        the end the tasks are stopped first, and then the plugin is closed.
Rule 2. Woken, reset, heard: what is said behind that wakes again. A plugin that wakes nobody is listened to all the same, every
        ``rescue_interval`` as long as something is outstanding; each answer found so is a *rescue*.
Rule 3. Who waits, waits until the deadline. Whoever leaves before the answer leaves his operation behind, with what it touches,
        and with what must be undone if the answer comes after all. An answer is used, or undone, and never both.
Rule 4. A plugin at fault is no reason for anybody else to fail. What cannot be listened to any more is *broken*: whoever
        waits is told at once, and so is whoever asks later.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import attrs
import trio

from .._errors import PlaceClosed
from ..abc import Key
from ..threads import run_in_thread
from ._config import HostConfig
from ._correlation import Completion, Correlation, Kind, Operation
from ._descriptor import Descriptor
from ._errors import NoAnswer, PluginFault
from ._peer import Peer

SLOW = 0.05
"""A submit that takes longer, in seconds, has held everybody up, and is counted."""


@attrs.define
class LineCounts:
    """What went wrong on a line so far, without anybody having to fail for it."""

    rescues: int = 0
    """Answers that were there, though the descriptor did not say so for a whole ``rescue_interval``."""
    empty_wakes: int = 0
    """Times that the descriptor said that there was something, and there was nothing."""
    resets: int = 0
    """Of these, how often the descriptor had to be reset here, since the plugin had not done it."""
    raised: int = 0
    """Exceptions from where the plugin's answers are heard."""
    slow_submits: int = 0
    """Submits that held everybody up."""
    failed_unlocks: int = 0
    """Exceptions from where the plugin is told to let go."""


class Line:
    """See above.

    Attributes:
        peer: the plugin.
        correlation: what is outstanding.
        counts: what went wrong.
    """

    def __init__(self, peer: Peer, config: HostConfig) -> None:
        self.peer: Peer = peer
        self.config: HostConfig = config
        self.correlation: Correlation = Correlation()
        self.counts: LineCounts = LineCounts()
        self._is_open = False
        self._was_open = False
        self._is_closed = False
        self._broken: str | None = None
        self._last_error: BaseException | None = None
        self._descriptors: dict[str, Descriptor] = {}
        self._patience: dict[str, trio.CancelScope] = {}
        self._waiting: dict[Operation, trio.Event] = {}
        self._quiet = trio.Event()
        self._submitted: deque[tuple[Operation, object, BaseException | None]] = deque()  # in threads, and not filed

    @property
    def is_open(self) -> bool:
        """Whether anything can be asked, as far as that depends on this side."""
        return self._is_open

    @property
    def was_open(self) -> bool:
        """Whether it has begun, or was closed without: there is no second time."""
        return self._was_open

    # --- its life -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listen as long as this is entered; then close the plugin, each in bounded time.

        Raises:
            PluginTypeError: the plugin's descriptors make no sense.
            PluginFault: its ``close`` raised.
            NoAnswer: its ``close`` did not return. It goes on in a thread that nobody waits for.
        """
        self._was_open = True
        error: BaseException | None = None
        try:
            try:
                channels = self.peer.channels()
            except BaseException as exc:
                error = exc
                raise
            async with trio.open_nursery() as nursery:
                for channel, fd in channels.items():
                    nursery.start_soon(self._listen, channel, fd)
                self._is_open = True
                try:
                    yield
                except BaseException as exc:
                    error = exc  # the body's own: it leaves as it came
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
        """Answers that nobody waits for: what they have locked is to be unlocked."""
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
                await run_in_thread(self.peer.close)
            except Exception as exc:
                failure = self._close_raised(exc)
        if scope.cancelled_caught:
            failure = self._close_hangs()
        if failure is not None:
            if error is None:
                raise failure
            error.add_note(str(failure))

    def close(self) -> None:
        """Close the plugin where this was never open. Waits for it, so long and no longer; in any thread."""
        if self._was_open:
            return
        self._was_open = self._is_closed = True
        came: list[Exception] = []

        def work() -> None:
            try:
                self.peer.close()
            except Exception as exc:
                came.append(exc)

        thread = threading.Thread(target=work, name="offload-close", daemon=True)
        thread.start()
        thread.join(self.config.close_deadline)
        if thread.is_alive():
            raise self._close_hangs()
        if came:
            raise self._close_raised(came.pop())

    def _close_raised(self, error: Exception) -> PluginFault:
        failure = PluginFault(f"{self.peer.name}: close raised {error!r}")
        failure.__cause__ = error
        return failure

    def _close_hangs(self) -> NoAnswer:
        return NoAnswer(f"{self.peer.name}: close did not return within {self.config.close_deadline:g} s")

    # --- asking ---------------------------------------------------------------------------------------------------

    async def ask(
        self,
        kind: Kind,
        keys: Sequence[Key],
        *,
        undo: Callable[[Operation], None] | None = None,
    ) -> list[bool]:
        """A bit for each key, of a question without buffers: see :meth:`question` and :meth:`answer`."""
        return await self.answer(self.question(kind, keys, undo=undo))

    def question(
        self,
        kind: Kind,
        keys: Sequence[Key],
        *,
        touches: object = None,
        undo: Callable[[Operation], None] | None = None,
    ) -> Operation:
        """What is to be asked. Nothing is asked yet.

        Args:
            kind: what.
            keys: of what; not empty.
            touches: stays alive until it is over.
            undo: called if the answer comes although nobody waits for it any more.
        """
        operation = Operation(kind, self.peer.channel_of(kind), keys, touches)
        operation.on_over = partial(self._on_over, undo)
        return operation

    async def answer(self, operation: Operation, buffers: Sequence[memoryview] = ()) -> list[bool]:
        """Ask, and wait for the answer: a bit for each key. A checkpoint.

        Cancelled or not answered in time, it leaves its operation behind, which then ``may_go_on``.

        Args:
            operation: the question, asked once.
            buffers: for each key, what to read from or write into.

        Raises:
            NoAnswer: not within the deadline, or not before the plugin broke down or was closed. It may go on.
            PluginFault: it failed as a whole, and is over; or it could not be asked.
            PlaceClosed: the tier is not open.
        """
        self._check()
        await trio.lowlevel.checkpoint_if_cancelled()
        bell = trio.Event()
        self._waiting[operation] = bell
        try:
            with trio.CancelScope() as patience:
                patience.deadline = trio.current_time() + self.config.deadline
                await self._submit(operation, buffers)
                await bell.wait()
        except BaseException:
            self._give_up(operation)
            if operation.is_over and not operation.in_vain and operation.on_over is not None:
                operation.on_over(operation)  # answered and cancelled in the same tick
            raise
        self._give_up(operation)
        if operation.fault is not None:
            raise operation.fault
        if operation.bits is None or operation.in_vain:
            raise self._silence(operation)
        return operation.bits

    def unlock(self, keys: Sequence[Key]) -> None:
        """Let go of keys that were found. One that raises is counted: nobody could do anything about it.

        A plugin that is closed has let go of everything, and is not told.
        """
        if keys and not self._is_closed:
            try:
                self.peer.unlock(keys)
            except Exception as exc:
                self.counts.failed_unlocks += 1
                self._last_error = exc

    def _check(self) -> None:
        if not self._is_open:
            raise PlaceClosed(f"{self.peer.name} is not open: a plugin is used inside `async with`")
        if self._broken is not None:
            raise PluginFault(self._broken) from self._last_error
        most, unanswered = self.config.most_unanswered, len(self.correlation) - len(self._waiting)
        if unanswered >= most:
            raise PluginFault(f"{self.peer.name}: {unanswered} operations are unanswered: most_unanswered is {most}")

    async def _submit(self, operation: Operation, buffers: Sequence[memoryview]) -> None:
        operation.started = True
        self.correlation.begin()
        self._hurry(operation.channel)
        if self.config.submit_in_thread:
            try:
                await run_in_thread(self._submit_late, operation, buffers)
            except Exception as exc:  # there was no thread to be had
                self._file(operation, None, exc)
            self._file_late()
            if operation.may_go_on:
                self._hear(
                    operation.channel, woken=False, expected=True
                )  # it may have been signalled before its id was known
            return
        start = time.perf_counter()
        try:
            returned = self.peer.submit(operation.kind, operation.keys, buffers)
        except Exception as exc:
            self._file(operation, None, exc)
        except BaseException:
            self.correlation.not_submitted()
            raise
        else:
            if time.perf_counter() - start > SLOW:
                self.counts.slow_submits += 1
            self._file(operation, returned, None)

    def _submit_late(self, operation: Operation, buffers: Sequence[memoryview]) -> None:
        """In a thread, which may be left: what it returns is filed by whoever comes by next. Raises nothing."""
        try:
            returned = self.peer.submit(operation.kind, operation.keys, buffers)
        except BaseException as exc:
            self._submitted.append((operation, None, exc))
        else:
            self._submitted.append((operation, returned, None))

    def _file_late(self) -> None:
        while self._submitted:
            self._file(*self._submitted.popleft())
        self._note_quiet()

    def _file(self, operation: Operation, returned: object, error: BaseException | None) -> None:
        """Submitting is over: it has returned an id, or something else, or it has raised and started nothing.

        Without an id of its own nobody can tell its completion, so nobody waits for one: it may go on for ever.
        """
        if error is not None:
            self.correlation.not_submitted()
            self._last_error = error
            operation.refuse(
                PluginFault(f"{self.peer.name}: submitting {operation.kind.value} raised {error!r}"), error
            )
            return
        try:
            number = int(returned)  # type: ignore[call-overload]  # whatever a plugin returns
        except Exception as exc:
            self.correlation.not_submitted()
            operation.fault = PluginFault(f"{self.peer.name}: submitting {operation.kind.value} returned {returned!r}")
            operation.fault.__cause__ = exc
        else:
            try:
                self.correlation.submitted(operation, number)
                return
            except PluginFault as fault:
                operation.fault = fault
        self._ring(operation)

    def _silence(self, operation: Operation) -> NoAnswer:
        why = (
            self._broken
            or (None if self._is_open else f"{self.peer.name} was closed")
            or f"{self.peer.name} did not answer within {self.config.deadline:g} s"
        )
        silence = NoAnswer(f"{why}, asked to {operation.kind.value} {len(operation.keys)} keys")
        silence.__cause__ = self._last_error
        return silence

    def _give_up(self, operation: Operation) -> None:
        operation.waited_for = False
        self._ring(operation)

    def _ring(self, operation: Operation) -> None:
        bell = self._waiting.pop(operation, None)
        if bell is not None:
            bell.set()

    def _on_over(self, undo: Callable[[Operation], None] | None, operation: Operation) -> None:
        if operation.waited_for:
            self._ring(operation)
        else:
            operation.in_vain = True
            if undo is not None:
                undo(operation)
        self._note_quiet()

    def _note_quiet(self) -> None:
        if not self._is_open and not len(self.correlation):
            self._quiet.set()

    # --- listening ------------------------------------------------------------------------------------------------

    def _hurry(self, channel: str) -> None:
        """From now on something is outstanding: do not wait for the descriptor alone."""
        scope = self._patience.get(channel)
        if scope is not None:
            scope.deadline = min(scope.deadline, trio.current_time() + self.config.rescue_interval)

    async def _listen(self, channel: str, fd: int) -> None:
        try:
            descriptor = self._descriptors[channel] = Descriptor(fd)
            try:
                while True:
                    with trio.CancelScope() as scope:
                        self._patience[channel] = scope
                        if len(self.correlation):
                            self._hurry(channel)
                        await descriptor.wait()
                    if scope.cancelled_caught:
                        descriptor.check()
                    if not self._hear(channel, woken=not scope.cancelled_caught):
                        await trio.sleep(self.config.rescue_interval)  # it raised: not again at once
            finally:
                descriptor.close()
        except (OSError, ValueError) as exc:
            self._last_error = exc
            self._break(f"{self.peer.name}: nobody can listen to its descriptor {fd} ({channel}): {exc!r}")

    def _hear(self, channel: str, *, woken: bool, expected: bool = False) -> bool:
        """What is to be heard now. Whether the plugin let itself be listened to.

        Args:
            channel: where.
            woken: its descriptor is readable.
            expected: it is not, and that is no fault of the plugin.
        """
        self._file_late()
        heard: list[Completion] = []
        answered = True
        try:
            if woken and not self.peer.resets:
                self._descriptors[channel].reset()
            self.peer.hear(channel, self.correlation.outstanding(channel), heard)
        except Exception as exc:
            self.counts.raised += 1
            self._last_error = exc
            answered = False
        matched = [self.correlation.completed(completion) for completion in heard]
        if not woken and not expected:
            self.counts.rescues += len(matched) - matched.count(None)
        elif woken and not heard and answered:
            self.counts.empty_wakes += 1
            if self._descriptors[channel].reset():
                self.counts.resets += 1
                self._hear(channel, woken=False, expected=True)  # what was said before the reset wakes nobody again
        self._note_quiet()
        return answered or bool(heard)

    def _break(self, why: str) -> None:
        self._broken = why
        for operation in list(self._waiting):
            self._give_up(operation)
        self._quiet.set()
