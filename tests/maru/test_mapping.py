"""Regions mapped here: one memory for all processes, written by its owner alone, and never gone under a view."""

import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings

import pytest

from maru import CannotMap, HandlerClosed
from maru.base.memory import memory as memory_module
from maru.base.memory import pinning
from maru.base.memory.mapping import map_region
from maru.base.memory.memory import PAGE_BYTES, Memory, can_populate
from tests.support.cuda_process import process_with_cuda
from tests.support.held_by_process import open_descriptors

LENGTH = 4 * PAGE_BYTES


@pytest.fixture
def region(tmp_path):
    """The file of a region: 16 pages, of which page i is filled with i."""
    path = tmp_path / "maru_1.dat"
    path.touch(0o600)
    path.write_bytes(b"".join(bytes([at]) * PAGE_BYTES for at in range(16)))
    return path


def mapped_files():
    with open("/proc/self/maps") as file:
        return file.read()


def run(script, *args, **options):
    return subprocess.run([sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True, **options)


# --- the same memory ----------------------------------------------------------------------------------------------

READER = """
import os, sys
from maru.base.memory.mapping import map_region
mapping = map_region(sys.argv[1], int(sys.argv[2]))
view = mapping.view(5, 5)
status = os.stat(sys.argv[1])
[line] = [line for line in open("/proc/self/maps") if line.split()[0].startswith(f"{mapping.address:x}-")]
_, rights, offset, device, inode, *_ = line.split()
print(rights, int(offset, 16), int(inode) == status.st_ino, flush=True)
for line in sys.stdin:
    print(bytes(view).decode(), flush=True)
"""


def test_a_write_of_the_owner_is_seen_by_a_view_in_another_process_without_a_copy(region):
    own = map_region(region, LENGTH, write=True)
    command = [sys.executable, "-c", READER, str(region), str(LENGTH)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        # Its address space has this file, shared and read-only. The view it reads from is made once, before any write.
        assert reader.stdout.readline().split() == ["r--s", "0", "True"]
        for text in (b"first", b"again"):
            own.view(5, 5)[:] = text
            print(file=reader.stdin, flush=True)
            assert reader.stdout.readline() == f"{text.decode()}\n"
        reader.stdin.close()


def test_a_span_is_mapped_at_its_offset_from_a_descriptor_or_a_path(region):
    before = open_descriptors(collect=True)
    fd = os.open(region, os.O_RDONLY)
    mappings = [map_region(fd, LENGTH, 3 * PAGE_BYTES), map_region(region, LENGTH, 3 * PAGE_BYTES)]
    os.close(fd)  # neither needs it any more
    assert open_descriptors() <= before
    for mapping in mappings:
        assert mapping.length == LENGTH and not mapping.writable
        assert bytes(mapping.view()) == region.read_bytes()[3 * PAGE_BYTES : 7 * PAGE_BYTES]
        assert bytes(mapping.view(PAGE_BYTES - 1, 2)) == b"\x03\x04"
        assert ctypes.string_at(mapping.address + PAGE_BYTES, 1) == b"\x04"


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, -1), (LENGTH, 1), (LENGTH - 1, 2), (0, 1 << 63), (1 << 63, None)]
)
def test_a_view_is_inside_or_refused(region, offset, length):
    mapping = map_region(region, LENGTH)
    with pytest.raises(ValueError, match="are not in a region"):
        mapping.view(offset, length)
    assert len(mapping.view(LENGTH)) == 0


@pytest.mark.parametrize(
    ("offset", "length", "text"),
    [
        (1, PAGE_BYTES, "multiple of"),
        (-PAGE_BYTES, PAGE_BYTES, "multiple of"),
        (0, 0, "multiple of"),
        (0, 17 * PAGE_BYTES, "were promised"),
        (16 * PAGE_BYTES, 1, "were promised"),
    ],
)
def test_what_is_not_in_the_file_is_not_mapped(region, offset, length, text):
    with pytest.raises(CannotMap, match=text):
        map_region(region, length, offset)


def test_what_cannot_be_opened_or_written_is_not_mapped(region, tmp_path):
    with pytest.raises(CannotMap, match="cannot be opened"):
        map_region(tmp_path / "gone", LENGTH)
    fd = os.open(region, os.O_RDONLY)
    with pytest.raises(CannotMap) as caught:  # a descriptor for readers
        map_region(fd, LENGTH, write=True)
    assert caught.value.__cause__.errno == errno.EACCES
    os.close(fd)


# --- only the owner writes ----------------------------------------------------------------------------------------


def test_a_view_of_a_foreign_region_refuses_to_be_written(region):
    mapping = map_region(region, LENGTH)
    view = mapping.view(0, 16)
    assert view.readonly
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    with pytest.raises(TypeError, match="not writable"):
        (ctypes.c_char * 16).from_buffer(view)
    own = map_region(region, LENGTH, write=True)
    own.view(0, 2)[:] = b"ok"
    assert bytes(view[:2]) == b"ok"


@pytest.mark.parametrize("way", ["memset", "torch", "mprotect"])
def test_what_writes_past_a_read_only_view_faults(region, way):
    writes = {
        "memset": "ctypes.memset(mapping.address, 1, 1)",
        "torch": "import torch; torch.frombuffer(mapping.view(), dtype=torch.uint8).fill_(1)",
        "mprotect": (  # nor can it be made writable, since the descriptor could not write
            "libc = ctypes.CDLL(None); libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int];"
            "print('protected' if libc.mprotect(mapping.address, mapping.length, 3) else 'open', flush=True);"
            "ctypes.memset(mapping.address, 1, 1)"
        ),
    }
    script = (
        "import ctypes, sys; from maru.base.memory.mapping import map_region; "
        f"mapping = map_region(sys.argv[1], {LENGTH});"
    )
    before = region.read_bytes()
    done = run(script + writes[way], region)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    if way == "mprotect":
        assert done.stdout == "protected\n"
    assert region.read_bytes() == before


# --- closing ------------------------------------------------------------------------------------------------------


def test_closing_unmaps_at_once_where_nobody_has_a_view(region):
    mapping = map_region(region, LENGTH, write=True)
    mapping.view(0, 10)[0] = 1
    assert str(region) in mapped_files() and mapping.mapped
    mapping.close()
    mapping.close()
    assert str(region) not in mapped_files() and not mapping.mapped
    assert mapping.closed and "closed" in repr(mapping)
    for use in (mapping.view, mapping.populate, lambda: mapping.owner):
        with pytest.raises(HandlerClosed):
            use()


def test_a_view_outlives_the_closing_and_takes_the_memory_with_it(region):
    mapping = map_region(region, LENGTH)
    views = [mapping.view(PAGE_BYTES, 4), mapping.view(2 * PAGE_BYTES)[:4].cast("I")]
    owner = mapping.owner
    mapping.close()
    assert mapping.closed and mapping.mapped and "in use" in repr(mapping)
    assert bytes(views[0]) == b"\x01" * 4 and views[1][0] == 0x02020202
    assert isinstance(owner, Memory)
    del views[0], owner
    assert mapping.mapped
    del views[0]
    assert not mapping.mapped
    assert str(region) not in mapped_files()


def test_a_mapping_that_is_dropped_is_unmapped_with_its_last_view(region):
    view = map_region(region, LENGTH).view(0, 1)
    gc.collect()
    assert view[0] == 0 and str(region) in mapped_files()
    del view
    assert str(region) not in mapped_files()


def test_a_tensor_keeps_the_memory_that_it_was_made_over(region):
    torch = pytest.importorskip("torch")
    mapping = map_region(region, LENGTH, write=True)
    tensor = torch.frombuffer(mapping.view(PAGE_BYTES), dtype=torch.uint8)
    mapping.close()
    gc.collect()
    assert mapping.mapped  # an mmap object could have been closed under it: it holds no export
    assert tensor.sum() == (1 + 2 + 3) * PAGE_BYTES
    del tensor
    assert not mapping.mapped


def test_releasing_a_view_by_hand_pulls_the_memory_from_under_a_tensor(region):
    """The trap that stays, and that the documentation names. The tensor is not touched here."""
    torch = pytest.importorskip("torch")
    mapping = map_region(region, LENGTH, write=True)
    view = mapping.view()
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    mapping.close()
    view.release()
    assert not mapping.mapped
    assert len(tensor) == LENGTH


def test_views_in_other_threads_keep_what_they_have_while_it_is_closed(region):
    mapping = map_region(region, LENGTH)
    wrong = []

    def read():
        try:
            while True:
                view = mapping.view(PAGE_BYTES, PAGE_BYTES)
                if bytes(view) != b"\x01" * PAGE_BYTES:
                    wrong.append(bytes(view))
        except HandlerClosed:
            pass

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    mapping.close()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not mapping.mapped


def test_a_process_that_ends_with_views_ends_in_peace(region):
    script = f"""
import sys
from maru.base.memory.mapping import map_region
mapping = map_region(sys.argv[1], {LENGTH}, write=True)
view = mapping.view()
kept = [view[1:], mapping, mapping.owner]
sys.kept = kept
if sys.argv[2] == "closed":
    mapping.close()
"""
    for way in ("open", "closed"):
        done = run(script, region, way)
        assert (done.returncode, done.stderr) == (0, "")


# --- pages in place -----------------------------------------------------------------------------------------------


def resident_pages(mapping):
    flags = []
    with open("/proc/self/pagemap", "rb") as file:
        for at in range(mapping.length // PAGE_BYTES):
            file.seek((mapping.address // PAGE_BYTES + at) * 8)
            flags.append(int.from_bytes(file.read(8), sys.byteorder) >> 63)
    return sum(flags)


@pytest.mark.skipif(not can_populate(), reason="a kernel before Linux 5.14")
def test_an_owners_pages_are_put_in_place_and_a_readers_on_demand(region):
    own, lazy = map_region(region, LENGTH, write=True), map_region(region, LENGTH, write=True, populate=False)
    foreign, eager = map_region(region, LENGTH), map_region(region, LENGTH, populate=True)
    assert [resident_pages(mapping) for mapping in (own, lazy, foreign, eager)] == [4, 0, 0, 4]
    assert lazy.populate(PAGE_BYTES, 2 * PAGE_BYTES)
    assert resident_pages(lazy) == 2
    assert lazy.populate()
    assert resident_pages(lazy) == 4
    assert bytes(own.view()) == region.read_bytes()[:LENGTH]  # with what was in them


def test_a_kernel_that_cannot_populate_has_its_pages_touched(region, monkeypatch):
    monkeypatch.setattr(memory_module, "madvise", lambda address, length, advice: errno.EINVAL)
    monkeypatch.setattr(memory_module, "_TOUCH_BYTES", 2 * PAGE_BYTES)
    before = region.read_bytes()
    mapping = map_region(region, 7 * PAGE_BYTES, write=True)
    assert resident_pages(mapping) == 7
    assert not mapping.populate()
    assert region.read_bytes() == before


def test_that_there_is_no_memory_is_an_error_and_no_sigbus(region, monkeypatch):
    fd = os.open(region, os.O_RDWR)
    mapping = map_region(fd, 16 * PAGE_BYTES, write=True, populate=False)
    os.ftruncate(fd, 8 * PAGE_BYTES)  # somebody makes it shorter: a touch of page 8 would be a SIGBUS
    os.close(fd)
    if can_populate():
        with pytest.raises(CannotMap, match="no memory for"):
            mapping.populate()
    assert mapping.populate(0, 8 * PAGE_BYTES) == can_populate()


@pytest.mark.parametrize(("offset", "length"), [(1, PAGE_BYTES), (-PAGE_BYTES, PAGE_BYTES), (PAGE_BYTES, LENGTH)])
def test_only_whole_pages_of_the_region_are_put_in_place(region, offset, length):
    with pytest.raises(ValueError, match="whole pages"):
        map_region(region, LENGTH).populate(offset, length)


def test_an_interrupted_populate_goes_on(monkeypatch):
    answers = [errno.EINTR, errno.EAGAIN]

    def interrupted(address, length, advice):
        if not answers:
            return 0
        ctypes.set_errno(answers.pop())
        return -1

    monkeypatch.setattr(memory_module, "_madvise", interrupted)
    assert memory_module.madvise(0, 0, 0) == 0
    assert not answers


def test_memory_is_populated_in_small_steps(monkeypatch):
    """The kernel locks the address space for the length of a call: the event loop waits for it when it maps or unmaps."""
    calls = []
    monkeypatch.setattr(memory_module, "_madvise", lambda address, length, advice: calls.append((address, length)) or 0)
    assert memory_module.madvise(PAGE_BYTES, (20 << 20) + PAGE_BYTES, 23) == 0
    assert max(length for _, length in calls) == 8 << 20
    ends = [PAGE_BYTES, *[address + length for address, length in calls]]
    assert ends[:-1] == [address for address, _ in calls] and ends[-1] == (20 << 20) + 2 * PAGE_BYTES


# --- pinning ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda():
    with process_with_cuda() as fake:
        yield fake


def test_what_is_pinned_is_unpinned_right_before_it_is_unmapped(region, cuda, monkeypatch):
    mapping = map_region(region, LENGTH, write=True, pin=None)
    assert mapping.pinned and set(cuda.registered) == {mapping.address}
    view = mapping.view()
    mapping.close()
    assert cuda.registered
    mapped, unregister = [], pinning._unregister

    def watched(start):
        mapped.append(f"{start:x}-" in mapped_files())
        unregister(start)

    monkeypatch.setattr(pinning, "_unregister", watched)
    del view
    assert mapped == [True] and not cuda.registered
    assert not mapping.mapped


def test_a_process_that_was_forked_off_does_not_unpin_what_its_parent_has_pinned(region, cuda):
    mapping = map_region(region, LENGTH, pin=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: this one only looks and leaves
        child = os.fork()
    if not child:
        mapping.close()
        os._exit(len(cuda.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    mapping.close()


def test_pinning_that_fails_is_an_error_only_where_it_was_wanted(region, cuda):
    cuda.most_registered = 0
    mapping = map_region(region, LENGTH, pin=None)
    assert not mapping.pinned and "OUT_OF_MEMORY" in mapping.why_not_pinned
    mapping.close()
    with pytest.raises(CannotMap, match="cannot be pinned: cuMemHostRegister_v2 failed with CUDA_ERROR_OUT_OF_MEMORY"):
        map_region(region, LENGTH, pin=True)
    assert str(region) not in mapped_files()


def test_a_region_is_not_pinned_unless_that_is_asked_for(region, cuda):
    assert not map_region(region, LENGTH).pinned
    assert not cuda.registered
