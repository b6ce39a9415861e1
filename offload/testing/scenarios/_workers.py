"""Many runs in many processes, as a stream in seed order.

A run is made by a *make*: called with a number, it plays and returns a report. Workers get it pickled, and numbers in
chunks; they send back a :class:`Played` for each, with the report only if it is needed.

Rule 1. The results do not depend on the number of processes, nor on which of them was fast.
Rule 2. Memory is bounded: no worker runs ahead of the oldest unfinished chunk by more than :data:`_AHEAD` chunks.
Rule 3. A run that makes no progress for ``watchdog`` real seconds costs its worker, and is a violation like any other:
        nothing that runs in the same process could end it. So is a run whose process died.
Rule 4. A caller that stops reading, or is interrupted, leaves no process behind.

The workers are plain subprocesses rather than those of :mod:`multiprocessing`: those import the caller's main module
again, which a script without ``if __name__ == "__main__"`` does not survive.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import IO, Any, Final, TypeAlias, TypeVar, cast

import attrs

from ._check import demand
from ._loads import unroll
from ._players import Player
from ._program import Scenario
from ._summary import Played, lost, played
from ._systems import SEAMS, factory_of
from ._trace import Report, Violation

T = TypeVar("T")
Make: TypeAlias = Callable[[int], Report]
"""Function that plays the program of a number, or a :class:`Player`.

It, and everything it refers to, must be importable. If it has a ``warm()``, that is called before the first run.
"""

WATCHDOG: Final = 60.0
"""Real seconds without progress after which a run is given up.

A run takes milliseconds.
"""

_CHUNK: Final = 8
"""Number of runs in a worker's chunk.

It is large enough to make the cost of the transfer negligible.
"""
_AHEAD: Final = 8
"""Chunks per worker that may wait for an older one to finish."""
_GRACE: Final = 5.0
"""Extra seconds that the parent waits beyond the worker's own watchdog.

The worker's watchdog reports where the run was.
"""
_START: Final = 120.0
"""Seconds for a worker to start: imports, on a busy machine."""


def play_many(
    make: Make,
    seeds: Iterable[int],
    *,
    processes: int = 1,
    watchdog: float = WATCHDOG,
    progress: Callable[[Played], object] | None = None,
    keep: bool = False,
) -> Iterator[Played]:
    """Play a scenario or random programs once per seed, in worker processes.

    Args:
        make: plays the program of a number.
        seeds: seeds in order; drawn as they are needed, so that they may end when time is up.
        processes: number of processes; 0: this one, in which no watchdog can end a run that hangs.
        watchdog: real seconds without progress after which a run is given up.
        progress: called for each run as soon as it is available, which may be before its turn.
        keep: return the reports of good runs as well. They may be large.

    Returns:
        The runs, in the order of the seeds.

    Raises:
        ScenarioError: raised by ``make``: the program makes no sense.
        KeyboardInterrupt: earlier results are complete; no process is left.
    """
    if processes < 1:
        return _play_here(make, seeds, progress, keep)
    return WorkerPool(make, seeds, processes, watchdog, progress, keep).results()


def cores() -> int:
    """Return the number of useful processes on this machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _play_here(
    make: Make, seeds: Iterable[int], progress: Callable[[Played], object] | None, keep: bool
) -> Iterator[Played]:
    _warm(make)
    for seed in seeds:
        one = _play_one(make, seed, keep)
        if progress is not None:
            progress(one)
        yield one


def _warm(make: Make) -> None:
    warm = getattr(make, "warm", None)
    if warm is not None:
        warm()


def _play_one(make: Make, seed: int, keep: bool) -> Played:
    began = perf_counter()
    return played(make(seed), perf_counter() - began, keep=keep)


# --- the parent's side --------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Chunk:
    seeds: deque[Any]
    """Seeds still to be played; the first is being played."""
    done: list[Played] = attrs.field(factory=list)


@attrs.define(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    last_words: IO[bytes]
    """File into which its watchdog writes the traceback of the run."""
    chunk: _Chunk | None = None
    ready: bool = False
    since: float = attrs.field(factory=perf_counter)
    """Time of its last message."""

    def give(self, chunk: _Chunk) -> None:
        self.chunk = chunk
        self.since = perf_counter()
        with contextlib.suppress(OSError):  # it died: the parent sees the end of its pipe
            self.connection.send(list(chunk.seeds))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.last_words.close()


class WorkerPool:
    """Workers and their chunks.

    Seeds are drawn when a worker is free, ``chunk`` at a time, and not before.
    """

    def __init__(
        self,
        make: Callable[[T], Report],
        seeds: Iterable[T],
        processes: int,
        watchdog: float,
        progress: Callable[[Played], object] | None,
        keep: bool,
        chunk: int = _CHUNK,
    ) -> None:
        try:
            self._work = pickle.dumps((make, watchdog, keep))
        except Exception as error:
            raise TypeError(f"{make!r} cannot be sent to another process, which needs to import it: {error}") from error
        self._seeds = iter(seeds)
        self._processes = processes
        self._size = chunk
        self._watchdog = watchdog
        self._progress = progress
        self._workers: list[_Worker] = []
        self._order: deque[_Chunk] = deque()
        self._again: deque[_Chunk] = deque()
        """Chunks whose worker was lost."""

    def results(self) -> Iterator[Played]:
        """Yield the runs, in the order of the seeds.

        Closed before its end, it leaves no process behind.
        """
        try:
            while self._employ() or self._order:
                self._listen()
                while self._order and (self._order[0].done or not self._order[0].seeds):
                    first = self._order[0]
                    yield from first.done
                    first.done.clear()
                    if first.seeds:
                        break
                    self._order.popleft()
        finally:
            with _uninterrupted():
                for worker in self._workers:
                    worker.end()

    def _employ(self) -> bool:
        """Give each idle worker a chunk, and start workers for the rest.

        Returns whether there was any chunk.
        """
        given = False
        for worker in self._workers:
            if worker.chunk is None and worker.ready:
                chunk = self._next()
                if chunk is None:
                    return given
                worker.give(chunk)
                given = True
        while len(self._workers) < self._processes and (chunk := self._next()) is not None:
            with _uninterrupted():  # otherwise a process that has just been started would be lost
                worker = self._hire()
                self._workers.append(worker)
            worker.give(chunk)
            given = True
        return given

    def _next(self) -> _Chunk | None:
        if self._again:
            return self._again.popleft()
        if len(self._order) >= self._processes * _AHEAD:
            return None
        seeds = deque(itertools.islice(self._seeds, self._size))
        if not seeds:
            return None
        self._order.append(_Chunk(seeds))
        return self._order[-1]

    def _hire(self) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        last_words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        handles = theirs.fileno(), last_words.fileno()
        program = f"from {__name__} import _serve; _serve({handles[0]}, {handles[1]})"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"],
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            stdout=2,  # a system's output does not belong among our results
            process_group=0,  # an interrupt is for the parent, which ends its workers
        )
        theirs.close()
        with contextlib.suppress(OSError):
            ours.send_bytes(self._work)
        return _Worker(process, ours, last_words)

    def _listen(self) -> None:
        """Wait until a worker sends something, or is silent for too long."""
        busy = {worker.connection: worker for worker in self._workers if worker.chunk is not None}
        now = perf_counter()
        patience = [self._patience(worker) - (now - worker.since) for worker in busy.values()]
        for connection in wait(list(busy), max(0.0, min(patience, default=0.0))):
            assert isinstance(connection, Connection)
            self._hear(busy[connection])
        now = perf_counter()
        for worker in busy.values():
            if worker in self._workers and worker.chunk is not None and now - worker.since >= self._patience(worker):
                self._lose(worker, "livelock", f"no end after {self._watchdog:g} real seconds")

    def _patience(self, worker: _Worker) -> float:
        return self._watchdog + _GRACE if worker.ready else max(_START, self._watchdog)

    def _hear(self, worker: _Worker) -> None:
        try:
            said: Any = worker.connection.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        worker.since = perf_counter()
        if said is None:
            worker.ready = True
            return
        if isinstance(said, BaseException):
            raise said
        assert isinstance(said, Played) and worker.chunk is not None
        self._note(worker.chunk, said)
        if not worker.chunk.seeds:
            worker.chunk = None

    def _note(self, chunk: _Chunk, one: Played) -> None:
        chunk.seeds.popleft()
        chunk.done.append(one)
        if self._progress is not None:
            self._progress(one)

    def _bury(self, worker: _Worker) -> None:
        """Record a worker that has ended by itself.

        Its watchdog ended it, or something else did.
        """
        code = worker.process.wait()
        worker.last_words.seek(0)
        said = worker.last_words.read().decode(errors="replace")
        if said.startswith("Timeout"):
            self._lose(worker, "livelock", f"no end after {self._watchdog:g} real seconds: it was in {_where(said)}")
        elif not worker.ready:
            raise RuntimeError(f"a worker process ended with {_code(code)} before it began")
        else:
            self._lose(worker, "crash", f"the process that played it ended with {_code(code)}")

    def _lose(self, worker: _Worker, rule: str, text: str) -> None:
        """Record a worker's run as lost; requeue the rest of its chunk."""
        chunk = worker.chunk
        worker.chunk = None
        self._workers.remove(worker)
        worker.end()
        assert chunk is not None
        self._note(chunk, lost(chunk.seeds[0], Violation(rule, text), perf_counter() - worker.since))
        if chunk.seeds:
            self._again.append(chunk)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer an interrupt until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
        if came and callable(handler):
            handler(signal.SIGINT, None)


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _where(traceback: str) -> str:
    """Return the innermost frame of the thread that plays."""
    _, _, frames = traceback.rpartition("(most recent call first):\n")
    found = re.search(r'File "(.*)", line (\d+) in (.*)', frames)
    return f"{found[3]}, {found[1]}:{found[2]}" if found else "an unknown place"


# --- a worker's side ----------------------------------------------------------------------------------------------


def _serve(connection_handle: int, last_words_handle: int) -> None:
    """Play the seeds that the parent sends, until the pipe is closed.

    This is the main function of a worker.
    """
    import faulthandler
    import logging

    logging.getLogger().addHandler(logging.NullHandler())  # thousands of warnings, from systems under faults
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(connection_handle) as connection, contextlib.suppress(EOFError, ConnectionError):
        make, watchdog, keep = connection.recv()
        _warm(make)
        connection.send(None)
        while True:
            for seed in connection.recv():
                # With exit=True it ends the process even if no Python code runs any more.
                faulthandler.dump_traceback_later(watchdog, exit=True, file=last_words_handle)
                said: object
                try:
                    said = _play_one(make, seed, keep)
                except Exception as error:
                    said = error
                faulthandler.cancel_dump_traceback_later()
                _send(connection, said)


def _send(connection: Connection, said: object) -> None:
    """Send a result; without the report, if that cannot be pickled."""
    try:
        connection.send(said)
    except (ConnectionError, EOFError):
        raise
    except Exception as error:
        if isinstance(said, Played) and said.report is not None:
            connection.send(attrs.evolve(said, report=None))
        else:
            connection.send(RuntimeError(f"{said!r} cannot be sent to another process: {error}"))


# --- one program after the other in a separate process ----------------------------------------------------------------


RUN_TIMEOUT: Final = 5.0
"""Real seconds that a program may take; most take milliseconds."""

Task: TypeAlias = tuple[Scenario, int]
"""A program and its seed."""


@attrs.frozen
class _Given(Player):
    """Player of each task that it is given."""

    base: Path | None
    system: str

    def program(self, number: Task) -> tuple[Scenario, int]:
        return number


class SubprocessPlayer:
    """Callable that plays programs in another process. Use it in a ``with``.

    It is a :data:`~._shrink.Play`, like the one of this process. A program that takes longer than its patience is a
    livelock; one whose process dies is a crash. The next one gets a new process.

    Args:
        system: ``module:factory``; empty: ours.
        base: directory that paths in programs are relative to.
        patience: real seconds that a program may take.
    """

    def __init__(self, system: str = "", base: Path | None = None, *, patience: float = RUN_TIMEOUT) -> None:
        self._tasks = _Given(base, system)
        self._patience = patience
        self._todo: deque[Task] = deque()
        self._played: Generator[Played, None, None] | None = None

    def __enter__(self) -> SubprocessPlayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._played is not None:
            self._played.close()
            self._played = None

    def __call__(self, scenario: Scenario, seed: int) -> Report:
        """Play one run.

        Raises:
            ScenarioError: the program makes no sense.
        """
        # Checked here, it costs no process.
        demand(scenario, SEAMS if factory_of(self._tasks.system) is not None else None)
        if self._played is None:
            crew = WorkerPool(self._tasks, self._given(), 1, self._patience, None, keep=True, chunk=1)
            self._played = cast("Generator[Played, None, None]", crew.results())
        self._todo.append((scenario, seed))
        try:
            one = next(self._played)
        except BaseException:
            self._played = None
            self._todo.clear()
            raise
        return one.report or self._lost(scenario, seed, one)

    def _given(self) -> Iterator[Task]:
        while self._todo:
            yield self._todo.popleft()

    def _lost(self, scenario: Scenario, seed: int, one: Played) -> Report:
        """Return the report of a run that never came back."""
        return Report(
            scenario=unroll(scenario, seed, self._tasks.base),
            seed=seed,
            moments=(),
            violations=one.violations,
            outcomes={},
            planned=len(scenario.fault),
            fired={},
            counts={},
            reached=frozenset(),
        )
