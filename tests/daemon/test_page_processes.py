"""Pages of real processes: an engine killed or stopped in the middle, and a daemon killed and started again."""

import signal
import time

import pytest
import trio

from offload.client import open_connection, open_pages
from tests.daemon.test_pages import read
from tests.daemon.test_processes import counters
from tests.support.daemons import SIZE, Process, directory, serve, until

SMALL = (
    "--block-bytes",
    str(SIZE),
    "--host-bytes",
    "8 MiB",
    "--maru-pool-size-gb",
    "0.01",
    "--engine-pool-size-gb",
    "0.02",
)


def serving(path, *options):
    return serve(path, *SMALL, *options)


def url_of(path):
    return f"ipc://{path}/daemon.sock"


class Engine(Process):
    """See :mod:`tests.support.daemon_pages`."""

    def __init__(self, path, name):
        super().__init__("-m", "tests.support.daemon_pages", url_of(path), name)
        try:
            assert self.event() == {"tier": "maru"}
        except BaseException:
            self.__exit__()
            raise

    async def do(self, command):
        self.say(command)
        return await trio.to_thread.run_sync(self.event)


def opened(path):
    return open_pages(url_of(path), block_bytes=SIZE, pool_bytes=0, wait=30)


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.long)])
async def test_an_engine_that_is_killed_with_pages_reserved_leaves_nothing_that_is_found(kills):
    with directory() as path, serving(path) as daemon:
        async with open_connection(url_of(path), name="watcher") as connection, opened(path) as pages:
            for number in range(kills):
                with Engine(path, f"e{number}") as engine:
                    await engine.do("store 4")
                    await engine.do("reserve 16")
                    await engine.do("fill")
                    engine.kill()
                    engine.wait()

                async def is_given_back():
                    return not (await counters(connection))["pages.announced"]

                await until(is_given_back, "its reservation is left")
                keys = [b"e%d %d" % (number, at) for at in range(20)]
                assert len(await read(pages, keys)) == 4  # what it had committed stays, with the right bytes
            assert (await counters(connection))["sessions"] == 2
            assert daemon.process.poll() is None


@pytest.mark.long
async def test_blocks_that_a_killed_engine_was_reading_can_go_when_its_lease_is_over():
    with directory() as path, serving(path, "--lease", "2") as daemon:
        async with open_connection(url_of(path), name="watcher") as connection, opened(path) as pages:
            with Engine(path, "reader") as engine:
                await engine.do("store 8")
                await engine.do("hold 8")
                keys = [b"reader %d" % at for at in range(8)]

                async def deleted():
                    answers = await pages._reading.delete(keys)
                    return [answer.value for answer in answers]

                assert set(await deleted()) == {"pinned"}
                engine.kill()
                engine.wait()

                async def are_gone():
                    return "pinned" not in await deleted()

                await until(are_gone, "its pins are left")
            assert (await counters(connection))["sessions"] == 2 and daemon.process.poll() is None


@pytest.mark.long
async def test_an_engine_that_was_stopped_behind_its_lease_harms_nobody_commits_nothing_and_goes_on():
    with directory() as path, serving(path, "--lease", "1"):
        async with open_connection(url_of(path), name="watcher") as connection, opened(path) as pages:
            with Engine(path, "late") as engine:
                await engine.do("reserve 4")
                engine.kill(signal.SIGSTOP)

                async def is_over():
                    return not (await counters(connection))["pages.announced"]

                await until(is_over, "its session goes on")
                with Engine(path, "late") as other:  # has its pages and its keys while it is away
                    assert await other.do("store 2") == {"stored": 2}
                    await other.do("hold 2")
                    engine.kill(signal.SIGCONT)
                    await engine.do("fill")  # into pages of its own, which nobody has been given
                    assert await engine.do("commit") == {"error": "DaemonUnavailable"}
                    assert await other.do("read 4") == {"read": 2}
                assert len(await read(pages, [b"late %d" % at for at in range(4)])) == 2

                async def goes_on():
                    return (await engine.do("store 4")) == {"stored": 2}

                await until(goes_on, "it does not go on")
                assert len(await read(pages, [b"late %d" % at for at in range(4)])) == 4


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.long)])
async def test_engines_of_a_daemon_that_is_killed_fail_loudly_and_go_on_and_find_what_they_had_committed(kills):
    with directory() as path:
        daemon = serving(path)
        try:
            with Engine(path, "e") as engine:
                await engine.do("store 4")
                for number in range(kills):
                    assert (await engine.do(f"reserve {8 + 4 * number}"))["reserved"] == 4
                    await engine.do("fill")
                    daemon.kill()
                    daemon.wait()
                    assert await engine.do("commit") == {"error": "DaemonUnavailable"}
                    assert await engine.do("read 8") == {"error": "DaemonUnavailable"}
                    daemon.__exit__()
                    daemon = serving(path)
                    began = time.monotonic()
                    while (said := await engine.do(f"store {8 + 4 * number}")) == {"error": "DaemonUnavailable"}:
                        assert time.monotonic() - began < 30
                    assert said == {"stored": 4}
                    assert await engine.do("read 250") == {"read": 8 + 4 * number}
        finally:
            daemon.__exit__()
