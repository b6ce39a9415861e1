"""What this process holds of the kernel, for tests of what stays behind: descriptors, and the threads of ZeroMQ."""

import contextlib
import errno
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from maru.base.spare_descriptor import SPARE


def open_descriptors(*, collect: bool = False) -> set[tuple[int, int, int]]:
    """Each that is open: its number, and the device and number of what it refers to.

    Not merely how many: of an earlier test's, some may go while a later one looks. Whoever looks first collects, so that
    what is garbage already is not there.
    """
    if collect:
        gc.collect()
    SPARE.keep()  # which stays from its first use on
    there = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile: the listing itself was one
            facts = os.fstat(number)
            there.add((number, facts.st_dev, facts.st_ino))
    return there


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Take all descriptors that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/", os.O_PATH))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


@contextlib.contextmanager
def no_spare_either() -> Iterator[None]:
    """Take all descriptors, and the one that is held back."""
    with SPARE.given_up():
        SPARE._open = lambda: None  # type: ignore[method-assign]
        try:
            with no_descriptor_left():
                SPARE._lock.release()
                try:
                    yield
                finally:
                    SPARE._lock.acquire()
        finally:
            del SPARE._open


def refuse_memory(*_: object) -> int:
    """Stand in for ``os.memfd_create`` of a host without memory."""
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def zmq_threads() -> set[str]:
    """The ids of those that run. One that was joined is over before the kernel has taken it out of the list."""
    there = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # over meanwhile
            if "ZMQ" in Path(f"/proc/self/task/{task}/comm").read_text():
                there.add(task)
    return there


def nothing_new_since(descriptors: set[tuple[int, int, int]], threads: set[str]) -> bool:
    """Whether there is no descriptor and no thread of ZeroMQ that was not there before. Those of an earlier test may go."""
    return open_descriptors() <= descriptors and zmq_threads() <= threads


def zmq_is_idle() -> bool:
    """Whether all of them sleep at one moment: then nothing moves any more until somebody asks for something.

    Whoever sleeps now, and has not run since it slept a moment ago, has slept in between: all of them at once.
    """
    before = _zmq_naps()
    return before is not None and before == _zmq_naps()


def _zmq_naps() -> dict[str, str] | None:
    """How often each has gone to sleep so far; None while one does not."""
    naps = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # over meanwhile
            fields = dict(
                line.split(":", 1) for line in Path(f"/proc/self/task/{task}/status").read_text().splitlines()
            )
            if "ZMQ" in fields["Name"]:
                if not fields["State"].strip().startswith("S"):
                    return None
                naps[task] = fields["voluntary_ctxt_switches"] + fields["nonvoluntary_ctxt_switches"]
    return naps
