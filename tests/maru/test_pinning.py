"""Pinned memory: all of it or none, never left pinned behind an error, and nothing of it in a forked child."""

import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from maru import CannotMap
from maru.base.memory import pinning
from maru.base.memory.cuda import NoDriver, find_driver
from maru.base.memory.mapping import Mapping, map_region
from maru.base.memory.memory import PAGE_BYTES, Memory
from maru.base.memory.pinning import Pin, spans
from maru.fake_cuda import FakeCuda, use
from tests.support.cuda_process import process_with_cuda

MIB = 1 << 20
CHUNK = 4 * MIB
BORDER = 2 * MIB


@pytest.fixture
def process(monkeypatch):
    """Small chunks in a process that does not use CUDA yet, and has no driver."""
    monkeypatch.setattr(pinning, "_process", pinning._Process(version=object()))
    monkeypatch.setattr(pinning, "_spans", {})  # copies without a proven end keep theirs
    monkeypatch.setattr(pinning, "CHUNK_BYTES", CHUNK)
    return pinning._process


@pytest.fixture
def fake(process):
    with process_with_cuda(FakeCuda(devices=2), uses=False) as fake:
        yield fake
        pinning.background.wait_prepared()
    assert not spans(0, sys.maxsize)


def registered(fake):
    return sorted((span.address, span.address + span.nbytes) for span in fake.registered.values())


# --- chunks -------------------------------------------------------------------------------------------------------


def test_memory_is_pinned_in_chunks_that_meet_on_borders(fake):
    memory = Memory.private(11 * MIB + 100)
    pin = Pin(memory)
    pin.pin()
    chunks = registered(fake)
    assert pin.is_whole and pin.pinned_bytes == 11 * MIB + PAGE_BYTES
    assert (chunks[0][0], chunks[-1][1]) == (memory.address, memory.address + pin.nbytes)
    for (_, stop), (start, _) in itertools.pairwise(chunks):
        assert stop == start and not stop % BORDER
    assert max(stop - start for start, stop in chunks) <= CHUNK
    del memory
    assert not fake.registered


def test_no_copy_takes_a_memory_for_pinned_before_all_of_it_is(fake):
    memory = Memory.private(3 * CHUNK)
    pin = Pin(memory)
    while pin.step():
        assert registered(fake) and not pinning.spans(memory.address, memory.length)
    assert pin.is_whole and pinning.spans(memory.address, memory.length) == registered(fake)


def test_spans_are_those_that_overlap_in_order(fake):
    memories = [Memory.private(random.Random(0).randrange(1, 9) * MIB) for _ in range(5)]
    pins = [Pin(memory) for memory in memories]
    for pin in pins:
        pin.pin()
    every = registered(fake)
    borders = sorted({border + offset for span in every for border in span for offset in (-1, 0, 1)})
    for start in borders:
        for stop in borders:
            if start < stop:
                wanted = [span for span in every if span[0] < stop and start < span[1]]
                assert spans(start, stop - start) == wanted
    assert spans(every[0][0] - PAGE_BYTES, PAGE_BYTES) == []
    del memories, pins, pin


def test_spans_may_be_read_while_others_pin(fake):
    wrong, over = [], threading.Event()

    def read():
        while not over.is_set():
            found = spans(0, sys.maxsize)
            if found != sorted(found):
                wrong.append(found)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(30):
        memory = Memory.private(8 * MIB)
        Pin(memory).pin()
        assert spans(memory.address, memory.length)
    del memory
    over.set()
    thread.join()
    assert not wrong


def test_memory_for_readers_is_pinned_to_be_read(fake, tmp_path):
    path = tmp_path / "region"
    path.touch(0o600)
    os.truncate(path, 4 * PAGE_BYTES)
    readers, writers = (map_region(path, 4 * PAGE_BYTES, write=write, pin=True) for write in (False, True))
    assert readers.pinned and writers.pinned
    assert {fake.registered[one.address].read_only for one in (readers,)} == {True}
    assert not fake.registered[writers.address].read_only
    view = writers.view()
    readers.close()
    writers.close()
    assert list(fake.registered) == [writers.address]
    del view


# --- refusals -----------------------------------------------------------------------------------------------------


def calls_to_pin():
    fake = FakeCuda()
    with use(fake):
        made = len(fake.calls)
        memory = Memory.private(11 * MIB)
        Pin(memory).pin()
        count = len(fake.calls) - made
        del memory
    return count


def test_whichever_call_fails_nothing_stays_pinned(process):
    refusals = 0
    for number in range(calls_to_pin()):
        fake = FakeCuda()
        with use(fake):
            at = len(fake.calls) + number
            fake.fail(at)
            memory = Memory.private(11 * MIB)
            pin = Pin(memory)
            pin.pin()
            refusals += not pin.is_whole
            assert pin.is_whole or ("OUT_OF_MEMORY" in pin.why_not and not fake.registered)
            assert spans(memory.address, memory.length) == registered(fake)
            assert fake._device is None or fake.calls[at] == "cuCtxPopCurrent_v2"  # the thread is as it was
            del memory
            assert not fake.registered
        assert not fake.wrong
    assert refusals > 6


def is_mapped(address):
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


def test_one_refused_call_leaves_nothing_pinned_that_is_unmapped(process):
    refused = 0
    for number in range(20):
        fake = FakeCuda()
        with use(fake):
            memory = Memory.private(2 * MIB)
            Pin(memory).pin()
            fake.fail(len(fake.calls) + number)
            address, calls = memory.address, len(fake.calls)
            del memory
            assert not fake.registered and not is_mapped(address)
            refused += len(fake.calls) - calls > number
    assert 4 < refused < 20


def test_memory_that_the_driver_does_not_unpin_stays_mapped(fake, monkeypatch, caplog):
    memory = Memory.private(2 * MIB)
    Pin(memory).pin()
    address = memory.address
    monkeypatch.setattr(fake, "_refuse", lambda name: 2 if name == "cuMemHostUnregister" else 0)
    del memory
    assert is_mapped(address) and fake.registered and "stays mapped" in caplog.text
    fake.registered.clear()


def test_two_first_copies_pin_a_memory_once(fake):
    mapping = Mapping(Memory.private(4 * MIB))
    pinning.when_used(mapping.pin_soon)
    both = threading.Barrier(2)

    def first_copy():
        sys.settrace(lambda frame, event, arg: step if frame.f_code is pinning.use_device.__code__ else None)
        pinning.use_device()

    def step(frame, event, arg):
        if event == "line" and not both.broken:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # each line is reached by both threads, if both reach it
        return step

    threads = [threading.Thread(target=first_copy) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pinning.background.wait_prepared()
    assert mapping.pinned and fake.calls.count("cuMemHostRegister_v2") == 1
    with pytest.raises(RuntimeError, match="pinned already"):
        Pin(mapping.owner)
    mapping.close()
    assert not fake.registered


def test_an_error_of_one_memory_leaves_the_others_pinned(fake, monkeypatch):
    mappings = [Mapping(Memory.private(2 * MIB)) for _ in range(4)]
    for mapping in mappings:
        pinning.when_used(mapping.pin_soon)
    broken, pin_soon = [], Pin.pin_soon

    def fail_once(self):
        if not broken:
            broken.append(self)
            raise KeyError("bug")
        pin_soon(self)

    monkeypatch.setattr(Pin, "pin_soon", fail_once)
    pinning.use_device()
    pinning.background.wait_prepared()
    assert sum(mapping.pinned for mapping in mappings) == 3
    broken.clear()


def test_a_mapping_closed_while_it_is_pinned_raises_nothing(fake, monkeypatch):
    mapping = Mapping(Memory.private(2 * MIB))
    monkeypatch.setattr(Pin, "__init__", closing(mapping, Pin.__init__))
    mapping.pin_soon()
    assert mapping.closed and not fake.wrong


def closing(mapping, make):
    def close_first(self, memory):
        mapping.close()
        make(self, memory)

    return close_first


def test_a_refused_chunk_unpins_those_before_it(fake):
    fake.most_registered = 9 * MIB
    memory = Memory.private(11 * MIB)
    pin = Pin(memory)
    assert pin.step() and pin.pinned_bytes
    pin.pin()
    assert not fake.registered and not pin.pinned_bytes
    assert "CUDA_ERROR_OUT_OF_MEMORY" in pin.why_not
    assert not pin.step()
    statistics = pinning.statistics()
    assert (statistics.refused_bytes, statistics.pinned_bytes, statistics.why_not) == (11 * MIB, 0, pin.why_not)


def test_the_limits_that_are_too_low_are_named(fake, monkeypatch):
    monkeypatch.setattr("maru.base.machine.memlock_limit", lambda: 8 * MIB)
    monkeypatch.setattr("maru.base.machine.memory_left", lambda: 5 * MIB)
    fake.most_registered = 0
    memory = Memory.private(6 * MIB)
    pin = Pin(memory)
    pin.pin()
    assert f"{5 * MIB} bytes of memory are left" in pin.why_not and "ulimit" not in pin.why_not
    memory = Memory.private(9 * MIB)
    pin = Pin(memory)
    pin.pin()
    assert f"it may lock {8 * MIB} bytes (ulimit -l" in pin.why_not


def test_memory_that_somebody_else_has_pinned_stays_theirs(fake):
    memory = Memory.private(2 * MIB)
    driver = find_driver()
    driver.attach(0)
    driver.register(memory.address, 2 * MIB)
    Pin(memory).pin()
    assert fake.registered
    driver.unregister(memory.address)


def test_a_lost_context_ends_pinning(fake, caplog):
    memory, later = Memory.private(2 * MIB), Memory.private(2 * MIB)
    Pin(memory).pin()
    fake.lose(0)
    pin = Pin(later)
    pin.pin()
    calls = len(fake.calls)
    third = Memory.private(2 * MIB)
    Pin(third).pin()
    assert len(fake.calls) == calls
    assert "ILLEGAL_ADDRESS" in pinning.statistics().lost and "lost its CUDA context" in pinning.statistics().lost
    del memory, later, third  # which raises nothing
    assert not spans(0, sys.maxsize)
    fake.registered.clear()


def test_without_a_driver_nothing_is_pinned_unless_that_is_wanted(process, tmp_path, monkeypatch):
    with pytest.raises(NoDriver):
        find_driver()
    path = tmp_path / "region"
    path.touch(0o600)
    os.truncate(path, PAGE_BYTES)
    assert not map_region(path, PAGE_BYTES, pin=None).pinned
    with pytest.raises(CannotMap, match="cannot be pinned: no CUDA driver"):
        map_region(path, PAGE_BYTES, pin=True)
    process.is_expected = True
    mapping = map_region(path, PAGE_BYTES, pin=None)
    assert not mapping.pinned and "no CUDA driver" in mapping.why_not_pinned
    assert "no CUDA driver" in pinning.why_no_driver()


# --- devices and threads ------------------------------------------------------------------------------------------


def test_pinning_makes_no_context_beside_the_one_in_use(fake):
    driver = find_driver()
    driver.attach(1)
    memory = Memory.private(2 * MIB)
    thread = threading.Thread(target=Pin(memory).pin)
    thread.start()
    thread.join()
    assert fake.registered and fake.contexts == {1}
    del memory


def test_a_finalizer_leaves_the_device_of_its_thread(fake):
    driver = find_driver()
    driver.attach(0)
    memory = Memory.private(2 * MIB)
    Pin(memory).pin()
    driver.attach(1)
    del memory
    assert not fake.registered and fake._device == 1


@pytest.mark.parametrize("whose", ["this thread", "another"])
def test_a_finalizer_invalidates_no_capture(fake, whose):
    driver = find_driver()
    driver.attach(0)
    stream = driver.stream()
    memory = Memory.private(2 * MIB)
    Pin(memory).pin()
    if whose == "another":
        thread = threading.Thread(target=fake.capture, args=[stream])
        thread.start()
        thread.join()
    else:
        fake.capture(stream)
    del memory
    assert not fake.registered and not fake.invalidated


# --- when -----------------------------------------------------------------------------------------------------------


def test_large_memory_is_pinned_in_the_background(fake, monkeypatch):
    monkeypatch.setattr(pinning, "AT_ONCE_BYTES", 2 * MIB)
    go_on, seen = threading.Semaphore(0), []
    step = Pin.step

    def wait(self):
        go_on.acquire()
        seen.append(threading.current_thread())
        return step(self)

    monkeypatch.setattr(Pin, "step", wait)
    memory = Memory.private(11 * MIB)
    pin = Pin(memory)
    pin.pin_soon()
    assert pinning.statistics().pinned_bytes == 0
    go_on.release(10)
    pinning.background.wait_prepared()
    assert pin.is_whole and threading.current_thread() not in seen
    assert pinning.statistics().pinned_bytes == pinning.statistics().wanted_bytes == 11 * MIB


def test_memory_that_is_gone_is_not_pinned(fake):
    memory = Memory.private(11 * MIB)
    pin = Pin(memory)
    assert pin.step()
    del memory
    assert not pin.step() and not fake.registered


def test_the_background_thread_outlives_an_error(caplog):
    def fail():
        raise KeyError("bug")

    pinning.background.in_background(fail)
    done = []
    pinning.background.in_background(lambda: bool(done.append(1)))
    pinning.background.wait_prepared()
    assert done == [1] and "not prepared" in caplog.text


def test_that_no_thread_is_left_is_a_reason(fake, monkeypatch):
    monkeypatch.setattr(pinning, "AT_ONCE_BYTES", 0)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory = Memory.private(2 * MIB)
    pin = Pin(memory)
    pin.pin_soon()
    assert "can't start new thread" in pin.why_not
    monkeypatch.undo()
    pinning.background.in_background(lambda: False)
    pinning.background.wait_prepared()


class FakeTorch:
    """As much of torch as is asked for."""

    def __init__(self, initialized):
        self.cuda = self
        self.is_initialized = lambda: initialized


def test_a_process_uses_cuda_once_torch_has_initialized_it(process, monkeypatch):
    for initialized in (False, True):
        monkeypatch.setitem(sys.modules, "torch", FakeTorch(initialized))
        assert pinning.uses_cuda() == initialized
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not pinning.uses_cuda()


def test_a_process_that_expects_cuda_uses_it_where_the_driver_is(process, monkeypatch, tmp_path):
    monkeypatch.setattr(pinning, "DRIVER_NODE", str(tmp_path / "nvidiactl"))
    monkeypatch.setitem(sys.modules, "torch", None)
    pinning.expect_cuda()
    assert not pinning.uses_cuda()
    (tmp_path / "nvidiactl").touch()
    pinning.expect_cuda()
    assert pinning.uses_cuda()


def test_pinning_imports_no_torch():
    script = """
import sys
from maru.base.memory.mapping import map_region
from maru.base.memory.pinning import uses_cuda
assert not uses_cuda()
print([name for name in ("torch", "numpy", "trio", "zmq", "asyncio") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "[]\n", done.stderr
