"""The check of keys, which every public entry point uses.

Keys are bytes, of a length that every tier accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .._errors import DuplicateKeys

MAX_STORED_BYTES: Final = 440
"""Bytes of the longest name of a block in a tier.

The size of its field in the header of a block's file, the smallest of all tiers.
"""
MAX_KEY_BYTES: Final = MAX_STORED_BYTES - 8
"""Bytes of a caller's longest key.

A chain of wrappers appends 8 bytes.
"""


def check_keys(keys: Sequence[bytes], most: int = MAX_KEY_BYTES) -> None:
    """Raise unless these are valid keys.

    Args:
        keys: the keys.
        most: bytes of the longest key; more than a caller's in a tier that may be wrapped.

    Raises:
        TypeError: one of them is not ``bytes``; or this is one key and not a sequence of keys.
        ValueError: one of them is longer than ``most``.
    """
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise TypeError(f"keys = {_shown(keys)} is one key: pass a sequence of keys, as in [key]")
    for key in keys:
        if type(key) is not bytes or len(key) > most:
            break
    else:
        return  # the common case, in one pass
    if not {*map(type, keys)} <= {bytes}:  # a subclass is one as well, and rare
        for key in keys:
            if not isinstance(key, bytes):
                raise TypeError(
                    f"the key {_shown(key)} is of type {type(key).__name__}: keys are bytes, as offload.block_key makes them"
                )
    if max(map(len, keys), default=0) > most:
        longest = max(map(len, keys))
        raise ValueError(f"a key of {longest} bytes: keys have at most {most}; hash longer keys (offload.block_key)")


def distinct_keys(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the keys as a tuple, checked.

    Raises:
        DuplicateKeys: a key is given twice.
        TypeError, ValueError: see :func:`check_keys`.
    """
    check_keys(keys)
    column = tuple(keys)
    if len(set(column)) != len(column):
        seen: set[bytes] = set()
        raise DuplicateKeys([key for key in column if key in seen or seen.add(key)])  # type: ignore[func-returns-value]
    return column


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
