"""Assignment of published clients' connections to sessions. Pure.

Published messages do not name a session. A published client sends its instance_id when it asks for a region or returns
one; a reader never does. Its session is all connections that sent one instance_id. It lives while one of them does,
however silent; when the last one is gone it has a lease left, since a client that opens a new socket is still the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from .changes import Changes
from .eviction_guard import EvictionGuard
from .limits import Limits
from .regions import RegionState
from .sessions import Leases, Session


class Published:
    """Published connections, by negative numbers, and the sessions that they have joined."""

    def __init__(self, changes: Changes, guard: EvictionGuard, leases: Leases, limits: Limits) -> None:
        self._changes = changes
        self._state = changes.state
        self._guard = guard
        self._leases = leases
        self._limits = limits
        self.connections: dict[int, set[int]] = {}
        """The sessions that each connection has joined."""
        self._last = 0

    def connect(self) -> int:
        """Add a connection. Return its number."""
        self._last -= 1
        self.connections[self._last] = set()
        return self._last

    def disconnect(self, connection: int, now: float) -> None:
        """Remove a connection.

        A session without another connection has its lease left; pins of the connection have ``v1_read_grace``.
        """
        for number in self.connections.pop(connection):
            session = self._state.sessions.get(number)
            if session is not None:
                session.connections.discard(connection)
                if not session.connections:
                    self._leases.set(number, now + session.lease)
        self._guard.keep_pins_until(connection, now + self._limits.v1_read_grace)

    def join(self, connection: int, instance_id: str) -> Session:
        """Add this connection to the session of this instance. Return the session.

        A session without connections is not joined by its name alone: a process that was started again under the same
        name knows nothing of the previous regions, and would keep them from being evicted for ever.
        """
        joined = self.connections[connection]
        session = self.find(instance_id)
        if session is None:
            session = self._changes.open_session(b"", instance_id, "", True, self._limits.published_lease)
        self._belongs(connection, joined, session)
        return session

    def find(self, instance_id: str) -> Session | None:
        """Return the session that a connection of this instance joins, if any."""
        account = self._state.instances.get(instance_id)
        living = () if account is None else account.sessions.values()
        return next((one for one in living if one.connections), None)

    def join_owners(self, connection: int, regions: int | Sequence[int]) -> None:
        """Add this connection to the published owners of these regions.

        It writes in them. No other client could know of these regions. An orphan has its owner back: a client that had
        lost its connection for long.
        """
        joined = self.connections[connection]
        for region_id in (regions,) if isinstance(regions, int) else dict.fromkeys(regions):
            region = self._state.regions.get(region_id)
            if region is None or not region.published or region.state is RegionState.RETURNED:
                continue
            if region.session is None:
                self._changes.add_region(region_id, region.length, self.join(connection, region.instance_id))
            elif region.session.number not in joined:
                self._belongs(connection, joined, region.session)

    def _belongs(self, connection: int, joined: set[int], session: Session) -> None:
        joined.add(session.number)
        session.connections.add(connection)
        self._leases.discard(session.number)
