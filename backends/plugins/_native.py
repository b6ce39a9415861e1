"""A native connector as a tier: six methods, one descriptor.

The contract, as LMCache publishes it for connectors in C++ and Rust, and as it is used here:

* ``submit_batch_get(keys, buffers)``, ``submit_batch_set(keys, buffers)``, ``submit_batch_exists(keys)`` and, if there
  is one, ``submit_batch_delete(keys)`` return an id at once. Keys are strings, at least one; buffers are writable
  and of one size. A method that raises has started nothing.
* ``event_fd()`` becomes readable when an operation is complete.
* ``drain_completions()`` resets it, and returns the completions: tuples ``(id, ok, error, bits)``. Never blocks.
* ``close()`` ends it.

A connector has no lock, and reports success of a *set* as a whole: :attr:`~backends.plugins.HostedTier.capabilities`
has neither pins nor outcomes per key, and deletes if there is a ``submit_batch_delete``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from maru.eviction import EvictionPolicy

from ..abc import Capabilities, Key
from ._config import HostConfig
from ._errors import PluginFault, PluginTypeError
from ._hosted import HostedTier
from ._operations import Completion, Kind
from ._salts import CacheSalts, salts_of
from .finding import NATIVE_METHODS, missing_methods

_CHANNEL: Final = "completions"


class NativeTier(HostedTier):
    """A connector with six methods as a tier.

    Open it by ``async with NativeTier(connector, 4096) as tier``.

    Args:
        connector: the object with the six methods, or seven. This tier owns it, and closes it in the end.
        block_bytes: size of every block.
        config: settings of the host.
        name_of: the connector's name for a key. By default as LMCache names objects for its connectors, some of which
            require that form: ``model@rank@group@hash``, with the key's hexadecimal digits as the hash.
        eviction: chooses the victims if there is a ``capacity_bytes``; :class:`~maru.eviction.AdaptiveLRFU` by default.

    Raises:
        PluginTypeError: the connector lacks one of the six.
        ValueError: a size that makes no sense.
    """

    def __init__(
        self,
        connector: object,
        block_bytes: int,
        config: HostConfig | None = None,
        *,
        name_of: Callable[[Key], str] | None = None,
        eviction: EvictionPolicy[Key] | None = None,
    ) -> None:
        config = HostConfig() if config is None else config
        salts = salts_of(config, block_bytes)
        plugin = NativePlugin(connector, salted(published_name if name_of is None else name_of, salts))
        super().__init__(plugin, block_bytes, config, eviction, salts)
        self.connector: object = connector


def published_name(key: Key) -> str:
    """Return a key's name as LMCache names objects for native connectors."""
    return f"trio-offload@00000000@0@{key.hex()}"


def salted(name_of: Callable[[Key], str], salts: CacheSalts | None) -> Callable[[Key], str]:
    """Return a function that appends a key's salt to its name.

    As LMCache writes it; a key without a salt keeps its name.
    """
    if salts is None:
        return name_of

    def name(key: Key) -> str:
        salt = salts.of(key)
        return f"{name_of(key)}@{salt}" if salt else name_of(key)

    return name


class NativePlugin:
    """A connector as a :class:`~backends.plugins._operations.Plugin`."""

    deletes_by_call = False
    resets = True  # as drain_completions does

    def __init__(self, connector: object, name_of: Callable[[Key], str]) -> None:
        missing = missing_methods(connector, NATIVE_METHODS)
        if missing:
            raise PluginTypeError(f"{connector!r} is not a native connector: it lacks {', '.join(missing)}")
        self._connector: Any = connector
        self._name_of = name_of
        self.name: str = type(connector).__name__
        self.capabilities: Capabilities = Capabilities(
            pins=False, deletes=not missing_methods(connector, ("submit_batch_delete",)), per_key_outcomes=False
        )

    def channels(self) -> Mapping[str, int]:
        """Return the connector's one descriptor.

        Raises:
            PluginTypeError: it is no descriptor.
        """
        fd = self._connector.event_fd()
        if isinstance(fd, bool) or not isinstance(fd, int) or fd < 0:
            raise PluginTypeError(f"{self.name}: event_fd() returned {fd!r}, not a descriptor")
        return {_CHANNEL: fd}

    def channel_of(self, kind: Kind) -> str:
        """Return the only channel."""
        return _CHANNEL

    def submit(self, kind: Kind, keys: Sequence[Key], buffers: Sequence[memoryview]) -> object:
        """Submit an operation, without waiting."""
        names = [self._name_of(key) for key in keys]
        if kind is Kind.GET:
            return self._connector.submit_batch_get(names, list(buffers))
        if kind is Kind.SET:
            return self._connector.submit_batch_set(names, list(buffers))
        if kind is Kind.DELETE:
            return self._connector.submit_batch_delete(names)
        return self._connector.submit_batch_exists(names)

    def poll(self, channel: str, outstanding: Sequence[int], completions: list[Completion]) -> None:
        """Append the completions. The connector resets its descriptor.

        Raises:
            PluginFault: an item is no completion. The others are appended.
        """
        failure: PluginFault | None = None
        for item in self._connector.drain_completions():
            try:
                number, ok, error, bits = item
                completions.append(Completion(channel, int(number), bool(ok), str(error or ""), bits))
            except Exception as exc:
                failure = PluginFault(f"{self.name}: drain_completions returned {item!r}, not (id, ok, error, bits)")
                failure.__cause__ = exc
        if failure is not None:
            raise failure

    def unlock(self, keys: Sequence[Key]) -> None:
        """Do nothing: a connector has no locks."""

    def delete(self, keys: Sequence[Key]) -> None:
        """Raise: a connector deletes by an operation."""
        raise AssertionError("a native connector deletes by an operation")

    def close(self) -> None:
        """Close the connector. In a thread."""
        self._connector.close()
