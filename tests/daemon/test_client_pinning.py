"""Memory that a client shares with a daemon, and vLLM's scheduler with its workers, is pinned where CUDA is used."""

import gc
import itertools
import os
import threading
from typing import Any

import pytest

from backends.base.copier import close_copiers, copier_of
from backends.memory import MemoryTier
from maru.base.memory import pinning
from maru.base.memory.mapping import map_region
from maru.base.memory.memory import Memory
from offload.client import SharedMemory, _shared
from offload.client._places import Staging
from offload.engines.vllm._arena import Arena
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


def test_a_process_without_cuda_pins_none_until_a_device_copies(tmp_path):
    with process_with_cuda(uses=False) as cuda:
        memory, tier = SharedMemory(5000), MemoryTier(4096, 4096)
        region = tmp_path / "region"
        region.write_bytes(bytes(8192))
        region.chmod(0o600)
        mapping, closed, gone = (map_region(str(region), 8192, write=True, pin=pin) for pin in (None, None, False))
        closed.close()
        pinning.background.wait_prepared()
        assert not cuda.registered
        del gone
        copier_of(0)
        pinning.background.wait_prepared()
        address = tier.views([0]).addresses[0]
        assert cuda.registered.keys() == {memory.memory.address, mapping.address, address}
        assert mapping.pinned and pinning.statistics().pinned_bytes == 2 * 8192 + 4096
        copier_of(0)
        tier.close()
        mapping.close()
        close_copiers()
        del memory, mapping


def test_memory_that_is_gone_before_a_device_copies_is_forgotten():
    with process_with_cuda(uses=False):
        before = len(pinning._later)
        memory = SharedMemory(5000)
        assert len(pinning._later) == before + 1
        del memory
        gc.collect()
        assert len(pinning._later) == before


def arena(**options: Any) -> SharedMemory:
    made = Arena(f"arena {os.getpid()} {next(_numbers)}", 4, 1 << 20, **options)
    made.unlink()
    return made.memory


def staging(**options: Any) -> SharedMemory:
    return Staging(1 << 20, 4, **options).memory


_numbers = itertools.count()
AREAS = pytest.mark.parametrize("area", [arena, staging])


@AREAS
def test_an_area_gets_huge_pages_in_the_background_before_it_is_pinned(area, monkeypatch):
    parts: list[tuple[str, int, int]] = []

    def make_huge(memory: Memory, start: int, length: int) -> None:
        parts.append((threading.current_thread().name, start, length))
        assert not cuda.registered

    monkeypatch.setattr(_shared, "make_huge", make_huge)
    monkeypatch.setattr(_shared, "_PART_BYTES", 4 << 20)
    with process_with_cuda() as cuda:
        memory = area()
        pinning.background.wait_prepared()
        assert parts[0] == ("prepare memory", 0, 4 << 20)
        assert sum(length for _, _, length in parts) == memory.memory.length
        whole = (memory.memory.address, memory.memory.address + memory.memory.length)
        assert pinning.spans(memory.memory.address, memory.nbytes) == [whole]
        del memory


@AREAS
def test_an_area_gets_small_pages_if_told_to(area, monkeypatch):
    monkeypatch.setattr(_shared, "make_huge", None)
    with process_with_cuda() as cuda:
        memory = area(huge_pages=False)
        pinning.background.wait_prepared()
        assert cuda.registered
        del memory
