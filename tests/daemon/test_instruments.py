"""What observes the pipelines of a daemon: a flight recorder, and instruments that its settings name."""

import os
import signal
import subprocess
import sys

import pytest

from offload import ConfigError
from offload.client import open_client
from offload.daemon import DaemonConfig, open_daemon
from offload.instruments import Counting
from offload.recorder import RecorderBusy, read_ring
from tests.daemon.test_daemon import KEYS, cache_of, store
from tests.support.daemons import PATIENCE, daemon, engine_config, host_only, serve
from tests.support.maru_processes import eventually

made: list[Counting] = []


def counting() -> Counting:
    """An instrument that a test can look at."""
    made.append(Counting())
    return made[-1]


def offload(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "offload", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_what_a_killed_daemon_had_decided_is_saved_and_played_again(path, tmp_path):
    ring, incident, scenario = (str(tmp_path / name) for name in ("daemon.ring", "night.incident", "night.toml"))
    with serve(path, host_only(path), "--flight-recorder", ring, "--flight-recorder-bytes", "1MiB") as process:
        cache = cache_of()
        async with open_client(cache, f"ipc://{path}/daemon.sock") as engine:
            assert (await store(engine, cache)).completed == tuple(KEYS)
            process.kill()
            process.wait()
    assert os.stat(ring).st_mode & 0o777 == 0o600
    offload("incident", "save", ring, "--out", incident)
    shown = offload("incident", "show", incident)
    assert f"COMPLETE: {len(KEYS)} of {len(KEYS)}" in shown
    assert KEYS[0].decode() not in shown
    assert KEYS[0] not in (tmp_path / "night.incident").read_bytes()
    offload("scenario", "from-incident", incident, "--out", scenario)
    assert offload("scenario", "run", scenario).startswith("ok")


async def test_the_recording_of_the_daemon_before_is_kept(path, tmp_path):
    ring = str(tmp_path / "daemon.ring")
    cache = cache_of()
    async with daemon(path, flight_recorder=ring) as server, open_client(cache, server.url) as engine:
        await store(engine, cache)
    async with daemon(path, flight_recorder=ring):
        before = read_ring((tmp_path / "daemon.ring.before").read_bytes())
    assert [one.name for one in before.description.pipelines] == ["host"]


async def test_two_daemons_do_not_share_a_recording(path, tmp_path):
    async with daemon(path, flight_recorder=str(tmp_path / "ring")):
        other = DaemonConfig(runtime_dir=str(tmp_path / "other"), flight_recorder=str(tmp_path / "ring"))
        with pytest.raises(RecorderBusy):
            async with open_daemon(other, engine_config()):
                pass
        assert not [name for name in os.listdir(tmp_path / "other") if name.endswith(".sock")]


async def test_an_instrument_that_the_settings_name_is_told_of_stores(path):
    cache = cache_of()
    async with (
        daemon(path, instruments=("tests.daemon.test_instruments:counting",)) as server,
        open_client(cache, server.url) as engine,
    ):
        await store(engine, cache)
    assert made.pop().statistics()["settled"] >= 1


def broken():
    """No instrument."""
    raise RuntimeError("no room for a gauge")


def test_reload_outlives_instrument_that_cannot_be_made(path, tmp_path):
    file = tmp_path / "daemon.toml"
    text = '[daemon]\nblock_bytes = 4096\n[engine.tiers.host]\ntype = "memory"\n'
    file.write_text(text)
    with serve(path, str(file)) as process:
        file.write_text(text.replace("[engine", 'instruments = ["tests.daemon.test_instruments:broken"]\n[engine'))
        process.kill(signal.SIGHUP)
        assert eventually(lambda: "no room for a gauge" in process.errors(), PATIENCE)
        assert "nothing was changed" in process.errors()
        process.kill(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.parametrize(
    "name",
    [
        "tests.daemon.elsewhere:counting",
        "tests.daemon.test_instruments:none",
        "tests.daemon.test_instruments:broken",
        "os:sep",
    ],
)
async def test_a_name_that_makes_no_instrument_is_a_wrong_setting_and_leaves_nothing(name, path):
    with pytest.raises(ConfigError, match=r"daemon\.instruments"):
        async with daemon(path, instruments=(name,)):
            pass
    assert not [file for file in os.listdir(path) if file.endswith(".sock")]


def test_check_names_an_instrument_that_cannot_be_made():
    done = subprocess.run(
        [sys.executable, "-m", "offload", "serve", "--check", "--instruments", "os:sep"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, "os:sep" in done.stderr) == (2, True)
