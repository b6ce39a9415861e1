"""What would go wrong with a pool, found before it does: decisions over facts, and the reading of facts."""

import fcntl
import os
import resource
import socket
import subprocess
import sys

import attrs
import pytest

from maru._pool.doctor import DeviceFact, Facts, PoolFact, Wanted, examine
from maru._pool.facts import file_system_of, locked_inodes, read_facts
from maru._pool.spans import ALIGN_BYTES as MIB2
from maru._pool.state_directory import StateDirectory
from maru.base import machine
from maru.base.findings import PathFact, worst

GIB = 1 << 30
WELL = Facts(
    directory=PathFact("/dev/shm/maru-1000"),
    free_bytes=20 * GIB,
    available_bytes=24 * GIB,
    memlock_bytes=None,
    descriptors=65_536,
    most_descriptors=65_536,
    curve=True,
)
WANTED = Wanted(capacity_bytes=10 * GIB, pin=True, curve=True)


def finding(name, wanted=WANTED, **facts):
    [found] = [found for found in examine(attrs.evolve(WELL, **facts), wanted) if found.name == name]
    return found


# --- deciding -----------------------------------------------------------------------------------------------------


def test_where_all_is_well_nothing_is_to_be_done():
    findings = examine(WELL, WANTED)
    assert worst(findings) == "ok" and not any(found.way_out for found in findings)
    assert [found.name for found in findings] == [
        "pool directory",
        "space for regions",
        "memory for regions",
        "file system",
        "file descriptors",
        "populating",
        "huge pages",
        "locked memory",
        "CURVE",
    ]
    assert examine(WELL, WANTED) == findings


CASES = [
    ("pool directory", {"directory": PathFact("/p", exists=False)}, "ok"),
    ("pool directory", {"directory": PathFact("/p", ours=False)}, "fail"),
    ("pool directory", {"directory": PathFact("/p/q", exists=False, has_parent=False)}, "fail"),
    ("pool directory", {"directory": PathFact("/p", mode=0o755)}, "fail"),
    ("pool directory", {"directory": PathFact("/p", mode=0o701)}, "fail"),
    ("pool directory", {"directory": PathFact("/p", mode=0o755, empty=True)}, "ok"),
    # A container gives /dev/shm 64 MiB unless told otherwise.
    ("space for regions", {"free_bytes": 64 << 20}, "fail"),
    ("space for regions", {"free_bytes": 10 * GIB - 1}, "fail"),
    ("space for regions", {"free_bytes": 10 * GIB}, "warn"),
    ("space for regions", {"free_bytes": 4 * GIB, "held_bytes": 7 * GIB}, "ok"),  # what it holds is its own
    ("memory for regions", {"available_bytes": 9 * GIB}, "fail"),
    ("memory for regions", {"available_bytes": 9 * GIB, "held_bytes": 2 * GIB}, "ok"),
    ("memory for regions", {"memory_left_bytes": 2 * GIB}, "fail"),
    ("memory for regions", {"memory_left_bytes": 11 * GIB}, "ok"),
    ("memory for regions", {"memory_left_bytes": 2 * GIB, "file_system": "ext4"}, "ok"),
    ("file system", {"file_system": "ext4"}, "warn"),
    ("file system", {"file_system": ""}, "warn"),
    ("file descriptors", {"descriptors": 2_320}, "ok"),
    ("file descriptors", {"descriptors": 2_319}, "warn"),
    ("file descriptors", {"descriptors": 1_024, "most_descriptors": 1_024}, "warn"),
    ("file descriptors", {"descriptors": 32, "most_descriptors": 32}, "fail"),
    ("populating", {"populates": False}, "warn"),
    ("huge pages", {"why_no_huge_pages": "Linux 5.15"}, "warn"),
    ("locked memory", {"memlock_bytes": 8 << 20}, "warn"),
    ("CUDA driver", {"why_no_driver": "no CUDA driver"}, "warn"),
    ("CUDA driver", {"why_no_driver": ""}, "ok"),
    ("locked memory", {"memlock_bytes": 10 * GIB}, "ok"),
    ("CURVE", {"curve": False}, "fail"),
    ("CURVE", {"curve": None}, "fail"),
]


@pytest.mark.parametrize(("name", "facts", "verdict"), CASES)
def test_each_fact_has_its_verdict_and_each_trouble_a_way_out(name, facts, verdict):
    found = finding(name, **facts)
    assert found.verdict == verdict
    assert bool(found.way_out) == (verdict != "ok")
    assert found.found and found.needed


def test_the_driver_is_there_with_the_call_that_copies():
    found = finding("CUDA driver", why_no_driver="", copy_call="cuMemcpyBatchAsync")
    assert "cuMemcpyBatchAsync" in found.found


def test_a_trouble_says_what_to_do():
    assert "--shm-size" in finding("space for regions", free_bytes=64 << 20).way_out
    assert "at most 1.8 GiB" in finding("space for regions", free_bytes=2 * GIB).way_out
    assert "memory.max" in finding("memory for regions", memory_left_bytes=GIB).way_out
    assert "add memory" in finding("memory for regions", available_bytes=GIB).way_out
    assert finding("file descriptors", descriptors=1_024).way_out == "ulimit -n 2320"
    assert "LimitNOFILE=2320" in finding("file descriptors", descriptors=1_024, most_descriptors=2_000).way_out
    assert "chmod 700 /p" in finding("pool directory", directory=PathFact("/p", mode=0o755)).way_out
    assert "mkdir -p /p" in finding("pool directory", directory=PathFact("/p/q", False, has_parent=False)).way_out
    assert "--ulimit memlock=-1" in finding("locked memory", memlock_bytes=64 << 10).way_out


def test_what_is_not_wanted_is_not_asked_for():
    plain = Wanted()
    names = {found.name for found in examine(attrs.evolve(WELL, memlock_bytes=1, curve=None), plain)}
    assert not names & {"locked memory", "CURVE"}
    assert finding("CURVE", plain, curve=False).verdict == "ok"
    assert finding("space for regions", plain, free_bytes=MIB2 - 1).verdict == "fail"  # not even one region
    assert finding("space for regions", plain, free_bytes=MIB2).verdict == "ok"


@pytest.mark.parametrize(
    ("fact", "verdict"),
    [
        (DeviceFact("/dev/dax0.0", "", 16 * GIB, MIB2), "ok"),
        (DeviceFact("/dev/dax0.0", "", 16 * GIB, GIB), "ok"),
        (DeviceFact("/dev/dax0.0", "", 8 * GIB, MIB2), "fail"),
        (DeviceFact("/dev/dax0.0", "", 16 * GIB, 4096), "fail"),
        (DeviceFact("/dev/dax0.0", "", 16 * GIB, 4 * GIB), "warn"),  # 2 of 10 GiB are less than a step
        (DeviceFact("/dev/null", "not a DAX device"), "fail"),
    ],
)
def test_a_device_has_to_be_large_enough_and_aligned(fact, verdict):
    found = finding("device", device=fact)
    assert found.verdict == verdict and bool(found.way_out) == (verdict != "ok")
    names = {found.name for found in examine(attrs.evolve(WELL, device=fact), WANTED)}
    assert "space for regions" not in names  # the directory then holds a few small files only


@pytest.mark.parametrize(
    ("fact", "verdict"),
    [
        (PathFact("/p/a.sock", mode=0o600), "ok"),
        (PathFact("/p/a.sock", mode=0o666), "fail"),
        (PathFact("/p/a.sock", mode=0o700), "fail"),
        (PathFact("/p/a.sock", mode=0o600, ours=False), "fail"),
        (PathFact("/p/a.sock", exists=False), "warn"),
    ],
)
def test_a_socket_is_ours_alone(fact, verdict):
    assert finding("socket a.sock", sockets=(fact,)).verdict == verdict


@pytest.mark.parametrize(
    ("fact", "verdict"),
    [
        (PoolFact("/p/old", GIB, False), "warn"),
        (PoolFact("/p/old", GIB, True), "ok"),
        (PoolFact("/p/old", 0, False), "ok"),
    ],
)
def test_memory_that_a_dead_server_holds_is_pointed_out(fact, verdict):
    found = finding("pool old", pools=(fact,))
    assert found.verdict == verdict
    assert ("rm -r /p/old" in found.way_out) == (verdict == "warn")


def test_the_worst_verdict_counts():
    assert worst([]) == "ok"
    assert worst(examine(attrs.evolve(WELL, populates=False), WANTED)) == "warn"
    assert worst(examine(attrs.evolve(WELL, populates=False, curve=False), WANTED)) == "fail"


# --- reading ------------------------------------------------------------------------------------------------------


def test_the_facts_of_this_place_are_read_and_nothing_is_changed(tmp_path):
    path = tmp_path / "pool" / "not there yet"
    facts = read_facts(path, curve=True)
    assert not path.parent.exists()
    assert not facts.directory.exists and facts.device is None and facts.curve
    system = os.statvfs(tmp_path)
    assert facts.free_bytes == pytest.approx(system.f_bavail * system.f_frsize, rel=0.1)
    assert facts.file_system
    assert facts.available_bytes > 1 << 20
    assert facts.descriptors == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert read_facts("/dev/shm/x").file_system == "tmpfs"
    examine(facts, WANTED)


def test_a_pool_its_sockets_and_its_neighbours_are_looked_at(tmp_path):
    mine = StateDirectory(tmp_path / "mine")
    (tmp_path / "mine" / "maru_1.dat").write_bytes(bytes(MIB2))
    (tmp_path / "mine" / "journal.1").write_bytes(bytes(MIB2))
    script = (
        "import sys; from maru._pool import state_directory as module; home = module.StateDirectory(sys.argv[1]); "
        "print(1, flush=True); sys.stdin.read()"
    )
    StateDirectory(tmp_path / "dead").close()
    (tmp_path / "dead" / "maru_7.dat").write_bytes(bytes(2 * MIB2))
    (tmp_path / "no pool").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "mine" / "a.sock"))
        os.chmod(tmp_path / "mine" / "a.sock", 0o640)
        command = [sys.executable, "-c", script, tmp_path / "served"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            server.stdout.readline()
            facts = read_facts(tmp_path / "mine", sockets=[str(tmp_path / "mine" / "a.sock")])
            assert fcntl.flock(mine._lock, fcntl.LOCK_EX | fcntl.LOCK_NB) is None
            server.stdin.close()
    assert facts.directory == PathFact(str(tmp_path / "mine"), True, True, 0o700)
    assert facts.held_bytes == MIB2
    assert facts.sockets == (PathFact(str(tmp_path / "mine" / "a.sock"), True, True, 0o640),)
    assert sorted(facts.pools, key=lambda pool: pool.path) == [
        PoolFact(str(tmp_path / "dead"), 2 * MIB2, False),
        PoolFact(str(tmp_path / "served"), 0, True),
    ]
    mine.close()


def test_the_device_is_looked_at(tmp_path):
    file = tmp_path / "device"
    file.write_bytes(bytes(MIB2))
    assert read_facts(tmp_path, device=str(file)).device == DeviceFact(str(file), "", MIB2, MIB2)
    assert "not a DAX device" in read_facts(tmp_path, device="/dev/null").device.problem
    assert "No such file" in read_facts(tmp_path, device="/dev/dax9.9").device.problem


MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
disk /dev/shm/with\\040space xfs rw 0 0
below /mnt ext4 rw 0 0
above /mnt btrfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/x", "ext4"),
        ("/dev/shm", "tmpfs"),
        ("/dev/shm/maru-0", "tmpfs"),
        ("/dev/shmoo", "ext4"),
        ("/dev/shm/with space/x", "xfs"),
        ("/mnt/x", "btrfs"),
    ],
)
def test_a_paths_file_system_is_that_of_the_nearest_mount(path, kind):
    assert file_system_of(path, MOUNTS) == kind


def test_locks_are_read_not_tried():
    locks = (
        "1: FLOCK  ADVISORY  WRITE 812 00:1c:5301 0 EOF\n2: POSIX  ADVISORY  READ 9 00:1c:77 0 EOF\n3: ->\nrubbish\n"
    )
    assert locked_inodes(locks) == {5301: 812}
    assert locked_inodes("") == {}


def test_a_memory_limit_is_the_least_of_all_groups_above(tmp_path):
    proc, group = tmp_path / "proc", tmp_path / "group"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (group / "a" / "b").mkdir(parents=True)

    def say(where, most, used, cached=0):
        (where / "memory.max").write_text(f"{most}\n")
        (where / "memory.current").write_text(f"{used}\n")
        (where / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\nslab 2\n")

    assert machine.group_memory_left(str(proc), str(group)) is None
    say(group / "a" / "b", "max", 5)
    assert machine.group_memory_left(str(proc), str(group)) is None
    say(group / "a", 8 * GIB, 5 * GIB, cached=GIB)  # a cache is given up for regions
    assert machine.group_memory_left(str(proc), str(group)) == 4 * GIB
    assert machine.memory_limit(str(proc), str(group)) == 8 * GIB
    say(group / "a" / "b", GIB, 3 * GIB)
    assert machine.group_memory_left(str(proc), str(group)) == 0

    (proc / "self" / "cgroup").write_text("4:memory,x:/c\n1:name=systemd:/\n")  # version 1
    (group / "memory" / "c").mkdir(parents=True)
    (group / "memory" / "c" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (group / "memory" / "c" / "memory.usage_in_bytes").write_text("5\n")
    assert machine.group_memory_left(str(proc), str(group)) is None
    (group / "memory" / "c" / "memory.limit_in_bytes").write_text("15\n")
    assert machine.group_memory_left(str(proc), str(group)) == 10


def test_who_may_lock_anything_has_no_limit(monkeypatch, tmp_path):
    status = tmp_path / "self" / "status"
    status.parent.mkdir()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    status.write_text("Name:\tx\nCapEff:\t0000000000004000\n")
    assert machine.memlock_limit(str(tmp_path)) is None
    status.write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    assert machine.memlock_limit(str(tmp_path)) == 8 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine.memlock_limit(str(tmp_path)) is None
