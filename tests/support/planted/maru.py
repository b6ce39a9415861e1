"""Faults of servers and clients of the page store, of its pool and its journal."""

from __future__ import annotations

import trio

# --- in clients --------------------------------------------------------------------------------------------------------


def pages_of_unanswered_stores_are_free(patch):
    """Fault 1."""
    from maru._client.pages import OwnedPages

    unanswered = OwnedPages.unanswered

    def free_them(self, pages, attempt, *, can_resolve):
        unanswered(self, pages, attempt, can_resolve=True)
        self.resolved(attempt, pages, [0] * len(pages))

    patch.setattr(OwnedPages, "unanswered", free_them)


def checksums_are_not_looked_at(patch):
    """Fault 2."""
    from tests.support import maru_actors

    patch.setitem(maru_actors.DEFAULTS, "checksums", False)


def a_lease_that_is_over_is_not_noticed(patch):
    """Fault 2."""
    from maru._client.operations import ClientState

    patch.setattr(ClientState, "check_era", lambda self, era: None)


def views_can_be_written(patch):
    """Fault 3."""
    from maru._client import views

    look = views.bytes_at
    patch.setattr(views, "bytes_at", lambda address, length, owner, *, write: look(address, length, owner, write=True))


def everything_is_mapped_to_be_written(patch):
    """Fault 3. It takes both: a client that does, and a server that lets it."""
    from maru._client import regions

    fetch = regions.map_region
    patch.setattr(
        regions,
        "map_region",
        lambda fd, length, offset, **others: fetch(fd, length, offset, **{**others, "write": True}),
    )


def pages_of_duplicates_are_kept(patch):
    """Fault 5."""
    from maru._client.operations import storing
    from maru._wire import StoreStatus

    _, answer = storing._ANSWERS[StoreStatus.DUPLICATE]
    patch.setitem(storing._ANSWERS, StoreStatus.DUPLICATE, (storing.PageEvent.NEW, answer))


def pages_of_unanswered_stores_are_lost(patch):
    """Fault 6."""
    from maru._client.pages import OwnedPages

    unanswered = OwnedPages.unanswered
    patch.setattr(
        OwnedPages,
        "unanswered",
        lambda self, pages, attempt, *, can_resolve: unanswered(self, pages, attempt, can_resolve=False),
    )


def a_timeout_is_a_miss(patch):
    """Fault 7."""
    from maru._client.operations import reading
    from maru.base.errors import NoAnswer

    find = reading._find

    def find_or_miss(s, names, prefix):
        try:
            return (yield from find(s, names, prefix))
        except NoAnswer:
            return []

    patch.setattr(reading, "_find", find_or_miss)


def late_pins_are_kept(patch):
    """Fault 7."""
    from maru._client.operations import ClientState

    patch.setattr(ClientState, "heard_late", lambda self, call, reply: None)


def what_a_server_forgot_is_not_stored_again(patch):
    """Fault 8."""
    from maru._client import operations

    def nothing(s):
        return
        yield

    patch.setattr(operations, "restore", nothing)


def close_waits_for_an_answer(patch):
    """Fault 11."""
    from maru._client import handler
    from maru._client.operations import connecting

    patch.setattr(connecting, "CLOSE_PATIENCE", 60.0)
    patch.setattr(handler, "CLOSE_TIME", 60.0)


def deleted_keys_are_registered_again(patch):
    """As it was: an owner that came back had the last word on what others had deleted meanwhile."""
    from maru._client.operations import ClientState

    lose_session = ClientState.lose_session
    patch.setattr(ClientState, "lose_session", lambda self, *, forgotten: lose_session(self, forgotten=True))


def a_store_asks_first(patch):
    """Fault 16."""
    from maru._client.operations import storing
    from maru._wire import Code, KeysRequest

    store = storing._store_own

    def ask_and_store(s, names, *rest):
        yield storing.Call(Code.BATCH_EXISTS_KV, KeysRequest(names))
        return (yield from store(s, names, *rest))

    patch.setattr(storing, "_store_own", ask_and_store)


def every_batch_has_a_marker(patch):
    """Fault 17."""
    from tests.support import maru_actors

    put = maru_actors.Client.put

    def put_and_mark(self, keys, size=maru_actors.SIZE):
        keys = list(keys)
        return put(self, [*keys, f"DONE {keys[0]}"], size)[: len(keys)]

    patch.setattr(maru_actors.Client, "put", put_and_mark)


def keys_hold_no_namespace(patch):
    """Fault 17."""
    from maru._client.operations import state

    patch.setattr(state, "salt_of", lambda tenant, namespace: "")


def what_is_read_is_copied(patch):
    """No sharing."""
    from maru._client import views

    look = views.bytes_at

    def copy(address, length, owner, *, write):
        view = look(address, length, owner, write=write)
        return view if write else memoryview(bytes(view))

    patch.setattr(views, "bytes_at", copy)


# --- in servers --------------------------------------------------------------------------------------------------------


def fences_are_forgotten(patch):
    """Fault 1."""
    from maru._directory.sessions import Fences

    patch.setattr(Fences, "__contains__", lambda self, attempt: False)


def pins_hold_nothing(patch):
    """Fault 2."""
    from maru._directory.eviction_guard import EvictionGuard

    patch.setattr(EvictionGuard, "pin", lambda self, by, keys, *rest: None)


def whoever_asks_may_write(patch):
    """Fault 3."""
    from maru._directory import Directory
    from maru._server import service as service_module

    region, answer = Directory.region, service_module._ACTIONS[0x48]

    def owned_by_the_asker(service, peer, header, message, payload, now):
        asker = service.directory.session_of(message.session)
        patch.setattr(Directory, "region", lambda self, region_id: (region(self, region_id)[0], asker))
        try:
            return answer(service, peer, header, message, payload, now)
        finally:
            patch.setattr(Directory, "region", region)

    patch.setitem(service_module._ACTIONS, 0x48, owned_by_the_asker)


def descriptors_are_for_writing(patch):
    """Fault 3: see :func:`everything_is_mapped_to_be_written`."""
    from maru._pool.pool import Pool

    open_fd = Pool.open_fd
    patch.setattr(Pool, "open_fd", lambda self, region_id, write: open_fd(self, region_id, True))


def pages_do_not_come_back(patch):
    """Fault 4."""
    from maru._directory import Directory

    patch.setattr(Directory, "pending", lambda self, session_id, now, *, resend=False: None)


def pins_outlive_their_session(patch):
    """Fault 7."""
    from maru._directory.eviction_guard import EvictionGuard

    patch.setattr(EvictionGuard, "keep_pins_until", lambda self, holder, *rest: None)


def nothing_is_written_down(patch):
    """Fault 8."""
    from maru._journal.journal import Journal

    patch.setattr(Journal, "append", lambda self, records: None)


def it_is_never_quiet(patch):
    """Fault 8."""
    from maru._directory.eviction_guard import EvictionGuard

    patch.setattr(EvictionGuard, "is_quiet", lambda self, now: False)


def leases_do_not_end(patch):
    """Fault 9."""
    from maru._directory.sessions import Leases

    patch.setattr(Leases, "due", lambda self, now: [])


def connections_do_not_end(patch):
    """Fault 9."""
    from maru._server.service import Service

    patch.setattr(Service, "disconnected", lambda self, identity, now: None)


def memory_is_reserved_on_the_loop(patch):
    """Fault 10."""
    from maru.base.workers import Workers

    async def make(self, work, undo):
        await trio.lowlevel.checkpoint()
        return work(lambda: None)

    patch.setattr(Workers, "make", make)


def a_torn_tail_bricks_the_start(patch):
    """Fault 12."""
    from maru._journal import replay
    from maru.base.errors import JournalFailed

    read = replay.read_frames

    def all_or_nothing(data, *rest):
        frames = read(data, *rest)
        if frames.verdict != "whole":
            raise JournalFailed("it is torn")
        return frames

    patch.setattr(replay, "read_frames", all_or_nothing)


def damage_is_skipped_over(patch):
    """Fault 12: what follows a damaged record is believed, deletions or not."""
    from maru._journal import recovery

    patch.setattr(recovery, "trust_in", lambda *, same_boot, lost: recovery.Trust.ALL)


def statistics_walk_through_all_keys(patch):
    """Fault 13."""
    from maru._directory import Directory

    statistics = Directory.statistics

    def walk(self):
        sum(location.length for location in self._located.values())
        return statistics(self)

    patch.setattr(Directory, "statistics", walk)


def freeing_walks_through_all_keys(patch):
    """Fault 13."""
    from maru._directory.state import State

    return_region = State.return_region

    def walk(self, region_id):
        any(location.region_id == region_id for location in self.located.values())
        return_region(self, region_id)

    patch.setattr(State, "return_region", walk)


def statistics_tell_every_key(patch):
    """Fault 13."""
    from maru._server.service import Service

    describe = Service.describe

    def tell(self, *rest):
        return {**describe(self, *rest), "keys": dict.fromkeys(self.directory._located, True)}

    patch.setattr(Service, "describe", tell)


def nothing_is_evicted(patch):
    """Fault 14."""
    from maru._directory.evictor import Evictor

    patch.setattr(Evictor, "_may", lambda self, session, now: False)


def the_newest_goes_first(patch):
    """Fault 14."""
    from maru.eviction import LRU

    def make_room(self, incoming, n, held):
        victims = [key for key in reversed(self._order) if key not in held][:n]
        self.discard(victims)
        return victims, []

    patch.setattr(LRU, "make_room", make_room)


def offsets_are_not_looked_at(patch):
    """Fault 15."""
    from maru._directory.registrar import Registrar

    patch.setattr(Registrar, "_bytes_if_right", lambda self, region, part: 1)


def anybody_registers_anywhere(patch):
    """Fault 15."""
    from maru._directory import Directory

    patch.setattr(Directory, "_may_write", lambda self, by, session, region: region.session is not None)


def sigterm_takes_its_time(patch):
    """Fault 18."""
    from maru._server.server import MaruServer

    aclose = MaruServer.aclose

    async def slow(self):
        with trio.CancelScope(shield=True):
            await trio.sleep(1.2)
        await aclose(self)

    patch.setattr(MaruServer, "aclose", slow)


def answers_leave_before_they_are_written_down(patch):
    """For kills: a record waits for the next five."""
    from maru._journal.journal import Journal

    append, waiting = Journal.append, []

    def late(self, records):
        waiting.append(records)
        while len(waiting) > 5:
            append(self, waiting.pop(0))

    patch.setattr(Journal, "append", late)


def deletions_are_not_written_down(patch):
    """For kills."""
    from maru._directory.changes import Changes

    patch.setattr(Changes, "remove", lambda self, keys: self.state.remove(keys))


def what_nobody_knows_is_not_swept(patch):
    """For kills."""
    from maru._server.service import Service

    patch.setattr(Service, "take_dropped", lambda self: self.directory.take_dropped() and [])


def returns_are_forgotten_with_the_restart(patch):
    """For kills: pages that were on their way back never arrive."""
    from maru._directory import Directory

    restart = Directory.restart

    def forget(self, now):
        restart(self, now)
        for session in self._state.sessions.values():
            session.outbox.acknowledge(len(session.outbox) + session.outbox.acknowledged)

    patch.setattr(Directory, "restart", forget)


def every_frame_is_kept(patch):
    """For the hostile: memory grows."""
    from maru._server.service import Service

    handle, kept = Service.handle, []

    def keep(self, identity, frame, now):
        kept.append(frame + bytes(600))
        return handle(self, identity, frame, now)

    patch.setattr(Service, "handle", keep)


def connections_are_kept(patch):
    """For the hostile."""
    connections_do_not_end(patch)


def capabilities_are_not_looked_at(patch):
    """For the hostile."""
    from maru._server.service import Service

    patch.setattr(Service, "permits", lambda self, *shown: True)


def capabilities_have_no_epoch(patch):
    """For the hostile."""
    from maru._server import service as service_module
    from maru._server import service_own

    issue, verify = service_own.issue, service_module.verify
    patch.setattr(service_own, "issue", lambda *shown: issue(*shown[:5], 1, shown[6]))
    patch.setattr(service_module, "verify", lambda *shown: verify(*shown[:6], 1, shown[7]))


def an_unreadable_frame_costs_nothing(patch):
    """For the hostile."""
    from maru._server.service import Service
    from maru._wire import error_reply

    patch.setattr(Service, "_unreadable", lambda self, peer, exc, now: error_reply(0, 0, str(exc), "malformed", 1))


def one_bad_frame_ends_the_server(patch):
    """For the hostile."""
    from maru._server import service as service_module
    from maru.base.errors import BadMessage

    decode = service_module.decode_request

    def raise_it(code, payload):
        try:
            return decode(code, payload)
        except BadMessage as exc:
            raise RuntimeError("what is this?") from exc

    patch.setattr(service_module, "decode_request", raise_it)


def files_are_for_everybody(patch):
    """For the hostile."""
    from maru._journal import journal

    open_, os = journal.os.open, journal.os

    class Open:
        def __getattr__(self, name):
            return getattr(os, name)

        def open(self, path, flags, mode=0o777, **kwargs):
            return open_(path, flags, 0o644 if mode == 0o600 else mode, **kwargs)

    patch.setattr(journal, "os", Open())


def published_keys_are_not_protected(patch):
    """For the compatible."""
    from maru._directory import remover

    patch.setattr(remover, "_protected", lambda region, by: False)


def silence_ends_published_clients(patch):
    """For the compatible."""
    from maru._directory.published import Published

    belongs = Published._belongs

    def with_a_lease(self, connection, joined, session):
        belongs(self, connection, joined, session)
        self._leases.set(session.number, trio.current_time() + session.lease)

    patch.setattr(Published, "_belongs", with_a_lease)


def published_readers_have_no_grace(patch):
    """For the compatible."""
    from maru._directory.eviction_guard import EvictionGuard

    patch.setattr(EvictionGuard, "note_read", lambda self, keys, *rest: None)
