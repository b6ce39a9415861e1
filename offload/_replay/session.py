"""Plays the requests of a trace, for several laps, over new tiers.

They are played through an engine, one after another or several at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Final

import trio

from backends.abc import Key, TierStatistics
from maru.eviction import LRU, AdaptiveLRFU

from .._engine import EngineStatistics
from .clock import SkippingClock
from .laps import Laps
from .leaks import left_over, resident_bytes
from .options import ReplayError, ReplayOptions
from .recording import Recorded, not_empty, not_recordable, scenario_of
from .replayer import Played, Replayer, TraceKeys, open_replayer
from .report import ReplayReport, Tally
from .simulation import simulate
from .tiers import open_tiers
from .trace import Request

if TYPE_CHECKING:
    from ..testing.scenarios._program import Scenario


async def replay(
    requests: Sequence[Request],
    options: ReplayOptions,
    progress: Callable[[int], None] = lambda done: None,
    record: Callable[[Scenario], None] | None = None,
    name: str = "a replay",
    clock: SkippingClock | None = None,
) -> ReplayReport:
    """Play requests through an engine over new tiers.

    They are played one after another or several at once, and every loaded block is compared. With ``options.laps`` they
    are played that many times, and then the tiers are checked for leaks (:mod:`.leaks`).

    Args:
        requests: as :func:`read_trace` gives them.
        options: tiers, policy, pace and laps.
        progress: called after each request with the number of requests done.
        record: called with the scenario that repeats the replay (see :mod:`offload.testing.scenarios`).
        name: of that scenario.
        clock: the clock of this trio run if it can skip: then the time between two requests is skipped.

    Raises:
        ReplayError: the options contradict each other, there is too little memory, or a tier to record is not empty.
    """
    laps = Laps(requests, options.laps, options.rename)
    _check_pace(laps, options)
    unique = laps.unique_blocks
    simulated = {f"{factor:g}x": _what_if(laps, options, factor) for factor in options.what_if}
    _check_recordable(record is not None, options)
    async with open_tiers(options, unique) as tiers:
        if record is not None and (full := not_empty(tiers)):
            raise ReplayError(f"--record: {full} already has blocks, which a scenario cannot reproduce: empty it")
        tally = Tally(len(laps))
        recorded: list[Played] | None = [] if record is not None else None
        resident = [resident_bytes()]
        policies = options.policies(next(iter(tiers.values())))
        most = max((len(request.hash_ids) for request in requests), default=1)
        async with open_replayer(
            list(tiers.values()), options.block_bytes, most, policies=policies, in_flight=options.in_flight
        ) as player:
            began = perf_counter()
            pace = _Pace(requests, options.speed, clock)
            for lap in laps:
                await _play_lap(lap, player, pace, tally, recorded, progress)
                resident.append(resident_bytes())
            wall_time = perf_counter() - began
            statistics = player.engine.statistics()
        at_the_end = {name: tier.statistics() for name, tier in tiers.items()}
        if record is not None and recorded is not None:
            record(_as_scenario(name, requests, recorded, options, unique, statistics))
        left = await left_over(tiers, options, laps) if options.laps > 1 else {}
    return _report(tally, laps, options, statistics, at_the_end, wall_time, simulated, resident, left)


class _Pace:
    """The times when requests are due."""

    def __init__(self, requests: Sequence[Request], speed: float, clock: SkippingClock | None) -> None:
        self._began = trio.current_time()
        self._first = requests[0].timestamp if requests else 0.0
        self._speed = speed
        self._clock = clock

    async def wait_for(self, request: Request) -> None:
        """Wait until the request is due, by skipping if the clock can."""
        if self._speed == math.inf:
            return
        due = self._began + (request.timestamp - self._first) / 1e3 / self._speed
        if self._clock is not None:
            await self._clock.skip_to(due)
        else:
            await trio.sleep_until(due)


_LONGEST: Final = 366 * 86_400
"""The longest replay, in seconds.

A longer one points to a wrong timestamp.
"""


def _check_pace(laps: Laps, options: ReplayOptions) -> None:
    if options.speed != math.inf or options.laps > 1:
        for number, (one, other) in enumerate(itertools.pairwise(laps.requests), 2):
            if other.timestamp < one.timestamp:
                raise ReplayError(
                    f"request {number} of the trace comes {one.timestamp - other.timestamp:g} ms before its predecessor: "
                    "sort the trace by its timestamps, or play it once with --speed max"
                )
    seconds = laps.laps * laps.period / 1e3 / options.speed
    if not seconds <= _LONGEST:
        last = max(laps.requests, key=lambda request: request.timestamp)
        raise ReplayError(
            f"at this speed the replay takes {seconds / 86_400:,.3g} days; the limit is {_LONGEST / 86_400:g}. Is timestamp "
            f"{last.timestamp:g} really in milliseconds? Otherwise use --speed max"
        )


async def _play_lap(
    lap: Sequence[Request],
    player: Replayer,
    pace: _Pace,
    tally: Tally,
    recorded: list[Played] | None,
    progress: Callable[[int], None],
) -> None:
    """Play a lap, as many requests at once as there are seats.

    They begin in the order of the trace.
    """
    names = TraceKeys()

    async def play(request: Request, seat: int) -> None:
        played = await player.play(names.of(request), seat=seat)
        tally.add(played)
        if recorded is not None:
            recorded.append(played)
        progress(tally.requests)

    if len(player.seats) == 1:
        for request in lap:
            await pace.wait_for(request)
            await play(request, 0)
        return
    stand, free = trio.open_memory_channel[int](len(player.seats))
    for seat in range(len(player.seats)):
        stand.send_nowait(seat)

    async def play_and_stand(request: Request, seat: int) -> None:
        await play(request, seat)
        stand.send_nowait(seat)

    async with trio.open_nursery() as nursery:
        for request in lap:
            seat = await free.receive()
            await pace.wait_for(request)
            nursery.start_soon(play_and_stand, request, seat)


def _check_recordable(recorded: bool, options: ReplayOptions) -> None:
    if not recorded:
        return
    kinds = [spec.kind if spec.made is None else f"{spec.kind}, as specified," for spec in options.tiers]
    if other := not_recordable(kinds):
        raise ReplayError(f"--record: a scenario cannot describe a tier of {other}: use memory or file:DIR")
    if options.laps > 1:
        raise ReplayError("--record: a scenario cannot repeat laps: leave out --laps")
    if options.in_flight > 1:
        raise ReplayError("--record: a scenario plays one request at a time: leave out --in-flight")


def _as_scenario(
    name: str,
    requests: Sequence[Request],
    played: Sequence[Played],
    options: ReplayOptions,
    unique: int,
    statistics: EngineStatistics,
) -> Scenario:
    names = TraceKeys()
    return scenario_of(
        name,
        requests,
        [names.of(request) for request in requests],
        played,
        [Recorded(spec.kind, spec.blocks(options.block_bytes, unique)) for spec in options.tiers],
        statistics.tiers,
        block_bytes=options.block_bytes,
        checksums=options.checksums,
        presence=options.policy != "pass-all",
    )


def _report(
    tally: Tally,
    laps: Laps,
    options: ReplayOptions,
    statistics: EngineStatistics,
    tiers: Mapping[str, TierStatistics],
    wall_time: float,
    simulated: Mapping[str, float],
    resident: Sequence[int],
    left: Mapping[str, int],
) -> ReplayReport:
    first = next(iter(tiers.values()))
    moved = sum(tier.stored + tier.loaded for tier in tiers.values())
    return ReplayReport(
        requests=tally.requests,
        blocks=tally.blocks,
        unique_blocks=laps.unique_blocks,
        hit_blocks=tally.hit,
        hit_rate=tally.hit / tally.blocks if tally.blocks else 0.0,
        wrong=tally.wrong,
        load_failures=statistics.load_failures,
        stored=first.stored,
        evicted=first.evicted,
        filtered=tally.filtered,
        dropped=tally.dropped,
        failures=dict(tally.failures),
        bytes=moved * options.block_bytes,
        lookup=tally.lookup,
        load=tally.load,
        store=tally.store,
        request=tally.request,
        cache_time=tally.cache_time,
        wall_time=wall_time,
        tiers=tiers,
        what_if=simulated,
        laps=laps.laps,
        trace_time=laps.laps * laps.period / 1e3,
        resident_bytes=resident,
        left_over=left,
        in_flight=options.in_flight,
    )


def _what_if(laps: Laps, options: ReplayOptions, factor: float) -> float:
    unique = max(1, laps.unique_blocks)
    presence = options.policy != "pass-all"
    # No tier holds more than this. Without the presence filter a block that is present is stored again and takes a second
    # slot for that moment; a tier with room for exactly all blocks would evict one.
    most = unique if presence else unique + max((len(request.hash_ids) for request in laps.requests), default=0)
    capacities = [min(spec.blocks(options.block_bytes, unique, factor), most) for spec in options.tiers]
    if 0 in capacities:
        raise ReplayError(f"what-if {factor:g}x: a tier would hold less than one block")
    hits = simulate(
        _keys_of(laps),
        capacities,
        options.further_policies(),
        presence=presence,
        eviction=[LRU if spec.kind == "maru" else AdaptiveLRFU for spec in options.tiers],
    )
    return hits / (laps.laps * sum(len(request.hash_ids) for request in laps.requests) or 1)


def _keys_of(laps: Laps) -> Iterator[Sequence[Key]]:
    def of(lap: Sequence[Request]) -> Iterator[Sequence[Key]]:
        names = TraceKeys()
        return (names.of(request) for request in lap)

    return chain.from_iterable(of(lap) for lap in laps)
