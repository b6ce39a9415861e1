"""What a chain has done, as a snapshot, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class WrapperStatistics:
    """A snapshot of one wrapped tier; counters count since it was made."""

    encoded: int
    """Blocks that were encoded and are in the tier now, or were when they were told to be."""
    plain_bytes: int
    """Bytes that were encoded, of those that were a duplicate in the end, too."""
    stored_bytes: int
    """Bytes they became, headers included. What of its slot a block leaves unused is not counted."""
    decoded: int
    """Blocks that were decoded and verified."""
    read_bytes: int
    """Stored bytes they were decoded from, as far as a load has read them."""
    missed: Mapping[str, int]
    """Blocks that the tier below had, and that could not be decoded, by reason: ``damaged``: not what was stored; ``tag``: not
    what was encrypted, or not under this key; ``foreign``: of another tenant; ``secret``: encrypted with a secret that is not
    here any more."""
    staging: int
    """Working memories taken from the system, in all: as many as copies have run at the same time."""

    @property
    def ratio(self) -> float:
        """Stored bytes for each plain one; 1.0 as long as nothing was encoded."""
        return self.stored_bytes / self.plain_bytes if self.plain_bytes else 1.0

    @property
    def bad_tags(self) -> int:
        """Blocks whose authentication failed: somebody, or something, has changed what was encrypted."""
        return self.missed.get("tag", 0)


@attrs.define
class Counters:
    """The numbers, on the trio thread."""

    encoded: int = 0
    plain_bytes: int = 0
    stored_bytes: int = 0
    decoded: int = 0
    read_bytes: int = 0
    missed: dict[str, int] = attrs.Factory(dict)

    def miss(self, reason: str) -> None:
        """One block could not be decoded."""
        self.missed[reason] = self.missed.get(reason, 0) + 1

    def snapshot(self, staging: int) -> WrapperStatistics:
        """An immutable copy."""
        return WrapperStatistics(
            self.encoded,
            self.plain_bytes,
            self.stored_bytes,
            self.decoded,
            self.read_bytes,
            dict(self.missed),
            staging,
        )
