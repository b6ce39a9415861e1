"""Threads and processes for servers, whose failure to start is an :class:`OSError`.

So it is handled like everything else that the environment refuses. The interpreter raises a bare :exc:`RuntimeError`,
which passes all handlers of a full disk or a limit of descriptors, and would end the nursery of a server because of one
request.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NoThread(OSError):
    """No thread can be started; the operator must act.

    Raise ``pids.max`` of the container, or ``ulimit -u``.
    """


def no_thread(cause: BaseException) -> NoThread:
    """Return the error for a thread that cannot be started."""
    return NoThread(errno.EAGAIN, f"{cause}: raise pids.max of this container, or `ulimit -u`")


@contextmanager
def _refusal_is_an_os_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:
        # Only the text identifies it: the interpreter has no class for it.
        if str(exc) != "can't start new thread":
            raise
        raise no_thread(exc) from exc


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        NoThread: no thread can be started.
    """
    with _refusal_is_an_os_error():
        thread.start()


async def run_in_thread(
    work: Callable[[*Ts], T],
    *args: *Ts,
    abandon_on_cancel: bool = False,
    limiter: trio.CapacityLimiter | None = None,
) -> T:
    """Call ``work(*args)`` as :func:`trio.to_thread.run_sync` does.

    Objects that an error's frames refer to are freed with the error, and not at a garbage collection.

    Raises:
        NoThread: no thread can be started.
        BaseException: the error that ``work`` raised.
    """
    value: list[T] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            value.append(work(*args))
        except BaseException as exc:
            error.append(exc)  # past trio's frames: they hold the error, which holds its frames

    with _refusal_is_an_os_error():
        await trio.to_thread.run_sync(run, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
    if error:
        raise error.pop()
    return value.pop()


async def run_process(command: list[str], **options: Any) -> Any:
    """Run a process to its end as :func:`trio.run_process` does.

    ``nursery.start`` returns the process as soon as it has started.

    Raises:
        OSError: no process can be started, or no thread to start it in.
    """
    with _refusal_is_an_os_error():
        return await trio.run_process(command, **options)
