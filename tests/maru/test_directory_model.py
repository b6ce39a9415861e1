"""The directory against a model of lists and linear scans, and against its own records and its own image.

The model says what each request answers and what is there afterwards, as one would say it; it knows no dicts by offset,
no sums that are kept, and no cases that are quicker than others. After every step the directory must agree with it, a
directory that was given the records must be the same, and so must one that was loaded from the image.
"""

import copy
import mmap

import attrs
import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from maru._directory import Columns, Directory, DropAnswer, GivenBack, Limits, StoreStatus
from maru._directory.records import decode, encode
from maru._index import IndexReader, TenantIndexes, bytes_for

PAGE = 16
KEYS = [*"abcdefghij", "k" * 40]
TOO_LONG = "l" * 41
LIMITS = Limits(
    lease_grace=1.0,
    published_lease=5.0,
    v1_read_grace=8.0,
    instance_quotas={"small": 3 * PAGE},
    tenant_quotas={"poor": 4 * PAGE},
    high_watermark=0.8,
    low_watermark=0.5,
    max_entries=9,
    max_key_bytes=40,
    max_returns=3,
    max_fences=2,
)


@attrs.define(eq=False)
class Session:
    number: int
    token: bytes
    instance: str
    tenant: str
    published: bool
    lease: float
    deadline: float | None = None
    connections: list = attrs.field(factory=list)
    order: list = attrs.field(factory=list)  # keys, the least recently used first
    returns: list = attrs.field(factory=list)  # (number, region, offset, attempt), not acknowledged
    acknowledged: int = 0
    sent: int = 0
    fences: list = attrs.field(factory=list)
    floor: int = 0


@attrs.define(eq=False)
class Region:
    id: int
    length: int
    instance: str
    published: bool
    owner: Session | None = None
    returned: bool = False
    read_until: float = 0.0


@attrs.define(eq=False)
class Entry:
    key: str
    region: Region
    offset: int
    length: int
    generation: int
    checksum: int | None
    attempt: int


@attrs.define(eq=False)
class Model:
    entries: list = attrs.field(factory=list)
    regions: list = attrs.field(factory=list)
    abandoned: list = attrs.field(factory=list)
    sessions: list = attrs.field(factory=list)
    connections: list = attrs.field(factory=list)
    pins: list = attrs.field(factory=list)  # (holder, key), once for each pin
    earlier: list = attrs.field(factory=list)  # the same, of those taken in epochs before the holder's latest
    epochs: dict = attrs.field(factory=dict)  # the latest of a session
    holders: list = attrs.field(factory=list)  # in the order in which they took the first of the pins they have
    departed: list = attrs.field(factory=list)  # (holder, until)
    reads: list = attrs.field(factory=list)  # (key, when), by published connections
    away: list = attrs.field(factory=list)
    quiet_until: float = 0.0
    quiet_surely_until: float = 0.0
    read_unpinned: bool = False
    generation: int = 0
    last_session: int = 0
    dropped: list = attrs.field(factory=list)

    # --- looking

    def entry(self, key):
        return next((entry for entry in self.entries if entry.key == key), None)

    def at(self, region, offset):
        return next((entry for entry in self.entries if entry.region is region and entry.offset == offset), None)

    def inside(self, region):
        return [entry for entry in self.entries if entry.region is region]

    def region(self, region_id):
        return next((region for region in self.regions if region.id == region_id), None)

    def session(self, number):
        return next(session for session in self.sessions if session.number == number)

    def pinned(self, key):
        return any(pinned == key for _, pinned in self.pins + self.earlier)

    def quiet(self, now):
        return now < self.quiet_surely_until or (bool(self.away) and now < self.quiet_until)

    def held(self, key, now):
        grace = LIMITS.v1_read_grace
        return self.pinned(key) or any(read == key and now // grace - when // grace <= 1 for read, when in self.reads)

    def allocated(self, session):
        return sum(region.length for region in self.regions if region.owner is session)

    def used(self, sessions):
        return sum(entry.length for entry in self.entries if entry.region.owner in sessions)

    def accounts(self, session):
        """The sessions that share a quota with this one, and the quota."""
        same_instance = [other for other in self.sessions if other.instance == session.instance]
        same_tenant = [other for other in self.sessions if other.tenant == session.tenant]
        return [
            (sessions, quota)
            for sessions, quota in (
                (same_instance, LIMITS.instance_quotas.get(session.instance)),
                (same_tenant, LIMITS.tenant_quotas.get(session.tenant)),
            )
            if quota is not None
        ]

    # --- happening

    def open(self, token, instance, tenant, published, lease):
        self.last_session += 1
        session = Session(self.last_session, token, instance, tenant, published, lease)
        self.sessions.append(session)
        return session

    def end(self, session, pinned_until):
        for region in sorted((region for region in self.regions if region.owner is session), key=lambda one: one.id):
            self.abandon(region)
        self.sessions.remove(session)
        self.back(session)
        self.leave(session.number, pinned_until)

    def abandon(self, region):
        for entry in self.inside(region):
            region.owner.order.remove(entry.key)
        region.owner = None
        self.abandoned.append(region)
        self.drop_if_empty(region)

    def drop_if_empty(self, region):
        if region.owner is None and not self.inside(region):
            self.regions.remove(region)
            self.abandoned.remove(region)
            self.dropped.append(region.id)

    def back(self, session):
        self.away = [one for one in self.away if one is not session]

    def leave(self, holder, until):
        self.departed.append((holder, until))

    def settle(self, now):
        over = [holder for holder, until in self.departed if until <= now]
        self.departed = [one for one in self.departed if one[0] not in over]
        self.pins = [pin for pin in self.pins if pin[0] not in over]
        self.earlier = [pin for pin in self.earlier if pin[0] not in over]
        self.count_holders()

    def count_holders(self):
        held = self.pins + self.earlier
        self.holders = [holder for holder in self.holders if any(holder == other for other, _ in held)]

    def remove(self, keys):
        regions = []
        for key in keys:
            region = self.entry(key).region
            if region not in regions:
                regions.append(region)
        for region in regions:
            for entry in [self.entry(key) for key in keys]:
                if entry is not None and entry.region is region:
                    self.take_out(entry)
                    owner = region.owner
                    if owner is not None and not owner.published:
                        number = owner.acknowledged + len(owner.returns) + 1
                        owner.returns.append((number, region.id, entry.offset, entry.attempt))
            self.drop_if_empty(region)

    def take_out(self, entry):
        self.entries.remove(entry)
        owner = entry.region.owner
        if owner is not None and entry.key in owner.order:
            owner.order.remove(entry.key)

    def use(self, keys):
        for key in reversed(keys):
            owner = self.entry(key).region.owner
            if owner is not None:
                if key in owner.order:
                    owner.order.remove(key)
                owner.order.append(key)

    # --- evicting

    def choose(self, session, n, stays, now):
        victims = []
        for _ in range(len(session.order)):
            if len(victims) < n:
                key = session.order.pop(0)
                (session.order if self.held(key, now) or key in stays else victims).append(key)
        return victims

    def may_evict(self, session, now):
        return not session.published and not self.quiet(now)

    def evict(self, session, n, now, stays=()):
        self.settle(now)
        victims = self.choose(session, n, stays, now) if self.may_evict(session, now) else []
        self.remove(victims)
        return len(victims)

    def evict_bytes(self, sessions, wanted, stays, now):
        self.settle(now)
        victims = []
        for session in sessions:
            while wanted > 0 and self.may_evict(session, now) and (found := self.choose(session, 1, stays, now)):
                wanted -= self.entry(found[0]).length
                victims += found
        self.remove(victims)
        return len(victims)

    # --- registering

    def join(self, connection, instance):
        for session in self.sessions:
            if session.published and session.connections and session.instance == instance:
                break
        else:
            session = self.open(b"", instance, "", True, LIMITS.published_lease)
        self.belongs(connection, session)
        return session

    def belongs(self, connection, session):
        if connection not in session.connections:
            session.connections.append(connection)
        session.deadline = None

    def own(self, region, session):
        if region in self.abandoned:
            self.abandoned.remove(region)
        region.owner = session
        session.order += [entry.key for entry in self.inside(region)]

    def one(self, by, key, region_id, offset, length, checksum, attempt, now, quotas):
        """Register one entry, or say why not."""
        region = self.region(region_id)
        if len(key) > LIMITS.max_key_bytes:
            return StoreStatus.KEY, None
        if region is None or region.owner is None or not (region.owner.number == by or by in region.owner.connections):
            return StoreStatus.FOREIGN, None
        if length < 1 or offset < 0 or offset + length > region.length:
            return StoreStatus.RANGE, None
        if self.entry(key):
            return StoreStatus.DUPLICATE, None
        if any((region_id, offset) == (one, other) for _, one, other, _ in region.owner.returns):
            return StoreStatus.BUSY, None
        old = self.at(region, offset)
        if old is not None and (self.quiet(now) or self.pinned(old.key)):
            return StoreStatus.PINNED, None
        if quotas:
            more = length - (old.length if old else 0)
            if any(self.used(sessions) + more > quota for sessions, quota in self.accounts(region.owner)):
                return StoreStatus.QUOTA, None
            if old is None and len(self.entries) + 1 > LIMITS.max_entries:
                return StoreStatus.QUOTA, None
        if old is not None:
            self.take_out(old)
        self.generation += 1
        self.entries.append(Entry(key, region, offset, length, self.generation, checksum, attempt))
        return StoreStatus.NEW, old and old.key

    def trial(self, by, rows, attempt, now, quotas):
        """What would become of these, and the model as it would be then."""
        then = copy.deepcopy(self)
        return [then.one(by, *row, attempt, now, quotas) for row in rows], then

    def more(self, then, session):
        """For each quota of this session: who shares it, by how much they grow until then, and the quota."""
        return [
            (sessions, then.used(sharing) - self.used(sessions), quota)
            for (sessions, quota), (sharing, _) in zip(
                self.accounts(session), then.accounts(then.session(session.number)), strict=True
            )
        ]

    def fits(self, then, owners):
        return self.more_entries(then) <= LIMITS.max_entries - len(self.entries) and all(
            self.used(sessions) + more <= quota for owner in owners for sessions, more, quota in self.more(then, owner)
        )

    def more_entries(self, then):
        return len(then.entries) - len(self.entries)

    def register(self, by, rows, attempt, now, whole):
        if by > 0:
            session = self.session(by)
            if attempt in session.fences or attempt <= session.floor:
                return None
        else:
            for region_id in dict.fromkeys(row[1] for row in rows):
                region = self.region(region_id)
                if region is not None and region.published and not region.returned:
                    if region.owner is None:
                        self.own(region, self.join(by, region.instance))
                    else:
                        self.belongs(by, region.owner)
        self.settle(now)
        outcome, then = self.trial(by, rows, attempt, now, quotas=False)
        refused = whole and any(status > StoreStatus.DUPLICATE for status, _ in outcome)
        owners = []
        for (status, _), row in zip(outcome, rows, strict=True):
            if status is StoreStatus.NEW and self.region(row[1]).owner not in owners:
                owners.append(self.region(row[1]).owner)
        if not refused and not self.fits(then, owners):
            there = [entry.key for entry in self.entries]
            stays = [row[0] for row in rows] + [old for _, old in outcome if old in there]
            needs = []
            for owner in owners:
                needs += [need for need in self.more(then, owner) if need not in needs]
            more_entries = self.more_entries(then)
            for sessions, more, quota in needs:
                first = [owner for owner in owners if owner in sessions]
                sessions = first + [session for session in sessions if session not in first]
                self.evict_bytes(sessions, self.used(sessions) + more - quota, stays, now)
            for owner in owners:
                self.evict(owner, max(0, len(self.entries) + more_entries - LIMITS.max_entries), now, stays)
            _, then = self.trial(by, rows, attempt, now, quotas=False)
            if not self.fits(then, owners):
                outcome, _ = self.trial(by, rows, attempt, now, quotas=True)
        if whole and any(status > StoreStatus.DUPLICATE for status, _ in outcome):
            return [int(status) for status, _ in outcome], [0] * len(rows)
        generations = []
        new = []
        for (expected, _), row in zip(outcome, rows, strict=True):
            if expected is StoreStatus.NEW:
                status, _ = self.one(by, *row, attempt, now, quotas=False)
                assert status is StoreStatus.NEW
                new.append(row[0])
            generations.append(self.generation if expected is StoreStatus.NEW else 0)
        self.use([key for key in new if self.entry(key)])
        return [int(status) for status, _ in outcome], generations

    # --- the other requests

    def add_region(self, by, region_id, length, instance):
        session = self.session(by) if by > 0 else self.join(by, instance)
        region = Region(region_id, length, session.instance, session.published)
        self.regions.append(region)
        self.own(region, session)
        return session.number

    def give_back(self, by, region_id, instance):
        region = self.region(region_id)
        if region is None or region.returned:
            return GivenBack.REFUSED
        if by > 0 and region.owner is not self.session(by):
            return GivenBack.REFUSED
        if by < 0 and not (region.published and region.instance == instance):
            return GivenBack.REFUSED
        region.returned = True
        if region.owner is not None:
            self.abandon(region)
        return GivenBack.DEFERRED if region in self.regions else GivenBack.FREED

    def find(self, by, keys, now, pin, prefix):
        found = []
        for key in keys:
            if self.entry(key):
                found.append(key)
            elif prefix:
                break
        self.use(found)
        if by < 0:
            for key in found:
                self.reads.append((key, now))
                self.read_unpinned = True
                self.entry(key).region.read_until = now + LIMITS.v1_read_grace
        if pin:
            self.take_pins(by, found)
        return found

    def take_pins(self, by, keys):
        self.pins += [(by, key) for key in keys]
        self.read_unpinned |= by < 0 and bool(keys)
        if keys and by not in self.holders:
            self.holders.append(by)

    def enter_pin_epoch(self, by, epoch):
        if epoch < self.epochs.get(by, 0):
            return False
        if epoch > self.epochs.get(by, 0):
            self.epochs[by] = epoch
            self.earlier += [pin for pin in self.pins if pin[0] == by]
            self.pins = [pin for pin in self.pins if pin[0] != by]
        return True

    def settle_pins(self, by, keys, counts, last):
        """One by one: what is named and was taken earlier is as if taken now."""
        for key, count in zip(keys, counts, strict=True):
            for _ in range(count):
                if (by, key) in self.earlier:
                    self.earlier.remove((by, key))
                    self.pins.append((by, key))
        gone = [pin for pin in self.earlier if pin[0] == by] if last else []
        for pin in gone:
            self.earlier.remove(pin)
        self.count_holders()
        return len(gone)

    def unpin(self, by, keys):
        answers = []
        for key in keys:
            if (by, key) in self.earlier and (by, key) not in self.pins:
                self.earlier.remove((by, key))
                answers.append(True)
                continue
            others = [holder for holder in self.holders if holder < 0] if by < 0 else []
            for holder in [by, *others]:
                if (holder, key) in self.pins:
                    self.pins.remove((holder, key))
                    answers.append(True)
                    break
            else:
                answers.append(False)
        self.count_holders()
        return answers

    def delete(self, by, keys, now):
        self.settle(now)
        answers = []
        gone = []
        for key in keys:
            entry = self.entry(key)
            owner = entry and entry.region.owner
            if entry is None or key in gone:
                answers.append(DropAnswer.MISSING)
            elif self.pinned(key):
                answers.append(DropAnswer.PINNED)
            elif self.quiet(now) or (owner and owner.published and by not in owner.connections):
                answers.append(DropAnswer.PROTECTED)
            else:
                answers.append(DropAnswer.DELETED)
                gone.append(key)
        self.remove(gone)
        return answers

    def make_room(self, wanted, now):
        self.settle(now)
        chosen = []
        for region in self.abandoned:
            may_go = not any(self.pinned(entry.key) for entry in self.inside(region)) and region.read_until <= now
            if may_go and sum(one.length for one in chosen) < wanted:
                chosen.append(region)
        if self.quiet(now) or sum(region.length for region in chosen) < wanted:
            return []
        for region in chosen:
            self.drop(region)
        return [region.id for region in chosen]

    def drop(self, region):
        self.unpin_all([entry.key for entry in self.inside(region)])
        for entry in self.inside(region):
            self.take_out(entry)
        if region in self.abandoned:
            self.abandoned.remove(region)
        self.regions.remove(region)
        self.dropped.append(region.id)

    def unpin_all(self, keys):
        self.pins = [pin for pin in self.pins if pin[1] not in keys]
        self.earlier = [pin for pin in self.earlier if pin[1] not in keys]
        self.count_holders()

    def resolve(self, session, attempt, pages):
        if attempt not in session.fences and attempt > session.floor:
            session.fences = sorted([*session.fences, attempt])
            while len(session.fences) > LIMITS.max_fences:
                session.floor = session.fences.pop(0)
        answers = []
        for region_id, offset in pages:
            region = self.region(region_id)
            is_own = region is not None and region.owner is session
            entry = self.at(region, offset) if is_own else None
            is_returning = is_own and (region_id, offset, attempt) in [tuple(rest) for _, *rest in session.returns]
            answers.append(
                entry.generation
                if entry is not None and entry.attempt == attempt
                else self.generation
                if is_returning
                else 0
            )
        return answers

    def pending(self, session, now, resend):
        waiting = [one for one in session.returns if resend or one[0] > session.sent][: LIMITS.max_returns]
        if not waiting or self.quiet(now):
            return None
        session.sent = max(session.sent, waiting[-1][0])
        return waiting

    def restart(self, now):
        self.connections, self.pins, self.holders, self.departed, self.reads, self.dropped = [], [], [], [], [], []
        self.earlier, self.epochs = [], {}
        for session in self.sessions:
            session.deadline = now + session.lease + LIMITS.lease_grace
            session.connections = []
            session.sent = session.acknowledged
        for region in self.regions:
            region.read_until = 0.0
        self.away = [session for session in self.sessions if not session.published]
        self.quiet_until = max((session.deadline for session in self.away), default=now)
        cannot_say = [session.deadline for session in self.sessions if session.published]
        self.quiet_surely_until = max([now, *cannot_say, now + LIMITS.v1_read_grace * self.read_unpinned])


def payload_columns(code, payload):
    assert code == 0x40
    return Columns(*msgspec.msgpack.decode(payload))


def recounted(directory):
    """Every sum that the directory keeps must be the sum; a page has one key at most, and is not on the way back as well."""
    state = directory._state
    places = [(location.region_id, location.offset) for location in state.located.values()]
    assert len(set(places)) == len(places)
    lying = {
        key: (region.region_id, offset) for region in state.regions.values() for offset, key in region.keys_at.items()
    }
    assert lying == {key: (location.region_id, location.offset) for key, location in state.located.items()}
    pinned = directory._guard.pinned
    for region in state.regions.values():
        mine = [location for location in state.located.values() if location.region_id == region.region_id]
        assert region.used_bytes == sum(location.length for location in mine)
        assert region.pinned == sum(key in pinned for key in region.keys_at.values())
        assert not region.returning.keys() & region.keys_at.keys()
        assert (region.session is None) == (region.region_id in state.abandoned)
        assert region.session is not None or (region.keys_at and not region.returning)
        assert region.session is None or region.session.regions[region.region_id] is region
    assert sum(region.used_bytes for region in state.regions.values()) == state.used_bytes
    assert sum(region.length for region in state.regions.values()) == state.allocated_bytes
    for session in state.sessions.values():
        owned = [region for region in state.regions.values() if region.session is session]
        assert (list(session.regions) and owned) or not owned
        assert session.used_bytes == sum(region.used_bytes for region in owned)
        assert session.allocated_bytes == sum(region.length for region in owned)
        assert set(session.policy._order) == {key for region in owned for key in region.keys_at.values()}
        out = [(region_id, offset) for region_id, offset, _ in session.outbox.pages if region_id in session.regions]
        assert len(set(out)) == len(out)
        assert set(out) == {(region.region_id, offset) for region in owned for offset in region.returning}
    for accounts, name in ((state.instances, "instance_id"), (state.tenants, "tenant")):
        for value, account in accounts.items():
            sessions = {n: session for n, session in state.sessions.items() if getattr(session, name) == value}
            assert account.sessions == sessions and sessions
            assert account.charged_bytes == sum(session.used_bytes for session in sessions.values())
    for instance_id, usage in state.usage.items():
        regions = [region for region in state.regions.values() if region.instance_id == instance_id]
        assert usage.regions == len(regions) > 0
        assert usage.allocated_bytes == sum(region.length for region in regions)
        assert usage.used_bytes == sum(region.used_bytes for region in regions)
    counts = {}
    pins = directory._guard._pins
    for own in [*pins._of.values(), *[part for parts in pins._earlier.values() for part in parts]]:
        assert own
        for key, count in own.items():
            assert count > 0
            counts[key] = counts.get(key, 0) + count
    assert counts == pinned
    departed = directory._guard._ended_holders._until.keys()  # what they pinned may be lost with its region before that
    assert pins._epochs.keys() <= state.sessions.keys() | departed
    assert pinned.keys() <= state.located.keys()


some_keys = st.lists(st.integers(0, len(KEYS) + 3), max_size=6)
places = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, PAGE, 2 * PAGE])), min_size=1, max_size=5)
which = st.integers(0, 5)
offsets = st.sampled_from([0, PAGE, 2 * PAGE, 3 * PAGE]) | st.sampled_from([-PAGE, 4 * PAGE, 1 << 62])
lengths = st.just(PAGE) | st.sampled_from([1, PAGE // 2, PAGE]) | st.sampled_from([0, -1, 5 * PAGE])
instances = st.sampled_from(["small", "large", "other"])
rows = st.lists(
    st.tuples(st.sampled_from([*KEYS, *KEYS, TOO_LONG]), which, offsets, lengths, st.none() | st.integers(0, 3)),
    max_size=5,
)


class SharedIndex:
    """What a server shows of a directory, and a reader of it."""

    def __init__(self):
        self.indexes = TenantIndexes()

    def begin(self, directory):
        """A new file, as at a start and when the one before was too small."""
        memory = mmap.mmap(-1, bytes_for(64))
        self.indexes.publish()
        self.indexes.open("", memory, 1, 1)
        self.indexes.fill("", directory.locate(directory.list_keys()))
        self.indexes.end_filling("")
        self.reader = IndexReader(memory)
        directory.watch_locations(self.indexes)


class DirectoryMachine(RuleBasedStateMachine):
    """Every request, of sessions of ours and of published connections, with time that passes, and restarts."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.tokens = 0
        self.region_ids = 0
        self.model = Model()
        self.directory = Directory(LIMITS)
        self.replayed = Directory(LIMITS)
        self.shared = SharedIndex()
        self.shared.begin(self.directory)

    # --- whom to ask with

    def ours(self, at):
        ours = [session for session in self.model.sessions if not session.published]
        return ours[at % len(ours)] if ours else None

    def anybody(self, at):
        """The number of a session of ours or of a connection; positions go round."""
        everybody = [
            session.number for session in self.model.sessions if not session.published
        ] + self.model.connections
        return everybody[at % len(everybody)] if everybody else 0

    def keys(self, ats):
        """Keys that are there, mostly."""
        keys = [entry.key for entry in self.model.entries] or ["never"]
        return [keys[at] if at < len(keys) else KEYS[at % len(KEYS)] for at in ats]

    def region_id(self, at):
        """A region that is there, mostly."""
        regions = [region.id for region in self.model.regions] + [999]
        return regions[at % len(regions)]

    # --- people

    @initialize()
    def somebody_is_there(self):
        self.open_session("small", "poor", 10.0)
        self.open_session("large", "poor", 10.0)
        self.connect()
        for at, instance in enumerate(["", "", "other"]):
            self.add_region(at, 4, instance)
            self.store(at, [(0, 0), (0, PAGE)], KEYS[3 * at :], 1, True)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 5.0, 8.0, 16.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def expire(self):
        due = [
            session for session in self.model.sessions if session.deadline is not None and session.deadline <= self.now
        ]
        due.sort(key=lambda session: (session.deadline, session.number))
        for session in due:
            self.model.end(session, self.now)
        self.model.settle(self.now)
        before = self.directory.next_expiry()
        ended = self.directory.expire(self.now)
        assert ended == [session.number for session in due]
        assert not ended or before <= self.now
        ends = [session.deadline for session in self.model.sessions if session.deadline is not None]
        pinned_until = [until for holder, until in self.model.departed if holder in self.model.holders]
        assert self.directory.next_expiry() <= min([*ends, *pinned_until], default=float("inf"))

    @rule(instance=instances, tenant=st.sampled_from(["", "poor"]), lease=st.sampled_from([2.0, 10.0]))
    def open_session(self, instance, tenant, lease):
        self.tokens += 1
        token = self.tokens.to_bytes(16, "big")
        session = self.model.open(token, instance, tenant, False, lease)
        session.deadline = self.now + lease + LIMITS.lease_grace
        number = self.directory.open_session(token, instance, tenant, lease, self.now)
        assert number == session.number == self.directory.session_of(token)

    @rule(at=which, attach=st.booleans())
    def renew(self, at, attach):
        if session := self.ours(at):
            session.deadline = self.now + session.lease + LIMITS.lease_grace
            if attach:
                self.model.back(session)
            (self.directory.attach if attach else self.directory.renew)(session.number, self.now)
            assert self.directory.remaining(session.number, self.now) == pytest.approx(session.lease)

    @rule(at=which, sure=st.integers(0, 1))
    def end_session(self, at, sure):
        if not sure and (session := self.ours(at)):
            self.model.end(session, session.deadline)
            self.model.settle(self.now)
            self.directory.end_session(session.number, self.now)
            assert self.directory.session_of(session.token) is None

    @rule()
    def connect(self):
        connection = self.directory.connect()
        assert connection < 0 and connection not in self.model.connections
        self.model.connections.append(connection)

    @precondition(lambda self: self.model.connections)
    @rule(at=which)
    def disconnect(self, at):
        connection = self.model.connections.pop(at % len(self.model.connections))
        for session in self.model.sessions:
            if connection in session.connections:
                session.connections.remove(connection)
                if not session.connections:
                    session.deadline = self.now + session.lease
        self.model.leave(connection, self.now + LIMITS.v1_read_grace)
        self.directory.disconnect(connection, self.now)

    @rule(load=st.booleans(), sure=st.integers(0, 2))
    def restart(self, load, sure):
        if sure:
            return
        image = self.directory.dump()
        self.directory = Directory.load(image, LIMITS) if load else self.replayed
        self.replayed = Directory.load(image, LIMITS)
        self.directory.restart(self.now)
        old, self.shared = self.shared, SharedIndex()
        self.shared.begin(self.directory)
        assert old.reader.find(KEYS).generations == self.shared.reader.find(KEYS).generations
        self.model.restart(self.now)
        for session in self.model.sessions:  # the order of use is not kept: take what it is now
            session.order = list(self.directory._state.sessions[session.number].policy._order)

    # --- regions

    @rule(at=which, pages=st.integers(1, 4), instance=instances)
    def add_region(self, at, pages, instance):
        by = self.anybody(at)
        if by and len(self.model.regions) < 6:
            self.region_ids += 1
            number = self.model.add_region(by, self.region_ids, pages * PAGE, instance)
            assert self.directory.add_region(by, self.region_ids, pages * PAGE, instance_id=instance) == number

    @rule(at=which, region=which, instance=instances)
    def give_back(self, at, region, instance):
        if by := self.anybody(at):
            region_id = self.region_id(region)
            expected = self.model.give_back(by, region_id, instance)
            assert self.directory.give_back_region(by, region_id, instance_id=instance) is expected

    @rule(pages=st.integers(0, 9))
    def make_room(self, pages):
        assert self.directory.make_room(pages * PAGE, self.now) == self.model.make_room(pages * PAGE, self.now)

    @rule(region=which, sure=st.integers(0, 4))
    def lose_region(self, region, sure):
        region_id = self.region_id(region)
        there = self.model.region(region_id)
        if not sure:
            keys = len(self.model.inside(there)) if there else 0
            if there:
                self.model.drop(there)
            assert self.directory.drop_region(region_id) == keys

    # --- keys

    @rule(at=which, rows=rows, attempt=st.integers(1, 6), whole=st.booleans(), one_number=st.booleans())
    def register(self, at, rows, attempt, whole, one_number):
        """Anything at all."""
        if by := self.anybody(at):
            rows = [(key, self.region_id(region), *rest) for key, region, *rest in rows]
            self.register_rows(by, rows, attempt, whole, one_number)

    @rule(
        at=which,
        places=places,
        keys=st.permutations(KEYS),
        attempt=st.integers(7, 9),
        one_number=st.booleans(),
        later=st.booleans(),
    )
    def store(self, at, places, keys, attempt, one_number, later=False):
        """What a client means to do: keys at pages of regions that are its own."""
        by = self.anybody(at)
        own = [
            region.id
            for region in self.model.regions
            if region.owner and (region.owner.number == by or (by < 0 and region.owner.published))
        ]
        if own:
            rows = [
                (key, own[region % len(own)], offset, PAGE, at)
                for key, (region, offset) in zip(keys, places, strict=False)
            ]
            self.register_rows(by, rows, attempt, False, one_number, later)

    def register_rows(self, by, rows, attempt, whole, one_number, later=False):
        if one_number and rows:
            rows = [(key, rows[0][1], offset, rows[0][3], None) for key, _, offset, _, _ in rows]
        columns = Columns(
            rows[0][1] if one_number and rows else [row[1] for row in rows],
            [row[0] for row in rows],
            [row[2] for row in rows],
            rows[0][3] if one_number and rows else [row[3] for row in rows],
            None if all(row[4] is None for row in rows) else [row[4] for row in rows],
            attempt if by > 0 else 0,
        )
        expected = self.model.register(by, rows, columns.attempt, self.now, whole)
        answer = self.directory.register(
            by, columns, self.now, source=(0x40, msgspec.msgpack.encode(columns)), whole=whole, later=later
        )
        assert (answer and (answer.statuses, answer.generations)) == expected
        if answer:
            new = [generation for generation in answer.generations if generation]
            assert answer.skipped == [at for at, generation in enumerate(answer.generations) if not generation]
            assert new == list(range(answer.first_generation, answer.first_generation + len(new)))

    @rule(at=which, keys=some_keys, pin=st.booleans(), prefix=st.booleans())
    def find(self, at, keys, pin, prefix):
        keys = self.keys(keys)
        by = self.anybody(at)
        pin = pin and by > 0
        found = self.model.find(by, keys, self.now, pin, prefix)
        answer = self.directory.find(by, keys, self.now, pin=pin, prefix=prefix)
        length = len(found) if prefix else len(keys)
        assert len(answer) == length
        for key, location in zip(keys, answer, strict=False):
            entry = self.model.entry(key)
            assert (location is None) == (entry is None)
            if entry:
                assert (location.region_id, location.offset) == (entry.region.id, entry.offset)
                assert (location.length, location.checksum) == (entry.length, entry.checksum)
                assert (location.generation, location.attempt) == (entry.generation, entry.attempt)

    @rule(at=which, keys=some_keys, prefix=st.booleans())
    def pin(self, at, keys, prefix):
        keys = self.keys(keys)
        if by := self.anybody(at):
            there = [self.model.entry(key) is not None for key in keys]
            assert self.directory.exists(keys) == there
            if prefix and False in there:
                there = [at < there.index(False) for at in range(len(there))]
            self.model.take_pins(by, [key for key, found in zip(keys, there, strict=True) if found])
            assert self.directory.pin(by, keys, prefix=prefix) == there

    @rule(at=which, keys=some_keys)
    def unpin(self, at, keys):
        keys = self.keys(keys)
        if by := self.anybody(at):
            assert self.directory.unpin(by, keys) == self.model.unpin(by, keys)

    @rule(at=which, ahead=st.integers(-1, 2))
    def enter_pin_epoch(self, at, ahead):
        if session := self.ours(at):
            epoch = self.model.epochs.get(session.number, 0) + ahead
            assert self.directory.enter_pin_epoch(session.number, epoch) == self.model.enter_pin_epoch(
                session.number, epoch
            )

    @rule(at=which, keys=some_keys, counts=st.lists(st.integers(-1, 3), min_size=6, max_size=6))
    def settle_pins(self, at, keys, counts):
        """Anything at all."""
        if session := self.ours(at):
            self.settle_pins_of(session, self.keys(keys), counts[: len(keys)], last=False)

    @rule(at=which, keys=some_keys, more=some_keys, overtaken=st.booleans(), data=st.data())
    def say_what_is_held(self, at, keys, more, overtaken, data):
        """As a client does: in a new pin epoch, some of what it has taken in those before, in two parts."""
        if session := self.ours(at):
            self.pins_more(session, keys)
            self.enter_pin_epoch(at, 1)
            if overtaken:
                self.pins_more(session, more)
            mine = sorted({key for holder, key in self.model.earlier if holder == session.number})
            held = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
            counts = data.draw(st.lists(st.integers(1, 3), min_size=len(held), max_size=len(held)))
            self.settle_pins_of(session, held[::2], counts[::2], last=False)
            self.settle_pins_of(session, held[1::2], counts[1::2], last=True)
            now = {key for holder, key in self.model.pins if holder == session.number}
            assert now >= set(held)
            assert overtaken or now == set(held)

    def pins_more(self, session, keys):
        keys = [key for key in self.keys(keys) if self.model.entry(key)]
        self.model.take_pins(session.number, keys)
        assert self.directory.pin(session.number, keys) == [True] * len(keys)

    def settle_pins_of(self, session, keys, counts, last):
        expected = self.model.settle_pins(session.number, keys, counts, last)
        assert self.directory.settle_pins(session.number, keys, counts, last=last) == expected

    @rule(at=which, keys=some_keys)
    def delete(self, at, keys):
        keys = self.keys(keys)
        by = self.anybody(at)
        assert self.directory.delete(by, keys, self.now) == self.model.delete(by, keys, self.now)

    @rule(at=which, pages=st.integers(0, 3))
    def reclaim(self, at, pages):
        if session := self.ours(at):
            expected = 0 if self.model.quiet(self.now) else self.model.evict(session, pages, self.now)
            assert self.directory.reclaim(session.number, pages, self.now) == expected

    @rule(at=which)
    def trim(self, at):
        if self.model.sessions:
            session = self.model.sessions[at % len(self.model.sessions)]
            used, allocated = self.model.used([session]), self.model.allocated(session)
            expected = 0
            if used > LIMITS.high_watermark * allocated:
                excess = used - int(LIMITS.low_watermark * allocated)
                expected = self.model.evict_bytes([session], excess, (), self.now)
            assert self.directory.trim(session.number, self.now) == expected

    @rule(keys=some_keys, sure=st.integers(0, 4))
    def forget(self, keys, sure):
        keys = self.keys(keys)
        if not sure:
            there = [key for key in dict.fromkeys(keys) if self.model.entry(key)]
            self.model.unpin_all(there)
            self.model.remove(there)
            assert self.directory.forget(keys) == len(there)

    # --- attempts and returns

    @rule(at=which, attempt=st.integers(1, 6), pages=st.lists(st.tuples(which, offsets), max_size=4))
    def resolve(self, at, attempt, pages):
        if session := self.ours(at):
            pages = [(self.region_id(region), offset) for region, offset in pages]
            expected = self.model.resolve(session, attempt, pages)
            regions, places = [page[0] for page in pages], [page[1] for page in pages]
            assert self.directory.resolve(session.number, attempt, regions, places) == expected
            assert self.directory.fenced(session.number, attempt)

    @rule(at=which, back=st.integers(-2, 3))
    def acknowledge(self, at, back):
        if session := self.ours(at):
            last = session.acknowledged + len(session.returns)
            number = last - back
            session.acknowledged = max(session.acknowledged, min(number, last))
            session.returns = [one for one in session.returns if one[0] > session.acknowledged]
            session.sent = max(session.sent, session.acknowledged)
            self.directory.acknowledge(session.number, number)

    @rule(at=which, resend=st.booleans())
    def pending(self, at, resend):
        if session := self.ours(at):
            expected = self.model.pending(session, self.now, resend)
            returns = self.directory.pending(session.number, self.now, resend=resend)
            if expected is None:
                assert returns is None
            else:
                numbers = range(returns.first_number, returns.first_number + len(returns.regions))
                answer = zip(numbers, returns.regions, returns.offsets, returns.attempts, strict=True)
                assert list(answer) == expected

    # --- what must hold

    @invariant()
    def agrees_with_the_model(self):
        model, directory = self.model, self.directory
        state = directory._state
        image = directory.dump()
        assert {key: attrs_of(location) for key, location in state.located.items()} == {
            entry.key: (entry.region.id, entry.offset, entry.length, entry.generation, entry.checksum, entry.attempt)
            for entry in model.entries
        }
        assert image.keys == [
            entry.key for region in image.regions for entry in model.inside(model.region(region.region_id))
        ]
        assert {region.region_id for region in image.regions} == {region.id for region in model.regions}
        for region in image.regions:
            expected = model.region(region.region_id)
            assert (region.length, region.instance_id) == (expected.length, expected.instance)
            assert (region.published, region.returned) == (expected.published, expected.returned)
            assert region.session == (expected.owner.number if expected.owner else 0)
        assert [region.region_id for region in image.regions if not region.session] == [
            region.id for region in model.abandoned
        ]
        assert [
            (one.number, one.token, one.instance_id, one.tenant, one.published, one.lease) for one in image.sessions
        ] == [(one.number, one.token, one.instance, one.tenant, one.published, one.lease) for one in model.sessions]
        for one, session in zip(image.sessions, model.sessions, strict=True):
            assert one.acknowledged == session.acknowledged
            assert one.returns == [tuple(rest) for _, *rest in session.returns]
            assert (one.fences, one.fence_floor) == (session.fences, session.floor)
            assert list(state.sessions[one.number].policy._order) == session.order
        assert (image.generation, image.last_session) == (model.generation, model.last_session)
        assert directory.quiet(self.now) == model.quiet(self.now)
        expected = {}
        for _, key in model.pins + model.earlier:
            expected[key] = expected.get(key, 0) + 1
        assert directory._guard.pinned == expected
        assert directory.take_dropped() == model.dropped
        model.dropped.clear()
        recounted(directory)
        for record in directory.take_records():
            self.replayed.apply(decode(encode(record)), payload_columns)
        assert self.replayed.dump() == image
        assert not self.replayed.records
        loaded = Directory.load(image, LIMITS)
        assert loaded.dump() == image
        recounted(loaded)
        assert directory.usage() == loaded.usage() == self.replayed.usage()

    @rule()
    def the_index_begins_anew(self):
        before = self.shared.reader
        self.shared.begin(self.directory)
        assert before.is_retired

    @invariant()
    def the_index_shows_what_may_be_read_without_a_pin_and_hides_what_is_gone_at_once(self):
        there = {entry.key: entry for entry in self.model.entries}
        before = self.shared.reader.find(KEYS)
        assert all(
            KEYS[at] in there and there[KEYS[at]].generation == generation
            for at, generation in zip(before.positions, before.generations, strict=True)
        )
        self.shared.indexes.publish()
        found = self.shared.reader.find(KEYS)
        columns = found.generations, found.regions, found.offsets, found.lengths, found.checksums
        rows = zip(found.positions, *columns, strict=True)
        assert {KEYS[at]: tuple(row) for at, *row in rows} == {
            key: (entry.generation, entry.region.id, entry.offset, entry.length, entry.checksum)
            for key, entry in there.items()
            if not entry.region.published
        }
        assert found.is_definite == all(not entry.region.published for entry in self.model.entries)

    @invariant()
    def statistics_are_a_recount(self):
        statistics = self.directory.statistics()
        model = self.model
        assert (statistics.entries, statistics.used_bytes) == (
            len(model.entries),
            sum(entry.length for entry in model.entries),
        )
        assert (statistics.regions, statistics.allocated_bytes, statistics.abandoned) == (
            len(model.regions),
            sum(region.length for region in model.regions),
            len(model.abandoned),
        )
        assert (statistics.sessions, statistics.connections) == (len(model.sessions), len(model.connections))
        assert statistics.pinned == len({key for _, key in model.pins + model.earlier})
        assert statistics.generation == model.generation
        listed = {region.id for region in model.regions if not region.returned}
        assert {region_id for region_id, _ in self.directory.regions()} == listed
        assert self.directory.region_ids() == {region.id for region in model.regions}


def attrs_of(location):
    return (
        location.region_id,
        location.offset,
        location.length,
        location.generation,
        location.checksum,
        location.attempt,
    )


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


@pytest.mark.long
def test_two_thousand_lives_of_fifty_steps_agree_with_the_model():
    run_state_machine_as_test(
        DirectoryMachine, settings=settings(max_examples=2_000, stateful_step_count=50, deadline=None)
    )
