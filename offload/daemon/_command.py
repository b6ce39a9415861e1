"""The command ``offload serve``.

It takes settings from a file, the environment and options, prints one ready line, and ends with a code. SIGTERM and
SIGINT drain, for ``drain_timeout``. The exit code is 0 if nothing was dropped; otherwise 5 for stores, 6 for other
requests, 7 for both. SIGHUP reads the settings again. Modules for serving are imported when the settings have been
read, and torch only when a cache of torch tensors is registered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import click

from maru.base.all_bytes import write_all
from maru.base.commands import age, given_knobs, knob_option, raise_descriptor_limit
from maru.base.ending import ExitCode
from maru.base.errors import MaruError
from maru.base.printable import LineFormatter, printable
from maru.exception_groups import leaves

from .._errors import ConfigError
from ._config import SECTION, daemon_knobs
from ._settings import (
    Settings,
    as_toml,
    keep_unreloadable,
    keep_unreloadable_of_engine,
    maru_config,
    notes_on_page_stores,
    read_settings,
    refused_changes,
)

if TYPE_CHECKING:
    import trio

    from ._dropped import Dropped
    from ._server import Daemon

_LAST_RESORT: Final = 0.4
"""Seconds after ``drain_timeout`` until the process ends in any case.

A copy may hang in the kernel.
"""

_log = logging.getLogger("offload.daemon")


@click.pass_context
def _command(ctx: click.Context, /, config_file: str | None, check: bool, print_config: bool, **values: object) -> None:
    """Serve the tiers and pipelines of this host to its inference engines.

    Without CONFIG.toml there are two tiers: host memory, and pages of a Maru server in the daemon. Engines of this user
    find it with offload.client.
    """
    try:
        settings = read_settings(config_file or "", given_knobs(SECTION, values))
        if check:
            from ._checking import check_settings  # it imports all parts of a daemon

            check_settings(settings)
    except (ConfigError, ValueError, LookupError) as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.FileError(error.filename or config_file or "", error.strerror or str(error)) from error
    if print_config:
        click.echo(as_toml(settings, os.environ))
    elif check:
        click.echo(f"{config_file or 'the defaults'}: valid; {len(settings.engine.tiers)} tiers")
        for note in notes_on_page_stores(settings):
            click.echo(note)
    else:
        ctx.exit(run(settings))


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status."""
    import gc

    # Modules imported until the daemon is ready stay: searching them for garbage costs a tenth of the start.
    gc.disable()
    import trio

    from .._errors import OffloadError
    from ._engine import CannotOpen

    _configure_logging(settings.daemon.log_level)
    raise_descriptor_limit()
    if settings.pinned_pool is not None:
        logging.getLogger("backends.pinned_pool").setLevel(settings.pinned_pool.log_level.upper())
    for note in notes_on_page_stores(settings):
        _log.info("%s", note)
    failures: list[BaseException] = []
    dropped: list[Dropped] = []
    try:
        dropped.append(trio.run(_serve, settings, restrict_keyboard_interrupt_to_checkpoints=True))
    except* (OffloadError, MaruError, CannotOpen, ImportError, OSError) as group:
        failures = leaves(group)
    finally:
        gc.enable()
    for failure in failures:
        about = "".join(f" ({note})" for note in getattr(failure, "__notes__", ()))
        click.echo(f"offload serve: {printable(str(failure))}{about}", err=True)
    if failures:
        return ExitCode.ENVIRONMENT
    return _exit_code(dropped[0])


def _exit_code(dropped: Dropped) -> int:
    if not dropped:
        return ExitCode.DONE
    click.echo(f"offload serve: {dropped}: they had not ended within drain_timeout", err=True)
    return dropped.exit_code


async def _serve(settings: Settings) -> Dropped:
    import gc

    import trio

    from ._notify import notify
    from ._server import open_daemon

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with open_daemon(
            settings.daemon, settings.engine, maru=maru_config(settings), pinned_pool=settings.pinned_pool
        ) as daemon:
            running = _Running(daemon, settings, trio.Lock())
            if daemon.admin is not None:
                daemon.admin.reload = running.reload
            print(ready_line(daemon), flush=True)
            notify("READY", f"serving at {daemon.url}")
            gc.freeze()
            gc.enable()
            why = await _until_the_end(running, signals)
            _log.info("%s: draining, for at most %g s", why, daemon.config.drain_timeout)
            notify("STOPPING", "draining")
            _end_at_last(daemon.config.drain_timeout + _LAST_RESORT)
            dropped = await daemon.drain()
    return dropped


async def _until_the_end(running: _Running, signals: AsyncIterator[int]) -> str:
    """Heed SIGHUP until the end. Returns the signal or operator that asked."""
    import trio

    async with trio.open_nursery() as nursery:

        async def wait_for_operator() -> None:
            await running.daemon.drain_asked.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait_for_operator)
        async for number in signals:
            if number != signal.SIGHUP:
                nursery.cancel_scope.cancel()
                return signal.Signals(number).name
            nursery.start_soon(running.reload_for_signal)
    return "an operator"


@attrs.define
class _Running:
    """A daemon that runs, and its current settings."""

    daemon: Daemon
    settings: Settings
    _turn: trio.Lock
    """Held by the running reload."""

    async def reload(self) -> list[str]:
        """Apply the settings that may change; return the names of others.

        Those are left as they are.

        Raises:
            offload.ConfigError: the settings cannot be read, or are invalid. Nothing was changed.
            ImportError: they need a package that is not installed.
            OSError: they cannot be read.
        """
        async with self._turn:
            return await self._reload()

    async def _reload(self) -> list[str]:
        from maru.base.threads import run_in_thread

        from ._checking import check_settings
        from ._notify import notify

        daemon, before = self.daemon, self.settings
        tiers = None if daemon.engine is None else daemon.engine.tiers
        notify("RELOADING", "reading the settings again")
        try:
            fresh = read_settings(before.path, before.options)
            check = partial(check_settings, fresh, running=before, tiers=tiers)
            await run_in_thread(check, abandon_on_cancel=True)  # engines are served while tiers are made
            engine = keep_unreloadable_of_engine(before.engine, fresh.engine)
            daemon.reload(keep_unreloadable(before.daemon, fresh.daemon), engine)
        finally:
            notify("READY", f"serving at {daemon.url}")
        refused = refused_changes(before, fresh)
        for name in refused:
            _log.error("reload: %s was not changed: it needs a restart", name)
        logging.getLogger("offload").setLevel(daemon.config.log_level.upper())
        _log.info("reload: the settings were reloaded")
        self.settings = attrs.evolve(before, daemon=daemon.config, engine=engine)
        return refused

    async def reload_for_signal(self) -> None:
        """Reload the settings, and log a failure: nobody waits for an answer."""
        try:
            await self.reload()
        except (ConfigError, ImportError, OSError) as exc:
            _log.error("SIGHUP: nothing was changed: %s", exc)
        except Exception:  # from a newly configured tier or policy; the daemon goes on
            _log.exception("SIGHUP: the settings could not be applied")


def _end_at_last(seconds: float) -> None:
    """End the process after ``seconds``, if it has not ended by then."""

    def end() -> None:
        with contextlib.suppress(OSError):  # a standard error that is closed, or full, is no reason to stay
            write_all(2, b"offload serve: a copy has not come to its end; leaving it\n")
        os._exit(ExitCode.DROPPED + 2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def ready_line(daemon: Daemon) -> str:
    """Return the ready line: the addresses, and the time of the start."""
    return (
        f"offload serve is ready at {daemon.url} (epoch {daemon.epoch:016x}, after {age():.3f} s, pid {os.getpid()}"
        f"{''.join(f', status at {bind}' for bind in daemon.status_at)}"
        f"{f', KV events at {daemon.events_at[0]}' if daemon.events_at else ''}"
        f"{f', pinned memory at {daemon.pinned_pool.address}' if daemon.pinned_pool else ''})"
    )


def _configure_logging(level: str) -> None:
    """Write the logs of this project to the standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    for name in ("offload", "backends", "maru"):
        root = logging.getLogger(name)
        root.handlers[:] = [handler]
        root.propagate = False
        root.setLevel(level.upper() if name == "offload" else "WARNING")


command: click.Command = click.Command(
    "serve",
    callback=_command,
    help=_command.__doc__,
    short_help="Serve the tiers of this host to its inference engines.",
    params=[
        click.Argument(["config_file"], required=False, metavar="[CONFIG.toml]"),
        click.Option(["--check"], is_flag=True, help="Check the settings, and exit."),
        click.Option(["--print-config"], is_flag=True, help="Print every setting and its origin, and exit."),
        *[knob_option(knob, SECTION) for knob in daemon_knobs()],
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
