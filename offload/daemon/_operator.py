"""Requests of a command to a daemon, over a blocking socket.

They need no session of an engine.

Rule 1. No wait without an end, and no traceback: an error names the address, and the way out.
Rule 2. The address of the daemon, and the path of its token, come from the daemon's own settings: the same file,
    environment and options.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final, TypeVar

import attrs
import click

from maru.base.commands import FiniteRange, given_knobs, knob_option
from maru.base.ending import BadInput, EnvironmentFault
from maru.base.errors import Shortage
from maru.transport import ChannelConnection

from .._errors import ConfigError
from ._admin import read_token
from ._admin_messages import AdminHello, Admitted, decode_admin_answer, decode_admin_request
from ._config import CHANNEL_NAME, SECTION, DaemonConfig, daemon_config, daemon_knobs, read_document
from ._messages import Answer, BadFrame, Refused, Request, decode_answer, decode_request, encode

A = TypeVar("A", bound=Answer)

_KNOBS: Final = ("runtime_dir", "admin", "admin_token_file")


@attrs.frozen
class DaemonOptions:
    """The daemon that a command asks, and the output format."""

    config: DaemonConfig
    timeout: float
    """Seconds for one answer."""
    as_json: bool

    @property
    def directory(self) -> str:
        """Directory of its sockets."""
        return os.path.realpath(self.config.runtime_dir)

    @property
    def path(self) -> str:
        """Path of the engines' socket."""
        return f"{self.directory}/{CHANNEL_NAME}"

    @property
    def admin_path(self) -> str:
        """Path of the operators' socket; empty if there is none."""
        return self.config.admin_path(self.directory)


def daemon_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add ``--config``, ``--runtime-dir``, ``--timeout``, ``--json`` and so on to a command.

    It is called with :class:`DaemonOptions`.
    """

    @functools.wraps(function)  # with the options that click has stored for the function itself
    def with_options(config_file: str | None, timeout: float, as_json: bool, **rest: object) -> None:
        knobs = {name: rest.pop(name) for name in _KNOBS}
        try:
            config = daemon_config(read_document(config_file or ""), options=given_knobs(SECTION, knobs))
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        except OSError as error:
            raise click.FileError(config_file or "", error.strerror or str(error)) from error
        function(DaemonOptions(config, timeout, as_json), **rest)

    decorated: Callable[..., None] = with_options
    seconds = FiniteRange(0, 86_400, min_open=True)
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
        click.option(
            "--timeout",
            type=seconds,
            default=10.0,
            show_default=True,
            metavar="SECONDS",
            help="Time to wait for an answer, in seconds.",
        ),
    ):
        decorated = option(decorated)
    decorated.__dict__.setdefault("__click_params__", []).extend(
        [knob_option(knob, SECTION) for knob in reversed(daemon_knobs()) if knob.name.partition(".")[2] in _KNOBS]
    )
    return click.option("--config", "config_file", metavar="CONFIG.toml", help="The daemon's TOML file.")(decorated)


class Operator:
    """A connection to a daemon's socket, for one request after the other."""

    def __init__(
        self, path: str, timeout: float, decode: Callable[[bytes], Answer], check: Callable[[bytes], Request]
    ) -> None:
        self.path: str = path
        self._timeout = timeout
        self._check = check
        self._decode = decode
        self._seq = 0
        try:
            self._connection = ChannelConnection(path)
        except PermissionError as exc:
            raise EnvironmentFault(f"{path}: {exc}: run this as the daemon's user") from exc
        except OSError as exc:
            raise EnvironmentFault(_nobody(path)) from exc

    def ask(self, make: Callable[[int], Request], answer: type[A], *, timeout: float = 0.0) -> A:
        """Send a request, and wait for its answer.

        It waits for ``timeout`` seconds if that is more than usual.

        Raises:
            click.ClickException: there is none, or it was refused.
        """
        self._seq += 1
        request = encode(make(self._seq))
        try:
            self._check(request)  # Here: the daemon hangs up on an invalid request, and sends no reason.
        except BadFrame as exc:
            raise BadInput(f"the request is too large: {exc}") from exc
        timeout = max(timeout, self._timeout)
        deadline = perf_counter() + timeout
        try:
            self._connection.send_by(request, deadline)
            frame = self._connection.receive_by(deadline)
            got = None if frame is None else self._decode(frame)
        except Shortage as exc:
            raise EnvironmentFault(f"no request can be sent to {self.path}: {exc}") from exc
        except OSError as exc:
            raise EnvironmentFault(f"{self.path} closed the connection: is it a daemon of this version?") from exc
        except BadFrame as exc:
            raise EnvironmentFault(
                f"{self.path} sent a malformed answer ({exc}): is it a daemon of this version?"
            ) from exc
        if got is None:
            raise EnvironmentFault(
                f"{self.path} did not answer within {timeout:g} s: is its process stopped? Or raise --timeout"
            )
        if isinstance(got, Refused):
            raise (EnvironmentFault if got.kind in ("unavailable", "full", "draining") else BadInput)(got.text)
        if not isinstance(got, answer):
            raise EnvironmentFault(f"{self.path} answered with {type(got).__name__}, not {answer.__name__}")
        return got

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


@contextmanager
def open_engine_side(options: DaemonOptions) -> Iterator[Operator]:
    """Open the socket of the engines, without a session."""
    operator = Operator(options.path, options.timeout, decode_answer, decode_request)
    try:
        yield operator
    finally:
        operator.close()


@contextmanager
def open_operator(options: DaemonOptions) -> Iterator[Operator]:
    """Open the socket of the operators, and show the token.

    Raises:
        click.ClickException: there is no such socket, or the token is another one.
    """
    path = options.admin_path
    if not path:
        raise BadInput(
            'this daemon has no listener for operators: set admin = "ipc", and admin_token_file, in [daemon]'
        )
    token_path = options.config.token_path(options.directory)
    _check_there(path)
    try:
        token = read_token(token_path)
    except ConfigError as exc:
        raise BadInput(str(exc)) from exc
    except OSError as exc:
        why = exc.strerror or str(exc)
        raise EnvironmentFault(f"{token_path}: {why}: name the token file with --admin-token-file") from exc
    operator = Operator(path, options.timeout, decode_admin_answer, decode_admin_request)
    try:
        operator.ask(lambda seq: AdminHello(seq, token), Admitted)
        yield operator
    finally:
        operator.close()


def _check_there(path: str) -> None:
    """Raise unless there is a socket.

    Raises:
        EnvironmentFault: there is none, or this user may not see it: which of the two matters to an operator.
    """
    try:
        os.stat(path)
    except PermissionError as exc:
        raise EnvironmentFault(f"{path}: {exc.strerror}: run this as the daemon's user") from exc
    except OSError as exc:
        raise EnvironmentFault(_nobody(path)) from exc


def _nobody(path: str) -> str:
    where = "its runtime_dir is another one: set --runtime-dir or --config"
    if os.path.exists(path):
        return f"{path}: no process listens there: the daemon has ended, or {where}"
    if os.path.exists(f"{os.path.dirname(path)}/{CHANNEL_NAME}"):
        return f'{path} is missing, but {CHANNEL_NAME} exists: this daemon has admin = "off", tenants, or another path'
    return f"{path} is missing: start `offload serve`, or {where}"
