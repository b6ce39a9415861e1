"""The commands of an operator.

These are ``offload ping | describe | query | explain | drain | quarantine | reload | log-level``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from time import perf_counter

import click
import msgspec

from maru.base.console import identifier, say
from maru.base.ending import BadInput, CheckFailed
from maru.base.output import duration, plural, print_json, show, size

from ._admin_messages import (
    Describe,
    Described,
    Drain,
    Drained,
    Fact,
    Inspect,
    Inspected,
    ListQuarantine,
    Quarantines,
    ReleaseQuarantine,
    Reload,
    Reloaded,
    SetLogLevel,
)
from ._dropped import Dropped
from ._messages import Done, State, Status
from ._operator import DaemonOptions, daemon_options, open_engine_side, open_operator

_SECONDS = {"up_for", "lease", "drain_timeout"}
_IDENTIFIERS = {"pid"}


@click.command()
@daemon_options
@click.option("-n", "--count", type=click.IntRange(1), default=10, show_default=True, help="Number of round trips.")
def ping(options: DaemonOptions, count: int) -> None:
    """Show the state of a daemon, and measure round trips to it.

    Needs neither the token nor a credential. Exit code 1 if the daemon is not ready, or drains.
    """
    times: list[float] = []
    with open_engine_side(options) as daemon:
        state = daemon.ask(Status, State)
        for number in range(count):
            if number:
                time.sleep(0.01)
            began = perf_counter()
            state = daemon.ask(Status, State)
            times.append(perf_counter() - began)
    figures = {"min": min(times), "p50": statistics.median(times), "max": max(times)}
    facts = {"state": state.state, "epoch": identifier(state.epoch), "sessions": state.sessions}
    if options.as_json:
        print_json(
            {"address": f"ipc://{options.path}", **facts, "under_way": state.under_way, "sent": count, **figures}
        )
    else:
        say(f"ipc://{options.path} is {state.state}, with {plural(state.sessions, 'session')}")
        say(", ".join(f"{name} {duration(figure)}" for name, figure in figures.items()))
    if state.state != "ready":
        raise CheckFailed(f"ipc://{options.path} is {state.state}")


@click.command()
@daemon_options
def describe(options: DaemonOptions) -> None:
    """Show a daemon's version, listeners, limits, tiers, tenants, sessions and counters."""
    with open_operator(options) as daemon:
        told = daemon.ask(Describe, Described)
    if options.as_json:
        lists = {"tiers": msgspec.to_builtins(told.tiers), "sessions": msgspec.to_builtins(told.sessions)}
        print_json({"epoch": identifier(told.epoch), "sections": told.sections, **lists})
        return
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    told.sections["daemon"]["epoch"] = str(identifier(told.epoch))
    for section, facts in told.sections.items():
        if section != "counters":
            for at, (name, value) in enumerate(facts.items()):
                table.add_row("" if at else section, name.removesuffix("_bytes").replace("_", " "), _shown(name, value))
    for at, tier in enumerate(told.tiers):
        used = (
            f"{size(tier.used_bytes)} of {size(tier.capacity_bytes)}, {tier.blocks:,} blocks, {tier.held_blocks:,} held"
        )
        table.add_row("" if at else "tiers", tier.name, f"{tier.kind}: {used}; breaker {tier.breaker}")
    for at, session in enumerate(told.sessions):
        tenant = f"tenant {session.tenant}, " if session.tenant else ""
        held = (
            f"{session.requests} requests, {session.holds} holds, {session.caches} caches, "
            f"{session.announced} reservations of pages"
        )
        text = f"{session.name}: {tenant}heard {duration(session.silent)} ago, {held}"
        table.add_row("" if at else "sessions", str(session.number), text)
    show(table)


def _shown(name: str, value: Fact) -> str:
    if value == "":
        return "none"
    if name == "block_bytes" and not value:
        return "not known before the first cache is registered"
    if isinstance(value, bool | str):
        return str(value)
    if name.endswith("_bytes"):
        return size(value)
    if name in _SECONDS:
        return duration(value)
    return str(value) if name in _IDENTIFIERS else f"{value:,}"


# --- blocks -------------------------------------------------------------------------------------------------------------


_key_arguments = (
    click.argument("keys", nargs=-1, required=True, metavar="KEY..."),
    click.option("--text", "as_text", is_flag=True, help="Read keys as texts instead of hexadecimal digits."),
    click.option("--tenant", default="", metavar="NAME", help="Tenant of the keys, if the daemon has tenants."),
)


def _of_keys(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_key_arguments):
        function = option(function)
    return function


def _keys_of(texts: Sequence[str], as_text: bool) -> list[bytes]:
    try:
        return [text.encode() if as_text else bytes.fromhex(text.removeprefix("0x")) for text in texts]
    except ValueError as exc:
        raise BadInput(f"{exc}: keys must be hexadecimal digits, or texts with --text") from exc


@click.command()
@daemon_options
@_of_keys
def query(options: DaemonOptions, keys: Sequence[str], as_text: bool, tenant: str) -> None:
    """Show the tiers that have the blocks of KEYs.

    A query does not count as a use of a block. Exit code 1 if a block is in no tier.
    """
    with open_operator(options) as daemon:
        told = daemon.ask(lambda seq: Inspect(seq, _keys_of(keys, as_text), tenant), Inspected)
    if options.as_json:
        print_json(
            [
                {"key": key, "tiers": b.tiers, "unavailable": b.unavailable}
                for key, b in zip(keys, told.blocks, strict=True)
            ]
        )
    else:
        for key, block in zip(keys, told.blocks, strict=True):
            silent = f"; no answer from {', '.join(block.unavailable)}" if block.unavailable else ""
            say(f"{key}: {', '.join(block.tiers) or 'in no tier'}{silent}")
    if missing := sum(not block.tiers for block in told.blocks):
        raise CheckFailed(f"{missing} of {plural(len(keys), 'key')} in no tier: `offload explain` shows why")


@click.command()
@daemon_options
@_of_keys
def explain(options: DaemonOptions, keys: Sequence[str], as_text: bool, tenant: str) -> None:
    """Explain why the blocks of KEYs are stored, or are not."""
    with open_operator(options) as daemon:
        told = daemon.ask(lambda seq: Inspect(seq, _keys_of(keys, as_text), tenant), Inspected)
    if options.as_json:
        blocks = [{"key": key, **msgspec.to_builtins(block)} for key, block in zip(keys, told.blocks, strict=True)]
        print_json({"usable": told.usable, "blocks": blocks})
        return
    for key, block in zip(keys, told.blocks, strict=True):
        say(f"{key}: {block.text}")
    if len(keys) > 1:
        say(f"a lookup of them in this order would find {told.usable} of {len(keys)}")


# --- running it ---------------------------------------------------------------------------------------------------------


@click.command()
@daemon_options
@click.pass_context
def drain(ctx: click.Context, options: DaemonOptions) -> None:
    """Drain and end a daemon, as SIGTERM does.

    The daemon refuses new work, and waits for work in progress. The command returns when the daemon is drained, with the
    daemon's exit code: 0, or 5, 6 or 7 if something was dropped.
    """
    with open_operator(options) as daemon:
        limit = daemon.ask(Describe, Described).sections["limits"]["drain_timeout"]
        told = daemon.ask(Drain, Drained, timeout=float(limit) + options.timeout)
    dropped = Dropped(told.stores, told.others)
    if options.as_json:
        print_json({"dropped_stores": dropped.stores, "dropped_requests": dropped.others})
    else:
        say(f"drained; {dropped}")
    ctx.exit(dropped.exit_code)


@click.command()
@daemon_options
def reload(options: DaemonOptions) -> None:
    """Reload the settings of a daemon, as SIGHUP does.

    Prints the changed settings that need a restart.
    """
    with open_operator(options) as daemon:
        told = daemon.ask(Reload, Reloaded)
    if options.as_json:
        print_json({"refused": told.refused})
        return
    say("the settings were read again")
    for name in told.refused:
        say(f"{name} was not changed: it needs a restart")


@click.command("log-level")
@daemon_options
@click.argument("level", type=click.Choice(["debug", "info", "warning", "error"]))
def log_level(options: DaemonOptions, level: str) -> None:
    """Set the log level of a daemon, until its settings are reloaded."""
    with open_operator(options) as daemon:
        daemon.ask(lambda seq: SetLogLevel(seq, level), Done)  # type: ignore[arg-type]  # one of the choices
    if options.as_json:
        print_json({"log_level": level})


# --- quarantine ---------------------------------------------------------------------------------------------------------


@click.group()
def quarantine() -> None:
    """List and release copies and keys in quarantine."""


@quarantine.command("list")
@daemon_options
def list_quarantine(options: DaemonOptions) -> None:
    """List the copies and keys in quarantine.

    A copy without a proven end may still read or write: its memory stays reserved. A key is withheld if the shadow check
    found a wrong block under it: the key is not served until it is stored again.
    """
    with open_operator(options) as daemon:
        told = daemon.ask(ListQuarantine, Quarantines)
    if options.as_json:
        copies = [{**msgspec.to_builtins(copy), "keys": [key.hex() for key in copy.keys]} for copy in told.copies]
        withheld = [key.hex() for key in told.withheld]
        print_json({"copies": copies, "withheld": withheld, "withheld_keys": told.withheld_keys})
        return
    for copy in told.copies:
        say(f"{copy.name}: {plural(copy.blocks, 'block')}, {duration(copy.seconds)} ago: {copy.reason}")
    for key in told.withheld:
        say(f"withheld: {key.hex()}")
    if told.withheld_keys > len(told.withheld):
        say(f"withheld: {told.withheld_keys - len(told.withheld):,} more")
    if not told.copies and not told.withheld:
        say("nothing is in quarantine")


@quarantine.command("release")
@daemon_options
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--withheld", multiple=True, metavar="KEY", help="Serve this withheld key again, with its stored block.")
def release_quarantine(options: DaemonOptions, names: Sequence[str], withheld: Sequence[str]) -> None:
    """Release the memory of the copies with these NAMEs.

    Do so only if you know that these copies have ended: a copy that still runs writes into memory of another block. The
    checksum of that block detects it; without checksums nothing does.
    """
    if not names and not withheld:
        raise BadInput("name the entries to release: NAMEs that `offload quarantine list` shows, or --withheld KEY")
    keys = _keys_of(withheld, as_text=False)
    with open_operator(options) as daemon:
        told = daemon.ask(lambda seq: ReleaseQuarantine(seq, list(names), keys), Done)
    if options.as_json:
        print_json({"released": told.count})
    else:
        say(f"{told.count} released")
