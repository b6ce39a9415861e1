"""Memory that a client shares with a daemon, and vLLM's scheduler with its workers, is pinned where CUDA is used."""

import gc

from maru.base.memory import pinning
from offload.client import SharedMemory
from tests.support.cuda_process import process_with_cuda


def test_shared_memory_is_pinned_in_the_background_until_it_goes():
    with process_with_cuda() as cuda:
        memory = SharedMemory(5000)
        pinning.background.wait_prepared()
        assert pinning.spans(memory.memory.address, 5000) == [(memory.memory.address, memory.memory.address + 8192)]
        view = memory.buffer()
        del memory
        gc.collect()
        assert cuda.registered
        del view


def test_a_process_without_cuda_pins_none():
    with process_with_cuda(uses=False) as cuda:
        memory = SharedMemory(5000)
        pinning.background.wait_prepared()
        assert not cuda.registered
        del memory
