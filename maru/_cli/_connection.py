"""Requests of a command to a server, over a blocking socket.

They need no session, so that looking changes nothing.

Rule 1. No wait without an end, and no traceback: an error's message has the address, the value, and the way out.
Rule 2. Codes of our own are used only if the server's handshake lists them. The handshake has no data of this client,
        so it opens no session.
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
"""Longest timeout, in seconds: every wait is finite."""
_LOOK = 0.5
"""Seconds for finding the reason of a missing answer."""


@attrs.frozen
class ServerOptions:
    """The server that a command queries, and the form of its output."""

    config: MaruConfig
    timeout: float
    """Seconds to wait for one answer."""
    as_json: bool
    config_file: str = ""
    """Configuration file, if any."""

    @property
    def address(self) -> str:
        """Address of the server."""
        return self.config.server_url


def _seconds(text: str) -> float:
    """Parse a finite number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:
        raise click.BadParameter(f"{text!r}: must be above 0 and at most {_LONGEST:,} seconds")
    return seconds


def server_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add ``--server``, ``--timeout``, ``--config`` and ``--json`` to a command.

    The function gets them as a :class:`ServerOptions`.
    """

    @functools.wraps(function)  # with click's record of the function's own options
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
                help="Time for an answer, in seconds.  [default: MARU_CLIENT__TIMEOUT_MS, or 2]",
            ),
            click.option(
                "--config",
                "config_file",
                metavar="FILE",
                help="TOML file whose [client] table has the server's URL and the CURVE keys.",
            ),
            click.option("--json", "as_json", is_flag=True, help="Print JSON."),
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
    """Turn a bad knob or an unreadable file into a usage error."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.FileError(config_file, error.strerror or str(error)) from error


class ServerConnection:
    """A connection to a server. Made by :func:`open_connection`."""

    def __init__(self, options: ServerOptions) -> None:
        from .._client.sockets import blocking_dealer, channel_path

        self.address = options.address
        self.over: str = "channel" if channel_path(options.config) else "ZeroMQ"
        """Transport in use: channel or ZeroMQ."""
        self.timeout = options.timeout
        self._dealer = blocking_dealer(options.config)
        self._sequence = 0

    @property
    def asked(self) -> int:
        """Number of requests sent."""
        return self._sequence

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close()

    def ask(self, code: Code, kind: type[T], message: Request | None = None) -> T:
        """Send a request, and return the answer.

        Raises:
            NoAnswer: none came in time.
            ServerRefused: the answer is an error, or not one for this code.
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
                    continue  # an answer to a request that was given up
                reply = decode_reply(code, memoryview(frame)[HEADER_BYTES : HEADER_BYTES + length])
            except (BadFrame, BadMessage) as error:
                raise ServerRefused(f"the answer is malformed: {error}") from error
            if isinstance(reply, ErrorReply):
                raise ServerRefused(reply.error, reply.code)
            assert isinstance(reply, kind)
            return reply

    def handshake(self) -> HandshakeReply:
        """Return the server's introduction. Opens no session."""
        return self.ask(Code.HANDSHAKE, HandshakeReply)

    def describe(self, key: str | None = None) -> DescribeReply:
        """Describe the server, and a key.

        Only for a server whose handshake lists DESCRIBE.
        """
        return self.ask(Code.DESCRIBE, DescribeReply, DescribeRequest(key))


@contextmanager
def open_connection(options: ServerOptions) -> Iterator[ServerConnection]:
    """Open a connection for a block.

    Errors in the block end the command with a message.
    """
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
    """Return the message for a server that does not answer.

    It has the cause, as far as it is known, and advice.
    """
    return f"{options.address} does not answer within {options.timeout:g} s: {probe_address(options.address).text}"


class ProbeResult(NamedTuple):
    """Cause of a missing answer."""

    absent: bool
    """Whether no server listens there."""
    text: str
    """Cause, and advice."""


def probe_address(address: str) -> ProbeResult:
    """Find the cause of a missing answer at an address."""
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
    except (OSError, OverflowError) as error:  # a port beyond 65,535 raises OverflowError
        return ProbeResult(False, f"{getattr(error, 'strerror', None) or error}. Check the address; or {HOW_TO_REACH}")
    return ProbeResult(
        False,
        "something listens there. Is it a page store, is it stopped (its process shows state T), is its disk full "
        "(see its log), and does it want CURVE keys (MARU_CLIENT__CURVE_KEY_FILE)?",
    )
