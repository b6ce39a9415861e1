"""The command ``offload pinned-pool``.

Knobs from a file, the environment and options; one ready line; a quick end.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path

import attrs
import click

from maru.base.commands import given_knobs, knob_option
from maru.base.ending import ExitCode
from maru.base.printable import LineFormatter
from maru.configuration import as_size
from maru.exception_groups import leaves

from ._config import SECTION, PinnedPoolConfig, knobs, pinned_pool_config
from ._errors import PinnedPoolConfigError, PinnedPoolError

_log = logging.getLogger(__name__)


@click.pass_context
def _command(ctx: click.Context, /, config_file: str | None, print_config: bool, **values: object) -> None:
    """Serve pinned host memory to processes of this host, one pool each.

    A pool consists of chunks. Engines take blocks from it with backends.pinned_pool.ServerPinnedMemoryPool. Engines of this
    user find it at 127.0.0.1:8073.
    """
    options = given_knobs(SECTION, values)
    try:
        config = pinned_pool_config(Path(config_file) if config_file else "", options=options)
    except PinnedPoolConfigError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.FileError(config_file or "", error.strerror or str(error)) from error
    if print_config:
        # A JSON string, number or boolean is one of TOML, too.
        click.echo(
            "\n".join(
                [f"[{SECTION}]", *(f"{name} = {json.dumps(value)}" for name, value in attrs.asdict(config).items())]
            )
        )
        return
    ctx.exit(run(config))


def run(config: PinnedPoolConfig) -> int:
    """Serve until SIGTERM or SIGINT. Return the exit status."""
    import trio

    _configure_logging(config)
    failures: list[BaseException] = []
    try:
        trio.run(_serve, config, restrict_keyboard_interrupt_to_checkpoints=True)
    except* (PinnedPoolError, OSError) as group:
        failures = leaves(group)
    for failure in failures:
        click.echo(f"offload pinned-pool: {failure}", err=True)
    return ExitCode.ENVIRONMENT if failures else ExitCode.DONE


async def _serve(config: PinnedPoolConfig) -> None:
    import trio

    from ._server import open_server

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with open_server(config) as server:
            facts = {
                "address": server.address,
                "host": server.host if config.insecure else "",
                "port": server.port,
                "descriptors": server.descriptors_path,
                "pool_memory_size": config.pool_memory_size,
                "chunk_size": config.chunk_size,
                "pid": os.getpid(),
            }
            if config.json_logs:
                print(json.dumps({"event": "ready", **facts}), flush=True)
            else:
                print(
                    f"offload pinned-pool is ready at {server.address} ({config.pool_memory_size} MiB in chunks of "
                    f"{as_size(config.chunk_size)}, shared memory {'on' if server.descriptors_path else 'off'}, "
                    f"pid {os.getpid()})",
                    flush=True,
                )
            async for number in signals:
                _log.info("%s: leaving", signal.Signals(number).name)
                break


def _configure_logging(config: PinnedPoolConfig) -> None:
    """Write this package's log to the standard error."""
    formatter: logging.Formatter = LineFormatter()
    if config.json_logs:
        from maru.base.printable import JsonFormatter

        formatter = JsonFormatter()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger("backends.pinned_pool")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(config.log_level.upper())


command: click.Command = click.Command(
    "pinned-pool",
    callback=_command,
    help=_command.__doc__,
    short_help="Serve pinned host memory to many processes.",
    params=[
        click.Option(["--config", "config_file"], metavar="FILE", help=f"TOML file; its [{SECTION}] table is read."),
        click.Option(["--print-config"], is_flag=True, help="Print the configuration as TOML, and exit."),
        *[knob_option(knob, SECTION, {"json_logs": "--json/--no-json"}) for knob in knobs()],
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
