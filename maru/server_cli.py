"""The command ``maru-server``: a page store with one command and no root.

Every knob of :class:`~maru._config.ServerConfig` is an option here, a variable ``MARU_SERVER__...`` and a name in the
``[server]`` table of a TOML file; the options win. The server's modules are imported once the configuration is read,
since half of the time from the start to the first answer is imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from ._config import ServerConfig, knobs, server_config
from .base.commands import Program, given_knobs, knob_option
from .base.ending import ExitCode
from .base.errors import ConfigError, MaruError
from .exception_groups import leaves

_SECTION = "server"


@click.pass_context
def _command(ctx: click.Context, /, config_file: str | None, print_config: bool, **values: object) -> None:
    """Serve a pool of shared memory to the clients of this host.

    By default the pool is a directory in /dev/shm, and the server listens on a Unix socket in that directory, which only
    this user can reach. Published clients also need TCP: --host 127.0.0.1.
    """
    options = given_knobs(_SECTION, {name: _lowered(name, value) for name, value in values.items()})
    try:
        config = server_config(Path(config_file) if config_file else "", options=options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.FileError(config_file or "", error.strerror or str(error)) from error
    if print_config:
        click.echo(_as_toml(config))
        return
    ctx.exit(run(config))


def _lowered(name: str, value: object) -> object:
    """Convert a log level to lower case.

    Scripts for published clients use ``--log-level INFO``.
    """
    return value.lower() if name == "log_level" and isinstance(value, str) else value


def run(config: ServerConfig) -> int:
    """Serve until SIGTERM, SIGINT, or an allowed SHUTDOWN message.

    Returns the exit status.
    """
    import gc

    # Objects made before the server is ready stay: searching them for garbage costs a tenth of the start.
    gc.disable()
    import trio

    from ._server.main import serve

    failures: list[BaseException] = []
    try:
        trio.run(serve, config, restrict_keyboard_interrupt_to_checkpoints=True)
    except* (MaruError, OSError) as group:
        failures = leaves(group)
    finally:
        gc.enable()
    for failure in failures:
        click.echo(f"maru-server: {failure}", err=True)
    return ExitCode.ENVIRONMENT if failures else ExitCode.DONE


def _as_toml(config: ServerConfig) -> str:
    """Return the configuration as a TOML file that reproduces it."""
    import json

    values: Mapping[str, Any] = attrs.asdict(config)
    # A JSON string, number, boolean or list of strings is one of TOML, too.
    return "\n".join(["[server]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())])


main: click.Command = Program(
    "maru-server",
    callback=_command,
    help=_command.__doc__,
    params=[
        click.Option(["--config", "config_file"], metavar="FILE", help="TOML file; its [server] table is read."),
        click.Option(["--print-config"], is_flag=True, help="Print the configuration as TOML, and exit."),
        *[knob_option(knob, _SECTION, {"json_logs": "--json/--no-json"}) for knob in knobs()],
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
"""Console script."""
click.version_option(None, "-V", "--version", package_name="trio-offload", message="%(package)s %(version)s")(main)
