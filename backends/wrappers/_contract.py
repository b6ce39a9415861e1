"""What a wrapper is: bytes in, other bytes out, in a copy thread; and what it is told about the block.

A wrapper knows no tier and keeps no block. It is called from several copy threads at once, and between two calls nothing of
one block may be left that another one could see.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs

from .._errors import BackendError
from ..abc import Key


@attrs.frozen
class Context:
    """What a wrapper may know of the block that it is given."""

    key: Key
    """Its name."""
    tenant: str | None
    """Whose it is; the empty text where nobody was named, None where several claim it at the same time."""
    chain: bytes
    """The id of all wrappers it passes through, in their order."""


class Damaged(BackendError):
    """What is to be decoded is not what was encoded, or not meant for whoever asks."""

    def __init__(self, reason: str = "damaged", *, keep: bool = False) -> None:
        super().__init__(f"the stored bytes are refused: {reason}")
        self.reason: str = reason
        """Why, in a word: what the miss is counted under."""
        self.keep: bool = keep
        """Whether somebody else may well be able to read the block, so that it is not to be forgotten."""


class ChainError(BackendError, ValueError):
    """The caller's wrappers make no chain; the text says which, and what would."""


class LossyNotChosen(BackendError, ValueError):
    """The caller uses what changes values without having said ``lossy=True``."""


class MissingExtra(BackendError, ImportError):
    """The caller uses what is not installed; the text names the extra that brings it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install 'trio-offload[{extra}]'")
        self.extra: str = extra
        """The extra of this distribution that brings it."""


class UnknownTenant(BackendError, LookupError):
    """A block is to be encrypted for a tenant without a secret, or for several tenants at once."""


@runtime_checkable
class Wrapper(Protocol):
    """One step of a chain. Thread-safe: called in copy threads, several at a time."""

    @property
    def id(self) -> bytes:
        """What it does, parameters included, as far as decoding depends on them: another id is another format."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether what it decodes may differ from what it was given."""
        ...

    def bound(self, size: int) -> int:
        """How many bytes :meth:`encode` makes of ``size`` bytes at most; never less for more.

        Raises:
            ValueError: it cannot encode so many.
        """
        ...

    def encode(self, context: Context, src: memoryview, dst: memoryview) -> int:
        """Encode ``src`` into the beginning of ``dst``, which is ``bound(len(src))`` bytes long; says how many it made.

        Called in a copy thread. An exception fails the whole batch (see :class:`Sealing` for one that fails alone).
        """
        ...

    def decode(self, context: Context, src: memoryview, dst: memoryview) -> None:
        """Fill ``dst``, which is as long as what was encoded, from ``src``, which is what :meth:`encode` has made of it.

        Called in a copy thread. Whatever ``src`` holds, nothing but ``dst`` is written, and no more memory taken than a
        small multiple of its length.

        Raises:
            Damaged: it is not what was encoded, or not for this tenant. ``dst`` may hold anything then.
        """
        ...


@runtime_checkable
class Sealing(Wrapper, Protocol):
    """A wrapper that encrypts: the last one of its chain, since what it makes can be neither compressed nor guessed."""

    @property
    def seals(self) -> bool:
        """Whether it does; a wrapper without this attribute does not."""
        ...

    def refusal(self, context: Context) -> Exception | None:
        """Why a block with this context cannot be encoded, if so: it then fails alone. Called in a copy thread."""
        ...
