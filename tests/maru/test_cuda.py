"""The calls of the CUDA driver: the same checks over the fake, and over a GPU where there is one."""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy
import pytest

from maru.base.memory import cuda
from maru.base.memory.cuda import CudaError, NoDriver, find_driver
from maru.base.memory.memory import Memory
from maru.fake_cuda import CHECKS, FakeCuda, every_order, use


def _is_here() -> bool:
    try:
        return bool(find_driver())
    except NoDriver:
        return False


FAKES = {
    "fake": {},
    "fake of CUDA 12.0": {"version": 12000},
    "fake of WSL2": {"host_pointers": False},
    "fake without batches": {"batches": False},
}


@pytest.fixture(params=[*FAKES, *(["a GPU"] if _is_here() else [])])
def driver(request):
    if request.param == "a GPU":
        found = find_driver()
        found.attach(0)
        yield found
        return
    fake = FakeCuda(**FAKES[request.param])
    with use(fake) as found:
        found.attach(0)
        yield found
    assert not fake.wrong and not fake.registered and not fake.streams and not fake.events


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_driver(driver, check):
    check(driver)


@pytest.fixture
def fake():
    fake = FakeCuda(devices=2)
    with use(fake):
        yield fake
    assert not fake.wrong


@pytest.fixture
def host():
    memory = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory


def _columns(*pieces):
    return [numpy.array(column, numpy.uint64) for column in zip(*pieces, strict=True)]


def test_no_driver_is_told_apart(monkeypatch):
    cuda.find_driver.cache_clear()
    monkeypatch.setattr(cuda, "open_library", lambda: FakeCuda(devices=0).library)
    with pytest.raises(NoDriver, match="sees no device"):
        find_driver()
    cuda.find_driver.cache_clear()


def test_a_driver_that_is_too_old_is_told_with_the_version_that_is_needed(monkeypatch):
    cuda.find_driver.cache_clear()
    library = FakeCuda().library
    del library.cuGetProcAddress_v2
    monkeypatch.setattr(cuda, "open_library", lambda: library)
    with pytest.raises(NoDriver, match=r"too old: it has no cuGetProcAddress_v2; CUDA 12\.0 is needed"):
        find_driver()
    cuda.find_driver.cache_clear()


def test_only_devices_that_are_attached_get_a_context(fake):
    driver = find_driver()
    driver.attach(1)
    driver.destroy_stream(driver.stream())
    assert fake.contexts == {1}


def test_a_sticky_error_ends_a_device_and_no_other(fake):
    driver = find_driver()
    driver.attach(0)
    fake.lose(0)
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS") as raised:
        driver.stream()
    assert raised.value.sticky
    driver.attach(1)
    driver.destroy_stream(driver.stream())


def test_an_attached_thread_leaves_a_capture_of_the_engine_alone(fake):
    driver = find_driver()
    driver.attach(0)
    stream, event = driver.stream(), driver.event()
    engine = threading.Thread(target=fake.capture, args=[stream])
    engine.start()
    engine.join()
    assert driver.is_capturing(stream)
    assert driver.query(event)
    assert not fake.invalidated
    driver.record(event, stream)
    with pytest.raises(CudaError, match="CAPTURED_EVENT"):
        driver.query(event)


def test_a_stream_that_waits_for_a_captured_event_joins_the_capture(fake):
    driver = find_driver()
    driver.attach(0)
    engines, ours, event = driver.stream(), driver.stream(), driver.event()
    fake.capture(engines)
    driver.record(event, engines)
    driver.wait(ours, event)
    assert driver.is_capturing(ours)
    with pytest.raises(CudaError, match="CAPTURE_UNSUPPORTED"):
        driver.synchronize_stream(ours)
    fake.end_capture(engines)
    assert not driver.is_capturing(ours)


def test_memory_is_pinned_for_all_devices():
    memory = Memory.private(1 << 16)
    with use(FakeCuda(devices=2)) as driver:
        driver.attach(0)
        driver.register(memory.address, 1 << 16)
        driver.attach(1)
        device, stream = driver.allocate(1 << 16), driver.stream()
        driver.copy(stream, *_columns((device, memory.address, 8)), load=True)
        driver.synchronize_stream(stream)


def test_a_piece_without_bytes_is_refused(fake, host):
    address, _ = host
    driver = find_driver()
    driver.attach(0)
    driver.register(address, 1 << 16)
    device, stream = driver.allocate(1 << 16), driver.stream()
    with pytest.raises(CudaError, match="copy 1 of 2"):
        driver.copy(stream, *_columns((device, address, 8), (device + 8, address, 0)), load=True)


def test_the_copy_that_was_refused_is_named(fake, host):
    address, _ = host
    driver = find_driver()
    driver.attach(0)
    driver.register(address, 1 << 16)
    device = driver.allocate(1 << 16)
    stream = driver.stream()
    pieces = [(device, address, 8), (device + (1 << 16), address, 8)]
    with pytest.raises(CudaError, match=r"INVALID_VALUE \(1\), copy 1 of 2"):
        driver.copy(stream, *_columns(*pieces), load=True)
    assert not fake.streams[stream].queue


@pytest.mark.parametrize("knobs", FAKES.values(), ids=FAKES)
def test_batches_that_do_not_work_are_tried_once_at_most(knobs, host):
    address, _ = host
    fake = FakeCuda(**knobs)
    with use(fake) as driver:
        driver.attach(0)
        driver.register(address, 1 << 16)
        stream, device = driver.stream(), driver.allocate(1 << 16)
        calls = []
        for _ in range(2):
            begun = len(fake.calls)
            driver.copy(stream, *_columns((device, address, 8), (device + 8, address + 8, 8)), load=True)
            calls.append(fake.calls[begun:])
        each, batch = ["cuMemcpyHtoDAsync_v2"] * 2, ["cuMemcpyBatchAsync"]
        assert calls == ([batch, batch] if not knobs else [batch + each, each] if "batches" in knobs else [each, each])
        assert driver.copy_call == calls[1][0].removesuffix("_v2")
        driver.synchronize_stream(stream)
        assert not fake.wrong


def test_an_error_of_no_copy_names_none(fake, host):
    address, _ = host
    driver = find_driver()
    driver.attach(0)
    driver.register(address, 1 << 16)
    stream, device = driver.stream(), driver.allocate(1 << 16)
    fake.fail(len(fake.calls))
    with pytest.raises(CudaError, match=r"OUT_OF_MEMORY \(2\), of 1 copies$"):
        driver.copy(stream, *_columns((device, address, 8)), load=True)


@pytest.mark.parametrize("waits", [True, False])
def test_every_order_finds_a_load_that_does_not_wait(host, waits):
    """The engine zeroes a block on its stream; a load that does not wait for it may be wiped."""
    address, memory = host
    found = set()

    def run(choose):
        fake = FakeCuda(choose=choose)
        with use(fake) as driver:
            driver.attach(0)
            driver.register(address, 1 << 16)
            memory[:4] = b"bits"
            device = driver.allocate(4)
            compute, copies, computed, over = driver.stream(), driver.stream(), driver.event(), driver.event()
            fake.kernel(compute, lambda: fake.write(device, bytes(4)))
            driver.record(computed, compute)
            if waits:
                driver.wait(copies, computed)
            driver.copy(copies, *_columns((device, address, 4)), load=True)
            driver.record(over, copies)
            driver.synchronize(over)
            fake.progress()
            found.add(fake.read(device, 4))
        assert not fake.wrong

    assert every_order(run, 6) > 20
    assert found == {b"bits"} if waits else found == {b"bits", bytes(4)}
