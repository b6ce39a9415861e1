"""Bytes are moved to the last one, or an error says that they were not; and no module goes round that."""

import ast
import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from maru.base import all_bytes as calls

ROOT = Path(__file__).resolve().parents[2]
DATA = bytes(range(251)) * 3


@pytest.fixture(params=[1, 7, 250, 1 << 20])
def stingy(request, monkeypatch):
    """A kernel that moves so many bytes a call at most."""
    most = request.param

    def cut(parts):
        left, cut = most, []
        for part in parts:
            cut.append(memoryview(part).cast("B")[:left])
            left -= len(cut[-1])
        return cut

    write, writev, pwrite, pread, preadv = os.write, os.writev, os.pwrite, os.pread, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:most]))
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, cut(parts)))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:most], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, most), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, cut(views), at))
    return most


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def content(fd):
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read()


def test_writes_are_whole_however_little_moves(stingy, file):
    calls.write_all(file, DATA[:100], bytearray(DATA[100:101]), memoryview(DATA)[101:])
    assert content(file) == DATA
    calls.write_all_at(file, DATA, 5)
    assert content(file) == DATA[:5] + DATA
    calls.write_with(lambda fd, data: os.write(fd, data[: stingy // 2 + 1]), file, DATA)
    assert content(file) == DATA[:5] + DATA[:-5] + DATA


def test_reads_are_whole_however_little_moves(stingy, file):
    calls.write_all(file, DATA)
    head, page = bytearray(10), bytearray(len(DATA) - 10)
    assert calls.read_up_to(file, head, memoryview(page), at=0) == len(DATA)
    assert head + page == DATA
    assert calls.read_head(file, len(DATA)) == calls.read_head(file, 10_000) == DATA
    calls.read_all(file, memoryview(page)[:100], 13)
    assert page[:100] == DATA[13:113]


def test_items_wider_than_a_byte_are_counted_in_bytes(stingy, file):
    wide = memoryview(bytearray(DATA[:64])).cast("Q")
    calls.write_all(file, b"head", wide)
    assert content(file) == b"head" + DATA[:64]
    back = memoryview(bytearray(64)).cast("Q")
    assert calls.read_up_to(file, bytearray(4), back, at=0) == 68
    assert back == wide


def test_a_file_that_ends_early_is_an_error(stingy, file):
    calls.write_all(file, DATA)
    with pytest.raises(OSError, match=rf"ends at byte {len(DATA)}, but 10 bytes from {len(DATA) - 9} are needed"):
        calls.read_all(file, bytearray(10), len(DATA) - 9)
    assert calls.read_up_to(file, bytearray(10), at=len(DATA) - 9) == 9


@pytest.mark.parametrize("name", ["writev", "pwrite"])
def test_a_kernel_that_takes_nothing_is_an_error(file, monkeypatch, name):
    monkeypatch.setattr(os, name, lambda *_: 0)
    with pytest.raises(OSError, match="wrote no bytes"):
        calls.write_all(file, DATA) if name == "writev" else calls.write_all_at(file, DATA, 0)
    with pytest.raises(OSError, match="wrote no bytes"):
        calls.write_with(lambda fd, data: 0, file, DATA)


def test_a_disk_that_is_full_after_a_part_is_an_error(file, monkeypatch):
    pwrite, full = os.pwrite, iter((False, True))

    def fills_up(fd, data, at):
        if next(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data[: len(data) // 2], at)

    monkeypatch.setattr(os, "pwrite", fills_up)
    with pytest.raises(OSError, match="No space left"):
        calls.write_all_at(file, DATA, 0)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_connection_gets_more_than_it_has_room_for(blocking):
    data = os.urandom(1 << 22)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(blocking)
        got = bytearray()

        def read():
            while len(got) < len(data):
                got.extend(theirs.recv(1 << 16))

        reader = threading.Thread(target=read)
        reader.start()
        calls.send_all(ours, data)
        reader.join()
    assert got == data


def test_an_eventfd_is_woken_and_cleared():
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        calls.wake(fd)
        calls.wake(fd)
        calls.clear_wake(fd)
        with pytest.raises(BlockingIOError):
            calls.clear_wake(fd)
    finally:
        os.close(fd)


# --- nobody goes round it: ruff's TID251 refuses the calls of `os`, and here are those of sockets and of files -------------

_WHOLE_PACKETS = {
    "maru/base/descriptors.py",
    "maru/base/relay/lookup.py",
    "maru/base/relay/supervisor.py",
    "maru/base/packets.py",
    "maru/base/all_bytes.py",
    "maru/_client/driver_trio.py",
    "maru/bench/echo.py",
    "maru/transport/_frames.py",
    "offload/daemon/_handover.py",
    "offload/daemon/_notify.py",
}
"""Modules whose sockets keep the borders of packets, or of ZeroMQ's frames: one is sent whole, or refused."""


def modules():
    for package in ("maru", "backends", "offload"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def test_only_packets_are_sent_by_the_bare_calls():
    found = set()
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                of_a_socket = "sock" in ast.unparse(node.value).lower()
                if node.attr in ("sendmsg", "sendto", "sendfile") or (node.attr == "send" and of_a_socket):
                    found.add(name)
    assert found == _WHOLE_PACKETS


def test_no_file_is_opened_without_a_buffer_for_writing():
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and any(word.arg == "buffering" for word in node.keywords):
                mode = ast.unparse(node.args[1])
                assert mode == "'rb'", f"{name}:{node.lineno}: write through maru.base.all_bytes"
            assert not (isinstance(node, ast.Attribute) and node.attr == "FileIO"), f"{name}:{node.lineno}"
