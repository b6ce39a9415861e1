"""The commands of an operator, against real daemons; and what ``offload doctor`` judges."""

import json
import os
import signal

import attrs
import pytest
import trio
from click.testing import CliRunner

import offload.cli
from maru.base.ending import ExitCode
from maru.base.findings import PathFact, worst
from maru.base.memory import pinning
from maru.fake_cuda import FakeCuda
from offload import ConfigError
from offload.client import open_client, open_connection
from offload.daemon._admin_messages import SessionFacts, TierFacts
from offload.daemon._doctor import DaemonFacts, Told, examine_daemon
from offload.daemon._messages import Store, Stored, packed
from tests.daemon.test_daemon import KEYS, begin_store, cache_of, registered, store
from tests.daemon.test_quotas import HIS, tenants
from tests.support.cuda_process import process_with_cuda
from tests.support.daemons import SIZE, daemon, directory, host_only, serve


def run(*arguments):
    return CliRunner().invoke(offload.cli.main, [*map(str, arguments)])


@pytest.fixture(scope="module")
def served():
    """A daemon with the blocks KEYS, and a function that runs a command on it."""
    with directory() as path, serve(path, host_only(path)) as process:

        async def fill():
            cache = cache_of()
            async with open_client(cache, f"ipc://{path}/daemon.sock", name="filler") as engine:
                await store(engine, cache)

        trio.run(fill)
        yield process, lambda *arguments: run(*arguments, "--runtime-dir", path)


def done(result, code=ExitCode.DONE):
    assert result.exit_code == code, result.output
    return result.stdout


def test_ping_says_how_it_is_without_a_token(served):
    _, command = served
    assert "is ready, with" in done(command("ping", "-n", 2))
    told = json.loads(done(command("ping", "--json")))
    assert told["state"] == "ready" and told["sent"] == 10 and told["min"] <= told["p50"] <= told["max"]


def test_describe_says_what_it_is(served):
    process, command = served
    text = done(command("describe"))
    assert str(process.pid) in text and "MemoryTier" in text and "4.0 KiB" in text
    told = json.loads(done(command("describe", "--json")))
    assert told["tiers"][0]["blocks"] == len(KEYS) and told["epoch"].startswith("0x")
    assert told["sections"]["limits"]["lease"] == 30.0
    assert told["sections"]["pinning"]["copy_call"] == ""  # no driver


def test_query_and_explain_say_where_blocks_are(served):
    _, command = served
    assert done(command("query", KEYS[0].hex())) == f"{KEYS[0].hex()}: host\n"
    missing = command("query", "--text", KEYS[1].decode(), "elsewhere")
    assert "elsewhere: in no tier" in done(missing, ExitCode.CHECK_FAILED)
    assert "offload explain" in missing.stderr
    text = done(command("explain", "--text", KEYS[1].decode(), "elsewhere"))
    assert f"{KEYS[1].decode()}: in host" in text and "never stored" in text and "would find 1 of 2" in text
    told = json.loads(done(command("explain", "--json", KEYS[0].hex(), "00")))
    assert told["usable"] == 1 and [block["cause"] for block in told["blocks"]] == ["found", "unknown"]
    assert "hexadecimal digits, or texts with --text" in command("query", "no digits").stderr


def test_quarantine_is_listed_and_what_is_not_there_is_not_released(served):
    _, command = served
    assert done(command("quarantine", "list")) == "nothing is in quarantine\n"
    assert json.loads(done(command("quarantine", "list", "--json"))) == {
        "copies": [], "withheld": [], "withheld_keys": 0,
    }  # fmt: skip
    refused = command("quarantine", "release", "host/1")
    done(refused, ExitCode.USAGE)
    assert "host/1" in refused.stderr and "offload quarantine list" in refused.stderr
    assert "--withheld KEY" in command("quarantine", "release").stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("query", *(f"{at:04x}" for at in range(1025))),
        ("explain", "ab" * 5000),
        ("query", "--tenant", "t" * 300, "ab"),
        ("quarantine", "release", "n" * 300),
    ],
    ids=["too many keys", "a long key", "a long tenant", "a long name"],
)
def test_a_request_that_cannot_be_sent_is_refused_before_it_is(served, arguments):
    _, command = served
    assert "the request is too large" in command(*arguments).output


def test_settings_are_read_again_and_the_log_level_is_set(served):
    process, command = served
    assert "read again" in done(command("reload"))
    assert json.loads(done(command("reload", "--json"))) == {"refused": []}
    done(command("log-level", "error"))
    assert "an operator set the log level: error" in process.errors()
    done(command("reload"))


def test_doctor_finds_nothing_wrong(served):
    _, command = served
    told = json.loads(done(command("doctor", "--json")))
    assert told["verdict"] == "ok", told
    names = [finding["name"] for finding in told["findings"]]
    assert {"daemon", "runtime directory", "socket admin.sock", "version", "leases", "tier host", "quarantine"} <= {
        *names
    }
    assert "what to do" not in done(command("doctor"))


def test_doctor_finds_a_socket_that_others_may_use(served):
    _, command = served
    told = json.loads(done(command("describe", "--json")))
    path = told["sections"]["daemon"]["url"].removeprefix("ipc://")
    os.chmod(path, 0o666)
    try:
        told = done(command("doctor"), ExitCode.CHECK_FAILED)
        assert f"chmod600{path}" in "".join(told.split())  # a long path is wrapped
    finally:
        os.chmod(path, 0o600)


def test_a_daemon_that_is_stopped_is_told_from_one_that_is_not_there(served):
    process, command = served
    process.kill(signal.SIGSTOP)
    try:
        stopped = command("ping", "--timeout", 0.2)
    finally:
        process.kill(signal.SIGCONT)
    done(stopped, ExitCode.ENVIRONMENT)
    assert "did not answer within 0.2 s: is its process stopped?" in stopped.stderr


@pytest.mark.parametrize("command", ["ping", "describe", "drain", "reload"])
def test_where_there_is_no_daemon_the_error_names_the_way_out(path, command):
    gone = run(command, "--runtime-dir", path)
    done(gone, ExitCode.ENVIRONMENT)
    assert "start `offload serve`" in gone.stderr and "--runtime-dir" in gone.stderr and "Traceback" not in gone.output
    told = json.loads(done(run("doctor", "--runtime-dir", path, "--json"), ExitCode.CHECK_FAILED))
    assert told["findings"][0]["verdict"] == "fail"


def test_what_is_wrong_with_the_options_is_said_with_them(path, tmp_path):
    assert "did you mean" in run("ping", "--config", write(tmp_path, "[daemon]\nruntime_dri = 7\n")).stderr
    assert "no listener for operators" in run("describe", "--runtime-dir", path, "--admin", "off").stderr
    assert "--admin-token-file" in run("describe", "--help").stdout


def write(tmp_path, text):
    file = tmp_path / "daemon.toml"
    file.write_text(text)
    return file


async def test_with_tenants_operators_have_a_token_of_their_own_name_the_tenant_and_are_told_what_a_drain_drops(
    path, tmp_path
):
    for name in ("token", "other"):
        (tmp_path / name).write_text(f"the {name} of operators\n")
        (tmp_path / name).chmod(0o600)
    knobs = f'[daemon]\ntenants_file = "{tenants(tmp_path, 8 * SIZE)}"\nadmin_token_file = "{tmp_path}/token"\n'
    knobs += f'block_bytes = {SIZE}\ndrain_timeout = 0.1\n[engine.tiers.host]\ntype = "memory"\n'
    named = ("--config", write(tmp_path, knobs), "--runtime-dir", path)
    with serve(path, str(named[1])) as process:
        async with open_connection(f"ipc://{path}/daemon.sock", credential=HIS) as connection:
            number = await registered(connection, cache_of())
            await connection.ask(lambda seq: Store(seq, number, KEYS, packed(range(8))), Stored)
            await trio.to_thread.run_sync(ask_as_operator, named, tmp_path)
            async with trio.open_nursery() as nursery:
                await begin_store(nursery, connection, number, [b"late"])  # its signal never comes
                drained = await trio.to_thread.run_sync(run, "drain", "--json", *named)
                assert json.loads(done(drained, ExitCode.DROPPED)) == {"dropped_stores": 1, "dropped_requests": 0}
                assert await trio.to_thread.run_sync(process.wait) == ExitCode.DROPPED
                nursery.cancel_scope.cancel()


def ask_as_operator(named, tmp_path):
    assert "is ready" in done(run("ping", *named))  # without a credential
    assert done(run("query", *named, "--tenant", "a", KEYS[0].hex())).endswith(": host\n")
    done(run("query", *named, "--tenant", "b", KEYS[0].hex()), ExitCode.CHECK_FAILED)
    assert "no tenant 'c'" in run("query", *named, "--tenant", "c", KEYS[0].hex()).stderr
    wrong = run("describe", *named, "--admin-token-file", tmp_path / "other")
    done(wrong, ExitCode.USAGE)
    assert "not the token" in wrong.stderr
    assert "quota 32 KiB" in done(run("describe", *named))


def test_drain_ends_the_daemon_and_has_its_exit_code(served):
    process, command = served
    assert "drained; 0 stores and 0 other" in done(command("drain"))
    assert process.wait() == ExitCode.DONE


# --- what doctor judges -------------------------------------------------------------------------------------------------


WELL = DaemonFacts(
    directory=PathFact("/run/it"),
    sockets=(PathFact("/run/it/daemon.sock", mode=0o600),),
    token=PathFact("/run/it/admin.token", mode=0o600),
    state="ready",
    version="1.2",
    told=Told(
        {"version": "1.2"},
        {"descriptors": 1024, "open_descriptors": 30, "max_sessions": 64, "lease": 30.0, "memlock_bytes": 1 << 40},
        [TierFacts("host", "MemoryTier", 1 << 30, 1 << 29, 10, 0, "closed")],
        [SessionFacts(1, "vllm", "", 1.0, 0, 0, 1)],
    ),
)


def told(**changes):
    return attrs.evolve(WELL, told=attrs.evolve(WELL.told, **changes))


def limits(**changes):
    return told(limits={**WELL.told.limits, **changes})


def test_where_all_is_well_nothing_is_to_be_done():
    assert worst(examine_daemon(WELL)) == "ok"
    assert not any(finding.way_out for finding in examine_daemon(WELL))


@pytest.mark.parametrize(
    ("facts", "name", "verdict", "way_out"),
    [
        (attrs.evolve(WELL, state="", told=None, why_not="not there"), "daemon", "fail", "offload serve"),
        (attrs.evolve(WELL, state="starting"), "daemon", "warn", "wait"),
        (attrs.evolve(WELL, state="draining"), "daemon", "warn", "start it again"),
        (attrs.evolve(WELL, directory=PathFact("/run/it", mode=0o755)), "runtime directory", "fail", "chmod 700 /run/it"),
        (attrs.evolve(WELL, sockets=(PathFact("/run/it/s", mode=0o666),)), "socket s", "fail", "chmod 600 /run/it/s"),
        (attrs.evolve(WELL, token=PathFact("/run/t", mode=0o644)), "token of operators", "fail", "chmod 600 /run/t"),
        (attrs.evolve(WELL, token=PathFact("/run/t", exists=False)), "token of operators", "warn", "admin_token_file"),
        (attrs.evolve(WELL, told=None, why_not="wrong token"), "operator", "warn", "the token of this daemon"),
        (attrs.evolve(WELL, version="1.3"), "version", "warn", "restart the daemon"),
        (limits(open_descriptors=1000), "file descriptors", "fail", "LimitNOFILE=2048"),
        (limits(descriptors=200), "file descriptors", "warn", "LimitNOFILE="),
        (attrs.evolve(limits(memlock_bytes=8 << 20), has_device=True), "locked memory", "warn", "LimitMEMLOCK"),
        (told(pinning={"copy_call": "cuMemcpyHtoDAsync"}), "copies of devices", "warn", "CUDA 12.8"),
        (told(sessions=[SessionFacts(1, "vllm", "", 20.0, 0, 0, 1)]), "leases", "warn", "end after 30 s"),
        (told(tiers=[TierFacts("host", "MemoryTier", 9, 1, 1, 0, "open")]), "tier host", "fail", "log says why"),
        (told(tiers=[TierFacts("host", "MemoryTier", 9, 9, 4, 4, "closed")]), "tier host", "warn", "release its hits"),
        (told(quarantined=1), "quarantine", "warn", "offload quarantine list"),
        (told(withheld=3), "quarantine", "warn", "offload quarantine list"),
        (told(degraded={"full_disk disk": "/kv is full: free some"}), "degraded: full_disk disk", "fail", "free some"),
        (told(degraded={"late_policies host": "late: raise it"}), "degraded: late_policies host", "warn", "raise it"),
    ],
)  # fmt: skip
def test_each_fault_is_found_with_its_way_out_and_nothing_else_is(facts, name, verdict, way_out):
    wrong = {finding.name: finding for finding in examine_daemon(facts) if finding.verdict != "ok"}
    assert set(wrong) == {name}
    assert wrong[name].verdict == verdict and way_out in wrong[name].way_out


def test_locked_memory_matters_where_there_is_a_device_only():
    assert worst(examine_daemon(limits(memlock_bytes=8 << 20))) == "ok"
    assert worst(examine_daemon(attrs.evolve(limits(memlock_bytes="none"), has_device=True))) == "ok"


@pytest.mark.parametrize(("version", "call"), [(12080, "cuMemcpyBatchAsync"), (12000, "cuMemcpyHtoDAsync")])
def test_doctor_says_which_call_copies(version, call):
    with process_with_cuda(FakeCuda(version=version)):
        pinned = {"copy_call": pinning.copy_call()}
    assert pinned == {"copy_call": call}
    [found] = [one for one in examine_daemon(told(pinning=pinned)) if one.name == "copies of devices"]
    assert call in found.found
    assert not pinning.copy_call()  # there is no driver


def test_an_engine_with_a_long_name_is_known_by_its_end():
    async def main(path):
        async with daemon(path) as server, open_connection(server.url, name="m" * 300 + "/end", wait=10):
            return [session.name for session in server.sessions]

    with directory() as path:
        [name] = trio.run(main, path)
    assert name.endswith("m/end") and len(name) == 256


def test_a_credential_that_no_hello_carries_is_refused_at_once():
    async def main(path):
        with pytest.raises(ConfigError, match="credential"):
            async with open_connection(f"ipc://{path}/daemon.sock", credential="c" * 300):
                pass

    with directory() as path:
        trio.run(main, path)
