"""Leases of blocks that are read in place, until they are released.

Rule 1. Reading sends no message. :meth:`ViewLease.check` reports whether the bytes are unchanged: this side's clock
        ends a lease before the server frees its pages, and the next message of a restarted server reveals the restart.
Rule 2. A view raises once it is released, since its page may hold another block by then. A tensor cannot be taken back:
        its memory stays mapped for as long as it lives, and is meaningless by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import trio

from maru import LeaseLost

from ...abc import Key
from ...base.pages import Pages
from ._tensors import tensors_over

if TYPE_CHECKING:
    import torch

    from maru import HeldBatch

    from ._maru_l1 import MaruL1


class ViewLease:
    """A hold on the present prefix of some keys, read in place.

    Open it by ``async with await l1.reserve_read(keys) as lease``.

    :meth:`MaruL1.reserve_read` makes it. It keeps :class:`backends.abc.ReadLease`. If it is dropped, it is released
    once no view and no tensor of it is left. Used on the trio thread, except :meth:`check` and the views.
    """

    __slots__ = ("__weakref__", "_held", "_is_over", "_l1", "_views", "keys")

    def __init__(self, l1: MaruL1, keys: Sequence[Key], held: HeldBatch) -> None:
        """Use :meth:`MaruL1.reserve_read` instead."""
        self._l1 = l1
        self._held = held
        self._is_over = False
        self._views: list[memoryview] | None = None
        self.keys: Sequence[Key] = tuple(keys)
        """The held keys."""

    def __repr__(self) -> str:
        return f"<lease of {len(self.keys)} blocks in {self._l1!r}{', released' if self._is_over else ''}>"

    @property
    def is_open(self) -> bool:
        """Whether it was not released; see :meth:`check` for lost pins."""
        return not self._is_over

    @property
    def expires(self) -> float:
        """Time at which the lease ends unless the server answers before.

        On the monotonic clock (:func:`time.monotonic`).
        """
        return self._held.expires

    @property
    def unresolved(self) -> Exception | None:
        """The error if a region could not be mapped here, else ``None``.

        The prefix ended early because of it. With ``None`` the next key is a plain miss.
        """
        return self._held.unresolved

    def check(self) -> None:
        """Raise unless the bytes are still those of the blocks.

        Sends no message; any thread. Call it before reading, and after.

        Raises:
            maru.LeaseLost: the lease was released; or the server restarted, or was silent for longer than it holds a
                pin.
        """
        if self._is_over:
            raise LeaseLost(f"{self!r}")
        self._held.check()

    @property
    def views(self) -> Sequence[memoryview]:
        """The blocks in place, read-only and without a copy.

        They raise ``ValueError`` once this is released.

        Raises:
            maru.LeaseLost: see :meth:`check`.
        """
        self.check()
        if self._views is None:
            self._views = [page.toreadonly() for page in self._pages()]
        return tuple(self._views)

    @property
    def places(self) -> Sequence[tuple[int, int]]:
        """Region and page number of each block in the pool."""
        page_bytes = self._l1._known_layout().page_bytes
        return [(region_id, offset // page_bytes) for region_id, offset in self._held.places]

    def tensors(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the tensors of each block in place, to be read only.

        They are in the order of the layout. Writing to one ends the process.

        They stay readable as long as they live, and are meaningless once :meth:`check` raises.

        Raises:
            maru.LeaseLost: see :meth:`check`.
            ImportError: the torch extra is not installed.
        """
        self.check()
        return tensors_over(self._pages(), self._l1._known_layout())

    async def damaged(self) -> list[Key]:
        """Read all blocks. Return the keys whose checksums do not match.

        A block whose writer gave no checksum counts as undamaged.

        Always a checkpoint.

        Raises:
            maru.LeaseLost: the lease ended meanwhile, so the result is unknown.
        """
        self.check()
        held = self._held
        expected, addresses = held.checksums, held.addresses
        found = await self._l1._sums(addresses, held, wanted=True) or ()
        self.check()
        if held.addresses is not addresses:
            raise LeaseLost(f"{self!r}: keys were released while they were read")
        return [key for key, was, now in zip(self.keys, expected, found, strict=True) if was is not None and was != now]

    def _pages(self) -> Pages:
        return Pages(self._held.addresses, self._l1._known_layout().block_bytes, self._held)

    # --- the end --------------------------------------------------------------------------------------------------

    def keep(self, keys: Collection[Key]) -> None:
        """Release all blocks but these. Never blocks.

        The server is notified in one message, whose answer is not awaited.

        Raises:
            ValueError: one of these is not held.
        """
        wanted = set(keys)
        if not wanted.issubset(self.keys):
            raise ValueError(f"{self!r} does not hold {len(wanted.difference(self.keys))} of these keys")
        if not wanted:
            self.release_nowait()
        elif len(wanted) < len(self.keys):
            positions = [at for at, key in enumerate(self.keys) if key in wanted]
            views, self._views = self._views, None
            if views is not None:
                self._views = [views[at] for at in positions]
                _take_back(view for at, view in enumerate(views) if self.keys[at] not in wanted)
            self.keys = tuple(self.keys[at] for at in positions)
            self._held.keep(positions)

    def release_nowait(self) -> None:
        """Release the blocks. Idempotent.

        The server is notified; its answer is not awaited.
        """
        if not self._is_over:
            self._is_over = True
            _take_back(self._views or ())
            self._views = None
            self._held.release()
            self._l1._closed_read(self)

    async def release(self) -> None:
        """Release the blocks, even when this is cancelled. Idempotent."""
        self.release_nowait()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> ViewLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, also when cancelled. No checkpoint."""
        self.release_nowait()


def _take_back(views: Iterable[memoryview]) -> None:
    for view in views:
        with contextlib.suppress(BufferError):  # a reader still uses it
            view.release()
