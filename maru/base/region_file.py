"""The file of a pool's region. Pure."""

from __future__ import annotations

import attrs


@attrs.frozen
class RegionFile:
    """The memory of a region: a part of a file."""

    region_id: int
    """Id, which is never used for another region."""
    length: int
    """Size in bytes; a multiple of 2 MiB."""
    path: str
    """The file; any process of the same user may open it."""
    offset: int
    """Offset of the region's first byte in the file."""


def region_file_name(region_id: int) -> str:
    """Return the name of a region's file.

    The published server uses the same.
    """
    return f"maru_{region_id}.dat"
