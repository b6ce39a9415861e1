"""Exceptions of this package.

Each names who must act: the caller, or an operator.
"""

from __future__ import annotations

from collections.abc import Sequence


class BackendError(Exception):
    """Base of all exceptions of this package."""


class Unproven(BackendError):
    """End of a copy that cannot be proven.

    The copy may still read its source or write its destination, so neither may be reused.
    """


class BlockSizeError(BackendError, ValueError):
    """Size of the caller's blocks that differs from the tier's."""

    def __init__(self, place: object, expected_bytes: int, got_bytes: int) -> None:
        super().__init__(f"{place!r} holds blocks of {expected_bytes} bytes, not of {got_bytes}")
        self.expected_bytes = expected_bytes
        self.got_bytes = got_bytes


class CapacityError(BackendError, ValueError):
    """Request that exceeds the capacity of the tier.

    The caller asks for more than the empty tier could hold, or the tier is full of held blocks.
    """


class DuplicateKeys(BackendError, ValueError):
    """Key that the caller gave twice in one set of blocks."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__(f"keys given more than once: {', '.join(key.hex() for key in keys[:4])}")
        self.keys: list[bytes] = list(keys)


class RepeatedPlaces(BackendError, ValueError):
    """Destination of the caller whose blocks share memory.

    One block would overwrite another.
    """

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"places {one} and {other} share memory: each block is loaded into a place of its own")
        self.places: tuple[int, int] = (one, other)


class MissingKeys(BackendError, KeyError):
    """Blocks that the caller wants to hold and that are absent."""

    def __init__(self, place: object, keys: Sequence[bytes]) -> None:
        super().__init__(f"{place!r} does not have {len(keys)} of the keys: {', '.join(key.hex() for key in keys[:4])}")
        self.keys: list[bytes] = list(keys)

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError.__str__ shows the repr of its argument


class PlaceClosed(BackendError):
    """Use of a tier after it was closed."""


class PlaceInUse(BackendError):
    """Directory in use by another tier, of this or another process."""


class UnreadableBlock(BackendError):
    """Block of a source that cannot be read now.

    Its stored bytes are unchanged, and other blocks of its batch may be readable.
    """


class DamagedBlock(BackendError):
    """Block whose bytes differ from those stored under its key."""

    def __init__(self, place: object, key: bytes, reason: str) -> None:
        super().__init__(f"the block {key.hex()} of {place!r} is {reason}")
        self.key = key
        self.reason = reason


class StrayPath(BackendError, ValueError):
    """Directory or file that this tier cannot use."""
