"""Encoding of stores and decoding of loads, in copy threads.

This is a source and a destination for the tier below, which copies as always; the bytes are encoded or decoded during
its copy. So a block is encoded straight into its slot or page, and decoded straight out of it, if these are in host
memory.

Rule 1. Unused bytes of a slot are zero: no byte of an earlier block remains there.
Rule 2. The destination of a block that is refused is zeroed: bytes that could not be verified do not remain there.
Rule 3. A block that is damaged in its source is not encoded: with a new checksum it would count as correct.
Rule 4. The memory that a copy works with belongs to one thread at a time, which gives it back itself: an abandoned copy
        still writes to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

import attrs

from maru.exception_groups import holds

from .._errors import BackendError, Unproven
from ..abc import Destination, Key, Source
from ..base._unproven import kept_if_unproven
from ..base.copying import Bounce, StoreCopy
from ..base.pages import Pages, new_pages
from ._chain import Chain, Context, Damaged, seals

T = TypeVar("T")

_KEPT: Final = 4
"""Most idle objects that are kept.

As many as copies run at once in common configurations.
"""


class Pool(Generic[T]):
    """Objects that are expensive to make.

    Each is used by one thread at a time.

    The thread that uses an object gives it back itself when its work is over, even if the waiting task was cancelled:
    so an abandoned copy never writes to an object that another copy uses. An object whose copy may still go on
    (:class:`Unproven`) is not used again.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._idle: list[T] = []  # `pop` and `append` are atomic, so threads need no lock
        self.made: int = 0
        """Number of objects made in total."""

    @contextmanager
    def take(self) -> Iterator[T]:
        """Take an object for this thread while the block lasts. Any thread."""
        try:
            thing = self._idle.pop()
        except IndexError:
            thing = self._make()
            self.made += 1
        try:
            with kept_if_unproven(thing):
                yield thing
        except BaseException as error:
            if not holds(error, Unproven):
                self._give_back(thing)
            raise
        self._give_back(thing)

    def _give_back(self, thing: T) -> None:
        if len(self._idle) < _KEPT:
            self._idle.append(thing)


PORTION_BYTES: Final = 4 << 20
"""Bytes of blocks outside of host memory that are staged at once.

A larger block is staged alone.
"""


class Scratch(Bounce):
    """The buffers of one copy thread, allocated when needed."""

    def __init__(self, between_bytes: int) -> None:
        super().__init__(PORTION_BYTES)
        self._between_bytes = between_bytes
        self._between: tuple[memoryview, memoryview] | None = None

    def between(self, step: int) -> memoryview:
        """Return the buffer between two wrappers.

        Two buffers are used in turn, by the number of the step.
        """
        if self._between is None:
            first, second = new_pages(2, self._between_bytes)
            self._between = (first, second)
        return self._between[step % 2]


class BrokenWrapper(BackendError):
    """A wrapper that reports an impossible size.

    More bytes than its bound, or a negative number.
    """


class Coder:
    """One chain and its buffers. For any thread."""

    def __init__(self, chain: Chain, slot_bytes: int) -> None:
        self.chain: Chain = chain
        self.slot_bytes: int = slot_bytes
        between = max(chain.bounds[1:-1], default=0)
        self.staging: Pool[Scratch] = Pool(lambda: Scratch(between))
        self.seals: bool = seals(chain.wrappers[-1])

    def refusals(self, contexts: Sequence[Context]) -> dict[int, Exception]:
        """Return the errors of blocks that cannot be encrypted, by position."""
        last = self.chain.wrappers[-1]
        refused = {at: last.refusal(context) for at, context in enumerate(contexts)}  # type: ignore[attr-defined]
        return {at: refusal for at, refusal in refused.items() if refusal is not None}

    def encode(self, context: Context, plain: memoryview, page: memoryview, scratch: Scratch) -> int:
        """Encode a plain block with its header. Return the stored size.

        It is encoded into the beginning of ``page``.
        """
        chain = self.chain
        head, last = chain.header_bytes, len(chain.wrappers) - 1
        src, lengths = plain, list[int]()
        for step, wrapper in enumerate(chain.wrappers):
            room = wrapper.bound(src.nbytes)
            dst = page[head : head + room] if step == last else scratch.between(step)[:room]
            length = wrapper.encode(context, src, dst)
            if not 0 <= length <= room:
                raise BrokenWrapper(f"{wrapper!r} returned {length} bytes, but its bound is {room}")
            src = dst[:length]
            lengths.append(length)
        return chain.write_header(context.key, lengths, page)

    def decode(self, context: Context, page: memoryview, plain: memoryview, scratch: Scratch) -> None:
        """Decode a stored block.

        Raises:
            Damaged: the bytes are not the stored ones, or not for this tenant. The content of ``plain`` is undefined
                then.
        """
        chain = self.chain
        lengths = chain.read_header(context.key, page)
        src = page[chain.header_bytes : chain.header_bytes + lengths[-1]]
        for step in range(len(chain.wrappers) - 1, -1, -1):
            dst = scratch.between(step - 1)[: lengths[step - 1]] if step else plain
            chain.wrappers[step].decode(context, src, dst)
            src = dst


@attrs.define(eq=False)
class Encoding:
    """The encoding of one transfer.

    It is a :class:`~backends.abc.Source` of encoded blocks, whose refs are positions.

    Made on the trio thread for one transfer; its figures are read there again when that is over.
    """

    coder: Coder
    copy: StoreCopy
    """The plain blocks, with the checksums that their source knows."""
    contexts: Sequence[Context]
    plain_bytes: dict[int, int] = attrs.Factory(dict)
    """Original size of each encoded block, by position."""
    stored_bytes: dict[int, int] = attrs.Factory(dict)
    """Stored size of each encoded block, with its header."""

    def as_source(self) -> EncodedSource:
        """Return the source that the tier below copies from."""
        return EncodedSource(self)

    def encode(self, positions: Sequence[int], pages: Pages) -> None:
        """Encode blocks into pages. In a copy thread.

        Raises:
            DamagedBlock: rule 3. The others can be copied in another call.
        """
        coder, slot, at = self.coder, pages.page_bytes, 0
        with coder.staging.take() as scratch:
            for portion, plain in self.copy.portions(positions, scratch):
                self.copy.verify(portion, plain)
                for position, block in zip(portion, plain, strict=True):
                    if position in self.copy.failed:
                        raise self.copy.failed[position]
                    used = coder.encode(self.contexts[position], block, pages[at], scratch)
                    ctypes.memset(pages.addresses[at] + used, 0, slot - used)
                    self.plain_bytes[position] = block.nbytes
                    self.stored_bytes[position] = used
                    at += 1


class EncodedSource(Source):
    """The encoded blocks as a source for the tier below.

    They are not in host memory, but encoded when they are copied.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding

    def __repr__(self) -> str:
        return f"<{self._encoding.copy.source!r} through {self._encoding.coder.chain!r}>"

    @property
    def block_bytes(self) -> int:
        """Largest size of a stored block, in bytes."""
        return self._encoding.coder.slot_bytes

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Return the refs as given: the transfer holds the blocks already."""
        chain = self._encoding.coder.chain
        position = {chain.name(context.key): at for at, context in enumerate(self._encoding.contexts)}
        return [position[key] for key in keys]

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Encode each block into the page at the same position."""
        self._encoding.encode(refs, pages)

    def used_bytes(self, page: memoryview) -> int:
        """Return the number of used bytes of a page.

        The others are zero.

        :meth:`copy_out` has filled the page.
        """
        return self._encoding.coder.chain.used_bytes(page)


class Decoding(Destination):
    """The decoding of one load: a destination for encoded blocks."""

    def __init__(
        self, coder: Coder, destination: Destination, there: Pages | None, contexts: Sequence[Context]
    ) -> None:
        self._coder = coder
        self._destination = destination
        self._there = there
        self._contexts = contexts
        self.bad: dict[int, Exception] = {}
        """Errors of blocks that could not be decoded, by position.

        :class:`Damaged`, or another error.
        """
        self.stored_bytes: list[int] = [0] * len(contexts)
        """Stored size of each block, if it could be decoded."""

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def block_bytes(self) -> int:
        """Largest size of a stored block, in bytes."""
        return self._coder.slot_bytes

    @property
    def on_device(self) -> bool:
        """Whether the decoded blocks go to a device."""
        return self._destination.on_device

    def views(self) -> None:
        """Return ``None``: blocks are decoded in :meth:`copy_in`."""
        return

    def copy_in(self, start: int, pages: Pages) -> None:
        """Decode blocks into the places from ``start`` on. In a copy thread."""
        with self._coder.staging.take() as scratch:
            if self._there is not None:
                self._decode(start, pages, self._there.part(start, start + len(pages)), scratch)
                return
            done, size = 0, self._destination.block_bytes
            while done < len(pages):
                plain = scratch.portion(len(pages) - done, size)
                self._decode(start + done, pages.part(done, done + len(plain)), plain, scratch)
                self._destination.copy_in(start + done, plain)
                done += len(plain)

    def _decode(self, start: int, pages: Pages, plain: Pages, scratch: Scratch) -> None:
        for at, (page, block) in enumerate(zip(pages, plain, strict=True), start):
            try:
                self._coder.decode(self._contexts[at], page, block, scratch)
                self.stored_bytes[at] = self._coder.chain.used_bytes(page)
            except Exception as exc:
                self.bad[at] = exc
                ctypes.memset(plain.addresses[at - start], 0, block.nbytes)


def decode_pages(coder: Coder, contexts: Sequence[Context], stored: Pages, plain: Pages, scratch: Scratch) -> None:
    """Decode all of these pages.

    Raises:
        Undecodable: a block could not be decoded; with its position. Its page is zeroed.
    """
    for at, (context, page, block) in enumerate(zip(contexts, stored, plain, strict=True)):
        try:
            coder.decode(context, page, block, scratch)
        except Damaged as exc:
            ctypes.memset(plain.addresses[at], 0, block.nbytes)
            raise Undecodable(at, exc) from None


class Undecodable(Exception):
    """A block that could not be decoded, with its position."""

    def __init__(self, at: int, why: Damaged) -> None:
        super().__init__(at, why)
        self.at = at
        self.why = why
