"""The recipe for containers: its manifest is within the restricted pod security standard, and what it starts runs under it.

The processes of its two containers run here as the manifest says, each in namespaces of its own (user, mounts, processes, IPC,
network): another uid, no capability, no new privileges, every file system read-only but the volumes, nothing to write in
``/dev/shm``. What is missing of a real pod is the seccomp filter of the runtime.
"""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.support.daemons import PATIENCE, Process

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/run-in-kubernetes.md").read_text()
POD = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
DOCKERFILE = re.search(r"```dockerfile\n(.*?)```", PAGE, re.DOTALL)[1]


# --- the manifest -------------------------------------------------------------------------------------------------------


VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def containers_of(spec):
    return [*spec.get("initContainers", []), *spec["containers"]]


def violations(spec):
    """What of the restricted pod security standard (and the baseline in it) a pod does not keep."""
    pod = spec.get("securityContext", {})
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    found += [f"volume {one['name']}" for one in spec.get("volumes", []) if not set(one) - {"name"} <= VOLUMES]
    found += ["sysctls"] if pod.get("sysctls") else []
    for container in containers_of(spec):
        name, own = container["name"], container.get("securityContext", {})
        both = {**pod, **own}
        kept = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": both.get("runAsNonRoot") is True,
            "runAsUser": both.get("runAsUser") != 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "capabilities.drop": "ALL" in own.get("capabilities", {}).get("drop", []),
            "capabilities.add": set(own.get("capabilities", {}).get("add", [])) <= {"NET_BIND_SERVICE"},
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", [])),
            "procMount": own.get("procMount", "Default") == "Default",
            "appArmorProfile": both.get("appArmorProfile", {}).get("type") != "Unconfined",
            "seLinuxOptions": not set(both.get("seLinuxOptions", {})) & {"user", "role"},
        }
        found += [f"{name}: {rule}" for rule, is_kept in kept.items() if not is_kept]
    return found


def test_the_manifest_keeps_the_restricted_standard():
    assert violations(POD["spec"]) == []


@pytest.mark.parametrize(
    ("where", "key", "value", "what"),
    [
        ("spec", "hostIPC", True, "hostIPC"),
        ("volume", "hostPath", {"path": "/dev/shm"}, "volume sockets"),
        ("pod", "runAsNonRoot", None, "offload: runAsNonRoot"),
        ("pod", "runAsUser", 0, "offload: runAsUser"),
        ("pod", "seccompProfile", {"type": "Unconfined"}, "offload: seccompProfile"),
        ("container", "privileged", True, "offload: privileged"),
        ("container", "allowPrivilegeEscalation", None, "offload: allowPrivilegeEscalation"),
        ("container", "capabilities", {"drop": ["NET_RAW"]}, "offload: capabilities.drop"),
        ("container", "capabilities", {"drop": ["ALL"], "add": ["IPC_LOCK"]}, "offload: capabilities.add"),
        ("container", "procMount", "Unmasked", "offload: procMount"),
    ],
)
def test_a_manifest_that_asks_for_more_is_found(where, key, value, what):
    spec = copy.deepcopy(POD["spec"])
    place = {
        "spec": spec,
        "volume": spec["volumes"][0],
        "pod": spec["securityContext"],
        "container": spec["initContainers"][0]["securityContext"],
    }[where]
    place[key] = value
    assert what in violations(spec)


def test_both_containers_are_one_user_with_a_read_only_root_and_no_other_writable_place_than_sockets():
    spec = POD["spec"]
    for container in containers_of(spec):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert "runAsUser" not in container["securityContext"]  # that of the pod, for both
    assert all(volume["emptyDir"]["medium"] == "Memory" for volume in spec["volumes"])
    assert spec["automountServiceAccountToken"] is False


def test_what_the_manifest_names_fits_together():
    (daemon,), (engine,) = POD["spec"]["initContainers"], POD["spec"]["containers"]
    options = dict(one.removeprefix("--").split("=", 1) for one in daemon["args"][1:])
    mounts = {mount["mountPath"] for mount in daemon["volumeMounts"]}
    assert os.path.dirname(options["runtime-dir"]) in mounts  # made by the daemon in it
    assert engine["env"][0]["value"] == f"ipc://{options['runtime-dir']}/daemon.sock"
    assert os.path.dirname(options["runtime-dir"]) in {mount["mountPath"] for mount in engine["volumeMounts"]}
    # The sockets of operators are where the engine has nothing mounted.
    operators = os.path.dirname(os.path.dirname(options["admin"].removeprefix("ipc://")))
    assert operators in mounts - {mount["mountPath"] for mount in engine["volumeMounts"]}
    assert POD["spec"]["terminationGracePeriodSeconds"] > float(options["drain-timeout"]) + 0.5
    for probe in ("startupProbe", "livenessProbe"):
        assert daemon[probe]["exec"]["command"] == ["offload", "ping", f"--runtime-dir={options['runtime-dir']}"]
    assert daemon["restartPolicy"] == "Always"


def test_the_image_is_of_the_same_user_and_starts_the_daemon():
    user = POD["spec"]["securityContext"]["runAsUser"]
    lines = DOCKERFILE.splitlines()
    assert f"USER {user}:{user}" in lines and 'ENTRYPOINT ["offload"]' in lines


# --- running it ---------------------------------------------------------------------------------------------------------


CONFINE = r"""
set -e
mount -t tmpfs -o mode=755,size=1m none /run
for volume in $VOLUMES; do
    mkdir "/run/$(basename "$volume")"
    mount --bind "$volume" "/run/$(basename "$volume")"
done
mount -t tmpfs -o size=4k none /dev/shm
cut -d' ' -f2 /proc/self/mounts | while read -r at; do
    case "$at" in
    /run/?*|/proc*|/sys*|/dev|/dev/pts|/dev/mqueue|/dev/hugepages) ;;
    *) mount -o remount,bind,ro "$at" 2>/dev/null || true ;;
    esac
done
for place in / /tmp /var/tmp /run /dev/shm "$HOME" "$PWD"; do
    if touch "$place/.written" 2>/dev/null; then echo "$place can be written" >&2; exit 9; fi
done
exec setpriv --ambient-caps=-all --inh-caps=-all --bounding-set=-all --no-new-privs -- "$@"
"""


def confined(volumes):
    """What starts a command in namespaces of its own, as the manifest's user, that can write to these directories alone.

    They are in /run by their names.
    """
    user = POD["spec"]["securityContext"]["runAsUser"]
    return [
        "unshare", "--user", f"--map-user={user}", f"--map-group={user}", "--keep-caps",
        "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--net", "--uts",
        "env", f"VOLUMES={' '.join(map(str, volumes))}", "PYTHONDONTWRITEBYTECODE=1",
        "sh", "-c", CONFINE, "sh",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def volumes():
    """The two volumes, as a kubelet makes them: everybody may write there."""
    why_not = subprocess.run([*confined([]), "true"], capture_output=True, text=True, check=False).stderr
    if why_not:
        pytest.skip(f"this machine makes no such namespaces: {why_not.strip()}")
    with tempfile.TemporaryDirectory(prefix="pod", dir="/var/tmp") as directory:
        made = [Path(directory) / "offload", Path(directory) / "offload-admin"]
        for volume in made:
            volume.mkdir()
            volume.chmod(0o777)
        yield made


def start(*command, volumes):
    return Process(*command, within=confined(volumes))


def inner(process):
    """The command that was started within: its parent made the namespaces."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def run_confined(*arguments, volumes):
    command = [*confined(volumes), sys.executable, "-m", "offload", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def status_of(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


(SPEC,) = POD["spec"]["initContainers"]
URL = POD["spec"]["containers"][0]["env"][0]["value"]
OPTIONS = [one.replace("=48GiB", "=32MiB") for one in SPEC["args"]]
WHERE = [one for one in OPTIONS if one.startswith(("--runtime-dir", "--admin"))]


def use(daemon, sockets):
    """An engine in its own container stores and loads, and is killed."""
    with start("-m", "tests.support.daemon_engine", URL, "first", "1000000", volumes=[sockets]) as engine:
        while json.loads(engine.line())["loaded"] < 256:
            pass
        # Its cache is a memfd, which the daemon in other namespaces has mapped.
        assert any("memfd:offload-cache" in one for one in mapped_files(inner(daemon)))
        engine.kill()


def test_the_daemon_and_an_engine_run_under_it_with_no_other_place_to_write_than_the_volumes(volumes):
    with start("-m", "offload", *OPTIONS, volumes=volumes) as daemon:
        assert f"ready at {URL}" in daemon.line()
        status = status_of(inner(daemon))
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"] == "1"
        assert "shm" not in " ".join(mapped_files(inner(daemon)))
        use(daemon, volumes[0])
        os.kill(inner(daemon), signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors()
    left = [str(path.relative_to(volumes[0].parent)) for volume in volumes for path in volume.rglob("*")]
    assert sorted(left) == ["offload-admin/daemon", "offload/daemon", "offload/daemon/daemon.lock"]


FOLLOW = """
import os, select, socket, struct, sys
from maru.base.listeners import open_peer
from maru.base.packets import connect
sock = connect(sys.argv[1].removeprefix('ipc://'))
number = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
peer = open_peer(sock)
print(number, peer >= 0, bool(select.select([peer], [], [], 0)[0]), flush=True)
print(bool(select.select([peer], [], [], 60)[0]), flush=True)
"""


def test_a_client_of_another_pid_namespace_is_told_of_the_end_of_the_daemon(volumes):
    with start("-m", "offload", *OPTIONS, volumes=volumes) as daemon:
        daemon.line()
        with start("-c", FOLLOW, URL, volumes=volumes[:1]) as client:
            assert client.line().strip() == "0 True False"  # a process without a number there
            os.kill(inner(daemon), signal.SIGKILL)
            assert client.line().strip() == "True"


@pytest.mark.long
def test_probes_answer_blocks_outlive_the_engine_and_operators_come_where_engines_do_not(volumes):
    with start("-m", "offload", *OPTIONS, volumes=volumes) as daemon:
        daemon.line()
        probe = run_confined(*SPEC["livenessProbe"]["exec"]["command"][1:], volumes=volumes)
        assert probe.returncode == 0, probe.stderr
        use(daemon, volumes[0])
        from_the_engine = run_confined("drain", *WHERE, volumes=volumes[:1])
        assert from_the_engine.returncode == 3 and "admin.sock" in from_the_engine.stderr
        told = json.loads(run_confined("describe", "--json", *WHERE, volumes=volumes).stdout)
        assert told["tiers"][0]["blocks"] >= 256
        doctor = run_confined("doctor", *WHERE, volumes=volumes)
        assert doctor.returncode == 0, doctor.stdout
        assert run_confined("drain", *WHERE, volumes=volumes).returncode == 0
        assert daemon.wait() == 0


def mapped_files(pid):
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}


def test_without_a_writable_volume_it_says_what_it_needs(volumes):
    done = run_confined("serve", "--runtime-dir=/run/elsewhere/daemon", "--maru-pool-size-gb=0", volumes=[])
    assert done.returncode == 3, done.stderr
    assert "no directory '/run/elsewhere'" in done.stderr and "mkdir -p /run/elsewhere" in done.stderr
