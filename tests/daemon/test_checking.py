"""``offload serve --check`` makes all that the settings name; a reload refuses what it refuses."""

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

import offload.cli
from backends.base.closing import closing
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.plugins import make_tier
from backends.testing import FakeTier
from maru.eviction import LRU
from offload import NO_WAIT, open_pipeline
from offload.client import open_connection
from tests.daemon.test_daemon import until
from tests.support.daemons import SIZE, serve

HOST = '[engine.tiers.host]\ntype = "memory"\ncapacity_bytes = "1 MiB"\n'
DISK = '[engine.tiers.disk]\ntype = "file"\ndirectory = "kv"\ncapacity_bytes = "1 MiB"\n'


class Explosive:
    """A tier that cannot be made."""

    def __init__(self, block_bytes):
        raise RuntimeError("no such device")


def check(text="", *options):
    """What --check says of a file."""
    Path("daemon.toml").write_text(text)
    return CliRunner().invoke(offload.cli.main, ["serve", "--check", "daemon.toml", *options])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").write_text("precious\n")
    (tmp_path / "full").mkdir(mode=0o777)
    (tmp_path / "full").chmod(0o777)
    (tmp_path / "full" / "file").touch()
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "small").mkdir(mode=0o700)
    (tmp_path / "small" / "maru").touch()
    (tmp_path / "small" / "maru.token").write_text("precious\n")
    return tmp_path


@pytest.fixture
def port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        # eviction
        (HOST + "eviction = 3\n", ("engine.tiers.host.eviction = 3", "adaptive, lru")),
        (HOST + 'eviction = "clairvoyant"\n', ("engine.tiers.host.eviction", "'clairvoyant'", "adaptive, lru")),
        (HOST + 'eviction = "os:getcwd"\n', ("engine.tiers.host.eviction", "must be an eviction policy")),
        (HOST + 'eviction = "nomodule:LRU"\n', ("engine.tiers.host", "nomodule")),
        (HOST + DISK + 'eviction = "clairvoyant"\n', ("engine.tiers.disk.eviction", "adaptive, lru")),
        # values of another kind
        (HOST + DISK + 'fsync = "often"\n', ("engine.tiers.disk.fsync = 'often'", "true or false")),
        (HOST + 'checksums = "xxh"\n', ("engine.tiers.host.checksums = 'xxh'", "true or false")),
        (HOST + DISK + "fingerprint = 3\n", ("engine.tiers.disk.fingerprint = 3", "a text")),
        (HOST.replace("1 MiB", "900 TiB"), ("engine.tiers.host", "capacity_bytes", "Cannot allocate memory")),
        (HOST + "wrappers = 3\n", ("engine.tiers.host", "wrappers")),
        # modules
        ('[engine.tiers.x]\ntype = "nomodule:Tier"\n', ("engine.tiers.x", "nomodule")),
        ('[engine.tiers.x]\ntype = "os:Tier"\n', ("engine.tiers.x", "Tier")),
        (f'[engine.tiers.x]\ntype = "{__name__}:Explosive"\n', ("engine.tiers.x", "no such device")),
        # names, routes and policies
        ('[engine.tiers."a\\nb"]\ntype = "memory"\n', ("tiers", r"'a\nb'", "printable")),
        (HOST + '[[engine.routes]]\nto = "host"\npolicies = ["sometimes"]\n', ("routes.host.policies", "'sometimes'")),
        (HOST + '[[engine.routes]]\nto = "host"\npolicies = ["nomodule:x"]\n', ("engine.routes.host", "nomodule")),
        (
            HOST + '[[engine.routes]]\nto = "host"\npolicies = [{ type = "frequency", least = 2 }]\n',
            ("routes.host.policies.least",),
        ),
        (HOST + DISK + '[[engine.routes]]\nto = "host"\nsource = "disk"\n', ("routes[0].source", "a route leads down")),
        # places
        ('[daemon]\nruntime_dir = "victim"\n', ("daemon.runtime_dir", "victim")),
        ('[daemon]\nruntime_dir = "full"\n', ("daemon.runtime_dir", "chmod 700")),
        ('[daemon]\nruntime_dir = "nowhere/run"\n', ("daemon.runtime_dir", "nowhere")),
        (f'[daemon]\nruntime_dir = "{"x" * 300}"\n', ("daemon.runtime_dir", "File name too long")),
        ('[daemon]\nadmin = "ipc://full/admin.sock"\n', ("daemon.admin", "chmod 700")),
        ('[daemon]\nflight_recorder = "victim"\n', ("flight_recorder", "is not a recording")),
        ('[daemon]\nflight_recorder = "nowhere/ring"\n', ("flight_recorder", "no directory")),
        ('[daemon]\ntenants_file = "nowhere.toml"\n', ("daemon.tenants_file", "nowhere.toml", "No such file")),
        ('[daemon]\nadmin_token_file = "nowhere"\n', ("daemon.admin_token_file", "nowhere", "No such file")),
        # addresses
        ('[daemon]\nstatus = "127.0.0.1:99999"\n', ("daemon.status", "99999", "65535")),
        ('[daemon]\nstatus = "127.0.0.1:PORT"\n', ("daemon.status", "PORT", "already in use")),
        ('[daemon]\nkv_events = "127.0.0.1:PORT"\nkv_events_insecure = true\n', ("daemon.kv_events", "already in use")),
        (
            '[daemon]\npinned_pool = true\n[pinned_pool]\ninsecure = true\nhost = "127.0.0.1"\nport = PORT\n',
            ("pinned_pool.port", "already in use"),
        ),
        (
            '[daemon]\nstatus = "127.0.0.1:FREE"\nkv_events = "127.0.0.1:FREE"\nkv_events_insecure = true\n',
            ("daemon.kv_events", "already in use"),
        ),
        (
            f'[daemon]\nruntime_dir = "{"r" * 90}"\nkv_events = "ipc"\n' + HOST,
            ("daemon.runtime_dir", "kv-answers.sock has over 107 bytes"),
        ),
        (f'[daemon]\nruntime_dir = "{"r" * 90}"\n', ("daemon.runtime_dir", "maru/maru.sock has over 107 bytes")),
        (
            '[daemon]\nadmin = "ipc://ours/daemon.sock"\nruntime_dir = "ours"\n',
            ("daemon.admin", "a path of daemon.runtime_dir"),
        ),
        ('[daemon]\nruntime_dir = "small"\n', ("daemon.runtime_dir", "small/maru", "Not a directory")),
        (
            '[daemon]\nruntime_dir = "ours"\nflight_recorder = "ours/daemon.lock"\n',
            ("flight_recorder", "daemon.runtime_dir"),
        ),
        (
            '[daemon]\nadmin = "ipc://ours/x.sock"\nflight_recorder = "ours/x.token"\n',
            ("daemon.flight_recorder", "a path of daemon.admin_token_file"),
        ),
        (
            '[daemon]\nruntime_dir = "ours"\nadmin = "ipc://small/maru.sock"\n',
            ("daemon.admin_token_file", "small/maru.token already exists"),
        ),
        ('[daemon]\nruntime_dir = "kv"\n' + DISK, ("engine.tiers.disk.directory", "a path of daemon.runtime_dir")),
        (
            '[daemon]\npinned_pool = true\n[pinned_pool]\nruntime_dir = "full"\n',
            ("pinned_pool.runtime_dir", "chmod 700"),
        ),
        # a daemon that would be its own engine
        ('[engine]\ndaemon_url = "ipc"\n', ("engine.daemon_url", "a daemon has the tiers itself")),
    ],
    ids=lambda one: one.replace("\n", " ")[-70:] if isinstance(one, str) else "",
)
def test_check_refuses_what_cannot_be(text, says, port):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        text = text.replace("FREE", str(free.getsockname()[1]))
    done = check(text.replace("PORT", str(port)))
    assert done.exit_code == 2, done.output
    for word in says:
        assert word.replace("PORT", str(port)) in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()[-1].replace(os.getcwd(), "/srv")) <= 400


@pytest.mark.parametrize("policy", ["adaptive", "lru", "wtinylfu", "maru.eviction:LRU"])
def test_an_eviction_policy_has_a_name(policy):
    done = check(HOST + f'eviction = "{policy}"\n' + DISK + f'eviction = "{policy}"\n')
    assert done.exit_code == 0, done.output


def test_each_tier_has_an_eviction_policy_of_its_own():
    tiers = [
        make_tier({"type": "memory", "capacity_bytes": 1 << 20, "eviction": "lru"}, block_bytes=SIZE) for _ in "ab"
    ]
    policies = [tier.pool._policy for tier in tiers]
    assert all(isinstance(policy, LRU) for policy in policies)
    assert policies[0] is not policies[1]


def test_an_object_that_is_no_policy_is_refused():
    with pytest.raises(ValueError, match="must be an eviction policy"):
        make_tier({"type": "memory", "capacity_bytes": 1 << 20, "eviction": object()}, block_bytes=SIZE)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (
            HOST + '[engine.tiers.m]\ntype = "maru"\nserver_url = "ipc:///x/y.sock"\npool_size = "8 MiB"\n',
            "at ipc:///x/y.sock",
        ),
        (HOST + '[engine.tiers.m]\ntype = "maru"\npool_size = "8 MiB"\n', "where clients of this user look"),
    ],
)
def test_check_tells_that_no_page_store_is_embedded(text, where):
    done = check(text)
    assert done.exit_code == 0, done.output
    assert f"tier m: no page store is embedded, as [engine] names tiers: maru-server has to run {where}" in done.stdout
    assert "embedded" not in check().stdout
    assert "embedded" not in check('[daemon]\nmaru_server_url = "ipc:///x/y.sock"\n').stdout


def test_a_start_names_the_tier_that_cannot_be(path):
    done = CliRunner().invoke(
        offload.cli.main,
        ["serve", "--runtime-dir", path, "--block-bytes", "16GiB", "--host-bytes", "1MiB", "--maru-pool-size-gb", "0"],
    )
    assert done.exit_code == 3, done.output
    assert "capacity_bytes is 1048576" in done.stderr and "while making tiers.host" in done.stderr


def test_check_leaves_no_runtime_directory(here):
    assert check('[daemon]\nruntime_dir = "run"\nflight_recorder = "ring"\n' + HOST).exit_code == 0
    assert not (here / "run").exists()
    assert not (here / "ring").exists()


@pytest.mark.parametrize(
    ("text", "module", "extra"),
    [
        ('[daemon]\nstatus = "ipc"\n', "hypercorn", "status"),
        (HOST + 'wrappers = ["zstd"]\n', "zstandard", "zstd"),
    ],
)
def test_a_missing_package_is_the_environment(here, text, module, extra):
    Path("daemon.toml").write_text(text)
    run = "from offload.cli import main; main(['serve', '--check', 'daemon.toml'])"
    program = f"import sys; sys.modules[{module!r}] = None; {run}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert f"trio-offload[{extra}]" in done.stderr
    assert "Traceback" not in done.stderr


def fill(directory, n):
    """Fill a directory with blocks."""

    async def store():
        host = MemoryTier(n * SIZE, SIZE)
        keys = [b"%d" % at for at in range(n)]
        for key in keys:
            host.put(key, bytes(SIZE))
        with closing(FileTier(directory, n * SIZE, block_bytes=SIZE)) as disk:
            async with open_pipeline(host, disk) as pipeline:
                await (await pipeline.enqueue(host.strong(keys), NO_WAIT)).wait()

    trio.run(store)


def files(directory):
    return {path: path.stat().st_mtime_ns for path in Path(directory).rglob("*") if path.is_file()}


def test_check_changes_nothing_in_a_directory_of_blocks(here):
    fill("kv", 16)
    before = files("kv")
    smaller = HOST + DISK.replace("1 MiB", str(4 * SIZE))
    assert check(f"[daemon]\nblock_bytes = {SIZE}\n" + smaller).exit_code == 0
    assert files("kv") == before


def test_check_makes_no_directory_of_blocks(here):
    assert check(HOST + DISK).exit_code == 0
    assert not (here / "kv").exists()


def test_check_refuses_a_directory_of_blocks_that_is_in_use(here):
    with closing(FileTier("kv", 1 << 20)):
        done = check(HOST + DISK)
    assert done.exit_code == 2 and "engine.tiers.disk" in done.stderr and "in use by another tier" in done.stderr


def test_a_reload_changes_nothing_in_a_directory_of_blocks(path, here):
    fill("kv", 16)
    before, file = files("kv"), here / "daemon.toml"
    file.write_text(f"[daemon]\nblock_bytes = {SIZE}\n" + HOST)
    with serve(path, str(file)):
        file.write_text(file.read_text() + DISK.replace("1 MiB", str(4 * SIZE)))
        done = CliRunner().invoke(offload.cli.main, ["reload", "--runtime-dir", path])
    assert "engine.tiers" in done.output and files("kv") == before


class Single(FakeTier):
    """A tier, or an instrument, of which a process can make one."""

    made = False

    def __init__(self, block_bytes=SIZE):
        assert not Single.made, "it is made a second time"
        Single.made = True
        super().__init__(64, block_bytes)

    def settled(self, container):
        """Observe nothing."""


@pytest.mark.parametrize(
    "single",
    [f'[engine.tiers.x]\ntype = "{__name__}:Single"\n', f'[daemon]\ninstruments = ["{__name__}:Single"]\n'],
)
def test_a_reload_makes_nothing_again_that_runs(path, here, single):
    file = here / "daemon.toml"
    text = single + HOST if "instruments" in single else HOST + single
    text = text if "[daemon]" in text else "[daemon]\n" + text
    file.write_text(text.replace("[daemon]", f"[daemon]\nblock_bytes = {SIZE}"))
    with serve(path, str(file)):
        file.write_text(file.read_text() + HOST.replace("host", "more") + '[[engine.routes]]\nto = "host"\n')
        done = CliRunner().invoke(offload.cli.main, ["reload", "--runtime-dir", path])
    assert "engine.tiers" in done.output and "second time" not in done.output


def test_a_check_touches_no_memory_of_tiers(here):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert check(HOST.replace("1 MiB", "1 GiB") + "populate = true\n").exit_code == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (512 << 10)


async def test_a_reload_refuses_what_check_refuses(path, tmp_path):
    file = tmp_path / "daemon.toml"
    good = f"[daemon]\nblock_bytes = {SIZE}\nlease = 30.0\n" + HOST
    file.write_text(good)
    with serve(path, str(file)) as process:
        file.write_text(good.replace("30.0", "7.0") + 'eviction = "clairvoyant"\n')
        process.kill(signal.SIGHUP)
        await until(lambda: "SIGHUP: nothing was changed" in process.errors())
        assert "adaptive, lru" in process.errors()
        done = CliRunner().invoke(offload.cli.main, ["reload", "--runtime-dir", path])
        assert done.exit_code == 2
        assert "clairvoyant" in done.stderr
        async with open_connection(f"ipc://{path}/daemon.sock") as connection:
            assert connection.session.lease == 30.0


def test_check_beside_a_running_daemon(path, tmp_path):
    """Its ports and directories are in use by the daemon that is to be replaced."""
    file = tmp_path / "daemon.toml"
    file.write_text(f'[daemon]\nblock_bytes = {SIZE}\nflight_recorder = "{tmp_path}/ring"\n' + HOST + DISK)
    with serve(path, str(file)):
        done = CliRunner().invoke(offload.cli.main, ["serve", "--check", str(file), "--runtime-dir", path])
        assert done.exit_code == 0, done.output
