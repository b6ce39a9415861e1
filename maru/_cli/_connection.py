"""How a command asks a server: over a blocking socket, without a session, so that looking changes nothing.

Rule 1. No wait without an end, and no traceback: what goes wrong is said with the address, the value, and the way out.
Rule 2. Codes of our own are used only if the server's handshake lists them. The handshake says nothing of this client, so it
        opens no session.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TypeVar

import attrs
import click

from .._config import HOW_TO_REACH, MaruConfig, client_config
from .._wire import (
    HEADER_BYTES,
    Code,
    DescribeReply,
    DescribeRequest,
    ErrorReply,
    HandshakeReply,
    Reply,
    Request,
    decode_reply,
    read_header,
    request,
)
from ..base.ending import BadInput, EnvironmentFault
from ..base.errors import BadFrame, BadMessage, ConfigError, NoAnswer, ServerRefused, excerpt

T = TypeVar("T", bound=Reply)

_LONGEST = 86_400
"""The longest timeout, in seconds: every wait is finite."""
_LOOK = 0.5
"""Seconds for finding out why there is no answer."""


@attrs.frozen
class ServerOptions:
    """Which server a command is about, and how its answer is to be shown."""

    config: MaruConfig
    timeout: float
    """Seconds for one answer."""
    as_json: bool
    config_file: str = ""
    """What it was read from, if anything."""

    @property
    def address(self) -> str:
        """Of the server."""
        return self.config.server_url


def _seconds(text: str) -> float:
    """A time that has an end."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:
        raise click.BadParameter(f"{text!r}: more than 0 seconds, and at most {_LONGEST:,}")
    return seconds


def server_options(function: Callable[..., None]) -> Callable[..., None]:
    """``--server``, ``--timeout``, ``--config`` and ``--json``, given to it as a :class:`ServerOptions`."""

    @functools.wraps(function)  # with what click has noted of the function's own options
    def with_options(
        server: str | None, timeout: float | None, config_file: str | None, as_json: bool, **rest: object
    ) -> None:
        function(_read_options(server, timeout, config_file, as_json), **rest)

    decorated: Callable[..., None] = with_options
    for option in reversed(
        (
            click.option(
                "--server",
                metavar="URL",
                help="tcp://host:port or ipc://path.  [default: MARU_CLIENT__SERVER_URL, or this user's Unix socket]",
            ),
            click.option(
                "--timeout",
                type=_seconds,
                metavar="SECONDS",
                help="How long to wait for an answer.  [default: MARU_CLIENT__TIMEOUT_MS, or 2]",
            ),
            click.option(
                "--config",
                "config_file",
                metavar="FILE",
                help="A TOML file; its [client] table says where the server is, and which CURVE keys to use.",
            ),
            click.option("--json", "as_json", is_flag=True, help="Print JSON for machines."),
        )
    ):
        decorated = option(decorated)
    return decorated


def _read_options(server: str | None, timeout: float | None, config_file: str | None, as_json: bool) -> ServerOptions:
    overrides: dict[str, tuple[str, object]] = {}
    if server is not None:
        overrides["client.server_url"] = "--server", server
    with usage_errors(config_file or ""):
        config = client_config(Path(config_file) if config_file else "", options=overrides)
    return ServerOptions(config, config.timeout_ms / 1_000 if timeout is None else timeout, as_json, config_file or "")


@contextmanager
def usage_errors(config_file: str) -> Iterator[None]:
    """A knob that cannot be, or a file that cannot be read, is told as what was typed."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.FileError(config_file, error.strerror or str(error)) from error


class ServerConnection:
    """The server at the other end. Made by :func:`open_connection`."""

    def __init__(self, options: ServerOptions) -> None:
        from .._client.sockets import blocking_dealer, channel_path

        self.address = options.address
        self.over: str = "channel" if channel_path(options.config) else "ZeroMQ"
        """The way to it."""
        self.timeout = options.timeout
        self._dealer = blocking_dealer(options.config)
        self._sequence = 0

    @property
    def asked(self) -> int:
        """Requests sent."""
        return self._sequence

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close()

    def ask(self, code: Code, kind: type[T], message: Request | None = None) -> T:
        """The answer.

        Raises:
            NoAnswer: none came in time.
            ServerRefused: it is an error, or is none of this code.
        """
        self._sequence += 1
        deadline = monotonic() + self.timeout
        if not self._dealer.send((b"", request(code, self._sequence, message)), self.timeout):
            raise NoAnswer(self.address)
        while True:
            received = self._dealer.receive(max(0.0, deadline - monotonic()))
            if received is None:
                raise NoAnswer(self.address)
            frame = received[-1]
            try:
                _, _, sequence, length = read_header(frame)
                if sequence != self._sequence:
                    continue  # an answer to what was given up
                reply = decode_reply(code, memoryview(frame)[HEADER_BYTES : HEADER_BYTES + length])
            except (BadFrame, BadMessage) as error:
                raise ServerRefused(f"what came is no answer: {error}") from error
            if isinstance(reply, ErrorReply):
                raise ServerRefused(reply.error, reply.code)
            assert isinstance(reply, kind)
            return reply

    def handshake(self) -> HandshakeReply:
        """Who it is. Opens no session."""
        return self.ask(Code.HANDSHAKE, HandshakeReply)

    def describe(self, key: str | None = None) -> DescribeReply:
        """Describe the server, and a key. Only for a server whose handshake lists DESCRIBE."""
        return self.ask(Code.DESCRIBE, DescribeReply, DescribeRequest(key))


@contextmanager
def open_connection(options: ServerOptions) -> Iterator[ServerConnection]:
    """A server to ask, for as long as the block lasts. What goes wrong in there ends the command, in words."""
    try:
        server = ServerConnection(options)
    except (ConfigError, OSError, ValueError) as error:
        raise BadInput(f"--server {excerpt(options.address)}: {excerpt(str(error), 240)}") from error
    try:
        yield server
    except NoAnswer as error:
        raise EnvironmentFault(explain_no_answer(options)) from error
    except ServerRefused as error:
        raise EnvironmentFault(f"{options.address} refuses: {error}") from error
    finally:
        server.close()


def explain_no_answer(options: ServerOptions) -> str:
    """The message for a server that does not answer: the cause, as far as it is known, and what to do."""
    return f"{options.address} does not answer within {options.timeout:g} s: {probe_address(options.address).text}"


class ProbeResult(NamedTuple):
    """The cause of a missing answer."""

    absent: bool
    """Whether no server listens there."""
    text: str
    """The cause, and what to check."""


def probe_address(address: str) -> ProbeResult:
    """What is at an address that does not answer."""
    scheme, _, place = address.partition("://")
    try:
        if scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_LOOK)
                connection.connect(place)
        else:
            host, _, port = place.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port)), _LOOK):
                pass
    except FileNotFoundError:
        return ProbeResult(True, f"there is no such socket; {HOW_TO_REACH}")
    except ConnectionRefusedError:
        return ProbeResult(True, f"no server listens there; {HOW_TO_REACH}")
    except PermissionError:
        return ProbeResult(False, "this user may not open that socket: it belongs to the user who runs the server")
    except (OSError, OverflowError) as error:  # a port beyond 65,535 is an overflow
        return ProbeResult(False, f"{getattr(error, 'strerror', None) or error}. Check the address; or {HOW_TO_REACH}")
    return ProbeResult(
        False,
        "something listens there. Is it a page store, is it stopped (its process shows state T), is its disk full "
        "(see its log), and does it want CURVE keys (MARU_CLIENT__CURVE_KEY_FILE)?",
    )
