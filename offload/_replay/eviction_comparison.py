"""All eviction policies over one trace, at several capacities, with the limit.

The limit is the highest hit rate that is possible. Each pair of policy and capacity is one simulation, by
:func:`offload._replay.simulation.simulate`. On a machine with several processors, as many child processes take one
simulation after the other. They read the trace from their standard input, and exit when it is closed, so none of them
outlives the parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import attrs
import msgspec
import trio

from backends.abc import Key
from maru.eviction import LRU, AdaptiveLRFU, EvictionPolicy, WTinyLFU
from maru.exception_groups import raise_unwrapped

from .._errors import OffloadError
from .simulation import most_hits, simulate

POLICIES: Final[Mapping[str, Callable[[], EvictionPolicy[Key]]]] = MappingProxyType(
    {
        "AdaptiveLRFU": AdaptiveLRFU,
        "LRU": LRU,
        "W-TinyLFU": WTinyLFU,
    }
)
"""The policies that are compared, by displayed name; the default first."""

LIMIT: Final = "Belady"
"""The name of the limit in tables and pictures."""

SHARES: Final = (0.01, 0.05, 0.1, 0.25, 0.5)
"""The default capacities, as shares of the trace's different blocks."""


Task: TypeAlias = tuple[str, int]
"""A simulation: the name of a policy or the limit, and capacity."""


@attrs.frozen
class Storing:
    """The way in which the blocks of a request are stored."""

    chunk: int | None = None
    """Blocks stored together, the head of the prefix first; None: all."""
    depths: bool = False
    """Whether each comes with its depth, its index in its prefix."""


class ComparisonFailed(OffloadError, OSError):
    """A child process that simulated exited by itself.

    It was killed by the system, or out of memory.
    """


@attrs.frozen
class Comparison:
    """Hit rates of the policies at some capacities."""

    requests: int
    """Requests of the trace."""
    blocks: int
    """Blocks of their prompts."""
    unique_blocks: int
    """Different blocks among these."""
    capacities: Sequence[int]
    """Capacities in blocks, ascending."""
    hit_rates: Mapping[str, Sequence[float]]
    """Hit rates of each policy, at each capacity."""
    limit: Sequence[float]
    """The highest hit rate that was possible, at each capacity."""

    @property
    def shares(self) -> list[float]:
        """The capacities, as shares of the different blocks."""
        return [capacity / self.unique_blocks for capacity in self.capacities]

    def best(self, at: int) -> list[str]:
        """Return the policies with the highest hit rate at this capacity.

        It is rounded as it is shown. Mostly there is one.
        """
        rates = {name: round(rates[at], 4) for name, rates in self.hit_rates.items()}
        return [name for name, rate in rates.items() if rate == max(rates.values())]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return attrs.asdict(self) | {"shares": self.shares}


def compare(
    requests: Sequence[Sequence[Key]],
    capacities: Sequence[int],
    progress: Callable[[int], None] = lambda done: None,
    *,
    storing: Storing = Storing(),
    processes: int | None = None,
) -> Comparison:
    """Simulate every policy, and the limit, at each of these capacities.

    Args:
        requests: the keys of each request.
        capacities: in blocks.
        progress: called after each simulation with the number done; there are ``simulations(capacities)``.
        storing: the way in which the blocks of a request are stored.
        processes: number of processes; by default as many as there are processors. With 1, none but this one.

    Raises:
        ComparisonFailed: a child process exited by itself.
        KeyboardInterrupt: the user interrupted; all child processes have exited.
    """
    capacities = sorted(set(capacities))
    tasks = [(name, capacity) for capacity in reversed(capacities) for name in [LIMIT, *POLICIES]]
    processes = processes or len(os.sched_getaffinity(0))
    if processes == 1:
        hits = {}
        for done, task in enumerate(tasks, 1):
            hits[task] = _hits(requests, storing, *task)
            progress(done)
    else:
        hits = trio.run(
            _share_out,
            msgspec.msgpack.encode((requests, attrs.astuple(storing))),
            tasks,
            min(processes, len(tasks)),
            progress,
            restrict_keyboard_interrupt_to_checkpoints=True,
        )
    blocks = sum(map(len, requests))
    rates = {task: found / (blocks or 1) for task, found in hits.items()}
    return Comparison(
        requests=len(requests),
        blocks=blocks,
        unique_blocks=len({key for keys in requests for key in keys}),
        capacities=capacities,
        hit_rates={name: [rates[name, capacity] for capacity in capacities] for name in POLICIES},
        limit=[rates[LIMIT, capacity] for capacity in capacities],
    )


def simulations(capacities: Sequence[int]) -> int:
    """Return the number of simulations of a comparison."""
    return (len(POLICIES) + 1) * len(set(capacities))


def _hits(requests: Sequence[Sequence[Key]], storing: Storing, name: str, capacity: int) -> int:
    if name == LIMIT:
        return most_hits(requests, capacity)
    return simulate(requests, [capacity], eviction=[POLICIES[name]], chunk=storing.chunk, depths=storing.depths)


# --- processes ----------------------------------------------------------------------------------------------------

_LENGTH: Final = 8
"""Bytes of the length prefix in front of the trace."""


async def _share_out(
    trace: bytes, tasks: Sequence[Task], processes: int, progress: Callable[[int], None]
) -> dict[Task, int]:
    """Run every task in one of ``processes`` child processes.

    When cancelled, it kills them and waits for their exit.
    """
    hits: dict[Task, int] = {}
    left = deque(tasks)

    async def work() -> None:
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,  # noqa: TID251
                    [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    check=False,
                    deliver_cancel=_kill,
                    process_group=0,  # an interrupt from the keyboard goes to the parent alone
                )
            )
            assert process.stdin is not None and process.stdout is not None
            try:
                await process.stdin.send_all(len(trace).to_bytes(_LENGTH) + trace)
                while left:
                    task = left.popleft()
                    await process.stdin.send_all(msgspec.json.encode(task) + b"\n")
                    hits[task] = int(await _line(process.stdout))
                    progress(len(hits))
                await process.stdin.aclose()
            except trio.BrokenResourceError as error:
                status = await process.wait()
                raise ComparisonFailed(f"a process of the comparison ended by itself, with status {status}") from error

    with raise_unwrapped():
        async with trio.open_nursery() as nursery:
            for _ in range(processes):
                nursery.start_soon(work)
    return hits


async def _line(stream: trio.abc.ReceiveStream) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = await stream.receive_some()
        if not part:
            raise trio.BrokenResourceError("it has closed its output")
        line += part
    return line


async def _kill(process: trio.Process) -> None:
    process.kill()


def serve() -> None:
    """Run simulations in a child process, until its standard input ends."""
    asked, answers = sys.stdin.buffer, sys.stdout
    nbytes = int.from_bytes(asked.read(_LENGTH))
    requests, storing = msgspec.msgpack.decode(
        asked.read(nbytes), type=tuple[list[tuple[bytes, ...]], tuple[int | None, bool]]
    )
    for line in asked:
        print(
            _hits(requests, Storing(*storing), *msgspec.json.decode(line, type=tuple[str, int])),
            file=answers,
            flush=True,
        )
