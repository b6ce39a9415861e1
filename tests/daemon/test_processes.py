"""Real processes, ended in the middle: an engine by SIGKILL or SIGSTOP, the daemon by SIGKILL or SIGTERM."""

import signal
import time

import pytest
import trio

from offload.client import open_connection
from offload.daemon._messages import Counters, Stats
from tests.support import object_counts
from tests.support.daemons import descriptors, directory, engine_process, host_only, mapped, serve, until
from tests.support.object_counts import grown

KILLS = 20


async def counters(connection):
    return (await connection.ask(lambda seq: Stats(seq), Counters)).values


async def at_rest(connection):
    """Nothing of another engine is left: no pin, no page on its way, no request."""
    values = await counters(connection)
    held = ("requests", "holds", "memories", "caches", "open_hits", "quarantined")
    tiers = ("held_blocks", "reserved_blocks", "used_blocks", "pending_marks")
    return values["sessions"] == 1 and not any(
        value for name, value in values.items() if name in held or name.endswith(tiers)
    )


@pytest.mark.parametrize("kills", [KILLS, pytest.param(200, marks=pytest.mark.long)])
async def test_an_engine_that_is_killed_leaves_nothing_behind(kills):
    counts = []
    with directory() as path, serve(path, host_only(path), counts_at=f"{path}.counts") as daemon:
        async with open_connection(f"ipc://{path}/daemon.sock", name="watcher") as connection:
            before, rounds = descriptors(daemon.pid), 0
            for number in range(kills):
                with engine_process(f"ipc://{path}/daemon.sock", f"engine {number}") as engine:
                    rounds = engine.event()["round"]
                    await trio.sleep(number % 7 * 1e-3)  # another moment of a round each time
                    engine.kill()
                    assert engine.wait() == -signal.SIGKILL
                await until(lambda: at_rest(connection), f"after kill {number}: {await counters(connection)}")
                if number in (kills // 2, kills - 1):
                    counts.append(object_counts.ask_at_rest(f"{path}.counts"))
            assert rounds >= 0
            # Of what was stored and evicted it keeps keys: in tables, and in the record that an explanation reads.
            kept = {"entries of tables", "offload._engine.history._Entry"}
            assert grown(*counts).keys() <= kept, "the daemon keeps something of each engine that is killed"
            await until(lambda: descriptors(daemon.pid) == before, "descriptors of engines stay open")
            assert mapped(daemon.pid) == 0
            assert (await counters(connection))["sessions_given_back"] == kills


async def test_an_engine_that_is_stopped_costs_its_session_when_its_lease_is_over_and_finds_out():
    with directory() as path, serve(path, host_only(path), "--lease", "1") as daemon:
        async with open_connection(f"ipc://{path}/daemon.sock", name="watcher") as connection:
            with engine_process(f"ipc://{path}/daemon.sock", "stopped") as engine:
                await trio.to_thread.run_sync(engine.event)
                engine.kill(signal.SIGSTOP)
                await until(lambda: at_rest(connection), "its session goes on")
                assert mapped(daemon.pid) == 0
                engine.kill(signal.SIGCONT)
                # In a thread: the watcher of this test must be heard as well.
                await trio.to_thread.run_sync(go_on, engine, abandon_on_cancel=True)
                await until(lambda: has_sessions(connection, 2), "it has no new session")


def go_on(engine):
    """Read what an engine says until it has a second session, and has loaded blocks in it."""
    while (event := engine.event())["sessions"] < 2:
        pass
    while engine.event()["loaded"] <= event["loaded"]:
        pass


async def has_sessions(connection, n):
    return (await counters(connection))["sessions"] == n


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.long)])
async def test_engines_of_a_daemon_that_is_killed_fail_loudly_and_go_on_with_the_next_one(kills):
    with directory() as path:
        daemon = serve(path, host_only(path))
        try:
            with engine_process(f"ipc://{path}/daemon.sock", "survivor") as engine:
                for _ in range(kills):
                    loaded = engine.event()["loaded"]
                    while engine.event()["loaded"] == loaded:  # it is served
                        pass
                    unavailable = engine.event()["unavailable"]
                    daemon.kill()
                    daemon.wait()
                    while engine.event()["unavailable"] == unavailable:  # it says so, and does not take it for a miss
                        pass
                    daemon.__exit__()
                    daemon = serve(path, host_only(path))
                loaded = engine.event()["loaded"]
                while engine.event()["loaded"] == loaded:
                    pass
        finally:
            daemon.__exit__()


@pytest.mark.parametrize("times", [3, pytest.param(200, marks=pytest.mark.long)])
async def test_sigterm_under_load_drains_and_ends_within_its_time(times):
    with directory() as path:
        for _ in range(times):
            with (
                serve(path, host_only(path), "--drain-timeout", "2") as daemon,
                engine_process(f"ipc://{path}/daemon.sock", "busy") as engine,
            ):
                engine.event()
                daemon.kill(signal.SIGTERM)
                began = time.monotonic()
                code = daemon.wait()
                assert time.monotonic() - began < 2.5, daemon.errors()
                assert code == 0, daemon.errors()
                engine.event()
