"""Copies of a CUDA device that come too early, too late, or elsewhere. The tests over the fake driver find each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from backends.base.copier import Copier, Event, Pieces, copier_of
from backends.base.copier._copier import _Lane
from backends.base.pages import Pages
from backends.device import DeviceBlocks
from maru.base.memory import cuda
from maru.base.memory.cuda import Driver
from maru.fake_cuda import _fake


def pieces_are_loaded_in_another_order(patch: Any) -> None:
    """A block is read otherwise than it was written: its first half is loaded where the second one belongs."""

    def load(self: DeviceBlocks, slots: Sequence[int], pages: Pages) -> None:
        found = self._pieces.of(slots, pages)
        half = len(found) // 2
        order = [*range(half, len(found)), *range(half)]
        copier_of(self._device).load(Pieces(found.device[order], found.host, found.sizes))

    patch.setattr(DeviceBlocks, "copy_in", load)


def chunks_are_loaded_in_another_order(patch: Any) -> None:
    """The same with vLLM's chunks: the first half of the blocks in all layers, where the second one belongs."""
    load = Copier.load

    def otherwise(self: Copier, pieces: Pieces, after: Sequence[Event] = ()) -> None:
        half = len(pieces) // 2
        load(self, Pieces(pieces.device[[*range(half, len(pieces)), *range(half)]], pieces.host, pieces.sizes), after)

    patch.setattr(Copier, "load", otherwise)


def a_load_waits_for_nothing(patch: Any) -> None:
    """What the engine has queued for its blocks comes behind it."""
    load = Copier.load
    patch.setattr(Copier, "load", lambda self, pieces, after=(): load(self, pieces))


def a_store_waits_for_nothing(patch: Any) -> None:
    """It reads what was there before the engine's pass."""
    store = Copier.store
    patch.setattr(Copier, "store", lambda self, pieces, after=(): store(self, pieces))


def nobody_waits_behind_an_error(patch: Any) -> None:
    """What was begun before it goes on, in memory that is used again."""
    patch.setattr(_Lane, "_settle", lambda self, error: None)


def nobody_waits_for_the_end(patch: Any) -> None:
    """Whoever is told that a copy is over uses its memory again."""
    patch.setattr(_Lane, "_finish", lambda self: None)


def each_thread_is_on_device_0(patch: Any) -> None:
    """A process gets a context there, and fails with memory of its own device."""
    attach = Driver.attach
    patch.setattr(Driver, "attach", lambda self, device: attach(self, 0))


def all_memory_counts_as_registered(patch: Any) -> None:
    """A device reads and writes pages that may move."""
    patch.setattr(Pieces, "split", lambda self, spans: (self, self.at(slice(0))))


def the_buffer_is_used_again_too_early(patch: Any) -> None:
    """A portion is put into it while the one before it may not have left it."""

    def through(self: _Lane, pieces: Pieces) -> None:
        finish, self._finish = self._finish, lambda: None  # type: ignore[method-assign]
        for portion in pieces.portions(self._staging.nbytes):
            self._portion(portion, self._staging.address)
        self._finish = finish  # type: ignore[method-assign]
        self._finish()

    patch.setattr(_Lane, "_through_the_buffer", through)


def the_buffer_is_filled_behind_its_copy(patch: Any) -> None:
    """A portion is put into it once the copy out of it has begun, which may have read it at once."""
    begin, portion = _Lane._begin, _Lane._portion

    def filled_later(self: _Lane, pieces: Pieces, buffer: int) -> None:
        before = ctypes.string_at(buffer, pieces.nbytes)

        def begun(staged: Pieces, copy: Any) -> None:
            filled = ctypes.string_at(buffer, pieces.nbytes)
            ctypes.memmove(buffer, before, len(before))
            begin(self, staged, copy)
            ctypes.memmove(buffer, filled, len(filled))

        self._begin = begun  # type: ignore[method-assign]
        portion(self, pieces, buffer)
        del self._begin

    patch.setattr(_Lane, "_portion", filled_later)


def memory_is_pinned_for_one_device(patch: Any) -> None:
    """Another device copies it as pageable memory, or refuses it."""
    patch.setattr(cuda, "PORTABLE", 0)


def copies_wait_for_the_default_stream(patch: Any) -> None:
    """The engine's work there and copies come one after the other."""
    patch.setattr(cuda, "_NON_BLOCKING", 0)
    patch.setattr(_fake, "_PATIENCE", 0.1)


def a_thread_that_waits_for_a_copy_spins(patch: Any) -> None:
    """Each copy that is waited for takes a processor."""
    patch.setattr(cuda, "_BLOCKING_SYNC", 0)
