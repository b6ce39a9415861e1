"""CURVE keys: the keys of servers and clients, and their files.

A key is 40 characters of Z85. A key file is text in the form that other ZeroMQ tools read and write: ``public-key =
"..."`` and, in its owner's file, ``secret-key = "..."``. A file with a secret key has mode 0600, and is refused if
others may read it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from typing import Final

import attrs
import zmq

from ..base.errors import ConfigError
from ..base.files import open_input

_KEY: Final = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LINE: Final = re.compile(rb"^\s*(public|secret)-key\s*=\s*[\"']?([^\"'\s]*)[\"']?\s*$", re.MULTILINE)
# A key may end in a ``#``, but none begins with one: no group of five characters is so large.
_COMMENT: Final = re.compile(rb"(^|\s)#.*")
_MOST_BYTES: Final = 1 << 20


def _as_key(value: str | bytes) -> bytes:
    return value.encode("ascii", "replace") if isinstance(value, str) else value


def _is_key(instance: object, attribute: attrs.Attribute[bytes], value: object) -> None:
    if not isinstance(value, bytes) or not _KEY.fullmatch(value):
        shown = "..." if attribute.name == "secret" else value  # a secret is never shown, not even a wrong one
        raise ConfigError(attribute.name, shown, "must be 40 characters of Z85")


@attrs.frozen
class KeyPair:
    """A public key and the secret that belongs to it."""

    public: bytes = attrs.field(converter=_as_key, validator=_is_key)
    """Public key."""
    secret: bytes = attrs.field(converter=_as_key, validator=_is_key, repr=False)
    """Secret key: its holder counts as the owner of the public key."""

    def __attrs_post_init__(self) -> None:
        if zmq.curve_public(self.secret) != self.public:
            raise ConfigError("public", self.public, "must be the public key of the secret one")


def has_curve() -> bool:
    """Return whether this ZeroMQ was built with CURVE."""
    return bool(zmq.has("curve"))


def new_key_pair() -> KeyPair:
    """Make a new CURVE key pair."""
    return KeyPair(*zmq.curve_keypair())


def _as_keys(value: Iterable[str | bytes] | None) -> frozenset[bytes] | None:
    return None if value is None else frozenset(map(_as_key, value))


def _are_keys(instance: object, attribute: attrs.Attribute[frozenset[bytes] | None], value: object) -> None:
    assert value is None or isinstance(value, frozenset)
    for key in value or ():
        _is_key(instance, attribute, key)  # type: ignore[arg-type]


@attrs.frozen
class CurveServer:
    """CURVE keys of the end that binds and of its clients."""

    pair: KeyPair
    """Own keys. Clients must know the public one."""
    clients: frozenset[bytes] | None = attrs.field(default=None, converter=_as_keys, validator=_are_keys)
    """Public keys of the clients that may connect, or ``None`` for any.

    With ``None``, every client that knows the server's public key may connect: that key is then the secret that clients
    share.
    """


@attrs.frozen
class CurveClient:
    """CURVE keys of the end that connects."""

    server_key: bytes = attrs.field(converter=_as_key, validator=_is_key)
    """Server's public key: no other process can answer."""
    pair: KeyPair = attrs.field(factory=new_key_pair)
    """Own keys; a new pair if the server accepts any client."""


# --- files --------------------------------------------------------------------------------------------------------


def save_key_pair(path: str | os.PathLike[str], pair: KeyPair) -> None:
    """Write both keys into a new file of mode 0600.

    Raises:
        FileExistsError: there is a file already; no key is ever overwritten.
        OSError: it cannot be written.
    """
    _write_new(path, 0o600, b'curve\n    public-key = "%s"\n    secret-key = "%s"\n' % (pair.public, pair.secret))


def save_public_key(path: str | os.PathLike[str], public: bytes) -> None:
    """Write a public key, for others, into a new file.

    Raises:
        FileExistsError: there is a file already.
        OSError: it cannot be written.
    """
    _write_new(path, 0o644, b'curve\n    public-key = "%s"\n' % public)


def load_key_pair(path: str | os.PathLike[str]) -> KeyPair:
    """Read a CURVE key pair from a file.

    Raises:
        maru.ConfigError: the file has no pair, or others than its owner may read it.
        OSError: the file cannot be read.
    """
    keys = _read(path, secret=True)
    if len(keys["public"]) != 1 or len(keys["secret"]) != 1:
        raise ConfigError("key file", os.fspath(path), "must hold one public-key and one secret-key")
    return KeyPair(keys["public"][0], keys["secret"][0])


def load_public_keys(path: str | os.PathLike[str]) -> frozenset[bytes]:
    """Read public keys: the ``public-key`` lines, or else one key a line.

    A ``#`` that begins a line, or follows space, begins a comment.

    Raises:
        maru.ConfigError: a line is not a key, or there is no key.
        OSError: the file cannot be read.
    """
    keys = _read(path)["public"]
    if not keys or not all(map(_KEY.fullmatch, keys)):
        raise ConfigError("key file", os.fspath(path), "must hold public keys, 40 characters of Z85 each")
    return frozenset(keys)


def _write_new(path: str | os.PathLike[str], mode: int, text: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # whatever the umask is
        file.write(text)


def _read(path: str | os.PathLike[str], *, secret: bool = False) -> dict[str, list[bytes]]:
    with open_input(path) as file:
        mode = os.fstat(file.fileno()).st_mode
        if secret and stat.S_IMODE(mode) & 0o077:
            raise ConfigError("key file", os.fspath(path), f"has mode {stat.S_IMODE(mode):04o}, but must have 0600")
        text = file.read(_MOST_BYTES)
    keys: dict[str, list[bytes]] = {"public": [], "secret": []}
    for which, key in _LINE.findall(text):
        keys[which.decode()].append(key)
    if not any(keys.values()):
        words = (_COMMENT.sub(b"", line).strip() for line in text.splitlines())
        keys["public"] = [word for word in words if word]
    return keys
