"""What every message means: the pure service, told frames and times. The bytes of messages are tested in test_maru_wire."""

import itertools
import math
import struct

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru import ServerConfig
from maru._directory import Directory, Limits
from maru._directory.records import Deleted, Fenced, Registered, decode
from maru._directory.slices import AT_ONCE, finish
from maru._journal.registrations import recorded_columns
from maru._server.peers import MAX_ANSWER_BYTES, Word
from maru._server.reports import INTERVAL, MAX_CLIENTS, MAX_OPERATIONS
from maru._server.service import Service
from maru._wire import (
    KEYS_AT_ONCE,
    MAX_KEYS,
    OWN_CODES,
    AllocRequest,
    BatchRegisterRequest,
    BeatRequest,
    CloseRequest,
    Code,
    DropAnswer,
    DropRequest,
    ErrorReply,
    FindRequest,
    HandshakeRequest,
    KeyRequest,
    KeysRequest,
    ListKeysRequest,
    ListRequest,
    PinsRequest,
    ReclaimRequest,
    RegionRequest,
    RegisterRequest,
    ReportEntry,
    ReportRequest,
    ResolveRequest,
    ReturnRequest,
    StoreRequest,
    StoreStatus,
    UnpinRequest,
    body_of,
    decode_reply,
    frame_of,
    read_header,
    request,
)
from maru._wire.capability import auth_token, verify

EPOCH = 0xFEED
SECRET = b"s" * 32
PAGE = 1 << 20
REGION = 16 * PAGE


@attrs.define
class World:
    """A service, and what is around it: a pool that has room, and time that passes when it is told to."""

    config: ServerConfig = attrs.field(factory=ServerConfig)
    limits: Limits = attrs.field(factory=Limits)
    service: Service = attrs.field(init=False)
    now: float = 100.0
    tokens: itertools.count = attrs.field(factory=lambda: itertools.count(1))
    regions: itertools.count = attrs.field(factory=lambda: itertools.count(1))
    sequences: itertools.count = attrs.field(factory=lambda: itertools.count(1))
    records: list = attrs.field(factory=list)

    def __attrs_post_init__(self):
        self.start(Directory(self.limits), EPOCH)

    def start(self, directory, epoch):
        self.service = Service(
            self.config,
            directory,
            epoch=epoch,
            secret=SECRET,
            new_token=lambda: next(self.tokens).to_bytes(16, "big"),
            totals=lambda: (1 << 40, 1 << 30),
            version="maru test",
        )
        self.service.rm_address = "127.0.0.1:9850"
        self.service.descriptors = "/run/maru/descriptors.sock"

    def restart(self):
        """Kill it, and start one that knows what the journal knows."""
        self.records += self.service.take_records()
        directory = Directory(self.limits)
        for record in self.records:
            directory.apply(decode(record), recorded_columns)
        directory.restart(self.now)
        self.start(directory, EPOCH + 1)
        for region_id in directory.region_ids():
            length, _ = directory.region(region_id)
            self.service.place(region_id, 0, length)

    def send(self, peer, code, message=None, flags=0):
        sequence = next(self.sequences)
        frame = self.service.handle(peer, request(code, sequence, message, flags), self.now)
        while self.service.is_busy:
            to, frame = self.service.go_on(self.now) or (peer, None)
            assert to == peer
        self.records += self.service.take_records()
        return None if frame is None else read(frame, code, sequence, flags)

    def alloc(self, peer, instance_id="theirs", size=REGION, session=None, region_id=None):
        """The whole of REQUEST_ALLOC; the id of the region."""
        assert self.send(peer, Code.REQUEST_ALLOC, AllocRequest(instance_id, size, session)) is None
        [allocation] = self.service.take_allocations()
        assert allocation.size == size
        region_id = next(self.regions) if region_id is None else region_id
        to, frame = self.service.allocated(allocation.ticket, region_id, 0, size, self.now)
        self.records += self.service.take_records()
        assert to == peer
        answer = decode_reply(Code.REQUEST_ALLOC, body_of(frame, read_header(frame)))
        assert answer.success and answer.handle.region_id == region_id
        return region_id

    def shake(self, peer, **kwargs):
        """Shake hands as a client of ours does."""
        return self.send(peer, Code.HANDSHAKE, HandshakeRequest(extensions=1, **kwargs))

    def ours(self, peer=b"ours", instance_id="ours"):
        """A client of ours with a region: its token, and the region."""
        token = self.shake(peer, instance_id=instance_id).session
        return token, self.alloc(peer, instance_id, session=token)

    def store(self, token, region, keys, offsets=None, attempt=1, ack=0, peer=b"ours", length=PAGE, checksums=None):
        offsets = [PAGE * at for at in range(len(keys))] if offsets is None else offsets
        message = StoreRequest(token, ack, attempt, region, keys, offsets, length, checksums)
        return self.send(peer, Code.STORE, message)

    def find(self, token, keys, pin=False, prefix=False, ack=0, peer=b"ours"):
        return self.send(peer, Code.FIND, FindRequest(token, ack, keys, pin, prefix))

    def beat(self, token, ack=0, peer=b"ours", epoch=0):
        return self.send(peer, Code.BEAT, BeatRequest(token, ack, epoch))

    def register(self, peer, key, region, offset=0, length=PAGE):
        return self.send(peer, Code.REGISTER_KV, RegisterRequest(key, region, offset, length))

    def kept(self):
        return [decode(record) for record in self.records]


def read(frame, code, sequence, flags=0):
    header = read_header(frame)
    assert header == (code | 0x80, flags, sequence, len(frame) - 16)
    return decode_reply(code, body_of(frame, header))


def refused(answer, word):
    assert isinstance(answer, ErrorReply), answer
    assert answer.code == word
    assert answer.error
    assert answer.epoch == EPOCH
    return True


@pytest.fixture
def world():
    return World()


# --- coming -------------------------------------------------------------------------------------------------------


def test_a_published_handshake_is_answered_and_opens_nothing(world):
    for message in (HandshakeRequest(), HandshakeRequest(instance_id="reader")):
        answer = world.send(b"a", Code.HANDSHAKE, message)
        assert (answer.success, answer.rm_address, answer.epoch) == (True, "127.0.0.1:9850", EPOCH)
        assert answer.session is None
        assert set(answer.codes) == OWN_CODES
    assert world.service.directory.statistics().sessions == 0
    assert not world.records


def test_our_handshake_opens_a_session_that_the_journal_knows(world):
    answer = world.shake(b"a", instance_id="one", tenant="blue", lease=5.0)
    assert len(answer.session) == 16
    assert (answer.resumed, answer.lease, answer.epoch) == (False, 5.0, EPOCH)
    assert answer.descriptors == "/run/maru/descriptors.sock"
    assert answer.server == "maru test"
    assert (answer.max_keys, answer.max_key_bytes) == (world.config.max_keys, world.config.max_key_bytes)
    [record] = world.kept()
    assert (record.token, record.instance_id, record.tenant, record.lease) == (answer.session, "one", "blue", 5.0)


def test_a_lease_is_granted_within_bounds(world):
    config = world.config
    asked = {None: config.session_lease, 0.001: config.min_lease, 9e9: config.max_lease, 7.5: 7.5}
    for lease, granted in asked.items():
        assert world.shake(b"a", lease=lease).lease == granted
    for lease in (0.0, -1.0, math.nan, math.inf):
        assert refused(world.shake(b"a", lease=lease), Word.MALFORMED)


def test_a_session_outlives_its_connection(world):
    token = world.shake(b"a", instance_id="one").session
    world.service.disconnected(b"a", world.now)
    again = world.shake(b"b", session=token)
    assert (again.session, again.resumed) == (token, True)
    assert world.beat(token, peer=b"b").lease == world.config.session_lease


def test_a_token_that_nobody_has_gives_a_new_session(world):
    answer = world.shake(b"a", session=b"?" * 16)
    assert not answer.resumed
    assert answer.session != b"?" * 16


def test_sessions_are_bounded():
    world = World(ServerConfig(max_sessions=2))
    tokens = [world.shake(peer).session for peer in (b"a", b"b")]
    assert refused(world.shake(b"c"), Word.TOO_MANY)
    assert world.shake(b"a", session=tokens[0]).resumed  # who is here may come back
    world.send(b"a", Code.CLOSE, CloseRequest(tokens[0], 0))
    assert world.shake(b"a").success


def test_one_connection_opens_a_part_of_all_sessions():
    world = World(ServerConfig(max_sessions=256))
    for _ in range(32):
        last = world.shake(b"a")
    assert refused(world.shake(b"a"), Word.TOO_MANY)
    assert refused(world.shake(b"a"), Word.TOO_MANY)
    assert world.shake(b"b").success
    world.send(b"a", Code.CLOSE, CloseRequest(last.session, 0))
    assert world.shake(b"a").success


def test_published_instances_of_one_connection_are_bounded():
    world = World(ServerConfig(max_sessions=256))
    for number in range(32):
        world.alloc(b"a", f"instance {number}")
    refusal = world.send(b"a", Code.REQUEST_ALLOC, AllocRequest("one more", REGION))
    assert not refusal.success and "over this connection" in refusal.error
    world.alloc(b"a", "instance 1")
    world.alloc(b"b", "another")


def test_a_silent_session_that_holds_nothing_leaves_its_place():
    world = World(ServerConfig(max_sessions=2))
    holds, _ = world.ours(b"a")
    idle = world.shake(b"b").session
    for peer in (b"a", b"b"):
        world.service.disconnected(peer, world.now)
    assert world.shake(b"c").success
    assert refused(world.beat(idle, peer=b"d"), Word.NO_SESSION)
    assert refused(world.shake(b"d"), Word.TOO_MANY)
    assert world.shake(b"d", session=holds).resumed


def test_sessions_that_are_over_together_end_some_at_once():
    world = World()
    for number in range(100):
        world.shake(str(number).encode(), lease=5.0)
    world.now += 60.0
    left = [100]
    while world.service.next_expiry() <= world.now:
        world.service.expire(world.now)
        left.append(world.service.directory.session_count)
    assert left[-1] == 0
    assert max(before - after for before, after in itertools.pairwise(left)) <= 32


def test_pins_of_one_connection_are_bounded(world, monkeypatch):
    monkeypatch.setattr("maru._server.service._MOST_PINS", 32)
    token, region = world.ours(b"a")
    keys = [f"k{number}" for number in range(4)]
    world.store(token, region, keys, peer=b"a")
    sessions = [world.shake(b"a").session for _ in range(2)]
    assert world.find(sessions[0], keys[:2], pin=True, peer=b"a").found == 2
    assert world.find(sessions[1], keys[:2], pin=True, peer=b"a").found == 2
    assert refused(world.find(sessions[1], keys[2:], pin=True, peer=b"a"), Word.TOO_MANY)
    assert world.find(sessions[1], keys[2:], peer=b"a").found == 2
    assert world.find(world.shake(b"b").session, keys, pin=True, peer=b"b").found == 4
    world.send(b"c", Code.PIN_KV, KeyRequest(keys[0]))
    assert refused(world.send(b"c", Code.BATCH_PIN_KV, KeysRequest(keys)), Word.TOO_MANY)


# --- memory -------------------------------------------------------------------------------------------------------


def test_a_region_is_answered_when_the_pool_has_made_it(world):
    assert world.send(b"a", Code.REQUEST_ALLOC, AllocRequest("one", 5 * PAGE)) is None
    assert not world.records
    [allocation] = world.service.take_allocations()
    assert world.service.take_allocations() == []
    to, frame = world.service.allocated(allocation.ticket, 7, 3 * PAGE, 6 * PAGE, world.now)
    answer = read(frame, Code.REQUEST_ALLOC, 1)
    assert to == b"a"
    assert (answer.handle.region_id, answer.handle.offset, answer.handle.length) == (7, 3 * PAGE, 6 * PAGE)
    assert answer.handle.auth_token == auth_token(SECRET, 7, 6 * PAGE)
    assert answer.epoch == EPOCH
    assert world.service.directory.region(7)[0] == 6 * PAGE


def test_a_pool_without_room_is_an_answer(world):
    world.send(b"a", Code.REQUEST_ALLOC, AllocRequest("one", PAGE))
    [allocation] = world.service.take_allocations()
    to, frame = world.service.not_allocated(allocation.ticket, "there is no room")
    answer = read(frame, Code.REQUEST_ALLOC, 1)
    assert (to, answer.success, answer.handle, answer.error) == (b"a", False, None, "there is no room")


@pytest.mark.parametrize("size", [0, -1, -(1 << 62)])
def test_a_region_without_bytes_is_refused_at_once(world, size):
    answer = world.send(b"a", Code.REQUEST_ALLOC, AllocRequest("one", size))
    assert not answer.success and answer.error
    assert world.service.take_allocations() == []


def test_requests_for_memory_of_one_peer_are_bounded():
    world = World(ServerConfig(max_in_flight=2))
    for _ in range(2):
        assert world.send(b"a", Code.REQUEST_ALLOC, AllocRequest("one", PAGE)) is None
    assert refused(world.send(b"a", Code.REQUEST_ALLOC, AllocRequest("one", PAGE)), Word.TOO_MANY)
    assert world.send(b"b", Code.REQUEST_ALLOC, AllocRequest("two", PAGE)) is None
    world.service.not_allocated(world.service.take_allocations()[0].ticket, "no")
    assert world.send(b"a", Code.REQUEST_ALLOC, AllocRequest("one", PAGE)) is None


def test_who_waits_for_memory_is_admitted_at_once(world):
    admitted = []
    world.service.admit = admitted.append
    assert world.send(b"v1", Code.REQUEST_ALLOC, AllocRequest("theirs", REGION)) is None
    assert admitted == [b"v1"]


@pytest.mark.parametrize("who", ["published", "ours"])
def test_a_region_for_somebody_who_has_gone_is_removed(world, who):
    token = world.shake(b"a").session if who == "ours" else None
    world.send(b"a", Code.REQUEST_ALLOC, AllocRequest("one", PAGE, token))
    [allocation] = world.service.take_allocations()
    world.service.disconnected(b"a", world.now)
    world.send(b"a", Code.HEARTBEAT)  # the transport may give the same name to somebody else
    assert world.service.allocated(allocation.ticket, 7, 0, PAGE, world.now) is None
    assert world.service.take_dropped() == [7]
    assert world.service.directory.region(7) is None


def test_a_region_for_a_session_that_has_ended_is_removed(world):
    token = world.shake(b"a").session
    world.send(b"a", Code.REQUEST_ALLOC, AllocRequest("one", PAGE, token))
    [allocation] = world.service.take_allocations()
    world.send(b"a", Code.CLOSE, CloseRequest(token, 0))
    to, frame = world.service.allocated(allocation.ticket, 7, 0, PAGE, world.now)
    assert to == b"a"
    assert refused(decode_reply(Code.REQUEST_ALLOC, body_of(frame, read_header(frame))), Word.NO_SESSION)
    assert world.service.take_dropped() == [7]


def test_an_unknown_session_gets_no_region(world):
    assert refused(world.send(b"a", Code.REQUEST_ALLOC, AllocRequest("one", PAGE, b"?" * 16)), Word.NO_SESSION)
    assert refused(world.send(b"a", Code.RETURN_ALLOC, ReturnRequest("one", 1, b"?" * 16)), Word.NO_SESSION)
    assert refused(world.send(b"a", Code.LIST_ALLOCATIONS, ListRequest(None, b"?" * 16)), Word.NO_SESSION)


def test_only_its_owner_hands_a_region_back_and_an_empty_one_goes_at_once(world):
    region = world.alloc(b"a", "one")
    refusal = world.send(b"b", Code.RETURN_ALLOC, ReturnRequest("two", region))
    assert not refusal.success and refusal.error
    assert not world.send(b"a", Code.RETURN_ALLOC, ReturnRequest("one", 99)).success
    assert world.service.take_dropped() == []
    assert world.send(b"a", Code.RETURN_ALLOC, ReturnRequest("one", region)).success
    assert world.service.take_dropped() == [region]
    assert not world.send(b"a", Code.RETURN_ALLOC, ReturnRequest("one", region)).success


def test_a_region_with_keys_is_hidden_and_goes_with_its_last_key(world):
    region = world.alloc(b"a", "one")
    world.register(b"a", "k", region)
    assert world.send(b"a", Code.RETURN_ALLOC, ReturnRequest("one", region)).success
    assert world.service.take_dropped() == []
    assert world.send(b"a", Code.LIST_ALLOCATIONS, ListRequest()).allocations == []
    assert world.send(b"a", Code.LOOKUP_KV, KeyRequest("k")).found
    assert world.send(b"a", Code.DELETE_KV, KeyRequest("k")).success
    assert world.service.take_dropped() == [region]


def test_listing_leaves_one_instance_out(world):
    first, second = world.alloc(b"a", "one"), world.alloc(b"b", "two")
    everything = world.send(b"c", Code.LIST_ALLOCATIONS, ListRequest())
    assert everything.success
    assert [handle.region_id for handle in everything.allocations] == [first, second]
    assert all(handle.auth_token == auth_token(SECRET, handle.region_id, REGION) for handle in everything.allocations)
    others = world.send(b"a", Code.LIST_ALLOCATIONS, ListRequest("one"))
    assert [handle.region_id for handle in others.allocations] == [second]


def test_our_regions_belong_to_the_session(world):
    token, region = world.ours()
    assert not world.send(b"x", Code.RETURN_ALLOC, ReturnRequest("ours", region)).success
    assert world.send(b"ours", Code.RETURN_ALLOC, ReturnRequest("ours", region, token)).success


# --- published keys -----------------------------------------------------------------------------------------------


def test_the_first_writer_wins(world):
    region = world.alloc(b"a")
    first = world.register(b"a", "k", region, 0)
    again = world.register(b"a", "k", region, PAGE)
    assert (first.success, first.is_new, first.epoch) == (True, True, EPOCH)
    assert (again.success, again.is_new) == (True, False)
    found = world.send(b"b", Code.LOOKUP_KV, KeyRequest("k"))
    assert (found.found, found.kv_offset, found.kv_length, found.epoch) == (True, 0, PAGE, EPOCH)
    assert (found.handle.region_id, found.handle.length) == (region, REGION)
    assert found.generation > 0
    assert found.checksum is None


def test_a_key_that_is_not_there(world):
    assert not world.send(b"a", Code.LOOKUP_KV, KeyRequest("k")).found
    assert not world.send(b"a", Code.EXISTS_KV, KeyRequest("k")).exists
    assert not world.send(b"a", Code.PIN_KV, KeyRequest("k")).exists
    assert not world.send(b"a", Code.UNPIN_KV, KeyRequest("k")).success
    assert not world.send(b"a", Code.DELETE_KV, KeyRequest("k")).success


@pytest.mark.parametrize(
    ("offset", "length"),
    [(-1, PAGE), (REGION, PAGE), (REGION - 1, 2), (0, -1), (0, 0), (0, REGION + 1), ((1 << 63) - 1, 1)],
)
def test_a_registration_out_of_range_is_refused_with_a_reason(world, offset, length):
    region = world.alloc(b"a")
    answer = world.register(b"a", "k", region, offset, length)
    assert (answer.success, answer.is_new) == (False, False)
    assert "'k'" in answer.error
    assert not world.send(b"a", Code.EXISTS_KV, KeyRequest("k")).exists


def test_a_registration_in_an_unknown_region_is_refused(world):
    answer = world.register(b"a", "k", 99)
    assert (answer.success, answer.is_new) == (False, False)
    _, ours = world.ours()
    assert not world.register(b"a", "k", ours).success  # nor does anybody else write into ours


def test_an_offset_that_holds_another_key_is_taken_over_unless_that_is_pinned(world):
    region = world.alloc(b"a")
    world.register(b"a", "old", region, 0)
    assert world.register(b"a", "new", region, 0).is_new
    assert not world.send(b"a", Code.EXISTS_KV, KeyRequest("old")).exists
    assert world.send(b"b", Code.PIN_KV, KeyRequest("new")).exists
    answer = world.register(b"a", "newer", region, 0)
    assert (answer.success, answer.is_new) == (False, False)
    assert "pinned" in answer.error


def test_a_pinned_key_is_not_deleted_and_any_connection_may_unpin(world):
    region = world.alloc(b"a")
    world.register(b"a", "k", region)
    assert world.send(b"b", Code.PIN_KV, KeyRequest("k")).exists
    assert world.send(b"b", Code.PIN_KV, KeyRequest("k")).exists
    refusal = world.send(b"a", Code.DELETE_KV, KeyRequest("k"))
    assert (refusal.success, refusal.error) == (False, "the key is pinned")
    assert [world.send(b"c", Code.UNPIN_KV, KeyRequest("k")).success for _ in range(3)] == [True, True, False]
    assert world.send(b"a", Code.DELETE_KV, KeyRequest("k")).success


def test_a_key_of_a_connected_published_owner_is_deleted_by_nobody_else(world):
    region = world.alloc(b"a")
    world.register(b"a", "k", region)
    refusal = world.send(b"b", Code.DELETE_KV, KeyRequest("k"))
    assert (refusal.success, refusal.error) == (False, "the key is protected")
    token = world.shake(b"ours").session
    assert world.send(b"ours", Code.DROP, DropRequest(token, 0, 1, ["k"])).answers == [DropAnswer.PROTECTED]
    assert world.send(b"a", Code.DELETE_KV, KeyRequest("k")).success


def batch(*entries):
    return BatchRegisterRequest([RegisterRequest(*entry) for entry in entries])


def test_a_batch_says_for_each_entry_whether_it_was_new(world):
    region = world.alloc(b"a")
    world.register(b"a", "b", region, 0)
    answer = world.send(
        b"a",
        Code.BATCH_REGISTER_KV,
        batch(("a", region, PAGE, PAGE), ("b", region, 2 * PAGE, PAGE), ("c", region, 3 * PAGE, PAGE)),
    )
    assert (answer.success, answer.results) == (True, [True, False, True])
    assert world.send(b"a", Code.BATCH_REGISTER_KV, batch()).results == []


def test_one_bad_entry_refuses_the_whole_batch(world):
    region = world.alloc(b"a")
    world.records.clear()
    answer = world.send(
        b"a", Code.BATCH_REGISTER_KV, batch(("a", region, 0, PAGE), ("b", region, -1, PAGE), ("c", region, PAGE, PAGE))
    )
    assert (answer.success, answer.results) == (False, [False, False, False])
    assert "'b'" in answer.error
    assert world.send(b"a", Code.BATCH_EXISTS_KV, KeysRequest(["a", "b", "c"])).results == [False] * 3
    assert not world.records


def test_a_batch_of_many_parts_is_registered_or_refused_as_a_whole(world):
    region = world.alloc(b"v1")
    n = 2 * KEYS_AT_ONCE + 5
    entries = [RegisterRequest(f"k{at}", region, at, 1) for at in range(n)]
    bad = [*entries[:-1], RegisterRequest("bad", region, REGION, 1)]
    answer = world.send(b"v1", Code.BATCH_REGISTER_KV, BatchRegisterRequest(bad))
    assert not answer.success and answer.results == [False] * n and "'bad' is refused" in answer.error
    assert not len(world.service.directory) and not [one for one in world.kept() if isinstance(one, Registered)]
    world.register(b"v1", "k7", region, offset=REGION - 1, length=1)
    answer = world.send(b"v1", Code.BATCH_REGISTER_KV, BatchRegisterRequest(entries))
    assert answer.success and answer.results == [at != 7 for at in range(n)]
    world.restart()
    assert world.send(b"v1", Code.BATCH_EXISTS_KV, KeysRequest([one.key for one in entries])).results == [True] * n


def test_a_large_batch_of_somebody_who_goes_ends_there(world):
    region = world.alloc(b"v1")
    entries = [RegisterRequest(f"k{at}", region, at, 1) for at in range(2 * KEYS_AT_ONCE)]
    assert (
        world.service.handle(b"v1", request(Code.BATCH_REGISTER_KV, 1, BatchRegisterRequest(entries)), world.now)
        is None
    )
    world.service.disconnected(b"v1", world.now)
    while world.service.is_busy:
        world.service.go_on(world.now)
    assert not len(world.service.directory) and not world.service.statistics().peers


def test_a_key_named_twice_in_a_batch_is_new_once(world):
    region = world.alloc(b"a")
    answer = world.send(b"a", Code.BATCH_REGISTER_KV, batch(("a", region, 0, PAGE), ("a", region, PAGE, PAGE)))
    assert answer.results == [True, False]


def test_batches_of_keys(world):
    region = world.alloc(b"a")
    world.send(b"a", Code.BATCH_REGISTER_KV, batch(("a", region, 0, PAGE), ("c", region, PAGE, 17)))
    keys = KeysRequest(["a", "b", "c"])
    found = world.send(b"b", Code.BATCH_LOOKUP_KV, keys)
    assert [(entry.found, entry.kv_offset, entry.kv_length) for entry in found.entries] == [
        (True, 0, PAGE),
        (False, 0, 0),
        (True, PAGE, 17),
    ]
    assert found.epoch == EPOCH
    again = world.send(b"b", Code.BATCH_LOOKUP_KV, keys)  # this time from what was encoded before
    assert again == found
    assert world.send(b"b", Code.BATCH_EXISTS_KV, keys).results == [True, False, True]
    assert world.send(b"b", Code.BATCH_PIN_KV, keys).results == [True, False, False]  # stops at the first miss
    assert world.send(b"b", Code.BATCH_UNPIN_KV, keys).results == [True, False, False]
    for code in (Code.BATCH_LOOKUP_KV, Code.BATCH_EXISTS_KV, Code.BATCH_PIN_KV, Code.BATCH_UNPIN_KV):
        answer = world.send(b"b", code, KeysRequest([]))
        assert (answer.entries if code == Code.BATCH_LOOKUP_KV else answer.results) == []


def test_what_a_published_reader_looked_up_is_not_evicted_for_a_while(world):
    token, region = world.ours()
    world.store(token, region, ["a", "b"])
    assert world.send(b"reader", Code.LOOKUP_KV, KeyRequest("a")).found
    assert world.send(b"ours", Code.RECLAIM, ReclaimRequest(token, 0, 1, 2)).dropped == 1
    assert list(world.find(token, ["a"]).positions) == [0]
    world.now += 2 * world.limits.v1_read_grace
    token, region = world.ours(b"later", "later")  # the first one's lease is over by now
    assert world.send(b"reader", Code.EXISTS_KV, KeyRequest("a")).exists


# --- figures ------------------------------------------------------------------------------------------------------


def test_statistics_count_without_looking_at_keys(world):
    region = world.alloc(b"a")
    world.register(b"a", "k", region)
    answer = world.send(b"b", Code.GET_STATS)
    assert (answer.kv_manager.total_entries, answer.kv_manager.total_size) == (1, PAGE)
    assert (answer.allocation_manager.num_allocations, answer.allocation_manager.total_allocated) == (1, REGION)
    assert answer.allocation_manager.active_clients == 1
    assert answer.stats_manager.clients["_all"].operations == {}


def report(client="c", op="get", result="hit", size=10, latency=2.0):
    return ReportEntry(client, op, result, size, latency)


def test_reports_are_told_per_client_and_together_and_intervals_begin_anew(world):
    entries = [
        report(),
        report(result="miss", latency=4.0),
        report("d", "put", "none", 5, 1.0),
        report(result="partial"),
    ]
    assert world.send(b"a", Code.REPORT_STATS, ReportRequest(entries)).success
    clients = world.send(b"a", Code.GET_STATS).stats_manager.clients
    assert set(clients) == {"_all", "c", "d"}
    get = clients["c"].operations["get"]
    assert (get.count, get.hit_count, get.miss_count, get.total_bytes) == (3, 1, 1, 30)
    assert (get.latency_sum_us, get.min_latency_us, get.max_latency_us) == (8.0, 2.0, 4.0)
    assert get.avg_latency_us == pytest.approx(8 / 3)
    assert (get.interval_count, get.interval_min_us, get.interval_max_us) == (3, 2.0, 4.0)
    assert clients["_all"].operations["put"].count == 1
    world.now += INTERVAL
    later = world.send(b"a", Code.GET_STATS).stats_manager.clients["c"].operations["get"]
    assert (later.count, later.interval_count, later.interval_avg_us, later.interval_min_us) == (3, 0, 0.0, 0.0)


def test_reports_that_cannot_be_are_left_out_and_the_table_is_bounded(world):
    entries = [report(latency=bad) for bad in (math.nan, math.inf, -1.0)] + [report(size=-1)]
    assert world.send(b"a", Code.REPORT_STATS, ReportRequest(entries)).success
    assert set(world.send(b"a", Code.GET_STATS).stats_manager.clients) == {"_all"}
    for number in range(100):
        world.send(b"a", Code.REPORT_STATS, ReportRequest([report(f"client {number}", f"op {number}")]))
    world.now += INTERVAL
    clients = world.send(b"a", Code.GET_STATS).stats_manager.clients
    assert len(clients) == 1 + MAX_CLIENTS
    assert "client 0" not in clients and "client 99" in clients
    assert len(clients["_all"].operations) == MAX_OPERATIONS


def test_what_is_counted_here_is_told_as_it_is_now(world):
    region = world.alloc(b"a")
    for number in range(3):
        world.register(b"a", f"k{number}", region, number * PAGE)
        assert world.send(b"a", Code.GET_STATS).kv_manager.total_entries == number + 1


def test_published_clients_respect_the_number_of_sessions():
    world = World(ServerConfig(max_sessions=2))
    for number in range(2):
        world.alloc(b"a", f"instance {number}")
    for peer in (b"a", b"b"):
        refusal = world.send(peer, Code.REQUEST_ALLOC, AllocRequest("one more", REGION))
        assert not refusal.success and refusal.handle is None
        assert "2 sessions" in refusal.error and "max_sessions" in refusal.error
    assert world.service.take_allocations() == []
    world.alloc(b"a", "instance 1")  # who is there goes on
    world.alloc(b"b", "instance 1")
    assert refused(world.shake(b"c"), Word.TOO_MANY)
    assert world.service.directory.statistics().sessions == 2


def test_who_comes_while_the_pool_is_asked_does_not_exceed_the_number_of_sessions():
    world = World(ServerConfig(max_sessions=2))
    for number in range(3):
        assert world.send(b"a", Code.REQUEST_ALLOC, AllocRequest(f"instance {number}", REGION)) is None
    answers = []
    for number, allocation in enumerate(world.service.take_allocations(), 1):
        _, frame = world.service.allocated(allocation.ticket, number, 0, REGION, world.now)
        answers.append(decode_reply(Code.REQUEST_ALLOC, body_of(frame, read_header(frame))).success)
    assert answers == [True, True, False]
    assert world.service.take_dropped() == [3]


def test_no_answer_is_larger_than_is_said():
    """docs/page-store.md and SECURITY.md count with it."""
    world = World(limits=Limits(max_entries=1 << 20))
    token, _ = world.ours()
    most = [f"{number:04}" for number in range(MAX_KEYS)]
    sizes = []

    def ask(code, message):
        frame = world.service.handle(b"ours", request(code, 1, message), world.now)
        while world.service.is_busy:
            _, frame = world.service.go_on(world.now) or (b"", None)
        sizes.append(len(frame))

    far = (1 << 62) - MAX_KEYS
    world.service.place(far, 0, far)
    world.service.directory._changes.add_region(far, far, world.service.directory._state.sessions[1])
    offsets = [far // 2 + at for at in range(MAX_KEYS)]
    ask(Code.STORE, StoreRequest(token, 0, 1, far, most, offsets, 1, [2**64 - 1] * MAX_KEYS))
    ask(Code.FIND, FindRequest(token, 0, most, True, False))
    ask(Code.BATCH_LOOKUP_KV, KeysRequest(most))
    ask(Code.BATCH_EXISTS_KV, KeysRequest(most))
    ask(Code.UNPIN, UnpinRequest(token, 0, most))
    for region_id in range(2, world.config.max_regions + 1):
        world.service.place(region_id, far, far)
        world.service.directory._changes.add_region(region_id, far, world.service.directory._state.sessions[1])
    ask(Code.LIST_ALLOCATIONS, ListRequest())
    for number in range(1100):
        session = world.service.directory._changes.open_session(
            b"", f"{number:04}" + "\N{SNOWMAN}" * 252, "", True, 1.0
        )
        world.service.directory._changes.add_region(10**6 + number, 1, session)
    ask(Code.GET_USAGE, None)
    ask(Code.DROP, DropRequest(token, 0, 1, most))
    ask(Code.BEAT, BeatRequest(token, 0))
    assert MAX_ANSWER_BYTES / 2 < max(sizes) <= MAX_ANSWER_BYTES, sizes


def test_usage_is_told_per_instance(world):
    region = world.alloc(b"b", "two")
    world.alloc(b"a", "one")
    world.register(b"b", "k", region)
    answer = world.send(b"a", Code.GET_USAGE)
    assert [(one.instance_id, one.regions, one.allocated, one.used) for one in answer.instances] == [
        ("one", 1, REGION, 0),
        ("two", 1, REGION, PAGE),
    ]
    assert (answer.pool_total, answer.pool_free) == (1 << 40, 1 << 30)


def test_a_heartbeat_is_answered(world):
    assert world.send(b"a", Code.HEARTBEAT).epoch == EPOCH


def test_shutdown_is_refused_unless_allowed(world):
    assert refused(world.send(b"a", Code.SHUTDOWN), Word.REFUSED)
    assert not world.service.stopping
    world = World(ServerConfig(allow_shutdown=True))
    assert world.send(b"a", Code.SHUTDOWN).success
    assert world.service.stopping


def test_a_description_has_facts_by_section(world):
    token, region = world.ours()
    world.store(token, region, ["a"])
    world.service.facts = lambda: {"pool": {"path": "/dev/shm/x"}, "server": {"pid": 7}}
    answer = world.send(b"anybody", Code.DESCRIBE)
    assert answer.epoch == EPOCH
    assert answer.sections["directory"]["entries"] == 1
    assert answer.sections["pool"] == {"path": "/dev/shm/x"}
    assert answer.sections["server"]["pid"] == 7
    assert answer.sections["server"]["connections"] == 2


# --- our own codes ------------------------------------------------------------------------------------------------


def test_a_store_is_found_with_generation_and_checksum(world):
    token, region = world.ours()
    stored = world.store(token, region, ["a", "b"], checksums=[11, 22])
    assert stored.statuses == [StoreStatus.NEW] * 2
    assert stored.epoch == EPOCH
    first, second = stored.generations
    assert 0 < first < second
    found = world.find(token, ["x", "a", "b"])
    assert found.found == [1, 2]
    assert found.columns() == ((region, region), (0, PAGE), (PAGE, PAGE), (first, second), (11, 22))
    assert list(world.find(token, ["x", "a"], prefix=True).positions) == []
    assert list(world.find(token, ["a", "x", "b"], prefix=True).positions) == [0]
    assert list(world.find(token, []).positions) == []
    published = world.send(b"v1", Code.LOOKUP_KV, KeyRequest("a"))
    assert (published.generation, published.checksum) == (first, 11)


def test_every_status_of_a_store(world):
    token, region = world.ours()
    other_token, other = world.ours(b"other", "other")
    world.store(token, region, ["held", "gone"], [0, PAGE])
    world.find(other_token, ["held"], pin=True, peer=b"other")
    world.send(b"ours", Code.DROP, DropRequest(token, 0, 1, ["gone"]))
    message = StoreRequest(
        token,
        0,
        2,
        [region, region, region, other, region, region, region],
        ["new", "held", "over", "foreign", "range", "x" * 1000 + "ü" * 24, "busy"],
        [2 * PAGE, 3 * PAGE, 0, 0, REGION, 4 * PAGE, PAGE],
        [PAGE] * 7,
        None,
    )
    assert world.send(b"ours", Code.STORE, message).statuses == [
        StoreStatus.NEW,
        StoreStatus.DUPLICATE,
        StoreStatus.PINNED,
        StoreStatus.FOREIGN,
        StoreStatus.RANGE,
        StoreStatus.KEY,
        StoreStatus.BUSY,
    ]


def test_a_quota_is_kept_by_evicting_ones_own_or_refused():
    world = World(limits=Limits(instance_quota_bytes=2 * PAGE))
    token, region = world.ours()
    assert world.store(token, region, ["a", "b"]).statuses == [0, 0]
    stored = world.store(token, region, ["c"], [2 * PAGE])
    assert stored.statuses == [StoreStatus.NEW]
    assert (stored.returns.regions, stored.returns.attempts) == ([region], [1])
    world.find(token, ["a", "b", "c"], pin=True)
    assert world.store(token, region, ["d"], [3 * PAGE]).statuses == [StoreStatus.QUOTA]


def test_pins_hold_and_belong_to_the_session(world):
    token, region = world.ours()
    other, _ = world.ours(b"other", "other")
    world.store(token, region, ["a"])
    assert list(world.find(other, ["a"], pin=True, peer=b"other").positions) == [0]
    assert world.send(b"ours", Code.DROP, DropRequest(token, 0, 1, ["a"])).answers == [DropAnswer.PINNED]
    assert world.send(b"ours", Code.UNPIN, UnpinRequest(token, 0, ["a"])).results == [False]
    assert world.send(b"other", Code.UNPIN, UnpinRequest(other, 0, ["a", "a", "x"])).results == [True, False, False]
    assert world.send(b"ours", Code.DROP, DropRequest(token, 0, 2, ["a"])).answers == [DropAnswer.DELETED]


def test_what_a_session_does_not_claim_goes_and_what_comes_of_an_earlier_turn_is_refused(world):
    token, region = world.ours()
    world.store(token, region, ["a", "b"])
    for _ in range(2):
        world.find(token, ["a", "b"], pin=True)
    world.service.take_events()
    assert world.send(b"ours", Code.PINS, PinsRequest(token, 0, 4, ["b", "x"], [1, 1], True)).dropped == 3
    [event] = world.service.take_events()
    assert "3 pins" in event.text
    assert refused(world.find(token, ["a"], pin=True), Word.FENCED)
    assert refused(world.send(b"ours", Code.UNPIN, UnpinRequest(token, 0, ["b"], 3)), Word.FENCED)
    assert refused(world.send(b"ours", Code.PINS, PinsRequest(token, 0, 3, [], [], True)), Word.FENCED)
    assert list(world.find(token, ["a"]).positions) == [0]  # what pins nothing is of no pin epoch
    assert world.send(b"ours", Code.PINS, PinsRequest(token, 0, 4, [], [], True)).dropped == 0
    answer = world.send(b"ours", Code.FIND, FindRequest(token, 0, ["a"], True, False, 4))
    assert list(answer.positions) == [0]
    assert world.send(b"ours", Code.DROP, DropRequest(token, 0, 1, ["a", "b"])).answers == [DropAnswer.PINNED] * 2
    assert world.send(b"ours", Code.UNPIN, UnpinRequest(token, 0, ["a", "b", "b"], 4)).results == [True, True, False]
    assert world.send(b"ours", Code.DROP, DropRequest(token, 0, 2, ["a", "b"])).answers == [DropAnswer.DELETED] * 2


def test_a_restart_knows_of_no_turn(world):
    token, region = world.ours()
    world.store(token, region, ["a"])
    world.send(b"ours", Code.PINS, PinsRequest(token, 0, 4, [], [], True))
    world.restart()
    assert list(world.find(token, ["a"], pin=True).positions) == [0]


def test_pages_that_others_delete_come_back_numbered_until_they_are_acknowledged(world):
    token, region = world.ours()
    world.store(token, region, ["a", "b", "c"], attempt=5)
    other = world.shake(b"other").session
    world.send(b"other", Code.DROP, DropRequest(other, 0, 1, ["a", "b"]))
    returns = world.find(token, []).returns
    assert (returns.first_number, returns.regions, returns.offsets, returns.attempts) == (
        1,
        [region] * 2,
        [0, PAGE],
        [5] * 2,
    )
    assert world.find(token, []).returns is None  # not again, unless asked for
    assert world.beat(token).returns == returns
    assert world.store(token, region, ["a"], [0], attempt=6).statuses == [StoreStatus.BUSY]
    assert world.store(token, region, ["a"], [0], attempt=7, ack=2).statuses == [StoreStatus.NEW]
    assert world.beat(token, ack=2).returns is None


def test_a_drop_asked_again_is_answered_again_and_not_done_again(world):
    token, region = world.ours()
    world.store(token, region, ["a"])
    first = world.send(b"ours", Code.DROP, DropRequest(token, 0, 9, ["a", "x"]))
    assert first.answers == [DropAnswer.DELETED, DropAnswer.MISSING]
    world.store(token, region, ["a"], [PAGE], attempt=2, ack=1)
    assert world.send(b"ours", Code.DROP, DropRequest(token, 1, 9, ["a", "x"])).answers == first.answers
    assert list(world.find(token, ["a"], ack=1).positions) == [0]


def test_a_reclaim_gives_back_the_least_recently_used_pages_once(world):
    token, region = world.ours()
    world.store(token, region, ["c", "b", "a"])  # the deepest of a prefix is the least recent: a
    answer = world.send(b"ours", Code.RECLAIM, ReclaimRequest(token, 0, 3, 2))
    assert answer.dropped == 2
    assert answer.returns.offsets == [2 * PAGE, PAGE]
    again = world.send(b"ours", Code.RECLAIM, ReclaimRequest(token, 0, 3, 2))
    assert (again.dropped, again.returns) == (2, None)
    assert list(world.find(token, ["a", "b", "c"]).positions) == [2]
    assert world.send(b"ours", Code.RECLAIM, ReclaimRequest(token, 0, 4, -5)).dropped == 0
    assert world.send(b"ours", Code.RECLAIM, ReclaimRequest(token, 0, 5, 1 << 60)).dropped == 1


def test_who_waits_for_a_long_reclaim_is_not_silent(world):
    token, region = world.ours()
    n = 4 * AT_ONCE
    world.store(token, region, [f"k{at}" for at in range(n)], list(range(n)), length=1)
    assert world.service.handle(b"ours", request(Code.RECLAIM, 1, ReclaimRequest(token, 0, 1, n)), world.now) is None
    answer = None
    while world.service.is_busy:
        world.now += 8.0
        world.service.expire(world.now)
        answer = world.service.go_on(world.now)
    assert decode_reply(Code.RECLAIM, body_of(answer[1], read_header(answer[1]))).dropped == n


def test_a_resolved_attempt_is_refused_when_it_arrives_after_all(world):
    token, region = world.ours()
    assert world.send(b"ours", Code.RESOLVE, ResolveRequest(token, 0, 1, [region], [0])).held == [0]
    assert refused(world.store(token, region, ["a"], attempt=1), Word.FENCED)
    assert not world.send(b"v1", Code.EXISTS_KV, KeyRequest("a")).exists
    stored = world.store(token, region, ["b"], attempt=2)
    resolve = ResolveRequest(token, 0, 2, [region, region, 99], [0, PAGE, 0])
    assert world.send(b"ours", Code.RESOLVE, resolve).held == [stored.generations[0], 0, 0]
    assert [record.attempt for record in world.kept() if isinstance(record, Fenced)] == [1, 2]


def test_a_closed_session_leaves_readable_orphans(world):
    token, region = world.ours()
    world.store(token, region, ["a"])
    empty = world.alloc(b"ours", "ours", session=token)
    answer = world.send(b"ours", Code.CLOSE, CloseRequest(token, 0))
    assert (answer.epoch, answer.returns) == (EPOCH, None)
    assert world.service.take_dropped() == [empty]
    assert refused(world.beat(token), Word.NO_SESSION)
    assert world.send(b"v1", Code.LOOKUP_KV, KeyRequest("a")).found
    world.now += 100
    assert finish(world.service.make_room(REGION, world.now), world.now) == [region]
    assert world.service.take_dropped() == [region]
    assert not world.send(b"v1", Code.LOOKUP_KV, KeyRequest("a")).found


def test_a_capability_is_for_one_region_one_right_one_epoch_and_one_session(world):
    token, region = world.ours()
    other, _ = world.ours(b"other", "other")
    write = world.send(b"ours", Code.REGION, RegionRequest(token, 0, region, True))
    read = world.send(b"other", Code.REGION, RegionRequest(other, 0, region, False))
    assert (write.writable, write.offset, write.length) == (True, 0, REGION)
    assert (read.writable, read.length) == (False, REGION)
    assert verify(SECRET, write.capability, region, 0, REGION, True, EPOCH, token)
    assert verify(SECRET, read.capability, region, 0, REGION, False, EPOCH, other)
    assert not verify(SECRET, read.capability, region, 0, REGION, True, EPOCH, other)
    assert not verify(SECRET, write.capability, region, 0, REGION, True, EPOCH + 1, token)
    assert not verify(SECRET, write.capability, region, 0, REGION, True, EPOCH, other)
    assert refused(world.send(b"other", Code.REGION, RegionRequest(other, 0, region, True)), Word.REFUSED)
    assert refused(world.send(b"ours", Code.REGION, RegionRequest(token, 0, 99, False)), Word.REFUSED)


OWN_REQUESTS = {
    Code.STORE: StoreRequest(b"?" * 16, 0, 1, 1, ["k"], [0], 1, None),
    Code.FIND: FindRequest(b"?" * 16, 0, ["k"], False, False),
    Code.UNPIN: UnpinRequest(b"?" * 16, 0, ["k"]),
    Code.DROP: DropRequest(b"?" * 16, 0, 1, ["k"]),
    Code.RECLAIM: ReclaimRequest(b"?" * 16, 0, 1, 1),
    Code.RESOLVE: ResolveRequest(b"?" * 16, 0, 1, [1], [0]),
    Code.BEAT: BeatRequest(b"?" * 16, 0),
    Code.CLOSE: CloseRequest(b"?" * 16, 0),
    Code.REGION: RegionRequest(b"?" * 16, 0, 1, False),
    Code.PINS: PinsRequest(b"?" * 16, 0, 1, ["k"], [1], True),
    Code.LIST_KEYS: ListKeysRequest(b"?" * 16, 0, "k"),
}


@pytest.mark.parametrize("code", sorted(OWN_CODES - {Code.DESCRIBE}))
def test_an_unknown_session_is_told_so(world, code):
    assert refused(world.send(b"a", code, OWN_REQUESTS[code]), Word.NO_SESSION)
    assert not world.records


def test_an_acknowledgement_of_what_was_never_sent_changes_nothing(world):
    token, region = world.ours()
    world.store(token, region, ["a"])
    for ack in (-5, 1, 1 << 62):
        assert world.beat(token, ack).returns is None
    other = world.shake(b"other").session
    world.send(b"other", Code.DROP, DropRequest(other, 0, 1, ["a"]))
    assert world.beat(token, -1).returns.first_number == 1


def test_keys_are_listed_by_prefix_in_pages(world):
    token, region = world.ours()
    names = [f"a{number:04}" for number in range(1500)]
    for at in range(0, 1500, 500):
        world.store(token, region, names[at : at + 500], offsets=list(range(at, at + 500)), length=1)
    world.store(token, region, ["b"], offsets=[1500], length=1)
    found, cursor, pages = [], 0, 0
    while True:
        answer = world.send(b"ours", Code.LIST_KEYS, ListKeysRequest(token, 0, "a", cursor))
        found += answer.keys
        cursor, pages = answer.cursor, pages + 1
        assert len(answer.keys) <= 1024
        if not cursor:
            break
        world.send(b"ours", Code.DROP, DropRequest(token, 0, pages, [names[-1]]))  # it was there when this began
    assert found == names and pages == 2
    later = ListKeysRequest(token, 0, "a", 1024)
    assert refused(world.send(b"ours", Code.LIST_KEYS, later), Word.FENCED)


def test_a_session_begins_one_listing_at_a_time_for_each_thousand_keys(world):
    token, region = world.ours()
    for at in range(0, 1500, 500):
        world.store(token, region, [f"k{n}" for n in range(at, at + 500)], offsets=list(range(at, at + 500)), length=1)
    other = world.shake(b"other").session
    again = ListKeysRequest(token, 0, "k")
    assert world.send(b"ours", Code.LIST_KEYS, again).cursor
    assert refused(world.send(b"ours", Code.LIST_KEYS, again), Word.TOO_MANY)
    assert not world.send(b"ours", Code.LIST_KEYS, ListKeysRequest(token, 0, "k", 1024)).cursor  # the first one goes on
    assert refused(world.send(b"ours", Code.LIST_KEYS, again), Word.TOO_MANY)
    assert world.send(b"other", Code.LIST_KEYS, ListKeysRequest(other, 0, "k")).cursor
    world.now += 1e-3
    assert world.send(b"ours", Code.LIST_KEYS, again).cursor


def test_listing_names_own_tenant_only(world):
    token, region = world.ours()
    salted = "\x1f3:one0:\x1fk"
    world.store(token, region, ["k", salted])
    assert world.send(b"ours", Code.LIST_KEYS, ListKeysRequest(token, 0, "")).keys == ["k"]
    assert world.send(b"ours", Code.LIST_KEYS, ListKeysRequest(token, 0, "\x1f3:one")).keys == []
    other = world.shake(b"other", tenant="one").session
    assert world.send(b"other", Code.LIST_KEYS, ListKeysRequest(other, 0, "")).keys == [salted]


def listers(world, count):
    """Ask for a page of a listing, each by a session and a connection of its own."""
    token, region = world.ours()
    for at in range(0, 1500, 500):
        world.store(token, region, [f"k{n}" for n in range(at, at + 500)], offsets=list(range(at, at + 500)), length=1)
    sessions = [world.shake(b"%d" % number).session for number in range(count)]

    def page(number, cursor=0):
        return world.send(b"%d" % number, Code.LIST_KEYS, ListKeysRequest(sessions[number], 0, "k", cursor))

    return page


def test_a_listing_too_many_is_refused_and_those_under_way_go_on(world):
    page = listers(world, 6)
    for number in range(4):
        assert page(number).cursor
    world.now += 0.5
    assert refused(page(4), Word.TOO_MANY)
    assert [len(page(number, 1024).keys) for number in range(4)] == [476] * 4
    assert page(4).cursor


def test_a_listing_that_rests_gives_way(world):
    page = listers(world, 5)
    for number in range(4):
        assert page(number).cursor
    world.now += 1.0
    assert page(0).cursor  # it begins again
    assert page(4).cursor
    assert refused(page(1, 1024), Word.FENCED)
    assert [len(page(number, 1024).keys) for number in (0, 2, 3, 4)] == [476] * 4


def test_a_listing_with_slow_questions_gives_way_after_a_while(world):
    page = listers(world, 5)
    for number in range(4):
        assert page(number).cursor
    for _ in range(2):
        world.now += 0.4
        assert refused(page(4), Word.TOO_MANY)
        assert all(page(number, 1).cursor for number in range(4))
    world.now += 0.4
    assert page(4).cursor
    assert len(world.service.listings) == 4


@pytest.mark.parametrize("how", ["close", "silence"])
def test_a_listing_ends_with_its_session(world, how):
    page = listers(world, 1)
    assert page(0).cursor
    [listing] = world.service.listings.values()
    if how == "close":
        world.service.end_session(listing.session_id, world.now)
    else:
        world.now += 10_000.0
        world.service.expire(world.now)
    assert not world.service.listings


def test_a_connection_has_one_listing(world):
    page = listers(world, 2)
    assert page(0).cursor and page(1).cursor
    for _ in range(8):
        world.now += 1.0
        another = world.shake(b"1").session
        assert world.send(b"1", Code.LIST_KEYS, ListKeysRequest(another, 0, "k", 0)).cursor
    assert refused(page(1, 1024), Word.FENCED)
    assert len(page(0, 1024).keys) == 476


def test_a_listing_goes_with_its_connection(world):
    page = listers(world, 1)
    assert page(0).cursor
    world.service.disconnected(b"0", world.now)
    assert not world.service.listings
    assert refused(page(0, 1024), Word.FENCED)


# --- leases -------------------------------------------------------------------------------------------------------


def test_silence_beyond_lease_and_grace_ends_a_session_and_any_message_renews_it(world):
    token, region = world.ours()
    world.store(token, region, ["a"])
    lease, grace = world.config.session_lease, world.limits.lease_grace
    for _ in range(3):
        world.now += lease
        world.service.expire(world.now)
        assert list(world.find(token, ["a"]).positions) == [0]
    world.now += lease + grace - 0.01
    world.service.expire(world.now)
    assert world.service.next_expiry() <= world.now + 0.02
    world.now += 0.02
    world.service.expire(world.now)
    assert refused(world.find(token, ["a"]), Word.NO_SESSION)
    assert world.send(b"ours", Code.LOOKUP_KV, KeyRequest("a")).found  # as anybody: its connection is nobody's now


def test_a_published_owner_is_kept_as_long_as_it_is_connected(world):
    region = world.alloc(b"a")
    world.register(b"a", "k", region)
    world.now += 1e6
    world.service.expire(world.now)
    assert world.send(b"b", Code.DELETE_KV, KeyRequest("k")).error == "the key is protected"
    world.service.disconnected(b"a", world.now)
    world.now += world.limits.published_lease + 0.01
    world.service.expire(world.now)
    assert world.send(b"b", Code.DELETE_KV, KeyRequest("k")).success


def test_a_published_owner_that_reconnects_in_time_goes_on(world):
    region = world.alloc(b"a")
    world.register(b"a", "k", region)
    world.service.disconnected(b"a", world.now)
    world.now += world.limits.published_lease / 2
    assert world.register(b"a2", "l", region, PAGE).is_new
    world.now += 1e6
    world.service.expire(world.now)
    assert world.send(b"b", Code.DELETE_KV, KeyRequest("k")).error == "the key is protected"


def test_watermarks_reclaim_ahead_of_need(world):
    token, region = world.ours()
    world.store(token, region, [f"k{number}" for number in range(16)])
    world.service.trim(world.now)
    assert world.service.go_on(world.now) is None and not world.service.is_busy
    returns = world.beat(token).returns
    assert len(returns.offsets) == 2  # 16 pages are above 0.95, 14 are below 0.90
    world.service.trim(world.now)
    assert world.beat(token, 2).returns is None


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0x00, 0x02, 0x05, 0x3F, 0x4C, 0x80, 0x90, 0xC0, 0xF4, 0xFD])
def test_an_unknown_code_is_answered_under_its_own_sequence(world, code):
    frame = world.service.handle(b"a", frame_of(code, 77, b"\x80", 5), world.now)
    header = read_header(frame)
    assert (header.code, header.sequence, header.flags) == (code | 0x80, 77, 5)
    answer = decode_reply(Code.HEARTBEAT, body_of(frame, header))
    assert refused(answer, Word.UNKNOWN_CODE)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", b"\x81\xa3key\x01", b"\x93", b"\x81\xa3key\xa1\xff", b"\x90" * 9]
)
def test_a_bad_body_is_answered_under_its_own_sequence(world, body):
    frame = world.service.handle(b"a", frame_of(Code.LOOKUP_KV, 78, body), world.now)
    assert refused(read(frame, Code.LOOKUP_KV, 78), Word.MALFORMED)
    assert world.send(b"a", Code.HEARTBEAT).epoch == EPOCH


BAD_FRAMES = [
    b"",
    b"\xcf",
    b"\0" * 16,
    request(Code.HEARTBEAT, 1)[:-1],
    struct.pack("!HBBB3xII", 0xCF00, 2, 1, 0, 1, 0),
    struct.pack("!HBBB3xII", 0xCF01, 1, 1, 0, 1, 0),
    struct.pack("!HBBB3xII", 0xCF00, 1, 1, 0, 1, 0xFFFFFFFF),
]


@pytest.mark.parametrize("frame", BAD_FRAMES)
def test_an_unreadable_frame_is_answered_once_with_sequence_zero(world, frame):
    answer = world.service.handle(b"a", frame, world.now)
    header = read_header(answer)
    assert (header.code, header.sequence) == (0x80, 0)
    assert refused(decode_reply(Code.HEARTBEAT, body_of(answer, header)), Word.MALFORMED)
    assert world.service.handle(b"a", frame, world.now) is None
    assert world.send(b"a", Code.HEARTBEAT).epoch == EPOCH
    assert world.service.handle(b"b", frame, world.now) is not None


def test_an_unreadable_frame_costs_its_sender_the_session_and_nobody_else(world):
    token, region = world.ours()
    other, _ = world.ours(b"other", "other")
    world.store(token, region, ["a"])
    world.service.handle(b"ours", b"nonsense", world.now)
    assert refused(world.beat(token), Word.NO_SESSION)
    assert list(world.find(other, ["a"], peer=b"other").positions) == [0]


def test_an_unreadable_frame_of_a_published_client_is_as_its_disconnection(world):
    region = world.alloc(b"a")
    world.register(b"a", "k", region)
    world.service.handle(b"a", b"nonsense", world.now)
    world.now += world.limits.published_lease + 0.01
    world.service.expire(world.now)
    assert world.send(b"b", Code.DELETE_KV, KeyRequest("k")).success


@pytest.mark.parametrize("n", [1, 2 * KEYS_AT_ONCE])
def test_want_of_memory_costs_one_request_in_slices(world, monkeypatch, n):
    token, region = world.ours()

    def no_memory(*_):
        raise MemoryError

    message = ResolveRequest(token, 0, 1, [region] * n, list(range(n)))
    with monkeypatch.context() as patch:
        patch.setattr(world.service.directory, "resolve", no_memory)
        assert world.send(b"ours", Code.RESOLVE, message) is None
    assert "not answered" in world.service.take_events()[-1].text
    assert world.service._under_way_bytes == 0
    assert world.send(b"ours", Code.RESOLVE, message).held == [0] * n


def test_batches_larger_than_configured_are_refused():
    world = World(ServerConfig(max_keys=64))
    token, region = world.ours()
    keys = [f"k{number}" for number in range(65)]
    for code in (Code.BATCH_LOOKUP_KV, Code.BATCH_EXISTS_KV, Code.BATCH_PIN_KV, Code.BATCH_UNPIN_KV):
        assert refused(world.send(b"a", code, KeysRequest(keys)), Word.TOO_MANY)
    assert refused(world.find(token, keys), Word.TOO_MANY)
    assert refused(world.store(token, region, keys, [0] * 65), Word.TOO_MANY)
    assert refused(world.send(b"ours", Code.UNPIN, UnpinRequest(token, 0, keys)), Word.TOO_MANY)
    assert refused(world.send(b"ours", Code.DROP, DropRequest(token, 0, 1, keys)), Word.TOO_MANY)
    assert refused(world.send(b"ours", Code.PINS, PinsRequest(token, 0, 1, keys, [1] * 65, True)), Word.TOO_MANY)
    assert refused(world.send(b"a", Code.BATCH_REGISTER_KV, batch(*((key, 1, 0, 1) for key in keys))), Word.TOO_MANY)


def test_what_lies_behind_a_frame_is_ignored_and_not_journaled(world):
    region = world.alloc(b"a")
    world.records.clear()
    frame = request(Code.REGISTER_KV, 5, RegisterRequest("k", region, 0, PAGE))
    answer = world.service.handle(b"a", frame + b"trailing", world.now)
    assert read(answer, Code.REGISTER_KV, 5).is_new
    [record] = map(decode, world.service.take_records())
    assert record.payload == frame[16:]


@settings(max_examples=200)
@given(st.data())
def test_no_frame_brings_the_service_down(data):
    world = World()
    token, region = world.ours()
    samples = [request(code, 1, message) for code, message in OWN_REQUESTS.items()]
    samples += [
        request(Code.STORE, 1, StoreRequest(token, 0, 1, region, ["k"], [0], 1, None)),
        request(Code.DROP, 1, DropRequest(token, 0, 1, ["k"])),
        request(Code.FIND, 1, FindRequest(token, 0, ["k"], True, False, 1)),
        request(Code.UNPIN, 1, UnpinRequest(token, 0, ["k"], 1)),
        request(Code.PINS, 1, PinsRequest(token, 0, 1, ["k"], [1], True)),
        request(Code.BATCH_REGISTER_KV, 1, batch(("k", region, 0, PAGE))),
        request(Code.REQUEST_ALLOC, 1, AllocRequest("one", PAGE)),
        request(Code.HANDSHAKE, 1, HandshakeRequest(extensions=1)),
        request(Code.GET_STATS, 1),
    ]
    for _ in range(5):
        frame = bytearray(data.draw(st.sampled_from(samples)))
        for _ in range(data.draw(st.integers(0, 4))):
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        answer = world.service.handle(data.draw(st.sampled_from([b"a", b"ours"])), bytes(frame), world.now)
        assert answer is None or read_header(answer).code & 0x80
    for allocation in world.service.take_allocations():
        world.service.not_allocated(allocation.ticket, "no")
    assert world.send(b"good", Code.HEARTBEAT).epoch == EPOCH


# --- doing half of the work later ---------------------------------------------------------------------------------

SMALL_KEYS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4)


@settings(max_examples=150)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), SMALL_KEYS, st.integers(0, 15), st.booleans()),
            st.tuples(st.just("register"), SMALL_KEYS, st.integers(0, 15), st.booleans()),
            st.tuples(st.just("find"), SMALL_KEYS, st.integers(0, 1), st.booleans()),
            st.tuples(st.just("drop"), SMALL_KEYS, st.integers(0, 1), st.booleans()),
            st.tuples(st.just("reclaim"), SMALL_KEYS, st.integers(0, 3), st.booleans()),
        ),
        max_size=25,
    )
)
def test_doing_half_of_a_registration_later_changes_no_answer_and_no_record(steps):
    worlds = [World(limits=Limits(instance_quota_bytes=6 * PAGE)) for _ in range(2)]
    seen = []
    for world, at_once in zip(worlds, (False, True), strict=True):
        answers = []
        token, region = world.ours()
        theirs = world.alloc(b"v1")
        for number, (name, keys, count, settles) in enumerate(steps, start=1):
            offsets = [PAGE * ((count + at) % 16) for at in range(len(keys))]
            if name == "store":
                answers.append(world.store(token, region, keys, offsets, attempt=number))
            elif name == "register":
                entries = [(key, theirs, offset, PAGE) for key, offset in zip(keys, offsets, strict=True)]
                answers.append(world.send(b"v1", Code.BATCH_REGISTER_KV, batch(*entries)))
            elif name == "find":
                answers.append(world.find(token, keys, pin=bool(count)))
            elif name == "drop":
                answers.append(world.send(b"ours", Code.DROP, DropRequest(token, 0, number, keys)))
            else:
                answers.append(world.send(b"ours", Code.RECLAIM, ReclaimRequest(token, 0, number, count)))
            if settles or at_once:
                world.service.directory.settle()
        seen.append((answers, world.records, world.service.directory.statistics(), world.service.directory.dump()))
    assert seen[0] == seen[1]


# --- a restart ----------------------------------------------------------------------------------------------------


def test_a_restart_finds_sessions_regions_and_keys_again(world):
    token, region = world.ours()
    stored = world.store(token, region, ["a", "b"], checksums=[1, 2])
    world.send(b"ours", Code.DROP, DropRequest(token, 0, 1, ["b"]))
    world.restart()
    again = world.shake(b"ours2", session=token)
    assert (again.session, again.resumed, again.epoch) == (token, True, EPOCH + 1)
    found = world.find(token, ["a", "b"], peer=b"ours2")
    *_, generations, checksums = found.columns()
    assert (found.found, generations, checksums) == ([0], tuple(stored.generations[:1]), (1,))
    assert found.epoch == EPOCH + 1
    assert world.beat(token, peer=b"ours2", epoch=EPOCH + 1).returns.offsets == [PAGE]


def test_after_a_restart_nothing_goes_until_every_session_has_heard_the_new_epoch(world):
    token, region = world.ours()
    world.store(token, region, ["a"])
    reader = world.shake(b"reader", lease=30.0).session
    world.restart()
    world.shake(b"ours2", session=token)
    world.beat(token, peer=b"ours2", epoch=EPOCH + 1)
    drop = DropRequest(token, 0, 1, ["a"])
    assert world.send(b"ours2", Code.DROP, drop).answers == [DropAnswer.PROTECTED]
    answer = world.send(b"ours2", Code.RECLAIM, ReclaimRequest(token, 0, 2, 1))
    assert (answer.code, answer.epoch) == (Word.QUIET, EPOCH + 1)
    world.shake(b"reader2", session=reader)  # the answer may not have arrived yet: it may still read
    drop = DropRequest(token, 0, 3, ["a"])
    assert world.send(b"ours2", Code.DROP, drop).answers == [DropAnswer.PROTECTED]
    world.beat(reader, peer=b"reader2", epoch=EPOCH + 1)
    drop = DropRequest(token, 0, 4, ["a"])
    assert world.send(b"ours2", Code.DROP, drop).answers == [DropAnswer.DELETED]


def test_a_message_from_before_the_restart_does_not_say_that_its_sender_knows_of_it(world):
    """It may come behind the handshake: a client has several sockets, and ZeroMQ keeps what could not leave."""
    token, region = world.ours()
    world.store(token, region, ["a"])
    reader = world.shake(b"reader", lease=30.0).session
    world.find(reader, ["a"], pin=True, peer=b"reader")
    world.restart()
    for one in (token, reader):
        world.shake(b"again", session=one)
    world.beat(token, epoch=EPOCH + 1)
    world.find(reader, ["a"], peer=b"reader2")
    world.beat(reader, peer=b"reader2")  # of a client that knows nothing of epochs
    world.beat(reader, peer=b"reader2", epoch=EPOCH)
    drop = DropRequest(token, 0, 1, ["a"])
    assert world.send(b"ours", Code.DROP, drop).answers == [DropAnswer.PROTECTED]
    world.beat(reader, peer=b"reader2", epoch=EPOCH + 1)
    drop = DropRequest(token, 0, 2, ["a"])
    assert world.send(b"ours", Code.DROP, drop).answers == [DropAnswer.DELETED]


def test_after_a_restart_a_session_that_does_not_come_back_holds_nobody_up_for_longer_than_its_lease(world):
    token, region = world.ours()
    world.store(token, region, ["a"])
    world.shake(b"reader", lease=30.0)
    world.restart()
    for _ in range(11):
        world.shake(b"ours2", session=token)
        world.service.expire(world.now)
        assert world.beat(token, peer=b"ours2", epoch=EPOCH + 1).lease > 0
        world.now += 3.0
    drop = DropRequest(token, 0, 1, ["a"])
    assert world.send(b"ours2", Code.DROP, drop).answers == [DropAnswer.DELETED]


def test_a_published_owner_goes_on_after_a_restart(world):
    region = world.alloc(b"a")
    world.register(b"a", "k", region)
    world.restart()
    assert world.register(b"a2", "l", region, PAGE).is_new
    assert world.send(b"a2", Code.LOOKUP_KV, KeyRequest("k")).found
    assert world.send(b"b", Code.DELETE_KV, KeyRequest("k")).error == "the key is protected"


def test_evictions_are_journaled_as_deletions(world):
    token, region = world.ours()
    world.store(token, region, ["a", "b"])
    world.send(b"ours", Code.RECLAIM, ReclaimRequest(token, 0, 1, 1))
    assert [record.keys for record in world.kept() if isinstance(record, Deleted)] == [["b"]]
    assert sum(isinstance(record, Registered) for record in world.kept()) == 1
    world.restart()
    world.shake(b"ours", session=token)
    assert list(world.find(token, ["a", "b"]).positions) == [0]


def test_what_the_service_is_asked_for_between_two_frames_is_empty_when_there_is_nothing(world):
    world.send(b"a", Code.HEARTBEAT)
    service = world.service
    assert (service.take_records(), service.take_allocations(), service.take_dropped()) == ([], [], [])
    world.service.disconnected(b"never seen", world.now)
    assert world.service.statistics().peers == 1
