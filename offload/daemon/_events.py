"""The KV events of a daemon, about the blocks in its tiers.

    tiers of the engine (books of keys) -> names (``_event_names``) -> publisher: PUB and ROUTER, at Unix sockets
                                                                       over TCP: relays, in processes of their own

Rule 1. The sockets are there when the daemon is, and nothing is published before the tiers are open: the blocks that a
    tier kept from an earlier run are not known before, so a mirror must not conclude that there are none.
Rule 2. Other tenants are other names, and so another epoch: names published before are never withdrawn by new ones.
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
    """Publishes the keys that the tiers of a daemon hold.

    Args:
        config: of the daemon.
        directory: of its sockets.
        engine: its tiers.
        tenants: the tenants whose names are published.

    Attributes:
        endpoints: address of the events, and the one where readers ask for missed ones.
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
        """Publish the names of these tenants from now on.

        It is a new epoch if their credentials have changed.
        """
        before, self._tenants = self._tenants, tenants
        if tenants.credentials != before.credentials:
            self._epoch.cancel()

    def counters(self) -> dict[str, float]:
        """Return the counts of published messages, by name."""
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
        """Return the tiers that know their keys.

        A page store that others run publishes by itself.
        """
        return dict(self._engine.books())

    async def _relay(self, nursery: trio.Nursery) -> None:
        """Start processes that take the connections over TCP.

        A bad handshake ends the process of a ZeroMQ socket.
        """
        host, _, port = self._config.kv_events.rpartition(":")
        told = []
        for offset, (name, kind) in enumerate(((EVENTS_NAME, "PUB"), (ANSWERS_NAME, "ROUTER"))):
            relay = RelaySupervisor(f"{self._directory}/{name}", kind=kind, most=_READERS, anybody=True)
            told.append(await nursery.start(partial(relay.run, host.strip("[]"), int(port) + offset)))
        self.endpoints = (told[0], told[1])
