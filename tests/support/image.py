"""Builds the image of docs/how-to/run-in-kubernetes.md by its own recipe, and runs it as a restricted pod has it.

``python -m tests.support.image DIRECTORY`` builds it into a store in there, beside a ``rootfs`` if there is one. Nothing
is pulled: Debian's ``debootstrap`` makes the base, the interpreter that runs this is copied to where an official image has
it, and the result gets the name that the recipe begins ``FROM``. Needs root, and Debian's ``buildah``, ``podman``,
``crun`` and ``debootstrap``.

A machine without a registry, and with control groups of both versions, still makes the container that a kubelet would: a user
that is not root, no capability, ``no_new_privs``, the seccomp filter of the runtime's default profile, a read-only root, and
namespaces of its own. Control groups are left out, so nothing bounds its memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/run-in-kubernetes.md").read_text()
_FOUND = re.search(r"```dockerfile\n(.*?)```", PAGE, re.DOTALL)
assert _FOUND is not None
RECIPE = _FOUND[1]
NAME = "localhost/offload:latest"
TOOLS = ("buildah", "podman", "crun", "debootstrap")


def missing() -> str:
    """Why no image can be built here; empty: it can."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"needs Debian's {', '.join(lacking)}"
    return "" if os.geteuid() == 0 else "needs root, for the namespaces of containers"


class Images:
    """The images in one directory, and the containers that are made of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = [f"--root={directory}/store", f"--runroot={directory}/run", "--storage-driver=vfs"]

    def build(self) -> None:
        """Build the recipe on a base that is made here."""
        self._base(RECIPE.split()[1])
        with tempfile.TemporaryDirectory(dir=self.directory) as context:
            Path(context, "Containerfile").write_text(RECIPE)
            wheels(Path(context, "dist"))
            self._buildah("bud", "--isolation=chroot", "--pull-never", f"--tag={NAME}", context)

    def run(self, *arguments: str, options: Sequence[str] = (), user: int = 10001) -> list[str]:
        """The command that runs the image with these arguments, until it ends, as a pod that is restricted has it."""
        confined = [
            "--rm", "--runtime=crun", "--cgroups=disabled", "--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096",
            f"--user={user}:{user}", "--cap-drop=all", "--security-opt=no-new-privileges", "--read-only",
            "--read-only-tmpfs=false", "--network=none", "--ipc=private", "--uts=private", "--shm-size=4k",
        ]  # fmt: skip
        command = ["podman", *self.store, "--log-level=error", "run", *confined, *options, NAME, *arguments]
        # In a mount namespace where control groups have one version, as the runtime wants it.
        hidden = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'
        return ["unshare", "--mount", "sh", "-c", hidden, "sh", *command]

    def _base(self, name: str) -> None:
        rootfs = self.directory / "rootfs"
        if not (rootfs / "usr").exists():
            subprocess.run(["debootstrap", "--variant=minbase", _suite(), rootfs], check=True, stdout=sys.stderr)
        if not (rootfs / "usr/local/bin/pip").exists():
            _add_interpreter(rootfs)
        container = self._buildah("from", "scratch").strip()
        self._buildah("add", container, str(rootfs), "/")
        self._buildah("config", "--env=PATH=/usr/local/bin:/usr/bin:/bin", container)
        self._buildah("commit", container, f"docker.io/library/{name}")
        self._buildah("rm", container)

    def _buildah(self, *arguments: str) -> str:
        done = subprocess.run(["buildah", *self.store, *arguments], check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"buildah {arguments[0]} ended with {done.returncode}: {done.stderr[-2_000:]}")
        return done.stdout


def wheels(directory: Path) -> None:
    """This tree as a wheel, and those that it needs: with all of them named, the recipe asks no index."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", f"--wheel-dir={directory}", str(ROOT)],
        check=True,
        stdout=sys.stderr,
    )


def _suite() -> str:
    return next(
        line.partition("=")[2].strip('"')
        for line in Path("/etc/os-release").read_text().splitlines()
        if line.startswith("VERSION_CODENAME=")
    )


def _add_interpreter(rootfs: Path) -> None:
    """Copy the interpreter that runs this, with pip, to where the official images have theirs, and the libraries it needs."""
    prefix, local = Path(sys.base_prefix), rootfs / "usr/local"
    if prefix == Path("/usr"):
        raise RuntimeError("the interpreter is the system's own: run this with one that has a prefix to itself")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    library = f"lib/python{version}"
    unneeded = shutil.ignore_patterns("test", "__pycache__", "site-packages", "idlelib", "config-*")
    shutil.copytree(prefix / library, local / library, ignore=unneeded, dirs_exist_ok=True)
    shutil.copytree(prefix / library / "site-packages/pip", local / library / "site-packages/pip", dirs_exist_ok=True)
    shutil.copy(Path(f"{prefix}/bin/python{version}").resolve(), local / "bin/python3")
    for shared in prefix.glob("lib/libpython*.so*"):
        shutil.copy(shared, local / "lib")
    for needed in _libraries([local / "bin/python3", *local.glob(f"{library}/lib-dynload/*.so")]):
        if not (rootfs / needed.relative_to("/")).exists():
            (rootfs / needed.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(needed, rootfs / needed.relative_to("/"))
    subprocess.run(["chroot", rootfs, "ldconfig"], check=True)
    pip = local / "bin/pip"
    pip.write_text('#!/bin/sh\nexec /usr/local/bin/python3 -m pip "$@"\n')
    pip.chmod(0o755)


def _libraries(files: Sequence[Path]) -> Iterator[Path]:
    """The shared libraries of the system that these files need."""
    told: Any = subprocess.run(["ldd", *files], check=False, capture_output=True, text=True).stdout
    for line in dict.fromkeys(re.findall(r"=> (/(?:usr/)?lib\S+)", told)):
        yield Path(line)


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve()
    where.mkdir(parents=True, exist_ok=True)
    Images(where).build()
    print(f"{NAME} is in {where}/store")
