"""The operator's listener of a daemon, with its own socket and token.

    offload drain ----- token, frames (admin.sock) ----->  Admin -> Daemon

Rule 1. A connection that has not shown the token is refused every request, and hung up on when it has shown a wrong
    one. The comparison takes constant time.
Rule 2. A connection has one running request. Its wait is cancelled when the connection is gone, except for a drain:
    that goes on.
Rule 3. The engines' listener does not know these messages: there, one costs its sender the session, as any invalid
    frame.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import trio

from maru.base.errors import PoolUnusable
from maru.base.files import OutputKind, open_input
from maru.base.packets import is_served
from maru.base.private_directory import open_private_directory
from maru.transport import ChannelServer

from .._errors import ConfigError
from ._admin_messages import (
    ADMIN_NAME_OF,
    MAX_ADMIN_KEYS,
    AdminHello,
    Admitted,
    BlockFacts,
    Describe,
    Described,
    Drain,
    Drained,
    Inspect,
    Inspected,
    ListQuarantine,
    QuarantinedCopy,
    Quarantines,
    ReleaseQuarantine,
    Reload,
    Reloaded,
    SetLogLevel,
    decode_admin_request,
)
from ._config import ADMISSION
from ._facts import described, version
from ._messages import MAX_CREDENTIAL_BYTES, Answer, BadFrame, Done, Refusal, Refused, Request, cut, encode
from ._operators import Operators
from ._tenants import stored_keys

if TYPE_CHECKING:
    from .._engine import Engine
    from ._dropped import Dropped
    from ._server import Daemon

_MOST: Final = 16
"""Operators at once."""
_MAX_FRAME_BYTES: Final = 1 << 20
"""More than the largest request."""
_KEYS_OF_A_COPY: Final = 4
_LEAST_TOKEN_BYTES: Final = 16
_TOKEN: Final = OutputKind("a token of a daemon", b"of-a-daemon-", private=True)
_LAST_ANSWERS: Final = 1.0
"""Seconds that the listener stays when a reload ends it.

An operator may have asked for that reload.
"""

_log = logging.getLogger("offload.daemon")

_Later: TypeAlias = Callable[[], Awaitable[Answer]]
"""Work that waits, and then answers."""


# --- the token ----------------------------------------------------------------------------------------------------------


def read_token(path: str) -> bytes:
    """Read the token from a file.

    Raises:
        offload.ConfigError: it is open to other users, or no token.
        OSError: it cannot be read.
    """
    with open_input(path) as file:
        mode = os.fstat(file.fileno()).st_mode
        token = file.read(MAX_CREDENTIAL_BYTES + 2).strip()
    if mode & 0o077:
        raise ConfigError("daemon.admin_token_file", path, f"must be closed to other users: chmod 600 {path}")
    if not _LEAST_TOKEN_BYTES <= len(token) <= MAX_CREDENTIAL_BYTES:
        raise ConfigError(
            "daemon.admin_token_file",
            path,
            f"must hold a token of {_LEAST_TOKEN_BYTES} to {MAX_CREDENTIAL_BYTES} bytes, such as "
            f"`python3 -c 'import secrets; print(secrets.token_hex())'` writes",
        )
    return token


class OwnToken:
    """A token of this daemon alone, in a private file.

    It begins with a mark of daemons.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self.path: str = path
        self.token: bytes = _TOKEN.begins + secrets.token_hex().encode()

    def check(self) -> None:
        """Raise unless the file may be written.

        Raises:
            offload.ConfigError: there is a file that no daemon has made.
            OSError: there is a file that cannot be read now.
        """
        if why := _TOKEN.why_not(self.path):
            why = f"{self.path} {why.partition(':')[0]}: set this to its path if operators show it, or change daemon.admin"
            raise ConfigError("daemon.admin_token_file", "", why)

    def write(self) -> None:
        """Write the file, or replace that of an earlier daemon.

        Raises:
            offload.ConfigError: there is a file that no daemon has made.
            OSError: it cannot be written.
        """
        self.check()
        _TOKEN.write(self.path, self.token + b"\n")

    def remove(self) -> None:
        """Remove the file, if it is there and has this token."""
        # A leftover begins with the mark of a daemon's token, and is replaced at the next start.
        with suppress(OSError), open_input(self.path) as file:
            if file.read(len(self.token)) == self.token:
                os.unlink(self.path)


@contextmanager
def open_admin(daemon: Daemon) -> Iterator[Admin | None]:
    """Open the operator's listener of a daemon, if it is configured.

    The daemon's directory must be there.

    Raises:
        offload.ConfigError: the token, or the directory of the socket, cannot be used.
        OSError: the token cannot be read.
    """
    config = daemon.config
    where = config.admin_path(daemon.directory)
    if not where:
        yield None
        return
    directory = os.path.dirname(where)
    descriptor, _ = open_private_directory(
        directory,
        lambda why: ConfigError("daemon.admin", config.admin, why),
        purpose="the directory of a daemon's operators",
    )
    os.close(descriptor)
    own = None if config.admin_token_file else OwnToken(config.token_path(daemon.directory))
    token = read_token(config.admin_token_file) if own is None else own.token
    try:
        if own is not None:
            own.check()
        if is_served(where):
            raise ConfigError("daemon.admin", config.admin, "another server listens there: choose another name")
        try:
            admin = Admin(daemon, where, token, own)
        except PoolUnusable as exc:
            raise ConfigError("daemon.admin", config.admin, str(exc)) from exc
        with admin:
            if own is not None:
                own.write()  # only now: another daemon that has the socket keeps its token
            yield admin
    finally:
        if own is not None:
            own.remove()


# --- the listener -------------------------------------------------------------------------------------------------------


class Admin:
    """Serves operators.

    A context manager: its socket is there as long as the block lasts.

    Args:
        daemon: the daemon that they manage.
        path: of the socket, in a directory that only this user enters.
        token: the token that operators must show.
        own: its file, if the daemon has made it.

    Attributes:
        reload: reads the settings again, and returns those that were refused; set by the command that runs the daemon.
    """

    def __init__(self, daemon: Daemon, path: str, token: bytes, own: OwnToken | None) -> None:
        self.operators: Operators = Operators(token)
        self._own = own
        self._running = trio.CancelScope()
        self.reload: Callable[[], Awaitable[Sequence[str]]] | None = None
        self._daemon = daemon
        self._handlers: Mapping[type, Callable[[bytes, Any], Answer | _Later | None]] = {
            request: getattr(self, f"_{name}") for request, name in ADMIN_NAME_OF.items() if request is not AdminHello
        }
        self._scopes: dict[bytes, trio.CancelScope] = {}
        self._began = time.monotonic()
        self._channel = ChannelServer(
            path,
            most=_MOST,
            max_bytes=_MAX_FRAME_BYTES,
            peer_bytes=8 * _MAX_FRAME_BYTES,
            all_bytes=32 * _MAX_FRAME_BYTES,
            on_gone=self._gone,
            weight=1,
            admission=ADMISSION,
        )

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *exc: object) -> None:
        self._channel.close()

    @property
    def url(self) -> str:
        """URL of its socket."""
        return f"ipc://{self._channel.path}"

    def renew(self) -> list[str]:
        """Make the socket and the token's file again, if they were removed.

        Returns:
            Their paths.
        """
        made = self._channel.renew()
        if self._own is not None and not os.path.lexists(self._own.path):
            self._own.write()
            made.append(self._own.path)
        return made

    async def end(self) -> None:
        """Admit no further operators, and stop listening after the last answers."""
        self.operators.change(secrets.token_bytes())
        if self._own is not None:
            self._own.remove()
        await trio.sleep(_LAST_ANSWERS)
        self._running.cancel()

    async def run(self) -> None:
        """Serve until cancelled or ended."""
        with self._running:
            await self._serve()
        self._channel.close()

    async def _serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._channel.run)
            while True:
                for peer, frame in await self._channel.receive_batch():
                    later = self.handle(peer, frame)
                    if later is not None:
                        scope = self._scopes[peer] = trio.CancelScope()
                        nursery.start_soon(self._answer_later, peer, scope, later)

    def handle(self, peer: bytes, frame: bytes) -> tuple[Request, _Later] | None:
        """Serve one frame. Returns work that has to wait.

        Never raises for the content of the frame.
        """
        try:
            request = decode_admin_request(frame)
        except BadFrame as exc:
            _log.warning("an operator is disconnected: %s", exc)
            self._channel.hang_up(peer)
            return None
        try:
            if isinstance(request, AdminHello):
                self._hello(peer, request)
                return None
            self.operators.begin(peer)
        except Exception as exc:
            self._send(peer, self._refused(request, _refusal(exc)))
            return None
        try:
            answer = self._handlers[type(request)](peer, request)
        except Exception as exc:
            answer = self._refused(request, _refusal(exc))
        if callable(answer):
            return request, answer
        if answer is not None:
            self._finish(peer, answer)
        return None

    async def _answer_later(self, peer: bytes, scope: trio.CancelScope, later: tuple[Request, _Later]) -> None:
        request, work = later
        answer: Answer = self._refused(request, Refusal("unavailable", "it was cancelled"))
        try:
            with scope:
                answer = await work()
        except Exception as exc:
            answer = self._refused(request, _refusal(exc))
        finally:
            if self._scopes.get(peer) is scope:
                del self._scopes[peer]
                self._finish(peer, answer)

    def _finish(self, peer: bytes, answer: Answer) -> None:
        self.operators.end(peer)
        self._send(peer, answer)

    def _send(self, peer: bytes, answer: Answer) -> None:
        self._channel.send(peer, encode(answer))

    def _refused(self, request: Request, refusal: Refusal) -> Refused:
        return Refused(request.seq, self._daemon.epoch, refusal.kind, cut(refusal))

    def _gone(self, peer: bytes) -> None:
        self.operators.gone(peer)
        scope = self._scopes.pop(peer, None)
        if scope is not None:
            scope.cancel()

    # --- requests ---------------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, request: AdminHello) -> None:
        if not self.operators.show(peer, request.token):
            _log.warning("an operator sent a wrong token")
            self._send(peer, self._refused(request, Refusal("credential", "this is not the token of admin_token_file")))
            self._channel.hang_up(peer)
            return
        self._channel.admit(peer)
        self._send(peer, Admitted(request.seq, self._daemon.epoch, version(), os.getpid()))

    def _describe(self, peer: bytes, request: Describe) -> Described:
        sections, tiers, sessions = described(self._daemon, time.monotonic() - self._began)
        return Described(request.seq, self._daemon.epoch, sections, tiers, sessions)

    def _inspect(self, peer: bytes, request: Inspect) -> _Later:
        if request.tenant and request.tenant not in self._daemon.tenants.credentials:
            raise Refusal("unknown", f"there is no tenant {request.tenant!r}")
        keys = stored_keys(request.tenant, request.keys)

        async def inspect() -> Answer:
            explanation = await self._engine.explain(keys, tenant=request.tenant, operator=True)
            blocks = [
                BlockFacts(block.cause.value, cut(block.text), list(block.facts.tiers), list(block.facts.unavailable))
                for block in explanation.blocks
            ]
            return Inspected(request.seq, self._daemon.epoch, explanation.usable, blocks)

        return inspect

    def _drain(self, peer: bytes, request: Drain) -> None:
        def tell(dropped: Dropped) -> None:
            self._finish(peer, Drained(request.seq, self._daemon.epoch, dropped.stores, dropped.others))

        _log.info("an operator requested a drain")
        self._daemon.ask_drain(tell)

    def _list_quarantine(self, peer: bytes, request: ListQuarantine) -> Quarantines:
        engine, now = self._daemon.engine, trio.current_time()
        copies = [
            QuarantinedCopy(name, len(one.keys), list(one.keys[:_KEYS_OF_A_COPY]), cut(one.reason), now - one.since)
            for name, one in (() if engine is None else engine.quarantine_by_name().items())
        ]
        withheld = [] if engine is None else engine.withheld
        return Quarantines(request.seq, self._daemon.epoch, copies, list(withheld[:MAX_ADMIN_KEYS]), len(withheld))

    def _release_quarantine(self, peer: bytes, request: ReleaseQuarantine) -> Done:
        # There is no "all": each name is a claim of the operator that this copy is over.
        there, withheld = self._engine.quarantine_by_name(), set(self._engine.withheld)
        unknown = [name for name in request.copies if name not in there]
        unknown += [key.hex() for key in request.withheld if key not in withheld]
        if unknown:
            raise Refusal(
                "unknown", f"not in quarantine: {', '.join(unknown)}; `offload quarantine list` shows all entries"
            )
        for name in request.copies:
            _log.warning("an operator released the copy %s: %r", name, there[name])
            there[name].release()
        released = self._engine.serve_again(request.withheld)
        return Done(request.seq, self._daemon.epoch, len(set(request.copies)) + released)

    def _reload(self, peer: bytes, request: Reload) -> _Later:
        read_again = self.reload
        if read_again is None:
            raise Refusal("unavailable", "this daemon was not started by `offload serve`, and has no file to reload")

        async def reload() -> Answer:
            return Reloaded(request.seq, self._daemon.epoch, list(await read_again()))

        return reload

    def _set_log_level(self, peer: bytes, request: SetLogLevel) -> Done:
        _log.warning("an operator set the log level: %s", request.level)
        logging.getLogger("offload").setLevel(request.level.upper())
        return Done(request.seq, self._daemon.epoch)

    @property
    def _engine(self) -> Engine:
        return self._daemon.require_engine()


def _refusal(exc: Exception) -> Refusal:
    if isinstance(exc, Refusal):
        return exc
    if isinstance(exc, ValueError | ConfigError):
        return Refusal("invalid", str(exc))
    _log.warning("a request of an operator failed: %r", exc)
    return Refusal("unavailable", f"{type(exc).__name__}: {exc}")
