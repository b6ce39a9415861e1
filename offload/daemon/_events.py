"""The KV events of a daemon: what its tiers hold is published, from when they are open.

    tiers of the engine (books of keys) -> names (``_event_names``) -> publisher: PUB and ROUTER, at Unix sockets
                                                                       over TCP: relays, in processes of their own

Rule 1. The sockets are there when the daemon is, and nothing is published before the tiers are open: what a tier kept from an
        earlier run is not known before, so a mirror must not take it for nothing.
Rule 2. Other tenants are other names, and so another epoch: what was told under old names is never taken back by new ones.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from maru.base.relay.supervisor import RelaySupervisor
from maru.kv_events import KeyBook, open_publisher

from ._event_names import EventNames
from ._tenants import Tenants

if TYPE_CHECKING:
    from maru.kv_events import EventPublisher

    from ._config import DaemonConfig
    from ._engine import DaemonEngine

EVENTS_NAME: Final = "kv-events.sock"
ANSWERS_NAME: Final = "kv-answers.sock"
_READERS: Final = 64
"""Over TCP, at each of both ports: routers and their replicas."""


class DaemonEvents:
    """Publishes what the tiers of a daemon hold.

    Args:
        config: of the daemon.
        directory: of its sockets.
        engine: its tiers.
        tenants: whose names are told.

    Attributes:
        endpoints: where the events are, and where readers ask for what they missed.
    """

    def __init__(self, config: DaemonConfig, directory: str, engine: DaemonEngine, tenants: Tenants) -> None:
        self.endpoints: tuple[str, str] = (f"ipc://{directory}/{EVENTS_NAME}", f"ipc://{directory}/{ANSWERS_NAME}")
        self._config = config
        self._directory = directory
        self._engine = engine
        self._tenants = tenants
        self._epoch = trio.CancelScope()
        self._publisher: EventPublisher

    def rename(self, tenants: Tenants) -> None:
        """Publish the names of these tenants from now on, as a new epoch where their credentials are other ones."""
        before, self._tenants = self._tenants, tenants
        if tenants.credentials != before.credentials:
            self._epoch.cancel()

    def counters(self) -> dict[str, float]:
        """What was published, by name."""
        told = self._publisher.statistics()
        return {
            "events.batches": told.sequence + 1,
            "events.heartbeats": told.heartbeats,
            "events.replays": told.replays,
            "events.snapshots": told.snapshots,
            "events.bad_requests": told.bad_requests,
            "events.given_up": told.given_up,
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish until cancelled; started when its sockets are open.

        Raises:
            OSError: an address cannot be used.
        """
        async with (
            open_publisher(*self.endpoints, topic=self._config.kv_events_topic) as self._publisher,
            trio.open_nursery() as nursery,
        ):
            if self._config.kv_events != "ipc":
                await self._relay(nursery)
            task_status.started()
            await self._engine.opened.wait()
            while True:
                with trio.CancelScope() as self._epoch:
                    await self._publisher.publish(self._books(), EventNames(self._tenants).of)

    def _books(self) -> dict[str, KeyBook[Any]]:
        """The tiers that know what they hold. A page store that others run publishes by itself."""
        return dict(self._engine.books())

    async def _relay(self, nursery: trio.Nursery) -> None:
        """Have processes of their own take the connections over TCP: a bad handshake ends that of a ZeroMQ socket."""
        host, _, port = self._config.kv_events.rpartition(":")
        told = []
        for offset, (name, kind) in enumerate(((EVENTS_NAME, "PUB"), (ANSWERS_NAME, "ROUTER"))):
            relay = RelaySupervisor(f"{self._directory}/{name}", kind=kind, most=_READERS, anybody=True)
            told.append(await nursery.start(partial(relay.run, host.strip("[]"), int(port) + offset)))
        self.endpoints = (told[0], told[1])
