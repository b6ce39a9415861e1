"""The longest step of a daemon, for every message of its table at its largest.

While one step runs, no other engine is served. The list of messages is the table itself: a new one without its largest frame
here fails.
"""

import contextlib
import time

import attrs
import pytest
import trio

from backends.abc import MAX_KEY_BYTES
from offload import BatchConfig, PipelineConfig
from offload.client import SharedMemory, open_connection
from offload.daemon import _admin_messages as admin
from offload.daemon import _messages as messages
from offload.daemon._messages import MAX_KEYS, MAX_NUMBERS, MAX_TENSORS, MESSAGES, TensorLayout, encode, packed
from tests.daemon.test_admin import Operator
from tests.daemon.test_hostile import Raw, serves
from tests.support.daemons import SIZE, daemon, engine_config

LIMIT = 0.02
"""Seconds of processor time, where a checkpoint of trio costs 2.5 us; in proportion where it costs more."""
CHECKPOINT = 2.5e-6
BLOCKS = 4_096
"""Of one store: ``budget_blocks``."""

HOLDS = 64
"""That are released by one message: more are beyond the bytes of a session."""

KEYS = [at.to_bytes(4, "big") * (MAX_KEY_BYTES // 4) for at in range(MAX_KEYS)]
NAMES = [f"{at:0256}" for at in range(MAX_NUMBERS)]
SESSIONS = 256
NUMBERS = list(range(1, MAX_NUMBERS + 1))
NO_BLOCK = packed([0] * MAX_KEYS)


@attrs.frozen
class Place:
    """What a frame names: a memory that is not registered yet, a cache, and a hold of so many blocks."""

    memory: int
    cache: int
    hold: int
    held: int


def tensors(place):
    return [TensorLayout(place.memory, 0, 1, [1, 128, 1], [SIZE, 2, 1], 0)] * MAX_TENSORS


LARGEST = {
    "hello": lambda seq, place: messages.Hello(seq, 1, messages.VERSION, "n" * 256, b"c" * 256),
    "status": lambda seq, place: messages.Status(seq),
    "register_kv_cache": lambda seq, place: messages.RegisterKVCache(seq, tensors(place)),
    "store": lambda seq, place: messages.Store(
        seq, place.cache, KEYS[:BLOCKS], packed([0] * BLOCKS), depths=packed(range(BLOCKS))
    ),
    "signal": lambda seq, place: messages.Signal(seq, 1, "f" * 4_096),
    "cancel": lambda seq, place: messages.Cancel(seq, NUMBERS, 1),
    "lookup": lambda seq, place: messages.Lookup(seq, KEYS, 5.0),
    "load": lambda seq, place: messages.Load(seq, place.hold, place.cache, packed(range(place.held))),
    "exists": lambda seq, place: messages.Exists(seq, KEYS),
    "page_store": lambda seq, place: messages.PageStore(seq, SIZE),
    "reserve_write": lambda seq, place: messages.ReserveWrite(seq, KEYS),
    "commit": lambda seq, place: messages.Commit(seq, 1, bytes(MAX_KEYS)),
    "explain": lambda seq, place: messages.Explain(seq, KEYS),
    "stats": lambda seq, place: messages.Stats(seq),
    "delete": lambda seq, place: messages.Delete(seq, KEYS, 5.0),
    "release": lambda seq, place: messages.Release(seq, NUMBERS),
    "unregister_kv_cache": lambda seq, place: messages.UnregisterKVCache(seq, place.cache),
}
"""The largest frame of each message, in an order in which those that are loaded were stored."""

ADMIN_LARGEST = {
    "hello": lambda token: (admin.AdminHello, token),
    "describe": lambda token: (admin.Describe,),
    "inspect": lambda token: (admin.Inspect, KEYS[: admin.MAX_ADMIN_KEYS]),
    "list_quarantine": lambda token: (admin.ListQuarantine,),
    "release_quarantine": lambda token: (admin.ReleaseQuarantine, NAMES, KEYS[: admin.MAX_ADMIN_KEYS]),
    "reload": lambda token: (admin.Reload,),
    "set_log_level": lambda token: (admin.SetLogLevel, "warning"),
    "drain": lambda token: (admin.Drain,),
}
"""The largest frame of each of the operators' messages; the daemon ends with the last one."""


class Steps(trio.abc.Instrument):
    """The processor time of the longest step of any task but the test's own, since it was set to 0."""

    def __init__(self):
        self.longest, self.task, self._began = 0.0, "", 0.0

    def before_task_step(self, task):
        self._began = time.thread_time()

    def after_task_step(self, task):
        spent = time.thread_time() - self._began
        if spent > self.longest and "test_" not in task.name:
            self.longest, self.task = spent, task.name


async def longest_steps(path):
    """Send each message at its largest; the longest step and its task, by message."""
    found, steps = {}, Steps()
    tiers = {"host": {"type": "memory", "capacity_bytes": 64 << 20}}
    pipeline = PipelineConfig(batch_config=BatchConfig(min_batch_size=1), on_destination_full="evict")
    async with (
        daemon(path, block_bytes=SIZE, engine=engine_config(tiers=tiers, pipeline=pipeline)) as server,
        open_connection(server.url) as connection,
    ):
        session, memory, large = await connection.wait_session(), SharedMemory(2 * SIZE), SharedMemory(BLOCKS * SIZE)
        ours = server._service.sessions.by_token(session.token)
        number = await connection.hand_over(large.descriptor, session)
        layout = [TensorLayout(number, 0, 1, [BLOCKS, SIZE], [SIZE, 1], 0)]
        cache = (await connection.ask(lambda seq: messages.RegisterKVCache(seq, layout), messages.Registered)).cache
        unregistered = await connection.hand_over(memory.descriptor, session)
        trio.lowlevel.add_instrument(steps)
        for at, (name, make) in enumerate(LARGEST.items()):
            while name == "release" and len(ours.holds) < HOLDS:
                await connection.ask(lambda seq: messages.Lookup(seq, KEYS[:BLOCKS], 5.0), messages.Found)
            hold = max(ours.holds, default=0)
            place = Place(unregistered, cache, hold, len(ours.holds[hold].keys) if hold else 0)
            frame = encode(make(1_000_000 + at, place))
            steps.longest, steps.task = 0.0, ""
            began = time.thread_time()
            server._service.handle(ours.peer, frame)
            here = time.thread_time() - began
            with trio.fail_after(60):
                while ours.requests:  # noqa: ASYNC110
                    await trio.sleep(1e-3)
            found[name] = max((here, "handle"), (steps.longest, steps.task))
        trio.lowlevel.remove_instrument(steps)
        await serves(server)
    return found


async def longest_steps_of_operators(path):
    """Send each of the operators' messages at its largest, with many keys and sessions; the longest step by message."""
    found, steps = {}, Steps()
    async with (
        daemon(path, block_bytes=SIZE, max_sessions=SESSIONS, engine=engine_config()) as server,
        open_connection(server.url) as connection,
        contextlib.AsyncExitStack() as stack,
    ):
        await connection.wait_session()
        for _ in range(SESSIONS - 1):
            await stack.enter_context(Raw(server)).hello()
        await connection.ask(lambda seq: messages.Exists(seq, KEYS), messages.Existing)
        trio.lowlevel.add_instrument(steps)
        operator = await stack.enter_async_context(Operator(server))
        for name, make in ADMIN_LARGEST.items():
            steps.longest, steps.task = 0.0, ""
            kind, *fields = make(operator.token)
            answer = await operator.ask(kind, *fields)
            found[name] = steps.longest, steps.task, type(answer)
        trio.lowlevel.remove_instrument(steps)
    return found


async def checkpoint_time():
    began = time.thread_time()
    for _ in range(2_000):
        await trio.lowlevel.checkpoint()
    return (time.thread_time() - began) / 2_000


def test_every_message_has_a_largest_frame():
    assert sorted(LARGEST) == sorted(kind.name for kind in MESSAGES)
    assert sorted(ADMIN_LARGEST) == sorted(kind.name for kind in admin.ADMIN_MESSAGES)


async def test_every_message_is_answered_at_its_largest(path):
    assert list(await longest_steps(path)) == list(LARGEST)


async def test_every_message_of_operators_is_answered_at_its_largest(path):
    answers = {name: kind for name, (_, _, kind) in (await longest_steps_of_operators(path)).items()}
    # There is no copy of these names, and no file to read again.
    refused = dict.fromkeys(["release_quarantine", "reload"], messages.Refused)
    assert answers == {kind.name: kind.answer for kind in admin.ADMIN_MESSAGES} | refused


@pytest.mark.long
async def test_no_step_for_an_operator_holds_up_engines(path):
    limit = LIMIT * max(1.0, await checkpoint_time() / CHECKPOINT)
    runs = [await longest_steps_of_operators(path) for _ in range(3)]
    best = {name: min(run[name][:2] for run in runs) for name in ADMIN_LARGEST}
    assert not {name: step for name, step in best.items() if step[0] > limit}, best


@pytest.mark.long
async def test_no_step_holds_up_other_engines(path):
    limit = LIMIT * max(1.0, await checkpoint_time() / CHECKPOINT)
    runs = [await longest_steps(path) for _ in range(3)]
    best = {name: min(run[name] for run in runs) for name in LARGEST}
    assert not {name: step for name, step in best.items() if step[0] > limit}, best
