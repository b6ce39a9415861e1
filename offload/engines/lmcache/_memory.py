"""Memory objects of LMCache as a source and a destination.

They are columns of addresses in memory that LMCache keeps alive. An object that is as large as a page is copied from
and to its own memory. A smaller one fills the rest of its page with zeros, so that equal objects have equal pages; a
page that is loaded into it writes only the object's size. The padding of an object is cleared before it is stored: it
may hold data of another request.
"""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import attrs

from backends.abc import Destination, ExternalBlocks, Key, Source
from backends.base.pages import Pages
from backends.base.planes import SAMPLES

from .._faults import AdapterError

if TYPE_CHECKING:
    import torch


class ObjectTooLarge(AdapterError):
    """An object that does not fit a page.

    The text names the knob.
    """

    fault_name = "object too large"

    def __init__(self, size: int, page_bytes: int) -> None:
        super().__init__(
            f"an object of {size} bytes does not fit a page of {page_bytes}: set chunk_size_bytes to the largest object"
        )


@attrs.define(eq=False)  # not frozen: setting five fields would take twice the time, for each object of each task
class Span:
    """The memory of an object."""

    address: int
    """Address in host memory."""
    size: int
    """Bytes that may be read and written: the whole allocation, padding included."""
    used: int
    """Bytes without padding."""
    owner: object = None
    """Object that keeps the memory alive."""
    dtype: torch.dtype | None = None
    """Dtype of its numbers, if there is one and it is known."""

    @classmethod
    def of(cls, buffer: memoryview) -> Span:
        """Return the span of a writable buffer."""
        flat = buffer.cast("B")
        address = ctypes.addressof(ctypes.c_char.from_buffer(flat)) if flat.nbytes else 0
        return cls(address, flat.nbytes, flat.nbytes, buffer)

    def within(self, page_bytes: int) -> Span:
        """Return the span without padding that does not fit a page.

        Raises:
            ObjectTooLarge: the object does not fit even without padding.
        """
        if self.size <= page_bytes:
            return self
        if self.used > page_bytes:
            raise ObjectTooLarge(self.used, page_bytes)
        return Span(self.address, page_bytes, self.used, self.owner, self.dtype)

    def samples(self) -> array[float] | None:
        """Return some numbers of each of the object's :data:`PARTS`.

        ``None`` if its dtype is not known, or it has too few numbers.
        """
        import torch  # a known dtype means that torch is imported

        if self.dtype is None or self.used < len(PARTS) * self.dtype.itemsize:
            return None
        data: Any = (ctypes.c_char * self.used).from_address(self.address)
        numbers = torch.frombuffer(data, dtype=torch.uint8).view(self.dtype)  # type: ignore[no-untyped-call, unused-ignore]
        return array("f", numbers[_sampled(len(numbers))].to(torch.float32).numpy().tobytes())


PARTS: Final = tuple(f"part {at}" for at in range(64))
"""Names of the equal parts in which objects are compared.

LMCache reports only to its kernels which bytes are a head, and whether keys or values. If keys and values have swapped
places, the parts differ; if heads have, the numbers in each part do.
"""


@lru_cache(maxsize=16)  # objects of one model and group have one size
def _sampled(n: int) -> list[int]:
    """Return the indexes of ``n`` numbers to sample: some in each part.

    Their distances match no distance between rows of tokens or heads.
    """
    rng, width = random.Random(n), n // len(PARTS)
    return [part * width + at for part in range(len(PARTS)) for at in sorted(rng.choices(range(width), k=SAMPLES))]


class MemoryObjects(Source):
    """The source that an engine stores from: objects under store.

    Nothing is found by key, since LMCache keeps its objects until their store has ended.

    Args:
        block_bytes: the size of a page.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._refs = count()
        self._spans: dict[int, Span] = {}

    def __repr__(self) -> str:
        return f"<MemoryObjects: {len(self._spans)} of at most {self.block_bytes} bytes are being stored>"

    def __len__(self) -> int:
        """Return the number of objects that are being stored."""
        return len(self._spans)

    @property
    def block_bytes(self) -> int:
        """Size of a page, in bytes."""
        return self._block_bytes

    def lend(self, keys: Sequence[Key], spans: Sequence[Span]) -> ExternalBlocks:
        """Lend objects for one store, until they are taken back. Thread-safe.

        Raises:
            ObjectTooLarge: one of them is larger than a page.
        """
        spans = [span.within(self.block_bytes) for span in spans]
        for span in spans:
            if span.used < span.size:
                ctypes.memset(span.address + span.used, 0, span.size - span.used)
        # Steps of the counter and of the dict are atomic, so two threads may lend at once.
        refs = [next(self._refs) for _ in spans]
        blocks = ExternalBlocks(self, keys, refs)
        self._spans.update(zip(refs, spans, strict=True))
        return blocks

    def take_back(self, blocks: ExternalBlocks) -> None:
        """Take objects back when their store has ended. Thread-safe.

        LMCache may reuse their memory.
        """
        for ref in blocks.refs or ():
            self._spans.pop(ref, None)

    # --- samples --------------------------------------------------------------------------------------------------

    @property
    def plane_names(self) -> Sequence[str]:
        """Parts of an object; see :attr:`backends.abc.Source.plane_names`."""
        return PARTS

    def plane_samples(self, refs: Sequence[int]) -> list[array[float] | None]:
        """Return the samples of objects that are being stored."""
        return [self._spans[ref].samples() for ref in refs]

    # --- the contract of a source ---------------------------------------------------------------------------------

    def views(self, refs: Sequence[int]) -> Pages | None:
        """Return the addresses of these objects, if each fills its page."""
        return _pages([self._spans[ref] for ref in refs], self.block_bytes)

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each object into a page, followed by zeros.

        Runs in a copy thread.
        """
        size = pages.page_bytes
        for ref, address in zip(refs, pages.addresses, strict=True):
            span = self._spans[ref]
            ctypes.memmove(address, span.address, span.size)
            ctypes.memset(address + span.size, 0, size - span.size)


class ObjectPlaces(Destination):
    """The destination of loads: objects of LMCache, one per page.

    Args:
        spans: the memory of the objects.
        block_bytes: the size of a page.

    Raises:
        ObjectTooLarge: an object without its padding is larger than a page.
    """

    def __init__(self, spans: Sequence[Span], block_bytes: int) -> None:
        self._spans = [span.within(block_bytes) for span in spans]
        self._block_bytes = block_bytes
        self._views = _pages(self._spans, block_bytes)

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def block_bytes(self) -> int:
        """Size of a page, in bytes."""
        return self._block_bytes

    def views(self) -> Pages | None:
        """Return the addresses of the objects, if each takes a whole page."""
        return self._views

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy pages into objects, up to each object's size.

        Runs in a copy thread.
        """
        for span, address in zip(self._spans[start:], pages.addresses, strict=False):
            ctypes.memmove(span.address, address, span.size)

    @property
    def plane_names(self) -> Sequence[str]:
        """Parts of an object; see :class:`backends.abc.Destination`."""
        return PARTS

    def plane_samples(self, positions: Sequence[int]) -> list[array[float] | None]:
        """Return the samples of objects that were loaded."""
        return [self._spans[at].samples() for at in positions]


def _pages(spans: Sequence[Span], page_bytes: int) -> Pages | None:
    for span in spans:
        if span.size != page_bytes:
            return None
    return Pages([span.address for span in spans], page_bytes, spans)
