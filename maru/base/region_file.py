"""The file that a region of a pool lies in. Pure."""

from __future__ import annotations

import attrs


@attrs.frozen
class RegionFile:
    """The memory of a region: a part of a file."""

    region_id: int
    """Never used for another region."""
    length: int
    """Bytes; a multiple of 2 MiB."""
    path: str
    """The file; any process of the same user may open it."""
    offset: int
    """Of its first byte in there."""


def region_file_name(region_id: int) -> str:
    """Return the name of a region's file in its directory; the published server uses the same."""
    return f"maru_{region_id}.dat"
