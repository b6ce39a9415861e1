"""The status page of a daemon, and its metrics.

It is that of :mod:`offload.status`, for the engine that a daemon keeps open. The tiers are opened after the page is
served, and perhaps only when the first cache is registered. Until then the page shows no tier, and ``/readyz`` has the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import trio

from ..instruments import StageTimes
from ..status import EngineStatus, NoSuchKey, StatusView, ViewMaker
from ._statistics import before_opening

if TYPE_CHECKING:
    from maru import MaruServer, PoolMap

    from ._engine import DaemonEngine


class DaemonStatus:
    """A :class:`offload.status.StatusSource` over a daemon.

    Args:
        engine: of the daemon; ``times`` is one of its instruments.
        times: measures its stages.
        state: returns the state of the daemon: ``ready``, or why it is not.
        server: the embedded page store, if there is one.
        name: title of the daemon on the page.
        has_tenants: whether the daemon has tenants. Then the page shows no keys and explains none: it needs no
            credential, and a tenant must not learn about another one's blocks.
        degraded: returns the degradations of the daemon.
    """

    def __init__(
        self,
        engine: DaemonEngine,
        times: StageTimes,
        state: Callable[[], str],
        *,
        server: MaruServer | None,
        name: str,
        has_tenants: Callable[[], bool] = lambda: False,
        degraded: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._daemon_engine = engine
        self._times = times
        self._state = state
        self._has_tenants = has_tenants
        self._degraded = degraded
        self._server = server
        self._maker = ViewMaker(name, trio.current_time())
        self._opened: EngineStatus | None = None

    @property
    def _status(self) -> EngineStatus | None:
        """Status of the tiers, once they are open."""
        if self._opened is None and self._daemon_engine.engine is not None:
            self._opened = EngineStatus(self._daemon_engine.engine, self._times, server=self._server, maker=self._maker)
        return self._opened

    def view(self) -> StatusView:
        """Return a snapshot."""
        status = self._status
        view = self._maker.nothing(trio.current_time()) if status is None else status.view()
        view = attrs.evolve(view, degraded=list(self._degraded().values()))
        if self._has_tenants():
            view = attrs.evolve(view, oldest=[attrs.evolve(one, keys=()) for one in view.oldest])
        return view

    async def map_pool(self) -> PoolMap | None:
        """Return the map of the embedded page store."""
        if self._server is None:
            await trio.lowlevel.checkpoint()
            return None
        return await self._server.map_pool()

    async def explain(self, key: str) -> Mapping[str, Any]:
        """Explain a key, as the daemon names it: with its tenant.

        Raises:
            NoSuchKey: these are no digits of a key, nothing is stored here yet, or the daemon has tenants.
        """
        if self._has_tenants():
            await trio.lowlevel.checkpoint()
            raise NoSuchKey(
                "this daemon has tenants: an operator with the token can use `offload explain --tenant NAME`"
            )
        status = self._status
        if status is None:
            await trio.lowlevel.checkpoint()
            raise NoSuchKey("no tier is open yet: the first registered cache sets the size of a block")
        return await status.explain(key)

    def degraded(self) -> Mapping[str, str]:
        """Return the degradations of the daemon."""
        return self._degraded()

    def not_ready(self) -> str:
        """Return the state of the daemon, if it is not ready."""
        state = self._state()
        return "" if state == "ready" else state


def metrics_of(
    engine: DaemonEngine, times: StageTimes, counters: Callable[[], Mapping[str, float]]
) -> Callable[[], bytes] | None:
    """Return the function that answers ``/metrics``.

    ``None`` if prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest

        from ..metrics import ConfigCollector, DaemonCollector, EngineCollector, StageCollector
    except ImportError:
        return None
    registry = CollectorRegistry()
    registry.register(StageCollector(times.statistics))
    registry.register(DaemonCollector(counters))
    registry.register(ConfigCollector(lambda: engine.config))

    registry.register(
        EngineCollector(lambda: before_opening(engine.config) if engine.engine is None else engine.engine.statistics())
    )
    return lambda: generate_latest(registry)
