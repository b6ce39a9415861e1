"""The operators' listener: who is let in, what each message does, and that nobody else can."""

import errno
import logging
import os
import shutil
import stat
import threading
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from backends.base.slots import SlotTier
from backends.base.threads import run_in_thread
from maru.transport import ChannelConnection
from offload import NO_WAIT, BatchConfig, ConfigError, PipelineConfig, Status
from offload.client import SharedBlocks, SharedMemory, open_client, open_connection
from offload.daemon import DaemonConfig
from offload.daemon import _admin_messages as messages
from offload.daemon._admin_messages import (
    ADMIN_MESSAGES,
    ADMIN_NAME_OF,
    AdminHello,
    Admitted,
    Described,
    Drain,
    Drained,
    Inspect,
    Inspected,
    ListQuarantine,
    Quarantines,
    ReleaseQuarantine,
    Reload,
    Reloaded,
    SetLogLevel,
    decode_admin_answer,
    decode_admin_request,
)
from offload.daemon._messages import (
    MESSAGES,
    BadFrame,
    Done,
    Refusal,
    Refused,
    Signal,
    State,
    Store,
    Stored,
    encode,
    packed,
)
from offload.daemon._messages import Status as AskStatus
from offload.daemon._operators import Operators
from tests.daemon.test_daemon import KEYS, begin_store, cache_of, registered, store, until
from tests.daemon.test_hostile import Raw
from tests.daemon.test_messages import SAMPLES as ENGINES
from tests.daemon.test_quotas import HIS, tenants
from tests.support.daemons import SIZE, daemon, engine_config

TOKEN = b"the token of operators"
SAMPLES = [
    AdminHello(1, TOKEN),
    messages.Describe(2),
    Inspect(3, [b"a"], "tenant"),
    Drain(4),
    ListQuarantine(5),
    ReleaseQuarantine(6, ["memory/1"], [b"a"]),
    Reload(7),
    SetLogLevel(8, "debug"),
]


def is_there(path):
    return os.path.exists(path)


def token_in(directory):
    return Path(f"{directory}/admin.token").read_bytes().strip()


class Operator:
    """Somebody who asks, and has shown the token that lies in the daemon's directory or another one."""

    def __init__(self, server, token=None):
        self.connection = ChannelConnection(f"{server.directory}/admin.sock")
        self.token = token_in(server.directory) if token is None else token
        self.seq = 0

    async def __aenter__(self):
        self.first = await self.ask(AdminHello, self.token)
        return self

    async def __aexit__(self, *exc):
        self.connection.close()

    async def ask(self, kind, *fields):
        self.seq += 1
        self.connection.send(encode(kind(self.seq, *fields)))
        return await self.answer()

    async def answer(self):
        with trio.fail_after(30):
            while True:
                try:
                    return decode_admin_answer(self.connection.receive())
                except BlockingIOError:
                    await trio.sleep(1e-3)

    async def is_over(self):
        with trio.fail_after(10):
            while True:
                try:
                    self.connection.receive()
                except BlockingIOError:
                    await trio.sleep(1e-3)
                except OSError:
                    return True


# --- the table ----------------------------------------------------------------------------------------------------------


def test_no_message_of_operators_has_the_code_of_one_of_engines():
    codes = {kind.code for kind in ADMIN_MESSAGES}
    assert len(codes) == len({kind.name for kind in ADMIN_MESSAGES}) == len(ADMIN_MESSAGES)
    assert not codes & {kind.code for kind in MESSAGES}
    assert {type(sample) for sample in SAMPLES} == set(ADMIN_NAME_OF)
    for kind in ADMIN_MESSAGES:
        assert kind.answer.__struct_config__.tag > 128 > kind.code > 0
        assert kind.purpose.endswith(".")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_request_comes_as_it_was_sent(sample):
    assert decode_admin_request(encode(sample)) == sample


@pytest.mark.parametrize("sample", ENGINES, ids=lambda sample: type(sample).__name__)
def test_what_engines_say_is_no_message_here(sample):
    with pytest.raises(BadFrame):
        decode_admin_request(encode(sample))


# --- who may ask --------------------------------------------------------------------------------------------------------


def test_only_who_has_shown_the_token_may_ask_and_one_thing_at_a_time():
    operators = Operators(TOKEN)
    with pytest.raises(Refusal, match="send the token"):
        operators.begin(b"peer")
    assert not operators.show(b"peer", TOKEN[:-1]) and operators.wrong == 1
    with pytest.raises(Refusal, match="send the token"):
        operators.begin(b"peer")
    assert operators.show(b"peer", TOKEN)
    operators.begin(b"peer")
    with pytest.raises(Refusal, match="one request at a time"):
        operators.begin(b"peer")
    operators.end(b"peer")
    operators.begin(b"peer")
    operators.gone(b"peer")
    with pytest.raises(Refusal, match="send the token"):
        operators.begin(b"peer")


def test_a_new_token_has_to_be_shown_and_the_same_one_does_not():
    operators = Operators(TOKEN)
    operators.show(b"peer", TOKEN)
    operators.change(TOKEN)
    operators.begin(b"peer")
    operators.end(b"peer")
    operators.change(b"another token of operators")
    with pytest.raises(Refusal, match="send the token"):
        operators.begin(b"peer")


@pytest.mark.parametrize(
    ("mode", "text", "why"),
    [
        (0o640, TOKEN, "chmod 600"),
        (0o600, b"short", "16 to 256 bytes"),
        (0o600, b"x" * 300, "16 to 256 bytes"),
        (0o600, b"", "16 to 256 bytes"),
    ],
)
async def test_a_daemon_with_a_token_that_cannot_be_does_not_begin(tmp_path, path, mode, text, why):
    file = tmp_path / "token"
    file.write_bytes(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=why):
        async with daemon(path, admin_token_file=str(file)):
            pass


async def test_the_daemon_writes_a_token_that_only_its_user_reads_and_removes_it(path):
    async with daemon(path) as server:
        token = f"{path}/admin.token"
        assert stat.S_IMODE(os.stat(token).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(f"{path}/admin.sock").st_mode) == 0o600
        assert server.admin_url == f"ipc://{path}/admin.sock"
        first = token_in(path)
    assert not is_there(token)
    async with daemon(path):
        assert token_in(path) != first


async def test_a_wrong_token_is_refused_and_its_connection_ends(path):
    async with daemon(path) as server, Operator(server, b"a token that is not it") as operator:
        assert isinstance(operator.first, Refused) and operator.first.kind == "credential"
        assert await operator.is_over()
        async with Operator(server) as other:
            assert isinstance(other.first, Admitted) and other.first.pid == os.getpid()


async def test_without_the_token_everything_is_refused(path):
    async with daemon(path) as server:
        for sample in SAMPLES[1:]:
            operator = Operator(server)
            operator.connection.send(encode(sample))
            assert (await operator.answer()).kind == "credential", sample
            operator.connection.close()
        assert server.state == "ready" and not server.drain_asked.is_set()


async def test_the_listener_of_engines_refuses_them_and_ends_the_session(path):
    async with daemon(path) as server:
        for sample in SAMPLES:
            with Raw(server) as raw:
                await raw.hello()
                raw.send(sample)
                assert await raw.is_over(), sample
        assert server.state == "ready" and not server.drain_asked.is_set()


async def test_a_frame_that_is_no_message_costs_its_connection_and_no_other(path):
    async with daemon(path) as server, Operator(server) as operator, Operator(server) as other:
        operator.connection.send(b"\xc1")
        assert await operator.is_over()
        assert isinstance(await other.ask(messages.Describe), Described)


@pytest.mark.parametrize(
    ("knobs", "listens"),
    [({}, True), ({"admin": "off"}, False), ({"tenants": True}, False), ({"tenants": True, "admin": "ipc"}, True)],
)
async def test_where_there_are_tenants_a_token_that_they_could_read_is_not_written_unasked(
    path, tmp_path, knobs, listens
):
    knobs = dict(knobs)
    if knobs.pop("tenants", False):
        knobs["tenants_file"] = tenants(tmp_path)
    async with daemon(path, **knobs) as server:
        assert bool(server.admin_url) == is_there(f"{path}/admin.sock") == listens
        assert is_there(f"{path}/admin.token") == listens


async def test_the_listener_may_be_in_another_directory_with_a_token_of_its_own(path, tmp_path):
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    (tmp_path / "token").chmod(0o600)
    knobs = {"admin": f"ipc://{path}-admin/it.sock", "admin_token_file": str(tmp_path / "token")}
    async with daemon(path, tenants_file=tenants(tmp_path), **knobs) as server:
        assert sorted(os.listdir(path)) == ["daemon.lock", "daemon.sock", "memory.sock"]
        operator = Operator.__new__(Operator)
        operator.connection, operator.token, operator.seq = ChannelConnection(f"{path}-admin/it.sock"), TOKEN, 0
        async with operator:
            assert isinstance(operator.first, Admitted)
            (tmp_path / "token").write_bytes(b"another token of operators")
            server.reload(DaemonConfig(runtime_dir=path, **knobs))
            assert (await operator.ask(ListQuarantine)).kind == "credential"


async def test_its_token_is_beside_the_socket_of_operators(path):
    async with daemon(path, admin=f"ipc://{path}-admin/it.sock"):
        assert is_there(f"{path}-admin/it.token") and not is_there(f"{path}/admin.token")
        assert stat.S_IMODE(os.stat(f"{path}-admin").st_mode) == 0o700


async def test_a_file_that_no_daemon_made_is_no_place_for_its_token(path):
    os.makedirs(f"{path}-ops", 0o700)
    token = trio.Path(f"{path}-ops/it.token")
    await token.write_bytes(TOKEN)
    with pytest.raises(ConfigError, match=r"it.token already exists, and is not a token of a daemon"):
        async with daemon(path, admin=f"ipc://{path}-ops/it.sock"):
            pass
    assert await token.read_bytes() == TOKEN
    await token.write_bytes(b"of-a-daemon-that was killed")
    async with daemon(path, admin=f"ipc://{path}-ops/it.sock"):
        own = await token.read_bytes()
        assert own.startswith(b"of-a-daemon-") and b"killed" not in own
        await token.write_bytes(b"of-a-daemon-" + b"2" * 64)
    assert await token.exists() and own != await token.read_bytes(), "it was not this daemon's any more"


async def test_a_token_that_cannot_be_read_now_is_not_taken_for_anothers(path, monkeypatch):
    os.makedirs(f"{path}-ops", 0o700)
    token = trio.Path(f"{path}-ops/it.token")
    await token.write_bytes(b"of-a-daemon-that was killed")
    real = open

    def refuse(name, *args, **options):
        if name == str(token):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(name, *args, **options)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        async with daemon(path, admin=f"ipc://{path}-ops/it.sock"):
            pass


async def test_a_daemon_that_finds_its_socket_taken_leaves_the_token(path):
    async with daemon(path, admin=f"ipc://{path}-ops/it.sock"):
        own = await trio.Path(f"{path}-ops/it.token").read_bytes()
        with pytest.raises(ConfigError, match="another server listens there"):
            async with daemon(f"{path}2", admin=f"ipc://{path}-ops/it.sock"):
                pass
        assert await trio.Path(f"{path}-ops/it.token").read_bytes() == own


async def test_a_directory_that_others_may_enter_is_refused(path):
    os.makedirs(f"{path}-open/something", 0o755)
    with pytest.raises(ConfigError, match=r"daemon\.admin"):
        async with daemon(path, admin=f"ipc://{path}-open/it.sock"):
            pass


async def test_whether_it_lives_may_be_asked_without_a_session_and_without_a_credential(path, tmp_path):
    async with daemon(path, tenants_file=tenants(tmp_path)) as server:
        with Raw(server) as raw:
            raw.send(AskStatus(1))
            assert (await raw.answer()) == State(1, server.epoch, "ready", 0, 0)
            raw.send(Store(2, 1, [b"a"], packed([0])))
            assert (await raw.answer()).kind == "session"


# --- looking ------------------------------------------------------------------------------------------------------------


async def test_it_says_what_it_is_and_who_is_there(path):
    async with daemon(path) as server, Operator(server) as operator:
        cache = cache_of()
        async with open_client(cache, server.url, name="vllm") as engine:
            await store(engine, cache)
            told = await operator.ask(messages.Describe)
            assert told.sections["daemon"]["state"] == "ready" and told.sections["daemon"]["url"] == server.url
            assert told.sections["counters"]["tier.host.blocks"] == len(KEYS)
            (tier,) = told.tiers
            assert (tier.name, tier.kind, tier.blocks, tier.breaker) == ("host", "MemoryTier", len(KEYS), "closed")
            (session,) = told.sessions
            assert session.name == "vllm" and session.caches == 1 and session.silent < 30


async def test_an_operator_sees_the_blocks_of_every_tenant(path, tmp_path):
    async with daemon(path, tenants_file=tenants(tmp_path), admin="ipc") as server, Operator(server) as operator:
        cache = cache_of()
        refused = await operator.ask(Inspect, KEYS[:1])
        assert refused.kind == "unavailable" and "register a cache" in refused.text
        async with open_client(cache, server.url, credential=HIS) as engine:
            await store(engine, cache)
        told = await operator.ask(Inspect, [*KEYS, b"nowhere"], "a")
        assert isinstance(told, Inspected) and told.usable == len(KEYS)
        assert told.blocks[0].tiers == ["host"] and told.blocks[-1].cause == "unknown"
        assert (await operator.ask(Inspect, KEYS, "b")).usable == 0
        assert (await operator.ask(Inspect, KEYS, "c")).kind == "unknown"


async def test_what_an_operator_waits_for_ends_with_its_connection(path):
    async with daemon(path) as server:
        cache, ended = cache_of(), trio.Event()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
        began = trio.Event()

        async def slowly(*args, **more):
            try:
                began.set()
                await trio.sleep_forever()
            finally:
                ended.set()

        server.engine.explain = slowly
        operator = Operator(server)
        async with operator:
            operator.connection.send(encode(Inspect(9, KEYS)))
            await began.wait()
            operator.connection.send(encode(ListQuarantine(10)))
            assert (await operator.answer()).kind == "full"
        with trio.fail_after(10):
            await ended.wait()
        async with Operator(server) as other:
            assert isinstance(await other.ask(ListQuarantine), Quarantines)


async def test_a_daemon_may_end_while_an_operator_waits(path):
    async with daemon(path) as server:
        cache, began = cache_of(), trio.Event()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)

        async def slowly(*args, **more):
            began.set()
            await trio.sleep_forever()

        server.engine.explain = slowly
        async with Operator(server) as operator:
            operator.connection.send(encode(Inspect(9, KEYS)))
            await began.wait()
            server._nursery.cancel_scope.cancel()
            assert await operator.is_over()


# --- running it ---------------------------------------------------------------------------------------------------------


async def test_a_drain_is_answered_when_what_was_under_way_has_ended(path):
    async with (  # noqa: SIM117
        daemon(path, drain_timeout=30.0) as server,
        Operator(server) as operator,
        open_connection(server.url) as connection,
    ):
        async with trio.open_nursery() as nursery:
            number = await registered(connection, cache_of())
            seq, answers = await begin_store(nursery, connection, number, KEYS)
            operator.connection.send(encode(Drain(9)))
            await until(lambda: server.state == "draining")
            async with Operator(server) as other:
                other.connection.send(encode(Drain(3)))
                await connection.ask(partial(Signal, store=seq), Done)
                assert await operator.answer() == Drained(9, server.epoch, 0, 0)
                assert await other.answer() == Drained(3, server.epoch, 0, 0)
            assert answers[0].status == "complete"
            assert await server.drain() == server._dropped  # again: the same
            nursery.cancel_scope.cancel()


async def test_what_a_drain_drops_is_told(path):
    async with (  # noqa: SIM117
        daemon(path, drain_timeout=0.0) as server,
        Operator(server) as operator,
        open_connection(server.url) as connection,
    ):
        async with trio.open_nursery() as nursery:
            number = await registered(connection, cache_of())
            await begin_store(nursery, connection, number, KEYS)
            answer = await operator.ask(Drain)
            assert (answer.stores, answer.others) == (1, 0) and server.drain_asked.is_set()
            nursery.cancel_scope.cancel()


async def test_a_drain_goes_on_when_who_has_asked_for_it_is_gone_or_cancelled(path):
    async with daemon(path, drain_timeout=30.0) as server, open_connection(server.url) as connection:  # noqa: SIM117
        async with trio.open_nursery() as nursery:
            number = await registered(connection, cache_of())
            seq, answers = await begin_store(nursery, connection, number, KEYS)
            async with Operator(server) as operator:
                operator.connection.send(encode(Drain(9)))
                await until(lambda: server.state == "draining")
            with trio.move_on_after(0):
                await server.drain()
            await connection.ask(partial(Signal, store=seq), Done)
            await until(lambda: server._dropped is not None)
            assert answers[0].status == "complete" and not server._dropped
            nursery.cancel_scope.cancel()


async def test_a_daemon_may_be_left_in_the_midst_of_a_drain(path):
    async with trio.open_nursery() as nursery, daemon(path, drain_timeout=30.0) as server:
        connection = await enter(nursery, server.url)
        number = await registered(connection, cache_of())
        await begin_store(nursery, connection, number, KEYS)
        server.ask_drain(lambda dropped: None)
        await until(lambda: server.state == "draining")
        assert server.statistics()["requests"] == 1
        nursery.cancel_scope.cancel()
    assert server._dropped is None and not is_there(f"{path}/admin.sock")


async def enter(nursery, url):
    """A connection that lasts as long as a nursery."""

    async def keep(task_status):
        async with open_connection(url) as connection:
            task_status.started(connection)
            await trio.sleep_forever()

    return await nursery.start(keep)


async def test_tenants_that_come_end_a_listener_whose_token_they_could_read(path, tmp_path):
    async with daemon(path) as server, Operator(server) as operator, Operator(server) as other:

        async def reload():
            server.reload(attrs.evolve(server.config, tenants_file=tenants(tmp_path)))
            return []

        server.admin.reload = reload
        assert isinstance(await operator.ask(Reload), Reloaded)
        await until(lambda: not is_there(f"{path}/admin.token"))
        assert (await other.ask(messages.Describe)).kind == "credential"
        assert await operator.is_over() and await other.is_over()
        assert server.admin_url == "" and not is_there(f"{path}/admin.sock")


async def test_a_token_that_was_removed_is_written_again(path, monkeypatch):
    monkeypatch.setattr("offload.daemon._server.LOOK", 0.01)
    async with daemon(path) as server:
        before = token_in(path)
        shutil.rmtree(path)
        await until(lambda: is_there(f"{path}/admin.token"))
        assert token_in(path) == before
        assert stat.S_IMODE(os.stat(f"{path}/admin.token").st_mode) == 0o600
        async with Operator(server) as operator:
            assert isinstance(await operator.ask(messages.Describe), Described)
    assert not is_there(f"{path}/admin.token")


async def test_settings_are_read_again_by_whom_has_the_file(path):
    async with daemon(path) as server, Operator(server) as operator:
        assert (await operator.ask(Reload)).kind == "unavailable"

        async def refuses():
            return ["daemon.max_sessions"]

        server.admin.reload = refuses
        assert await operator.ask(Reload) == Reloaded(3, server.epoch, ["daemon.max_sessions"])

        async def fails():
            raise ConfigError("daemon.lease", 0, "must be more")

        server.admin.reload = fails
        refused = await operator.ask(Reload)
        assert refused.kind == "invalid" and "daemon.lease" in refused.text


async def test_the_log_level_is_set(path):
    before = logging.getLogger("offload").level
    try:
        async with daemon(path) as server, Operator(server) as operator:
            assert isinstance(await operator.ask(SetLogLevel, "error"), Done)
            assert logging.getLogger("offload").level == logging.ERROR
    finally:
        logging.getLogger("offload").setLevel(before)


# --- quarantine ---------------------------------------------------------------------------------------------------------


async def test_a_copy_without_a_proven_end_is_listed_and_its_room_comes_back_when_it_is_released(path, monkeypatch):
    over = threading.Event()

    async def hang(self, *args):
        await run_in_thread(over.wait)  # cancelled, this returns, and its thread goes on
        return {}

    monkeypatch.setattr(SlotTier, "write", hang)
    impatient = PipelineConfig(batch_config=BatchConfig(min_batch_size=1), transfer_timeout=0.05)
    async with daemon(path, engine=engine_config(pipeline=impatient)) as server, Operator(server) as operator:  # noqa: SIM117
        async with open_connection(server.url) as connection:
            cache = SharedBlocks(SharedMemory(8 * SIZE), SIZE)
            number = await registered(connection, cache)
            answer = await connection.ask(lambda seq: Store(seq, number, KEYS[:3], packed(range(3))), Stored)
            assert answer.status == "unproven"
            (copy,) = (await operator.ask(ListQuarantine)).copies
            assert copy.blocks == 3 and copy.keys == KEYS[:3] and copy.seconds >= 0
            assert server.statistics()["tier.host.reserved_blocks"] == 3
            wrong = await operator.ask(ReleaseQuarantine, [copy.name, "elsewhere/7"])
            assert wrong.kind == "unknown" and "elsewhere/7" in wrong.text
            assert server.statistics()["quarantined"] == 1  # nothing was changed
            over.set()  # by now it is over, as the operator knows
            assert (await operator.ask(ReleaseQuarantine, [copy.name])).count == 1
            assert not (await operator.ask(ListQuarantine)).copies
            assert server.statistics()["tier.host.reserved_blocks"] == 0
            assert (await operator.ask(ReleaseQuarantine, [copy.name])).kind == "unknown"


async def test_a_withheld_key_is_listed_and_served_again_when_it_is_released(path):
    async with daemon(path) as server, Operator(server) as operator:
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            server.engine._shadow.withheld.add(KEYS[:2])  # as the shadow check does where it finds another block
            told = await operator.ask(ListQuarantine)
            assert told.withheld == KEYS[:2] and told.withheld_keys == 2
            assert (await operator.ask(ReleaseQuarantine, [], [b"another one"])).kind == "unknown"
            assert (await operator.ask(ReleaseQuarantine, [], KEYS[:2])).count == 2
            async with await engine.lookup(KEYS) as hit:
                assert list(hit.keys) == KEYS
            handle = await engine.store(cache.external([0], KEYS[:1]), NO_WAIT)
            assert (await handle.wait()).status is Status.COMPLETE
