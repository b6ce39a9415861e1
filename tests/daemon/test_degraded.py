"""A daemon that does less than it was set up for says so: log, readiness, page, metrics, describe, doctor."""

import json
import logging
import os
import resource
import shutil
import threading

import pytest
import trio

import maru
from offload.daemon import DaemonConfig, open_daemon
from offload.daemon._admin_messages import AdminHello, Admitted, Describe, Described
from offload.daemon._messages import encode
from offload.status import fetch_view
from tests.daemon.test_daemon import until
from tests.daemon.test_operator_commands import done, run
from tests.daemon.test_serve import get
from tests.support.daemons import SIZE, daemon, engine_config

FACES = ("/readyz", "/status", "/metrics")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("offload.daemon._degraded.INTERVAL", 0.01)


def with_disk(tmp_path):
    return engine_config(
        tiers={
            "host": {"type": "memory", "capacity_bytes": 1 << 20},
            "disk": {"type": "file", "directory": str(tmp_path / "kv"), "capacity_bytes": 1 << 20},
        }
    )


async def faces(path):
    return [await trio.to_thread.run_sync(get, path, face) for face in FACES]


def begins(caplog):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("degraded: ")]


async def test_a_healthy_daemon_says_nothing(path, tmp_path, caplog):
    async with daemon(path, engine=with_disk(tmp_path), block_bytes=SIZE, status="ipc") as server:
        await trio.sleep(0.1)
        assert server.degradations.texts() == {}
        (code, ready), (_, status), (_, metrics) = await faces(path)
        assert (code, json.loads(ready)) == (200, {"status": "ready"})
        assert json.loads(status)["degraded"] == []
        assert "kv_offload_daemon_degraded_full_disk 0.0" in metrics
    assert begins(caplog) == []


async def test_a_full_disk_is_shown_by_all_faces_until_it_is_over(path, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "offload.daemon")
    real, left = os.statvfs, [None]

    def statvfs(where):
        found = real(where)
        if left[0] is None or not str(where).endswith("kv"):
            return found
        return os.statvfs_result((4096, 4096, 100, 0, left[0], 100, 100, 100, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    async with daemon(path, engine=with_disk(tmp_path), block_bytes=SIZE, status="ipc") as server:
        left[0] = 1
        await until(lambda: server.degradations.texts())
        assert set(server.degradations.texts()) == {"full_disk disk"}
        (code, ready), (_, status), (_, metrics) = await faces(path)
        assert code == 200  # an orchestrator is not to restart it
        assert json.loads(ready)["status"] == "ready"
        assert "4 KiB left" in json.loads(ready)["degraded"]["full_disk disk"]
        assert "4 KiB left" in json.loads(status)["degraded"][0]
        assert "kv_offload_daemon_degraded_full_disk 1.0" in metrics
        view = await trio.to_thread.run_sync(fetch_view, f"unix:{path}/status.sock")
        assert "4 KiB left" in view.degraded[0]
        shown = await trio.to_thread.run_sync(run, "describe", "--runtime-dir", path)
        assert "4 KiB left" in " ".join(done(shown).split())  # a table may break the line
        shown = await trio.to_thread.run_sync(run, "doctor", "--runtime-dir", path)
        assert shown.exit_code == 1
        assert "degraded: full_disk disk" in shown.stdout and "free some" in shown.stdout
        left[0] = None
        await until(lambda: not server.degradations.texts())
    assert len(begins(caplog)) == 1
    assert [r.getMessage() for r in caplog.records].count("no longer degraded: full_disk disk") == 1


async def test_files_that_are_removed_under_it_are_named(path, monkeypatch):
    monkeypatch.setattr("offload.daemon._server.LOOK", 3600.0)  # seconds: nothing is made again
    async with daemon(path, block_bytes=SIZE) as server:
        os.rename(f"{path}/memory.sock", f"{path}/elsewhere")
        await until(lambda: server.degradations.texts())
        assert set(server.degradations.texts()) == {f"unlinked_files {path}/memory.sock"}
        os.rename(f"{path}/elsewhere", f"{path}/memory.sock")
        await until(lambda: not server.degradations.texts())


async def test_a_cancelled_look_turns_off_no_later_one(path, monkeypatch):
    monkeypatch.setattr("offload.daemon._server.LOOK", 3600.0)
    async with daemon(path, block_bytes=SIZE) as server:
        with trio.CancelScope() as scope:
            scope.cancel()
            await server.degradations.look()
        os.unlink(f"{path}/memory.sock")
        await until(lambda: server.degradations.texts())


async def test_descriptors_that_run_short_are_named(path):
    async with daemon(path, block_bytes=SIZE) as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
        try:
            await until(lambda: server.degradations.texts())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert set(server.degradations.texts()) == {"few_descriptors"}
        await until(lambda: not server.degradations.texts())


async def test_operators_are_answered_without_descriptor_left(path):
    """That is when they ask."""
    async with daemon(path, block_bytes=SIZE, admin="ipc") as server:
        answers: list[object] = []
        server.admin._send = lambda peer, answer: answers.append(answer)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(map(int, os.listdir("/proc/self/fd"))), hard))
        try:
            server.admin.handle(b"peer", encode(AdminHello(1, server.admin.operators.token)))
            server.admin.handle(b"peer", encode(Describe(2)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        admitted, told = answers
        assert isinstance(admitted, Admitted) and isinstance(told, Described)
        assert told.sections["limits"]["open_descriptors"] == told.sections["limits"]["descriptors"]


async def test_a_file_system_that_hangs_costs_one_thread(path, tmp_path, monkeypatch):
    monkeypatch.setattr("offload.daemon._degraded._PATIENCE", 0.01)
    async with daemon(path, engine=with_disk(tmp_path), block_bytes=SIZE) as server:
        goes_on, real, asked = threading.Event(), os.statvfs, []

        def statvfs(where):
            if str(where).endswith("kv"):
                asked.append(where)
                goes_on.wait(30)
            return real(where)

        monkeypatch.setattr(os, "statvfs", statvfs)
        await until(lambda: asked)
        await trio.sleep(0.2)
        assert len(asked) == 1
        goes_on.set()
        await until(lambda: len(asked) > 1)
        assert server.degradations.texts() == {}


async def test_a_page_store_that_waits_for_its_journal_is_named(path, monkeypatch):
    engine = engine_config(tiers={"host": {"type": "memory", "capacity_bytes": 1 << 20}})
    config = maru.ServerConfig(rm_address="", pool_path=f"{path}/maru", capacity_bytes=64 << 20)
    async with open_daemon(DaemonConfig(runtime_dir=path, block_bytes=SIZE), engine, maru=config) as server:
        await server.degradations.look()
        assert server.degradations.texts() == {}
        monkeypatch.setattr(type(server._engine.page_store), "journal_trouble", "No space left on device")
        await until(lambda: server.degradations.texts())
        assert "(No space left on device)" in server.degradations.texts()["stuck_journal"]
        monkeypatch.undo()
        await server.degradations.look()
        assert server.degradations.texts() == {}


async def test_a_directory_that_is_gone_hides_no_other_degradation(path, tmp_path):
    async with daemon(path, engine=with_disk(tmp_path), block_bytes=SIZE) as server:
        shutil.rmtree(tmp_path / "kv")
        server.degradations.keep(f"{path}/never")
        await until(lambda: any(name.startswith("unlinked_files") for name in server.degradations.texts()))


async def test_a_look_that_fails_is_logged_once_and_tried_again(path, caplog, monkeypatch):
    async with daemon(path, block_bytes=SIZE) as server:
        monkeypatch.setattr(server.degradations, "engine", lambda: [][0])
        await trio.sleep(0.1)
        monkeypatch.undo()
        server.degradations.keep(f"{path}/never")
        await until(lambda: server.degradations.texts())
    assert (
        sum("cannot look for degradations" in one.getMessage() for one in caplog.records if one.levelname == "ERROR")
        == 1
    )
