"""Names of keys in the page store, whose keys are texts.

There are two ways to name keys, and each can be undone. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

import attrs

from ..abc import Key

KeyNames: TypeAlias = Literal["hex", "text"]
"""The way to name keys.

``hex``: by the hexadecimal digits of the key. ``text``: the key is a text in UTF-8 already.
"""

_SALT: Final = "\x1f"
"""First character of the client's salts for tenants and namespaces."""


@attrs.frozen
class KeyNaming:
    """Naming of keys in the page store. Made by :meth:`of`."""

    characters_per_byte: int
    """Bytes of a name for each byte of its key."""
    name: Callable[[Key], str]
    """Function from a key to its name."""
    key: Callable[[str], Key]
    """Function from a name to its key."""

    @classmethod
    def of(cls, names: KeyNames) -> KeyNaming:
        """Return the naming called ``names``.

        Raises:
            ValueError: there is no such naming.
        """
        if names not in _WAYS:
            raise ValueError(f"key_names = {names!r}: must be one of {', '.join(_WAYS)}")
        return _WAYS[names]

    def names(self, keys: Sequence[Key]) -> list[str]:
        """Return the names of these keys in the page store.

        Raises:
            ValueError: one of them cannot be named this way.
        """
        return list(map(self.name, keys))


def _text(key: Key) -> str:
    try:
        name = key.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the key {key!r:.60} is not UTF-8, as keys must be with key_names = text") from error
    # Otherwise it would be taken for the key of another tenant, whose salt precedes the name.
    if name.startswith(_SALT):
        raise ValueError(f"the key {key!r:.60} begins with the salt of a tenant")
    return name


# Digits can be undone (`bytes.fromhex`), are readable in `maru query`, and never begin as a salt does, so no key can be
# taken for a salted one. They cost 64 bytes for a digest of 32, while base64 costs 43; a message of 64 keys is 1.4 kB
# longer.
_WAYS: Final[dict[str, KeyNaming]] = {
    "hex": KeyNaming(2, bytes.hex, bytes.fromhex),
    "text": KeyNaming(1, _text, str.encode),
}
