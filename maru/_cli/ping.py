"""``maru ping``: measurement of round trips."""

from __future__ import annotations

import statistics
import time
from time import perf_counter

import click

from .._wire import Code, HeartbeatReply
from ..base.commands import FiniteRange
from ..base.console import identifier, say
from ..base.ending import CheckFailed
from ..base.errors import NoAnswer
from ..base.output import duration, plural, print_json
from ._connection import ServerOptions, open_connection, probe_address, server_options


@click.command()
@server_options
@click.option("-n", "--count", type=click.IntRange(1), default=10, show_default=True, help="Number of round trips.")
@click.option(
    "--interval",
    type=FiniteRange(0, 3_600),
    default=0.1,
    show_default=True,
    metavar="SECONDS",
    help="Time between two round trips, in seconds.",
)
def command(options: ServerOptions, count: int, interval: float) -> None:
    """Measure round trips of HEARTBEAT messages.

    The first one, which connects, does not count. Exit code 1 if an answer is lost; 3, as for every
    command, if the server does not answer at all.
    """
    times: list[float] = []
    with open_connection(options) as server:
        epoch = server.ask(Code.HEARTBEAT, HeartbeatReply).epoch
        for number in range(count):
            if number:
                time.sleep(interval)
            began = perf_counter()
            try:
                epoch = server.ask(Code.HEARTBEAT, HeartbeatReply).epoch
            except NoAnswer:
                continue
            times.append(perf_counter() - began)
    lost = count - len(times)
    figures = _figures(times) if times else {}
    if options.as_json:
        print_json(
            {
                "address": options.address,
                "over": server.over,
                "epoch": identifier(epoch or None),
                "sent": count,
                "lost": lost,
                **figures,
            }
        )
    else:
        say(f"{options.address}, over {server.over}: {plural(count, 'round trip')}, {lost} lost")
        say(", ".join(f"{name} {duration(figure)}" for name, figure in figures.items()))
    if lost:
        raise CheckFailed(
            f"{options.address} did not answer {lost} of {count} within {options.timeout:g} s: "
            f"{probe_address(options.address).text}"
        )


def _figures(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"min": ordered[0], "p50": statistics.median(ordered), "p99": p99, "max": ordered[-1]}
