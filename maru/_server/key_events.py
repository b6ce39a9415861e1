"""KV events of a server's keys: the publisher's sockets, with TCP relays.

A key may be published before it is in the journal: readers know a run of the server by its epoch, and ask again after
its end.
"""

from __future__ import annotations

from typing import Final

import trio

from .._config import ServerConfig
from ..base.relay.supervisor import RelaySupervisor
from ..kv_events import EventPublisher, KeyBook, PublisherStatistics, publish_events
from ..kv_events._messages import hash_of_hex
from .endpoints import ANSWERS_NAME, EVENTS_NAME, event_addresses, event_ports, socket_options

_SHARE: Final = 4
"""Part of all connections that may read events, unauthenticated."""


class KeyEvents:
    """The KV events of one server.

    Args:
        config: of the server.
        keys: the stored keys, with their changes.
        most_connections: over TCP, of all clients together.
    """

    def __init__(self, config: ServerConfig, keys: KeyBook[str], most_connections: int) -> None:
        self._config, self._keys = config, keys
        self._most = max(2, most_connections // _SHARE)
        self._publisher: EventPublisher | None = None
        self._relayed: tuple[str, str] | None = None

    @property
    def endpoints(self) -> tuple[str, str] | None:
        """Addresses of events, and of requests for missed ones; None without them."""
        if self._publisher is None:
            return None
        return self._relayed or (self._publisher.endpoint, self._publisher.answers_endpoint)

    def statistics(self) -> PublisherStatistics | None:
        """Return an immutable snapshot; ``None`` if nothing is published."""
        return None if self._publisher is None else self._publisher.statistics()

    async def run(self, runtime: str, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish until cancelled.

        ``task_status.started`` is called once readers can connect.

        Raises:
            OSError: it cannot listen at its address.
        """
        config = self._config
        events, answers = event_addresses(config, runtime)
        async with (
            publish_events(
                {"maru": self._keys},
                events,
                answers,
                topic=config.kv_events_topic,
                name_of=hash_of_hex if config.kv_events_keys == "hex" else str.encode,
                options=socket_options(config),
            ) as self._publisher,
            trio.open_nursery() as nursery,
        ):
            if config.kv_events_relayed:
                host, first, second = event_ports(config)
                self._relayed = (
                    await nursery.start(self._relay(f"{runtime}/{EVENTS_NAME}", "PUB").run, host, first),
                    await nursery.start(self._relay(f"{runtime}/{ANSWERS_NAME}", "ROUTER").run, host, second),
                )
            task_status.started()
            await trio.sleep_forever()

    def _relay(self, path: str, kind: str) -> RelaySupervisor:
        return RelaySupervisor(path, kind=kind, most=self._most, anybody=True)
