"""Where the status page has its facts from: an engine in this trio run, and the page store that it embeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import trio

from maru import MaruServer, PoolMap

from .._engine import Engine
from .._stage_times import StageTimes
from ._view import MOST_CONTAINERS, StatusView, ViewMaker

_MOST_HEX: Final = 2 * 4096
"""Digits of a key that is asked about."""


class NoSuchKey(ValueError):
    """What was asked about is no key in hexadecimal digits."""


class StatusSource(Protocol):
    """Something whose status is shown. All methods are called in one trio run."""

    def view(self) -> StatusView:
        """A snapshot, with the rates since the last one. Called by one sampler only."""

    async def map_pool(self) -> PoolMap | None:
        """The map of its page store; ``None`` if it has none. Cancelled, nothing has changed."""

    async def explain(self, key: str) -> Mapping[str, Any]:
        """Why this key, in hexadecimal digits, is or is not there.

        Raises:
            NoSuchKey: these are no digits of a key.
        """

    def not_ready(self) -> str:
        """Why it should get no work now; empty if it should."""


def degraded_of(source: StatusSource) -> Mapping[str, str]:
    """Sentences of what a source does less than it was set up for, by name; none from a source that has no ``degraded``."""
    degraded: Callable[[], Mapping[str, str]] = getattr(source, "degraded", dict)
    return degraded()


class EngineStatus:
    """The status of an engine that runs here.

    Args:
        engine: open.
        times: one of its instruments.
        server: the page store behind it, if it is in this process.
        name: what the page calls it.
        maker: makes its views; a new one of this name if there is none.
    """

    def __init__(
        self,
        engine: Engine,
        times: StageTimes,
        *,
        server: MaruServer | None = None,
        name: str = "engine",
        maker: ViewMaker | None = None,
    ) -> None:
        self._engine = engine
        self._times = times
        self._server = server
        self._maker = ViewMaker(name, trio.current_time()) if maker is None else maker

    def view(self) -> StatusView:
        """A snapshot; see :class:`StatusSource`."""
        return self._maker.make(self._engine.statistics(), self._times.inside(MOST_CONTAINERS), trio.current_time())

    async def map_pool(self) -> PoolMap | None:
        """The map of the page store; see :class:`StatusSource`."""
        if self._server is None:
            await trio.lowlevel.checkpoint()
            return None
        return await self._server.map_pool()

    async def explain(self, key: str) -> Mapping[str, Any]:
        """Explain one key, as an operator; see :class:`StatusSource`."""
        explanation = await self._engine.explain(key_of(key), operator=True)
        (block,) = explanation.blocks
        return {"key": key, "cause": block.cause.value, "text": block.text}

    def not_ready(self) -> str:
        """Tiers that have not been entered; see :class:`StatusSource`."""
        missing = [name for name, health in self._engine.statistics().health.items() if not health.entered]
        return f"not entered yet: {', '.join(missing)}" if missing else ""


def key_of(digits: str) -> bytes:
    """The key that these hexadecimal digits are.

    Raises:
        NoSuchKey: they are none.
    """
    text = digits.strip()
    try:
        key = bytes.fromhex(text) if len(text) <= _MOST_HEX else b""
    except ValueError:
        key = b""
    if not key:
        raise NoSuchKey(f"{digits[:80]!r} is no key: 1 to {_MOST_HEX // 2} bytes in hexadecimal digits")
    return key
