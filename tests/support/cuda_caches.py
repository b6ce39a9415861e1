"""A KV cache in the memory of a fake CUDA device; and an engine process with one: ``python -m tests.support.cuda_caches URL``.

The process does what each line of its standard input says, and answers with one JSON object:

    store FIRST    stores BLOCKS blocks from number 0 on, under the keys from FIRST on; answers with a status
    load FIRST     looks them up, loads them to numbers from BLOCKS on, and compares; answers with how many were right
"""

from __future__ import annotations

import json
import sys
import threading

import trio

from backends.base.block_layout import TensorMemory
from backends.device import DeviceTier
from backends.testing import payload_of
from maru.fake_cuda import FakeCuda, use
from offload import NO_WAIT
from offload.client import open_client

BLOCKS = 8
LAYERS, RUN = 4, 512
"""Layers of keys and values, and bytes of each piece."""
SIZE = LAYERS * 2 * RUN
WHOLE = 2 << 20


def in_thread(call):
    """What a call returns in a thread of its own: the threads of a test are not attached to a device, as an engine's may be."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


class CudaCache:
    """Blocks on device 0 of a fake: two times ``BLOCKS``, all layers in one allocation, or each in one of its own."""

    def __init__(self, fake: FakeCuda, driver, nbytes: int = WHOLE, allocations: int = 1, n: int = 2 * BLOCKS) -> None:
        self.fake, self.n = fake, n

        def allocate():
            driver.attach(0)
            return [driver.allocate(nbytes) for _ in range(allocations)]

        self.allocations = in_thread(allocate)
        self.layers = [
            self.allocations[at % allocations] + at // allocations * 2 * self.n * RUN for at in range(LAYERS)
        ]
        shape, strides = (2, self.n, RUN), (self.n * RUN, RUN, 1)
        tensors = [TensorMemory(layer, shape, strides, 1, "uint8", 0, None) for layer in self.layers]
        self.tier = DeviceTier(tensors, block_axis=1)

    def _pieces(self, number: int) -> list[int]:
        return [layer + (part * self.n + number) * RUN for layer in self.layers for part in range(2)]

    def write(self, number: int, data: bytes) -> None:
        for at, piece in enumerate(self._pieces(number)):
            self.fake.write(piece, data[at * RUN : (at + 1) * RUN])

    def read(self, number: int) -> bytes:
        return b"".join(self.fake.read(piece, RUN) for piece in self._pieces(number))


def keys_from(first: int) -> list[bytes]:
    return [b"key %d" % (first + at) for at in range(BLOCKS)]


async def store(engine, cache, first: int = 0, precondition=NO_WAIT):
    for at, key in enumerate(keys_from(first)):
        cache.write(at, payload_of(key, SIZE))
    handle = await engine.store(cache.tier.external(range(BLOCKS), keys_from(first)), precondition)
    return await handle.wait()


async def load(engine, cache, first: int = 0) -> int:
    """How many were found and are right; a wrong one is an error."""
    keys = keys_from(first)
    for at in range(BLOCKS):
        cache.write(BLOCKS + at, bytes(SIZE))
    async with await engine.lookup(keys) as hit:
        loaded = (
            await engine.load(hit, cache.tier.into(range(BLOCKS, BLOCKS + len(hit.keys))), precondition=NO_WAIT)
        ).loaded
    for at in range(loaded):
        assert cache.read(BLOCKS + at) == payload_of(keys[at], SIZE), f"block {at} is another one"
    return loaded


async def main(url: str) -> None:
    with use(fake := FakeCuda()) as driver:
        cache = CudaCache(fake, driver)
        async with open_client(cache.tier, url) as engine:
            while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
                name, first = line.split()
                try:
                    if name == "store":
                        said = {"status": str((await store(engine, cache, int(first))).status)}
                    else:
                        said = {"loaded": await load(engine, cache, int(first))}
                except AssertionError:
                    raise
                except Exception as exc:
                    said = {"error": repr(exc), "loaded": 0}
                opened = fake.calls.count("cuIpcGetMemHandle")
                print(json.dumps({**said, "shared": opened, "wrong": len(fake.wrong)}), flush=True)


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # an engine's tensors are described without it
    trio.run(main, sys.argv[1])
