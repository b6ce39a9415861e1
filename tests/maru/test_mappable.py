"""What a client maps of what it was told or handed, and what it refuses: the rule alone, and at the place that opens."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path

import attrs
import pytest

from maru import CannotMap
from maru.base.memory import validation
from maru.base.memory.mapping import map_region
from maru.base.memory.validation import open_mappable, why_not_mappable
from tests.support.other_user import UID, needs_root

LENGTH = 4096
SHRINK = fcntl.F_SEAL_SHRINK


@attrs.frozen
class Status:
    """As much of what ``fstat`` says as the rule looks at."""

    st_mode: int = stat.S_IFREG | 0o600
    st_uid: int = 7
    st_size: int = LENGTH
    st_nlink: int = 1
    st_dev: int = 1
    st_ino: int = 1
    st_rdev: int = 0


def why(status=None, *, end=LENGTH, uid=7, **options):
    return why_not_mappable(status or Status(), end, uid=uid, **options)


# --- the rule -----------------------------------------------------------------------------------------------------


def test_a_regular_file_of_ours_that_is_closed_to_others_may_be_mapped_to_its_end():
    assert not why()
    assert "4096 bytes, but 4097 were promised" in why(end=LENGTH + 1)


def test_a_file_of_another_user_may_not():
    assert "belongs to user 8, and this process runs as 7" in why(Status(st_uid=8))
    assert why(Status(st_uid=0))  # root's neither: what it may do by itself is not what a peer may have it do


@pytest.mark.parametrize("mode", [0o601, 0o602, 0o604, 0o610, 0o620, 0o640, 0o666])
def test_a_file_that_others_may_use_may_not(mode):
    assert f"{mode:04o}" in why(Status(st_mode=stat.S_IFREG | mode))


@pytest.mark.parametrize("kind", [stat.S_IFDIR, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFBLK, stat.S_IFLNK])
def test_what_is_no_regular_file_may_not(kind):
    assert "not a regular file" in why(Status(st_mode=kind | 0o600))


def test_a_file_with_two_names_may_not():
    assert "2 hard links" in why(Status(st_nlink=2))


def test_a_file_without_a_name_may_only_where_nobody_can_shorten_it():
    assert "not sealed" in why(Status(st_nlink=0))
    assert not why(Status(st_nlink=0), seals=SHRINK)


def test_a_device_may_only_if_the_configuration_names_it():
    device = Status(st_mode=stat.S_IFCHR | 0o660, st_uid=0, st_size=0, st_rdev=9)
    assert "dax_path" in why(device)
    assert not why(device, device=device)
    assert "dax_path" in why(device, device=attrs.evolve(device, st_rdev=10))
    file = Status(st_mode=stat.S_IFREG | 0o644, st_ino=3)  # taken for a device
    assert not why(file, device=file)
    assert "were promised" in why(file, device=file, end=LENGTH + 1)
    assert "others may use it" in why(file, device=attrs.evolve(file, st_ino=4))


# --- where it is kept ---------------------------------------------------------------------------------------------


@pytest.fixture
def region(tmp_path: Path) -> Path:
    path = tmp_path / "maru_1.dat"
    path.touch(0o600)
    path.write_bytes(bytes(LENGTH))
    return path


def test_a_path_through_a_symbolic_link_is_not_opened_wherever_that_is(region, tmp_path):
    os.close(open_mappable(region, LENGTH, write=False))
    (tmp_path / "last").symlink_to(region)
    (tmp_path / "before").symlink_to(tmp_path)
    for path in (tmp_path / "last", tmp_path / "before" / region.name):
        with pytest.raises(CannotMap, match=f"{path.relative_to(tmp_path).parts[0]!r} in it is a symbolic link"):
            open_mappable(path, LENGTH, write=False)


@pytest.mark.parametrize("path", ["maru_1.dat", "", "/", "/tmp/", "/tmp/../etc/passwd", "/tmp/\0", "./maru_1.dat"])
def test_what_is_no_absolute_path_of_a_file_is_not_opened(path):
    with pytest.raises(CannotMap):
        open_mappable(path, LENGTH, write=False)


def test_what_may_not_be_mapped_is_not_opened_at_all(tmp_path, monkeypatch):
    """To open a pipe waits for its other end, and to open a device may do something."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "directory").mkdir(0o700)
    paths = [tmp_path / "pipe", tmp_path / "directory", Path("/dev/null")]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        paths.append(tmp_path / "socket")
        opened = []
        real = os.open

        def watched(path, flags, *rest, **options):
            opened.append(flags)
            return real(path, flags, *rest, **options)

        monkeypatch.setattr(validation.os, "open", watched)
        for path in paths:
            with pytest.raises(CannotMap, match="is not mapped"):
                map_region(path, LENGTH, write=True)
    assert opened and all(flags & os.O_PATH for flags in opened)


def test_nothing_stays_open_whatever_is_refused(region, tmp_path):
    (tmp_path / "link").symlink_to(region)
    region.chmod(0o644)
    before = len(os.listdir("/proc/self/fd"))
    for path in (region, tmp_path / "link", tmp_path / "gone" / "gone"):
        with pytest.raises(CannotMap):
            map_region(path, LENGTH)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_is_judged_as_a_path_is(region):
    with open(region, "r+b") as file:
        map_region(file.fileno(), LENGTH).close()
        os.chmod(region, 0o644)
        with pytest.raises(CannotMap, match="mode 0644"):
            map_region(file.fileno(), LENGTH)


def test_a_memfd_that_can_be_made_shorter_is_not_mapped():
    fd = os.memfd_create("region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, LENGTH)
        with pytest.raises(CannotMap, match="not sealed against shrinking"):
            map_region(fd, LENGTH)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SHRINK)
        map_region(fd, LENGTH).close()
    finally:
        os.close(fd)


def test_a_device_of_the_configuration_is_mapped_and_another_one_is_not(region, tmp_path):
    region.chmod(0o640)
    map_region(region, LENGTH, device=str(region)).close()
    with pytest.raises(CannotMap, match="dax_path = "):
        map_region(region, LENGTH, device=str(tmp_path / "gone"))


@needs_root
def test_a_file_that_another_user_has_made_is_not_mapped():
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "maru_1.dat"
        path.touch(0o600)
        path.write_bytes(bytes(LENGTH))
        os.chown(path, UID, UID)
        with pytest.raises(CannotMap, match=f"belongs to user {UID}"):
            map_region(path, LENGTH, write=True)
