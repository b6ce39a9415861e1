"""The image of docs/how-to/run-in-kubernetes.md, built by its recipe, in containers as the restricted standard has them.

``OFFLOAD_IMAGE=DIRECTORY`` names a directory in which ``python -m tests.support.image`` has built it; else it is built anew.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.daemon.test_container import OPTIONS, SPEC, URL, WHERE, mapped_files, status_of
from tests.support.daemons import PATIENCE
from tests.support.image import ROOT, Images, missing

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(missing()), reason=missing())]
ENGINE = ["--entrypoint=python3", f"--volume={ROOT}/tests/support/daemon_engine.py:/engine.py:ro"]
READ = """
import sys
from backends.testing import payload_of
from offload import from_thread
from offload.client import DaemonTier, SharedBlocks, SharedMemory
url, of, number = sys.argv[1:]
keys = [b"%s %d %d" % (of.encode(), int(number), at) for at in range(64)]
cache = SharedBlocks(SharedMemory(64 * 4096), 4096)
with from_thread.open_engine(cache, {"daemon": DaemonTier(url, name="reader")}, policies=()) as engine:
    with engine.lookup(keys, timeout=60) as hit:
        loaded = engine.load(hit, cache.into(range(len(hit))), timeout=60).loaded
    assert all(cache.read(at) == payload_of(keys[at], 4096) for at in range(loaded))
    print(loaded)
"""


@pytest.fixture(scope="module")
def images():
    if built := os.environ.get("OFFLOAD_IMAGE"):
        yield Images(Path(built))
        return
    with tempfile.TemporaryDirectory(prefix="image", dir="/var/tmp") as directory:
        one = Images(Path(directory))
        one.build()
        yield one


@pytest.fixture
def volumes():
    """The two volumes, as a kubelet makes them: everybody may write there."""
    with tempfile.TemporaryDirectory(prefix="pod", dir="/var/tmp") as directory:
        made = [Path(directory) / "offload", Path(directory) / "offload-admin"]
        for volume in made:
            volume.mkdir()
            volume.chmod(0o777)
        Path(directory).chmod(0o755)
        yield made


def mounted(volumes):
    return [f"--volume={one}:/run/{one.name}" for one in volumes]


class Pod:
    """What runs in containers of the image, each with namespaces of its own, over some volumes."""

    def __init__(self, images, stack):
        self._images = images
        self._stack = stack

    def start(self, *arguments, volumes, options=()):
        """Start a container; its standard output is read line by line, and ``pid`` is its process as this machine knows it."""
        file = self._stack.enter_context(tempfile.TemporaryDirectory()) + "/pid"
        said = self._stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  # by the stack
        options = [*options, "--interactive", f"--pidfile={file}", *mounted(volumes)]
        command = self._images.run(*arguments, options=options)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True)

        def end():
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(Path(file).read_text()), signal.SIGKILL)
            with process:  # closes its pipes, and waits
                pass

        self._stack.callback(end)
        first = process.stdout.readline()
        said.seek(0)
        assert first, said.read()
        return process, first, int(Path(file).read_text())

    def run(self, *arguments, volumes, options=()):
        """Run a container to its end."""
        command = self._images.run(*arguments, options=[*options, *mounted(volumes)])
        return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)


@pytest.fixture
def pod(images):
    with contextlib.ExitStack() as stack:
        yield Pod(images, stack)


def loaded(line):
    return json.loads(line)["loaded"]


def test_the_image_serves_within_the_standard_and_blocks_outlive_the_engine_that_stored_them(pod, volumes):
    daemon, ready, pid = pod.start(*OPTIONS, volumes=volumes)
    assert f"ready at {URL}" in ready
    status = status_of(pid)
    assert status["Uid"].split() == ["10001"] * 4 and status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert {int(status[one], 16) for one in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {0}
    own = {one: os.readlink(f"/proc/{pid}/ns/{one}") for one in ("pid", "mnt", "ipc", "net", "uts")}
    assert all(os.readlink(f"/proc/self/ns/{one}") != name for one, name in own.items())
    assert Path(f"/proc/{pid}/mounts").read_text().splitlines()[0].split()[3].startswith("ro")

    probe = pod.run(*SPEC["livenessProbe"]["exec"]["command"][1:], volumes=volumes)
    assert probe.returncode == 0, probe.stderr
    engine, first, engine_pid = pod.start("/engine.py", URL, "first", "1000000", volumes=volumes[:1], options=ENGINE)
    while loaded(first) < 256:
        first = engine.stdout.readline()
    assert os.readlink(f"/proc/{engine_pid}/ns/pid") != own["pid"]
    assert any("memfd:offload-cache" in one for one in mapped_files(pid))  # the engine's, over the socket
    assert not any("/dev/shm" in one for one in mapped_files(pid) | mapped_files(engine_pid))
    os.kill(engine_pid, signal.SIGKILL)
    last = json.loads((engine.stdout.read().splitlines() or [first])[-1])["round"]
    second = pod.run("-c", READ, URL, "first", str(last), volumes=volumes[:1], options=ENGINE)
    assert (second.returncode, second.stdout.strip()) == (0, "64"), second.stderr
    doctor = pod.run("doctor", *WHERE, volumes=volumes)
    assert doctor.returncode == 0, doctor.stdout
    assert pod.run("drain", *WHERE, volumes=volumes).returncode == 0
    assert daemon.wait(PATIENCE) == 0


# What the other user namespace meets is a directory of somebody else.
def test_pods_share_a_daemon_where_its_user_is_theirs_and_are_told_where_it_is_not(pod, volumes):
    """Each container has a user namespace of its own besides. Mapped alike, their users are one to the kernel; else two."""
    same, other = [[f"--uidmap=0:{first}:65536", f"--gidmap=0:{first}:65536"] for first in (200_000, 300_000)]
    _, ready, pid = pod.start(*OPTIONS, volumes=volumes, options=same)
    assert "ready" in ready and status_of(pid)["Uid"].split() == ["210001"] * 4
    engines = [
        pod.start("/engine.py", URL, name, "1000000", volumes=volumes[:1], options=[*ENGINE, *same]) for name in "ab"
    ]
    for engine, line, engine_pid in engines:
        assert os.readlink(f"/proc/{engine_pid}/ns/user") != os.readlink(f"/proc/{pid}/ns/user")
        while loaded(line) < 128:
            line = engine.stdout.readline()
    (first, _, first_pid), (second, _, second_pid) = engines
    os.kill(second_pid, signal.SIGSTOP)  # it would store so much that the other's blocks are evicted
    os.kill(first_pid, signal.SIGKILL)
    last = json.loads((first.stdout.read().splitlines() or [engines[0][1]])[-1])["round"]
    seen = pod.run("-c", READ, URL, "a", str(last), volumes=volumes[:1], options=[*ENGINE, *same])
    assert (seen.returncode, seen.stdout.strip()) == (0, "64"), seen.stderr
    refused = pod.run("ping", *WHERE[:1], volumes=volumes[:1], options=other)
    assert refused.returncode != 0 and "user" in refused.stderr, refused.stderr
    os.kill(second_pid, signal.SIGCONT)
    os.kill(pid, signal.SIGKILL)
    while not json.loads(second.stdout.readline())["unavailable"]:  # it is told, and goes on without
        pass
    second.stdin.close()
    assert second.wait(PATIENCE) == 0
