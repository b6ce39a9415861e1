"""The exceptions of this package. Each says who must act: the caller, or an operator."""

from __future__ import annotations

from collections.abc import Sequence


class BackendError(Exception):
    """Base of all exceptions of this package."""


class Unproven(BackendError):
    """The end of a copy cannot be proven: it may still read its source or write its destination.

    Neither may be reused.
    """


class BlockSizeError(BackendError, ValueError):
    """The caller's blocks do not have the size of this tier's."""

    def __init__(self, place: object, expected_bytes: int, got_bytes: int) -> None:
        super().__init__(f"{place!r} holds blocks of {expected_bytes} bytes, not of {got_bytes}")
        self.expected_bytes = expected_bytes
        self.got_bytes = got_bytes


class CapacityError(BackendError, ValueError):
    """The caller asks for more than the empty tier could hold, or the tier is full of held blocks."""


class DuplicateKeys(BackendError, ValueError):
    """The caller gave a key twice in one set of blocks."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__(f"keys given more than once: {', '.join(key.hex() for key in keys[:4])}")
        self.keys: list[bytes] = list(keys)


class RepeatedPlaces(BackendError, ValueError):
    """The caller's destination has blocks that share memory: one would overwrite another."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"places {one} and {other} share memory: each block is loaded into a place of its own")
        self.places: tuple[int, int] = (one, other)


class MissingKeys(BackendError, KeyError):
    """The caller wants to hold blocks that are not there."""

    def __init__(self, place: object, keys: Sequence[bytes]) -> None:
        super().__init__(f"{place!r} does not have {len(keys)} of the keys: {', '.join(key.hex() for key in keys[:4])}")
        self.keys: list[bytes] = list(keys)

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError's own shows the repr of its argument


class PlaceClosed(BackendError):
    """The caller uses a tier after closing it."""


class PlaceInUse(BackendError):
    """The caller's directory is in use by another tier, here or in another process."""


class UnreadableBlock(BackendError):
    """A block of a source cannot be read now; others of its batch may be. Its bytes are as they were."""


class DamagedBlock(BackendError):
    """The bytes of a block are not those that were stored under its key."""

    def __init__(self, place: object, key: bytes, reason: str) -> None:
        super().__init__(f"the block {key.hex()} of {place!r} is {reason}")
        self.key = key
        self.reason = reason


class StrayPath(BackendError, ValueError):
    """The given directory or file cannot be used by this tier."""
