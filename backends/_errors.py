"""What can go wrong at a place, and who must act."""

from __future__ import annotations

from collections.abc import Sequence


class BackendError(Exception):
    """Base of everything this package raises on its own account."""


class Unproven(BackendError):
    """The end of a copy cannot be proven: it may still read its source or write its destination.

    Nobody may reuse either.
    """


class BlockSizeError(BackendError, ValueError):
    """The caller's block is not of the size that this place holds."""

    def __init__(self, place: object, expected_bytes: int, got_bytes: int) -> None:
        super().__init__(f"{place!r} holds blocks of {expected_bytes} bytes, not of {got_bytes}")
        self.expected_bytes = expected_bytes
        self.got_bytes = got_bytes


class CapacityError(BackendError, ValueError):
    """The caller asks for more than this place could hold even if it were empty, or it is full of held blocks."""


class DuplicateKeys(BackendError, ValueError):
    """The caller named a key twice in one set of blocks."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__(f"keys named more than once: {', '.join(key.hex() for key in keys[:4])}")
        self.keys: list[bytes] = list(keys)


class RepeatedPlaces(BackendError, ValueError):
    """The caller wants to load into places that share memory: one block would be written over another."""

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
    """The caller uses a place after closing it."""


class PlaceInUse(BackendError):
    """The caller wants a directory that another tier owns, here or in another process."""


class DamagedBlock(BackendError):
    """What a place holds under a key is not what was stored there."""

    def __init__(self, place: object, key: bytes, reason: str) -> None:
        super().__init__(f"the block {key.hex()} of {place!r} is {reason}")
        self.key = key
        self.reason = reason


class StrayPath(BackendError, ValueError):
    """The directory or file given to a place is not one that it may use."""
