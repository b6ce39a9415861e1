"""Locations of keys, their owners, pins and readers, and eviction decisions. Pure.

This module decides which changes are allowed. `maru._directory.state` carries them out, and is the part that a restart
restores; pins, leases and reads of published clients are not restored.

Rule 1. No clock and no randomness: each method gets ``now`` (seconds; monotonic, the server's own), and the same calls
        give the same answers.
Rule 2. Each change is recorded (`maru._directory.records`) before the answer is given, and in the order of the changes.
Rule 3. A pinned key stays, and so does one that a client holds without a message (`maru._index.boards`). A lease counts
        at the server until its end and ``lease_grace``, whatever ends it: a reader stops using its views by its own
        clock. After a restart the pins are unknown, so all keys count as pinned until every session has sent the new
        epoch, which means that it has dropped its views, or until the longest lease is over. Published clients cannot
        send it, so with them it takes that long.
Rule 4. While a published owner lives, none of its keys is removed except at its own request: it would not learn of it.
        A key that a published connection has looked up is not evicted for a while, since such a client reads without
        pins.
Rule 5. A session that needs room pays for it: its own least recently used keys go first, then those that share its
        quota. For a new region, abandoned regions go as a whole. No other keys are evicted for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from .._wire.messages_own import Returns, StoreStatus
from ..eviction import LRU, EvictionPolicy
from ..kv_events import KeyWatcher
from . import image as image_module
from .changes import Changes
from .eviction_guard import EvictionGuard, Holds
from .evictor import Evictor
from .image import DirectoryImage
from .limits import Limits
from .locations import Columns, GivenBack, Location, LocationWatcher, Registration
from .pool_map import PoolMap, map_pool
from .published import Published
from .reader import Reader
from .records import AnyRecord
from .regions import Region, RegionState, keys_in_pieces
from .registrar import Registrar
from .remover import Remover
from .sessions import Leases, Session
from .slices import SESSIONS_AT_ONCE, USES_AT_ONCE, Slices, finish
from .state import State
from .statistics import Counters, DirectoryStatistics, InstanceUsage, KeyFacts, facts_of, statistics_of, usage_of


class Directory:
    """Map from key to location, with sessions, regions, pins, quotas and returns.

    It also keeps the order of use. ``by`` is the number of the requester: a session of ours (positive, from
    :meth:`open_session`), a published connection (negative, from :meth:`connect`), or 0, the server itself. An unknown
    number raises ``KeyError`` and changes nothing.

    Changes to be journaled gather in order in ``records`` until :meth:`take_records`; removed regions, whose memory the
    pool may free once those records are written, gather until :meth:`take_dropped`.

    Args:
        limits: the knobs.
        eviction: makes the policy of one owner; called once for each session.
    """

    # LRU, since one thread serves all clients: a use of 64 keys costs 3 us, and 80 us with the policy of the other tiers.
    def __init__(self, limits: Limits | None = None, eviction: Callable[[], EvictionPolicy[str]] = LRU) -> None:
        limits = Limits() if limits is None else limits
        self._begin(limits, State(limits, eviction))

    def _begin(self, limits: Limits, state: State) -> None:
        self._limits = limits
        self._state = state
        self._located = state.located
        self._changes = Changes(state)
        self._counters = Counters()
        self._leases = Leases()
        self._guard = EvictionGuard(state, limits)
        self._published = Published(self._changes, self._guard, self._leases, limits)
        self._evictor = Evictor(self._changes, self._guard, self._counters)
        self._registrar = Registrar(self._changes, limits, self._guard, self._evictor, self._counters)
        self._reader = Reader(self._changes, self._guard, self._counters)
        self._remover = Remover(self._changes, limits, self._guard, self._evictor, self._counters)

    def __len__(self) -> int:
        self.settle()
        return len(self._located)

    def __repr__(self) -> str:
        return f"<Directory of {len(self._located)} keys in {len(self._state.regions)} regions>"

    # --- output for the server ------------------------------------------------------------------------------------

    @property
    def records(self) -> Sequence[AnyRecord]:
        """The records that :meth:`take_records` would take."""
        return self._changes.records

    def take_records(self) -> list[AnyRecord]:
        """Return the records since the last call, in order."""
        records, self._changes.records = self._changes.records, []
        return records

    def take_dropped(self) -> list[int]:
        """Return the regions dropped since the last call.

        Free their memory after the records are written; their ids are spent.
        """
        dropped, self._state.dropped = self._state.dropped, []
        return dropped

    def take_chores(self) -> list[Slices[None]]:
        """Return the work that was left for later, in slices.

        No answer depends on when it is done.
        """
        chores = self._state.chores
        return [chores.popleft() for _ in range(len(chores))] if chores else []

    # --- sessions of ours -----------------------------------------------------------------------------------------

    def open_session(self, token: bytes, instance_id: str, tenant: str, lease: float, now: float) -> int:
        """Open a session for a client of ours. Return its number.

        Raises:
            ValueError: the token is empty or taken.
        """
        if not token or token in self._state.tokens:
            raise ValueError("the token is empty, or belongs to another session")
        number = self._changes.open_session(token, instance_id, tenant, False, lease).number
        self._leases.set(number, now + lease + self._limits.lease_grace)
        return number

    def session_of(self, token: bytes) -> int | None:
        """Return the number of the living session with this token."""
        return self._state.tokens.get(token)

    def tenant_of(self, token: bytes) -> str | None:
        """Return the tenant of the living session with this token."""
        number = self._state.tokens.get(token)
        return None if number is None else self._state.sessions[number].tenant

    def tenants(self) -> set[str]:
        """Return the tenants that have a session.

        The cost grows with the number of sessions.
        """
        return {session.tenant for session in self._state.sessions.values()}

    def attach(self, session_id: int, now: float) -> None:
        """Record that this session has sent our epoch, and renew its lease.

        It has stopped using everything that it knew from an earlier epoch.
        """
        self.renew(session_id, now)
        self._guard.note_returned(session_id)

    def renew(self, session_id: int, now: float) -> None:
        """Restart the lease of this session, which has sent a message."""
        self._leases.set(session_id, now + self._state.sessions[session_id].lease + self._limits.lease_grace)

    def remaining(self, session_id: int, now: float) -> float:
        """Return the seconds left of this session's lease.

        The server's grace is not included. Never negative.
        """
        return max(0.0, self._leases.until(session_id) - self._limits.lease_grace - now)

    def end_session(self, session_id: int, now: float) -> None:
        """End this session: its regions become orphans, the empty ones are dropped.

        Its pins count until the end of its lease and the grace.
        """
        self.settle()
        self._end(session_id, self._leases.until(session_id))
        self._guard.expire_pins(now)

    def expire(self, now: float) -> list[int]:
        """End some sessions and pins whose time is over.

        Return the sessions' numbers. As long as :meth:`next_expiry` is not later than ``now``, there may be more.
        """
        self.settle()
        ended = self._leases.due(now, SESSIONS_AT_ONCE)
        for number in ended:
            self._end(number, now)
        self._guard.expire_pins(now)
        return ended

    def holds_nothing(self, session_id: int, now: float) -> bool:
        """Return whether ending this session costs nothing.

        It has no region, no page on the way back, no pin and no board.
        """
        session = self._state.sessions[session_id]
        idle = not session.regions and not session.outbox.pages and not session.under_way
        return idle and self._guard.holds_nothing(session_id) and not self.quiet(now)

    def _end(self, session_id: int, pinned_until: float) -> None:
        self._changes.end_session(session_id)
        self._leases.discard(session_id)
        self._guard.note_returned(session_id)
        self._guard.keep_pins_until(session_id, pinned_until)

    def next_expiry(self) -> float:
        """Return when :meth:`expire` may have something to do, or an earlier time.

        ``math.inf`` if there is nothing to wait for.
        """
        return min(self._leases.next(), self._guard.next_expiry())

    # --- published connections ------------------------------------------------------------------------------------

    def connect(self) -> int:
        """Add the connection of a published client. Return its number."""
        return self._published.connect()

    def disconnect(self, connection: int, now: float) -> None:
        """Remove a published connection.

        Its pins count for ``v1_read_grace`` more; a session without another connection has its lease left.
        """
        self._published.disconnect(connection, now)

    @property
    def session_count(self) -> int:
        """Number of living sessions, ours and published ones."""
        return len(self._state.sessions)

    def is_there(self, instance_id: str) -> bool:
        """Return whether a published connection of this instance would join a session."""
        return self._published.find(instance_id) is not None

    # --- restart --------------------------------------------------------------------------------------------------

    def apply(self, record: AnyRecord, decode: Callable[[int, bytes], Columns]) -> None:
        """Apply one record of the journal again, without recording it.

        Args:
            record: the next record.
            decode: return the columns of a ``Registered`` from its code and payload.
        """
        self._changes.replay(record, decode)

    def dump(self) -> DirectoryImage:
        """Return the state as a value.

        It has all but pins, running leases, connections and the order of use.
        """
        return finish(self.dumping(), 0.0)()

    def dumping(self) -> Slices[Callable[[], DirectoryImage]]:
        """Do :meth:`dump` in slices. Return a function that makes the image.

        The image shows the state at the first slice; the function may be called in any thread. One dump at a time.
        """
        self.settle()
        return (yield from image_module.dumping(self._state))

    @classmethod
    def load(
        cls,
        image: DirectoryImage,
        limits: Limits | None = None,
        eviction: Callable[[], EvictionPolicy[str]] = LRU,
    ) -> Directory:
        """Return a directory in the state of ``image``.

        Keys count as used in the order in which they were registered.
        """
        limits = Limits() if limits is None else limits
        directory = cls.__new__(cls)
        directory._begin(limits, image_module.load(image, limits, eviction))
        return directory

    def restart(self, now: float) -> None:
        """Restart all leases and begin the quiet time.

        Called once, after load and replay. It is quiet until every session of ours is back or over. Published clients
        cannot report that they are back, so their sessions are waited for until they would be over. If some have read,
        the keys that they read stay for ``v1_read_grace``.
        """
        state, limits = self._state, self._limits
        state.dropped.clear()
        ends = {session.number: now + session.lease + limits.lease_grace for session in state.sessions.values()}
        for number, end in ends.items():
            self._leases.set(number, end)
        ours = {number: end for number, end in ends.items() if not state.sessions[number].published}
        surely = [end for number, end in ends.items() if number not in ours]
        if state.read_unpinned:
            surely.append(now + limits.v1_read_grace)
        self._guard.begin_quiet(ours, surely=max(surely, default=now))

    def quiet(self, now: float) -> bool:
        """Return whether evictions, deletes and returns of pages must wait.

        Views from before the restart may be in use.
        """
        return self._guard.is_quiet(now)

    def forget(self, keys: Iterable[str]) -> int:
        """Drop these keys in spite of any protection.

        Return how many existed. This is for keys whose bytes turned out to be wrong.
        """
        self.settle()
        return self._remover.forget(keys)

    # --- regions --------------------------------------------------------------------------------------------------

    def add_region(self, by: int, region_id: int, length: int, *, instance_id: str = "") -> int:
        """Give a region of the pool its owner.

        Return the number of the owner's session.

        Args:
            by: a session of ours becomes the owner itself; a published connection joins the session of ``instance_id``,
                which is opened unless it has another connection.
            region_id: never used before.
            length: in bytes.
            instance_id: of a published client.

        Raises:
            ValueError: this region exists already.
        """
        if region_id in self._state.regions:
            raise ValueError(f"region {region_id} already exists")
        session = self._state.sessions[by] if by > 0 else self._published.join(by, instance_id)
        self._changes.add_region(region_id, length, session)
        return session.number

    def give_back_region(self, by: int, region_id: int, *, instance_id: str = "") -> GivenBack:
        """Hand a region back (RETURN_ALLOC), which only its owner may do.

        For a published client, any connection with its instance_id may.
        """
        self.settle()
        session = self._session(by)
        region = self._state.regions.get(region_id)
        if region is None or region.state is RegionState.RETURNED:
            return GivenBack.REFUSED
        if session is None:
            if not region.published or region.instance_id != instance_id:
                return GivenBack.REFUSED
        elif region.session is not session:
            return GivenBack.REFUSED
        self._changes.return_region(region_id)
        return GivenBack.DEFERRED if region_id in self._state.regions else GivenBack.FREED

    def drop_region(self, region_id: int) -> int:
        """Drop a region whose memory is lost.

        Return the number of its keys. Every key in it goes, pinned or not. An unknown region has none.
        """
        self.settle()
        return self._remover.drop_region(region_id)

    def regions(self, exclude_instance_id: str | None = None) -> list[tuple[int, int]]:
        """Return (region_id, length) of the regions not handed back, for LIST_ALLOCATIONS.

        Regions of ``exclude_instance_id`` are left out.
        """
        return [
            (region.region_id, region.length)
            for region in self._state.regions.values()
            if region.state is not RegionState.RETURNED and region.instance_id != exclude_instance_id
        ]

    def region_ids(self) -> set[int]:
        """Return the ids of all regions, handed back or not.

        Any other region in the pool is stale after a restart.
        """
        return set(self._state.regions)

    def region(self, region_id: int) -> tuple[int, int] | None:
        """Return (length, number of the owner's session) of a region that exists.

        The number is 0 if the region is abandoned; ``None`` if there is no such region.
        """
        region = self._state.regions.get(region_id)
        if region is None:
            return None
        return region.length, 0 if region.session is None else region.session.number

    def make_room(self, wanted_bytes: int, now: float) -> list[int]:
        """Evict abandoned regions whole, if that frees ``wanted_bytes``. Return their ids.

        The longest abandoned go first. If they do not free so much, none goes. A region with a pinned key in it stays,
        and so does one in which a published connection has looked up something lately. The ids are in
        :meth:`take_dropped`, too.
        """
        return finish(self.making_room(wanted_bytes, now), now)

    def making_room(self, wanted_bytes: int, now: float) -> Slices[list[int]]:
        """Do :meth:`make_room` in slices. One at a time."""
        self.settle()
        return self._remover.make_room(wanted_bytes, now)

    # --- keys -----------------------------------------------------------------------------------------------------

    def register(
        self,
        by: int,
        columns: Columns,
        now: float,
        *,
        source: tuple[int, bytes] = (0, b""),
        whole: bool = False,
        later: bool = False,
    ) -> Registration | None:
        """Register keys, judging each entry after the effects of those before it.

        Args:
            by: the owner of the regions. A published connection that registers in a region of another published client
                joins its session, and gets an orphan back: no other client could know of that region.
            columns: the keys and their locations.
            now: the time.
            source: code and body of the request, for the journal.
            whole: one refused entry refuses them all (a published batch): then nothing is registered, and the statuses
                show which would be refused.
            later: apply half of the work only at :meth:`settle`, which the caller calls once the answer has been sent.

        Returns:
            The result of each entry; ``None`` if the attempt is fenced: then nothing has changed.

        Raises:
            ValueError: the columns are not equally long.
        """
        self.settle()
        if not columns.equally_long():
            raise ValueError("columns of different lengths")
        session = self._session(by)
        if session is None:
            self._published.join_owners(by, columns.regions)
        elif columns.attempt in session.fences:
            return None
        elif session.outbox.under_way >= self._limits.max_unacknowledged:
            # Each key that goes would add to the pages kept for this session. Nobody else pays: its own keys are
            # refused.
            n = len(columns.keys)
            self._counters.refused += n
            return Registration([StoreStatus.BUSY.value] * n, [0] * n, 0, list(range(n)))
        self._guard.expire_pins(now)
        parts = columns.by_region()
        regions = self._writable(by, session, parts)
        if columns.keys and len(regions) == len(parts):
            answer = self._registrar.register_plain(regions, parts, columns, source, later)
            if answer is not None:
                return answer
        return self._registrar.register(regions, columns, now, source, whole)

    def judge(self, by: int, columns: Columns, now: float) -> list[int]:
        """Return a ``StoreStatus`` for each entry of a registration, ignoring quotas.

        Nothing is registered.
        """
        self.settle()
        session = self._session(by)
        if session is None:
            self._published.join_owners(by, columns.regions)
        self._guard.expire_pins(now)
        return self._registrar.judge(self._writable(by, session, columns.by_region()), columns, now)

    def settle(self) -> None:
        """Finish the registrations that :meth:`register` left for later.

        Every method that could notice the difference calls it first.
        """
        if self._changes.deferred:
            self._changes.settle()

    def find(
        self, by: int, keys: Sequence[str], now: float, *, pin: bool = False, prefix: bool = False
    ) -> list[Location | None]:
        """Return the locations of these keys, and count a use of each.

        With ``prefix`` the answer ends before the first miss.
        """
        self.settle()
        self._session(by)
        return self._reader.find(by, keys, now, pin, prefix)

    def exists(self, keys: Iterable[str]) -> list[bool]:
        """Return whether each key exists. Counts no use."""
        self.settle()
        return self._reader.exists(keys)

    def pin(self, by: int, keys: Sequence[str], *, prefix: bool = False) -> list[bool]:
        """Add one pin to each key that exists.

        With ``prefix``, no key after the first miss gets one.
        """
        self.settle()
        self._session(by)
        return self._reader.pin(by, keys, prefix)

    def unpin(self, by: int, keys: Iterable[str]) -> list[bool]:
        """Remove one pin of ``by`` from each key.

        False if there was none. A published connection may drop another one's pin.
        """
        self.settle()
        self._session(by)
        return self._guard.unpin(by, keys)

    def pin_entries(self, holder: int | None = None) -> int:
        """Return the number of keys pinned by this holder, or by all.

        Each key is counted for each of its holders.
        """
        return self._guard.pin_entries(holder)

    def enter_pin_epoch(self, session_id: int, pin_epoch: int) -> bool:
        """Note that this session is in this pin epoch.

        False if the epoch is over. Call it before the session's pins and unpins.
        """
        self._state.sessions[session_id]
        return self._guard.enter_pin_epoch(session_id, pin_epoch)

    def settle_pins(self, session_id: int, keys: Sequence[str], counts: Sequence[int], *, last: bool) -> int:
        """Keep only the pins that a session still holds from earlier epochs.

        Args:
            session_id: of ours.
            keys: the keys that it holds, or a part of them. A key that does not exist, or that the session has not
                pinned, is passed over: this pins nothing.
            counts: pins of each.
            last: there are no others. Pins that were not named are removed.

        Returns:
            How many pins were removed.
        """
        self.settle()
        self._state.sessions[session_id]
        return self._guard.reconcile_pins(session_id, keys, counts, last)

    def delete(
        self,
        by: int,
        keys: Iterable[str],
        now: float,
        *,
        request_id: int = 0,
        generations: Sequence[int] | None = None,
    ) -> list[int]:
        """Delete keys. Return a ``DropAnswer`` for each, as a number.

        A repeated request id gets the same answer. Pages go back to their owners, also to the one that asks. With
        ``generations``, one for each key, a key is deleted only if it was registered under its generation.
        """
        self.settle()
        return self._remover.delete(by, self._session(by), keys, now, request_id, generations)

    def deleting(
        self,
        session_id: int,
        keys: Sequence[str],
        now: float,
        *,
        request_id: int = 0,
        generations: Sequence[int] | None = None,
    ) -> Slices[list[int]]:
        """Do :meth:`delete` in slices, for a session of ours."""
        self.settle()
        session = self._state.sessions[session_id]
        return self._remover.delete_in_slices(session_id, session, keys, now, request_id, generations)

    def reclaim(self, session_id: int, pages: int, now: float, *, request_id: int = 0) -> int:
        """Delete up to ``pages`` keys of a session that are not held.

        Return how many. The least recently used go first, and their pages go back to the session. A repeated request id
        gets the same answer. In quiet time (:meth:`quiet`) nothing can be reclaimed.
        """
        return finish(self.reclaiming(session_id, pages, now, request_id=request_id), now)

    def reclaiming(self, session_id: int, pages: int, now: float, *, request_id: int = 0) -> Slices[int]:
        """Do :meth:`reclaim` in slices.

        A repeated request that comes before the last slice gets 0.
        """
        self.settle()
        return self._remover.reclaim(self._state.sessions[session_id], pages, now, request_id)

    def keep_ahead(self, session_id: int, now: float) -> int:
        """Evict ahead of need for a session that has registered.

        Return how many keys. Only for a session that has had to ask for room.
        """
        self.settle()
        session = self._state.sessions.get(session_id)
        return 0 if session is None else self._remover.keep_ahead(session, now)

    def trim(self, session_id: int, now: float) -> int:
        """Delete keys above the high watermark down to the low one.

        Return how many. O(1) if its keys are below the high watermark.
        """
        return finish(self.trimming(session_id, now), now)

    def trimming(self, session_id: int, now: float) -> Slices[int]:
        """Do :meth:`trim` in slices."""
        self.settle()
        return self._remover.trim(self._state.sessions[session_id], now)

    # --- attempts and returns -------------------------------------------------------------------------------------

    def fenced(self, session_id: int, attempt: int) -> bool:
        """Return whether this attempt is refused."""
        return attempt in self._state.sessions[session_id].fences

    def resolve(self, session_id: int, attempt: int, regions: Sequence[int], offsets: Sequence[int]) -> list[int]:
        """Fence the attempt. Return the generation under which it holds each page.

        0 for a page that it does not hold. A page on its way back counts as held: its owner may use it again once the
        return has come, and not before. Its generation is gone, so any stands for it.
        """
        self.settle()
        session = self._state.sessions[session_id]
        self._changes.fence(session_id, attempt)
        held: list[int] = []
        for region_id, offset in zip(regions, offsets, strict=True):
            region = session.regions.get(region_id)
            if region is None:
                held.append(0)
            elif (key := region.keys_at.get(offset)) is not None:
                location = self._located[key]
                held.append(location.generation if location.attempt == attempt else 0)
            else:
                held.append(self._state.generation if region.returning.get(offset) == attempt else 0)
        return held

    def acknowledge(self, session_id: int, number: int) -> None:
        """Record that the owner has applied every return up to this number.

        A lower number than before has no effect. At most as many are taken at once as can be under way to the owner:
        its next message repeats the number.
        """
        acknowledged = self._state.sessions[session_id].outbox.acknowledged
        if number > acknowledged:
            self._changes.acknowledge(session_id, min(number, acknowledged + self._limits.max_unacknowledged))

    def pending(self, session_id: int, now: float, *, resend: bool = False) -> Returns | None:
        """Return the next pages on the way back to this session.

        Return the pages that were not sent yet or, with ``resend``, the first that are not acknowledged, and mark them
        as sent.
        """
        outbox = self._state.sessions[session_id].outbox
        if not outbox.pages or self.quiet(now):
            return None
        if resend:
            return outbox.pending(True, self._limits.max_returns)
        room = self._limits.max_unacknowledged - outbox.under_way
        return outbox.pending(False, min(self._limits.max_returns, room)) if room > 0 else None

    # --- statistics -----------------------------------------------------------------------------------------------

    def list_keys(self) -> list[str]:
        """Return all keys, in the order of their registration."""
        self.settle()
        return list(self._located)

    def keys_in_pieces(self, size: int) -> Iterator[list[str]]:
        """Yield all registered keys, region by region.

        A piece has at most ``size`` keys. Keys may come and go between two pieces; some keys of a piece may be gone
        already.
        """
        self.settle()
        return keys_in_pieces(list(self._state.regions.values()), size)

    def watch_keys(self, watcher: KeyWatcher[str]) -> Callable[[], None]:
        """Notify ``watcher`` of added and removed keys.

        The returned function ends this. After a restart there are no watchers.
        """
        self.settle()
        return self._state.watchers.add(watcher)

    def watch_locations(self, watcher: LocationWatcher) -> None:
        """Notify ``watcher`` of the locations of keys from now on.

        It learns of a change before it is answered, and before a page is handed back.
        """
        self.settle()
        self._state.location_watcher = watcher

    def heed(self, boards: Holds) -> None:
        """Protect the keys held on these boards as if pinned.

        Their uses are counted, too. A client notes the uses on its board.
        """
        self._guard.boards = boards

    def note_uses(self, by: int | None = None, most: int = USES_AT_ONCE) -> None:
        """Count uses made without a message since the last call.

        Evictions do so themselves, for all sessions.

        Args:
            by: the session; ``None``: all, in turn.
            most: uses that are counted at once. Of all, the rest is a chore; of one session, it waits for the next
                call.
        """
        self.settle()
        self._evictor.note_uses(by, most)

    def locate(self, keys: Iterable[str]) -> list[tuple[str, Location, bool]]:
        """Return the location of each key that exists.

        Return, too, whether the key may be read without a pin. This counts no use.
        """
        self.settle()
        located, regions = self._located, self._state.regions
        return [
            (key, location, not regions[location.region_id].published)
            for key in keys
            if (location := located.get(key)) is not None
        ]

    def usage(self) -> list[InstanceUsage]:
        """Return the usage of each instance, sorted by instance_id."""
        self.settle()
        return usage_of(self._state)

    def map_pool(self, cells: int, piece: int) -> Generator[None, None, PoolMap]:
        """Draw the pool, piece by piece; see :mod:`maru._directory.pool_map`."""
        self.settle()
        return map_pool(self._state, cells, piece)

    def inspect(self, key: str) -> KeyFacts | None:
        """Return all facts about a key; ``None`` if it does not exist.

        Counts neither as a use nor as a read.
        """
        return facts_of(self._state, self._guard.pins_of(key), key)

    def statistics(self) -> DirectoryStatistics:
        """Return an immutable snapshot, in O(1) but for the boards."""
        self.settle()
        connections, pinned = len(self._published.connections), len(self._guard.pinned) + self._guard.count_held()
        return statistics_of(self._state, self._counters, connections=connections, pinned=pinned)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _session(self, by: int) -> Session | None:
        """Return the requesting session of ours.

        ``None`` for a published connection, and for the server itself.
        """
        if by > 0:
            return self._state.sessions[by]
        if by < 0:
            self._published.connections[by]
        return None

    def _writable(self, by: int, session: Session | None, region_ids: Iterable[int]) -> dict[int, Region]:
        """Return the regions in which a session may register."""
        return {
            region_id: region
            for region_id in region_ids
            if (region := self._state.regions.get(region_id)) is not None and self._may_write(by, session, region)
        }

    def _may_write(self, by: int, session: Session | None, region: Region) -> bool:
        """Return whether the requester owns the region.

        The owner is this session, or a published one that this connection belongs to.
        """
        owner = region.session
        return owner is not None and (by in owner.connections if session is None else owner is session)
