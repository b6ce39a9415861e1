"""A device with an engine's cache on it, which is the real one where torch sees it, and the one in Python everywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from backends.base.block_layout import TensorMemory
from backends.base.copier import close_copiers
from backends.device import DeviceTier
from maru.base.memory.cuda import Driver, Event, Stream, find_driver
from maru.fake_cuda import FakeCuda, use

BLOCKS, LAYERS, ROW = 16, 4, 4096
"""Of the cache, and bytes of a block in each layer."""


class RecordedEvent:
    """An event of the driver, as a precondition takes it. A call binds its thread to the device, as those of torch do."""

    def __init__(self, driver: Driver, event: Event) -> None:
        self._driver, self.cuda_event = driver, int(event)

    def query(self) -> bool:
        self._driver.attach(0)
        return self._driver.query(Event(self.cuda_event))

    def synchronize(self) -> None:
        self._driver.attach(0)
        self._driver.synchronize(Event(self.cuda_event))


class FakeDevice:
    """The device in Python. Work of the engine waits for :meth:`let_go`."""

    is_real = False

    def __init__(self, fake: FakeCuda, driver: Driver) -> None:
        self.fake, self.driver = fake, driver
        driver.attach(0)
        self._rows = [driver.allocate(BLOCKS * ROW) for _ in range(LAYERS)]
        self.stream: Stream = driver.stream()
        self._gate = threading.Event()
        self.tier = DeviceTier([TensorMemory(row, (BLOCKS, ROW), (ROW, 1), 1, "uint8", 0, None) for row in self._rows])

    def write(self, blocks: Sequence[int], byte: int, *, late: bool = False) -> None:
        """Have the engine write these blocks; late: not before :meth:`let_go`."""

        def work() -> None:
            for row in self._rows:
                for block in blocks:
                    self.fake.write(row + block * ROW, bytes([byte]) * ROW)

        self.fake.kernel(self.stream, work, self._gate if late else None)

    def let_go(self) -> None:
        """Let late work go on."""
        self.fake.open_gate(self._gate)
        self._gate = threading.Event()

    def record(self) -> Any:
        """An event behind all that the engine has been told until now."""
        event = self.driver.event()
        self.driver.record(event, self.stream)
        return RecordedEvent(self.driver, event)

    def hold(self, blocks: Sequence[int]) -> set[int]:
        """Wait for the engine; the bytes that these blocks have."""
        self.driver.synchronize_stream(self.stream)
        return {byte for row in self._rows for block in blocks for byte in self.fake.read(row + block * ROW, ROW)}

    @contextmanager
    def capturing(self) -> Iterator[Callable[[], bool]]:
        """The engine captures a graph, in a thread of its own; yields whether that is still well."""
        begun, over = threading.Event(), threading.Event()

        def capture() -> None:
            self.fake.capture(self.stream)
            begun.set()
            over.wait(30)  # a thread that has ended would give its number to another one

        thread = threading.Thread(target=capture)
        thread.start()
        begun.wait(30)
        try:
            yield lambda: not self.fake.invalidated
        finally:
            self.fake.end_capture(self.stream)
            over.set()
            thread.join()


class TorchDevice:
    """The real device, through torch."""

    is_real = True

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.driver = find_driver()
        self.driver.attach(0)
        self._layers = [torch.zeros(BLOCKS, ROW, dtype=torch.uint8, device="cuda:0") for _ in range(LAYERS)]
        self._stream = torch.cuda.Stream(0)
        torch.cuda.synchronize()
        self.tier = DeviceTier(self._layers)

    def write(self, blocks: Sequence[int], byte: int, *, late: bool = False) -> None:
        with self._torch.cuda.stream(self._stream):
            if late:
                self._torch.cuda._sleep(200_000_000)  # a tenth of a second
            for layer in self._layers:
                layer[list(blocks)] = byte

    def let_go(self) -> None:
        """Late work goes on by itself."""

    def record(self) -> Any:
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event

    def hold(self, blocks: Sequence[int]) -> set[int]:
        self._stream.synchronize()
        return {byte for layer in self._layers for byte in layer[list(blocks)].unique().tolist()}

    @contextmanager
    def capturing(self) -> Iterator[Callable[[], bool]]:
        begun, over, well = threading.Event(), threading.Event(), list[bool]()

        def capture() -> None:
            graph = self._torch.cuda.CUDAGraph()
            try:
                with self._torch.cuda.graph(graph, stream=self._torch.cuda.Stream(0), capture_error_mode="global"):
                    self._layers[0][0] += 0
                    begun.set()
                    over.wait(30)
                well.append(True)
            except RuntimeError:
                well.append(False)
            begun.set()

        thread = threading.Thread(target=capture)
        thread.start()
        begun.wait(30)

        def is_well() -> bool:
            over.set()
            thread.join()
            return well == [True]

        try:
            yield is_well
        finally:
            over.set()
            thread.join()


def sees_a_device() -> bool:
    """Whether torch does."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


@contextmanager
def device(kind: str) -> Iterator[Any]:
    """One of them: "a GPU", or "Python"."""
    if kind == "a GPU":
        try:
            yield TorchDevice()
        finally:
            close_copiers()
        return
    fake = FakeCuda()
    with use(fake) as driver:
        try:
            yield FakeDevice(fake, driver)
        finally:
            close_copiers()
    assert not fake.wrong


KINDS = ["Python", *(["a GPU"] if sees_a_device() else [])]
