"""Exit codes, error lines and cleanup at the end of every command.

    0      done
    1      a check failed: the checked object is not as it must be
    2      usage or configuration: the request cannot be carried out
    3      the environment: a missing disk, server or package, or too little memory or too few descriptors
    5, 6, 7    a server that was asked to end has dropped stores, other requests, or both
    70     a fault of the program itself: the only end with a traceback
    129, 130, 141, 143    SIGHUP, SIGINT, SIGPIPE, SIGTERM: 128 and the signal's number

Rule 1. SIGTERM and SIGHUP unwind as SIGINT does, however Python, or trio, treats that: so every ``with`` and
        ``finally`` of a command runs. A signal that is ignored when the command starts (``nohup``) stays ignored.
        During the unwinding, another SIGTERM or SIGHUP changes nothing; a second SIGINT still interrupts.
Rule 2. Child processes end with the command. The code that started one ends it; any left over is killed here, with all
        its descendants.
Rule 3. If the reader of the output has stopped reading, the command ends with SIGPIPE's code, without a message.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Final

import click

from ..exception_groups import holds, leaves
from .printable import printable_lines

_AGAIN: Final = 0.01
"""Seconds until a signal that could not be handled is sent again."""


class ExitCode(IntEnum):
    """Exit codes of a command.

    A command that was ended by a signal exits with 128 plus the signal's number.
    """

    DONE = 0
    CHECK_FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    DROPPED = 5
    OUR_FAULT = 70


class CheckFailed(click.ClickException):
    """A check's failure: the checked object is not as it must be."""

    exit_code: ClassVar[int] = ExitCode.CHECK_FAILED


class BadInput(click.ClickException):
    """Options that cannot be carried out, and that the caller can change."""

    exit_code: ClassVar[int] = ExitCode.USAGE


class EnvironmentFault(click.ClickException):
    """A valid request that fails in this environment, at least for now.

    The cause is a disk, a server, a package or memory.
    """

    exit_code: ClassVar[int] = ExitCode.ENVIRONMENT


@contextlib.contextmanager
def ending(program: str) -> Iterator[None]:
    """Turn any error of the enclosed command into an exit code.

    Raises:
        SystemExit: however the block ends, unless it raises SystemExit itself.
    """
    before = set(_below(os.getpid()))
    code = int(ExitCode.DONE)
    with _unwinding_signals() as received:
        try:
            try:
                yield
            finally:
                _flush()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException as error:
            code = _say(program, error, received)
        if received:
            code = 128 + received[0]
        if code > 128:
            _kill(set(_below(os.getpid())) - before)
    raise SystemExit(code)


class Interruption:
    """Whether a block was interrupted. Made by :func:`until_interrupted`."""

    def __init__(self) -> None:
        self.came: bool = False

    def go_on(self) -> None:
        """Raise the interrupt again, after the partial result was shown.

        Raises:
            KeyboardInterrupt: the block was interrupted.
        """
        if self.came:
            raise KeyboardInterrupt


@contextlib.contextmanager
def until_interrupted() -> Iterator[Interruption]:
    """Catch an interrupt of the block, and record it.

    The rest of the command can then show partial results.
    """
    interruption = Interruption()
    try:
        yield interruption
    except BaseException as error:
        if not interrupted(error):
            raise
        interruption.came = True


def _say(program: str, error: BaseException, received: list[int]) -> int:
    """Write the line for an error. Returns the exit code."""
    if interrupted(error):
        number = signal.Signals(received[0] if received else signal.SIGINT)
        _write(f"{program}: ended by {number.name}")
        return 128 + number
    every = [_as_said(one) for one in leaves(error)]
    said = every[0]
    if None in every or said is None:
        _write("".join(traceback.format_exception(error)) + f"{program}: this is a fault of the program itself")
        return ExitCode.OUR_FAULT
    if isinstance(said, BrokenPipeError):
        return 128 + signal.SIGPIPE
    text = io.StringIO()
    said.show(text)
    _write(printable_lines(text.getvalue().rstrip("\n")))  # it may contain a peer's text
    return ExitCode.USAGE if isinstance(said, click.FileError) else said.exit_code


def interrupted(error: BaseException) -> bool:
    """Return whether an error is an interrupt, or followed from one.

    An error that was raised while an interrupt unwound counts.
    """
    if holds(error, (KeyboardInterrupt, click.Abort)):
        return True
    return (
        error.__context__ is not None and not isinstance(error, click.ClickException) and interrupted(error.__context__)
    )


def _as_said(error: BaseException) -> click.ClickException | BrokenPipeError | None:
    """Return the error as a message for a person, or None.

    None means that the error is unexpected.
    """
    if isinstance(error, click.ClickException):
        return error
    if isinstance(error, OSError):
        where = error.filename
        if where is None and _is_of_output(error):
            _forget_output()
            if isinstance(error, BrokenPipeError):
                return error
            where = "standard output"
        text = error.strerror or str(error) or type(error).__name__
        return EnvironmentFault(text if where is None else f"{os.fsdecode(where)}: {text}")
    if isinstance(error, MemoryError):
        return EnvironmentFault(f"there is not enough memory{f': {error}' if str(error) else ''}")
    if isinstance(error, ModuleNotFoundError) and error.name is not None and _is_foreign(error.name):
        return EnvironmentFault(lacking(error.name))
    if isinstance(error, ImportError) and "pip install" in str(error):  # raised by a module that needs an extra
        return EnvironmentFault(str(error))
    return None


_EXTRAS: Final = {"torch": "torch", "numpy": "torch", "zstandard": "zstd", "cryptography": "aes"}


def _is_foreign(name: str) -> bool:
    return name.partition(".")[0] not in ("offload", "backends", "maru")


def lacking(name: str) -> str:
    """Return the message for a missing package.

    It names the extra that installs the package.
    """
    package = name.partition(".")[0]
    if package in _EXTRAS:
        return f"the package {package} is not installed: pip install 'trio-offload[{_EXTRAS[package]}]'"
    return f"the package {package} is not installed"


# --- output -------------------------------------------------------------------------------------------------------


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


_WRITERS: Final = frozenset({"click.utils", "rich.console", __name__})
"""Modules that write to the standard output."""


def _is_of_output(error: OSError) -> bool:
    """Return whether a write to the standard output raised an error.

    Such an error names no file, so it is recognised by the module that raised it.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"] in _WRITERS


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _forget_output() -> None:
    """Discard the unwritten output.

    Otherwise the interpreter would try to write it again at exit, and print an error of its own.
    """
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


# --- signals ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _unwinding_signals() -> Iterator[list[int]]:
    """Treat SIGTERM and SIGHUP as SIGINT. Yields the list of received signals.

    Does nothing in a thread other than the main one.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def heed(number: int, frame: FrameType | None) -> None:
        if _finalizing(frame):  # an exception raised in a finalizer is lost
            again = threading.Timer(_AGAIN, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        received.append(number)
        interrupt: Any = signal.getsignal(signal.SIGINT)
        if len(received) == 1:
            # If SIGINT is ignored, as after `&` in a script, the handler is not callable, and these signals still
            # interrupt.
            (interrupt if callable(interrupt) else signal.default_int_handler)(signal.SIGINT, frame)

    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in heeded:
        signal.signal(number, heed)
    try:
        yield received
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)


def _finalizing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


# --- processes ----------------------------------------------------------------------------------------------------


def _below(parent: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, children.read_text().split()):
                yield pid
                yield from _below(pid)


def _kill(processes: set[int]) -> None:
    for pid in processes:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
