"""Source of the status page: an engine in this trio run.

The page store that it embeds is shown, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import trio

from maru import MaruServer, PoolMap

from .._engine import Engine
from .._stage_times import StageTimes
from ._view import MOST_CONTAINERS, StatusView, ViewMaker

_MOST_HEX: Final = 2 * 4096
"""Most digits of a key in a request for an explanation."""


class NoSuchKey(ValueError):
    """A text that is no key in hexadecimal digits."""


class StatusSource(Protocol):
    """Source of a status page.

    All methods are called in one trio run.
    """

    def view(self) -> StatusView:
        """Return a snapshot, with the rates since the last one.

        Called by one sampler only.
        """

    async def map_pool(self) -> PoolMap | None:
        """Return the map of its page store; ``None`` if it has none.

        Cancelled, nothing has changed.
        """

    async def explain(self, key: str) -> Mapping[str, Any]:
        """Explain why this key, in hexadecimal digits, is or is not there.

        Raises:
            NoSuchKey: these are no digits of a key.
        """

    def not_ready(self) -> str:
        """Return the reason why it should get no work, or ""."""


def degraded_of(source: StatusSource) -> Mapping[str, str]:
    """Return descriptions of all degraded abilities of a source, by name.

    A degraded ability is less than the source was set up for. None for a source that has no ``degraded``.
    """
    degraded: Callable[[], Mapping[str, str]] = getattr(source, "degraded", dict)
    return degraded()


class EngineStatus:
    """Status of an engine in this process.

    Args:
        engine: open.
        times: one of its instruments.
        server: its page store, if that is in this process.
        name: of the engine on the page.
        maker: makes its views; by default a new one with this name.
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
        """Return a snapshot; see :class:`StatusSource`."""
        return self._maker.make(self._engine.statistics(), self._times.inside(MOST_CONTAINERS), trio.current_time())

    async def map_pool(self) -> PoolMap | None:
        """Return the map of the page store; see :class:`StatusSource`."""
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
        """Return the tiers that were not entered; see :class:`StatusSource`."""
        missing = [name for name, health in self._engine.statistics().health.items() if not health.entered]
        return f"not entered yet: {', '.join(missing)}" if missing else ""


def key_of(digits: str) -> bytes:
    """Return the key with these hexadecimal digits.

    Raises:
        NoSuchKey: they are none.
    """
    text = digits.strip()
    try:
        key = bytes.fromhex(text) if len(text) <= _MOST_HEX else b""
    except ValueError:
        key = b""
    if not key:
        raise NoSuchKey(f"{digits[:80]!r} is not a key: must be 1 to {_MOST_HEX // 2} bytes in hexadecimal digits")
    return key
