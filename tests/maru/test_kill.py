"""``kill -9``, of the server under load and of its clients: nothing that was acknowledged is lost, and nothing is wrong.

The load is in :mod:`maru_load`: five clients of ours in both faces, and a published one.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest

from tests.support import maru_load
from tests.support.maru_actors import BE, FACES, PublishedOwner, client
from tests.support.maru_load import Load, Reader
from tests.support.maru_processes import PATIENCE, TCP, Actor, Server, eventually, temporary_pool
from tests.support.published import PublishedClient
from tests.support.published_wire import Ask

KNOWN = re.compile(
    r"maru\.(lock|pool|state|sock|index\.[0-9]+)|(descriptors|channel|tcp)\.sock|compaction\.lock|(journal|snapshot)\.[0-9]+|maru_[0-9]+\.dat"
    r"|snapshot\.[0-9.]+(server\.)?tmp"  # of a compaction that is at work
)


@pytest.fixture
def pool():
    with temporary_pool() as path:
        yield path


def assert_no_stale_file(server: Server) -> None:
    """Exactly the regions that the server lists are there, and nothing that nobody knows."""

    def agree() -> bool:
        with PublishedClient(server.ipc) as raw:
            listed = raw.ask(Ask.LIST_ALLOCATIONS)["allocations"]
        return server.region_files() == {f"maru_{handle['region_id']}.dat" for handle in listed}

    eventually(agree)
    unknown = [name for name in os.listdir(server.pool) if not KNOWN.fullmatch(name)]
    assert not unknown


def stand_still(server: Server, seconds: float) -> None:
    """For so long; 0: not at all."""
    if seconds:
        with server.stopped():
            time.sleep(seconds)


def kill_under_load(
    server: Server,
    cycles: int,
    seed: int,
    *,
    check_every: int,
    stopped: float = 0.0,
    quiet: Callable[[], object] | None = None,
) -> list[float]:
    """Kill and start again so often, and look every now and then. How long each start took.

    Args:
        server: with published clients, of short grace: they cannot say that they are back.
        cycles: how often.
        seed: of how long it is left alone.
        check_every: so many cycles.
        stopped: seconds for which it stands still, before each kill and after each start.
        quiet: to be called when it has been started, and the quiet time shall be over.
    """
    dice = random.Random(seed)
    waited = []
    published = server.tcp if TCP[0] in server.options else server.ipc
    with Load(published, server.ipc, seed) as load:
        load.go()
        for cycle in range(1, cycles + 1):
            time.sleep(dice.uniform(0.05, 0.13))  # of these, clients wait TIMEOUT for the server of before
            # On a busy machine somebody may fall behind, and a kill that hits nobody's work shows nothing.
            load.wait(lambda cycle=cycle: all(worker.done > cycle for worker in load.workers))
            load.wait(
                lambda cycle=cycle: all(reader.views > cycle for reader in load.workers if isinstance(reader, Reader))
            )
            stand_still(server, stopped)
            server.restart()
            waited.append(server.waited)
            stand_still(server, stopped)
            if cycle % check_every == 0 or cycle == cycles:
                time.sleep(0.05)
                with load.at_rest():
                    (quiet or partial(server.skip, 12.0))()
                    load.check()
                    assert_no_stale_file(server)
            assert not load.findings, f"in cycle {cycle} with seed {seed}: {load.findings[:10]}"
        with load.at_rest():  # and a client that was not there says the same
            everything = [key for worker in load.workers for key in getattr(worker, "kept", ())]
            with client("blocking", server.ipc, pool_size=0) as auditor:
                assert set(auditor.get(everything, 1024)) == {"right"}
            assert len(everything) > min(100, cycles)
        over_index = load.found_here()
        held = load.held_by_board()
        print(f"\n{cycles} times kill -9: {load}; found over the index: {over_index}; held by boards: {held}")
        assert min(over_index) > cycles, "the index must be read under the kills"
        assert sum(held) > cycles, "pages must be held by boards under the kills"
        readers = [worker for worker in load.workers if isinstance(worker, Reader)]
        assert all(worker.cut_off or worker in readers for worker in load.workers), f"a kill must hit somebody: {load}"
    assert not load.findings, f"with seed {seed}: {load.findings[:10]}"
    return waited


SOON = ("--v1-read-grace", "5")
"""What published clients read stays no longer after a restart than their sessions do."""


def show(waited: list[float]) -> None:
    milliseconds = sorted(1e3 * seconds for seconds in waited)
    print(
        f"ready again after kill -9: {statistics.median(milliseconds):.0f} ms in the median, {milliseconds[-1]:.0f} ms at most"
    )


def test_a_server_killed_50_times_under_load_loses_nothing_and_says_nothing_wrong(pool):
    with Server(pool, *SOON, "--segment-bytes", "64KiB", skips=True) as server:
        show(kill_under_load(server, 50, seed=int(os.environ.get("MARU_SEED", "7")), check_every=10))


@pytest.mark.long
@pytest.mark.parametrize("sync", ["never", "each"])
def test_a_server_killed_500_times_under_load_loses_nothing_and_says_nothing_wrong(pool, sync):
    with Server(pool, *TCP, *SOON, "--segment-bytes", "64KiB", "--journal-sync", sync, skips=True) as server:
        show(kill_under_load(server, 500, seed=11, check_every=5))


@pytest.mark.long
def test_a_server_stopped_and_killed_in_turn_under_load_ends_nobodys_session(pool, monkeypatch):
    """It stands still for longer than a lease and the grace, before it is killed and when it has just come up."""
    monkeypatch.setitem(maru_load.PATIENT, "lease", 2.0)
    options = ("--segment-bytes", "64KiB", "--session-lease", "1.0", "--v1-read-grace", "1.0")
    with Server(pool, *options) as server:
        kill_under_load(server, 6, seed=13, check_every=3, stopped=3.5, quiet=partial(time.sleep, 2.5))
    ours = set(re.findall(r"session ([0-9]+) of ", server.text))
    assert ours and not ours & set(re.findall(r"session ([0-9]+) is over", server.text))


@pytest.mark.parametrize("face", FACES)
def test_clients_killed_in_turn_leave_orphans_that_are_read_and_then_make_room(pool, face):
    """Three regions fit. Each client owns one, is killed in the middle of a store, and is succeeded by the next."""
    options = ("--capacity-bytes", "6MiB", "--v1-read-grace", "0.0")
    with Server(pool, *options, skips=True) as server, client("blocking", server.ipc, lease=60.0) as survivor:
        survivor.put(["mine"])
        for number in range(4):
            keys = [f"{number} {at}" for at in range(6)]
            in_the_middle = [f"{number} in the middle {at}" for at in range(2)]  # with more, it would evict its own
            with Actor(BE, face, server.ipc, {"lease": 10.0}) as victim:
                assert eventually(lambda keys=keys, victim=victim: victim.ask("put", keys) == ["NEW"] * 6)
                assert victim.ask("hold", keys[0]) == victim.ask("pin", "mine") == [True]
                victim.tell("put", in_the_middle)
                victim.kill()
            assert survivor.get(keys) == ["right"] * 6
            assert set(survivor.get(in_the_middle)) <= {"right", "missing"}
            survivor.beat()
            server.skip(20.0)
            eventually(lambda: server.facts()["sessions"] == 1 and server.facts()["pinned"] == 0)
            if number == 1:
                server.restart()
            assert survivor.get(["mine", *keys]) == ["right"] * 7
            assert_no_stale_file(server)
        assert len(server.region_files()) == 3
        assert survivor.get(["0 0", "3 0"]) == ["missing", "right"]  # the longest abandoned went first
        assert survivor.delete(["mine"]) == ["DELETED"]


def test_server_and_clients_killed_together_leave_what_was_acknowledged(pool):
    """Nobody comes back. The next server starts with orphans only, quiet until the last lease is over, and then has room."""
    options = ("--capacity-bytes", "4MiB", "--v1-read-grace", "0.0")
    with Server(pool, *options, skips=True) as server:
        for number, faces in enumerate((("trio", "blocking"), ("blocking", "trio"))):
            with (
                Actor(BE, faces[0], server.ipc, {"lease": 10.0}) as one,
                Actor(BE, faces[1], server.ipc, {"lease": 10.0}) as two,
            ):
                eventually(lambda one=one, number=number: one.ask("put", [f"{number} one"]) == ["NEW"])
                eventually(lambda two=two, number=number: two.ask("put", [f"{number} two"]) == ["NEW"])
                server.kill()
                one.kill()
                two.kill()
            server.start()
            with client("blocking", server.ipc, pool_size=0) as reader:
                assert reader.get([f"{number} one", f"{number} two"]) == ["right"] * 2
            assert server.facts()["sessions"] == 2
            server.skip(20.0)
            eventually(lambda: server.facts()["sessions"] == 0)
            assert_no_stale_file(server)
        assert server.facts()["abandoned"] == 2


HEIR = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1] + "/maru.lock", os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
os.ftruncate(fd, 0)
if os.fork():
    os.pwrite(fd, b"%d\\n" % os.getpid(), 0)
    os._exit(0)
os.close(1)
time.sleep(0.3)
"""


def test_a_server_starts_although_a_child_of_the_killed_one_has_the_lock_for_a_moment_longer(pool):
    """Killed while it starts a compaction, between fork and exec: seen once in some thousand kills."""
    with Server(pool) as server, client("blocking", server.ipc) as owner:
        owner.put(["k"])
        server.kill()
        # It says that it has the lock, dies, and leaves a child that has it, too.
        subprocess.run([sys.executable, "-c", HEIR, str(pool)], check=True, stdout=subprocess.PIPE, timeout=PATIENCE)
        server.start()
        assert server.waited > 0.1
        assert eventually(lambda: owner.get(["k"])) == ["right"]


# --- how long it takes -----------------------------------------------------------------------------------------------


def fill(server: Server, keys: int) -> PublishedOwner:
    """So many keys, by a published client, whose bytes nobody looks at."""
    owner = PublishedOwner(server.ipc, "filler", region=keys * 64)
    numbers = iter(range(keys))
    while some := list(itertools.islice(numbers, 4096)):
        entries = [
            {"key": f"{number:064x}", "region_id": owner.handle["region_id"], "kv_offset": number * 64, "kv_length": 64}
            for number in some
        ]
        assert owner.ask(Ask.BATCH_REGISTER_KV, entries=entries)["results"] == [True] * len(some)
    return owner


def start_again(server: Server, keys: int, times: int) -> list[float]:
    waited = []
    for _ in range(times):
        server.kill()
        began = time.monotonic()
        server.start()
        with PublishedClient(server.ipc) as raw:
            assert raw.ask(Ask.EXISTS_KV, key=f"{keys - 1:064x}")["exists"]
        waited.append(time.monotonic() - began)
        assert server.ready["keys"] == keys
    return waited


def test_a_server_with_ten_thousand_keys_is_ready_again(pool):
    with Server(pool) as server, fill(server, 10_000):
        print("\n10,000 keys, forked: ", end="")
        show(start_again(server, 10_000, 3))


@pytest.mark.long
def test_a_server_with_a_hundred_thousand_keys_is_ready_again(pool):
    """The goal is 300 ms, from starting the command to its first answer. What it takes is printed."""
    for what, fresh in (("forked: ", False), ("the command: ", True)):
        with Server(pool.with_name(what[:3]), fresh=fresh) as server, fill(server, 100_000):
            eventually(lambda server=server: server.facts("journal")["closed_segments"] < 2)
            print(f"\n100,000 keys, {what}", end="")
            show(start_again(server, 100_000, 9))
