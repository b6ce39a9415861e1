"""Checks of a client's keys: texts that a message can carry.

Keys are checked on entry, before anything is allocated for them.
"""

from __future__ import annotations

from collections.abc import Iterable


def list_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys as a list, after a check.

    Raises:
        TypeError: one of them is no text; or this is one key, and not several.
        ValueError: one of them is not Unicode: half a surrogate pair.
    """
    if isinstance(keys, str | bytes | bytearray | memoryview):
        raise TypeError(f"keys = {_shown(keys)} is one key: pass a sequence of keys, as in [key]")
    keys = list(keys)
    if not {*map(type, keys)} <= {str}:  # a subclass is one as well, and rare
        for key in keys:
            if not isinstance(key, str):
                raise TypeError(
                    f"the key {_shown(key)} is of type {type(key).__name__}: keys of the page store are str (key.hex())"
                )
    if not "".join(keys).isascii():
        for key in keys:
            try:
                key.encode()
            except UnicodeEncodeError as exc:
                raise ValueError(
                    f"the key {_shown(key)} is not valid Unicode, so it cannot be sent: {exc.reason}"
                ) from exc
    return keys


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
