"""The adapter's configuration, and the engine that it describes.

The keys of the page store are those of its published adapter. An ``engine`` table with tiers configures any others, as
:class:`offload.EngineConfig` reads it, and ``daemon_url`` names a daemon that has them; then the keys of the page store
are not used.
"""

# ruff: noqa: RUF009  # the functions called in the class body make fields
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from backends.abc import Key
from backends.maru import KeyNames as TierKeyNames
from backends.maru import KeyNaming
from maru.blocking import MaruHandler
from maru.configuration import Knobs

from ... import from_thread
from ..._engine import EngineConfig
from ..._errors import ConfigError
from .._tables import DAEMON_URL, as_batch_cache, located
from .._weights import VERSION_KNOB
from ._memory import MemoryObjects
from ._names import KeyNames
from ._opening import OpenEngine

_knob: Final = Knobs("OFFLOAD", ConfigError)

_OF_LMCACHE: Final = frozenset({"type", "affinity_tag", "eviction", "persist_enabled", "serde", "shared"})
"""Keys that LMCache reads itself for any adapter, but passes on."""

_PATIENCE: Final = 1.5
"""Factor of an engine's timeout for a tier over the tier's own.

A tier waits that much less for its server.

So the tier can report the cause first.
"""


def _check_gigabytes(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 << 20:
        raise ConfigError(attribute.name, value, "must be a number of GiB from 0 to 1048576")


def _check_engine(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str | Mapping):
        raise ConfigError(attribute.name, value, "must be a table of an engine, or the path of a TOML file with one")


@attrs.frozen
class CacheConfig:
    """The adapter's configuration."""

    server_url: str = _knob.text(
        "", "a text", r".*", "URL of the page store's server. Empty: the Unix socket of this user."
    )
    pool_size_gb: float = _knob.field(
        1.0,
        "a number of GiB",
        "Size of this instance's part of the pool, in GiB, which LMCache measures its use against. 0: only read.",
        _check_gigabytes,
    )
    chunk_size_bytes: int = _knob.size(
        0,
        0,
        1 << 34,
        "Bytes of a page, which holds one object. 0: the size of the first object that is stored, loaded or looked up.",
    )
    instance_id: str = _knob.text(
        "", "a text", r".*", "Instance ID of the owner of the pages. Empty: a new random name."
    )
    timeout_ms: int = _knob.integer(
        2_000, 1, 3_600_000, "Time to wait for an answer of the server, and for room in its pool, in milliseconds."
    )
    checksums: bool = _knob.flag(True, "Store a checksum with each page, and verify it on load.")
    key_names: KeyNames = _knob.choice(
        "hashed",
        KeyNames,
        "Names of objects: a hash of LMCache's key, or the text that published integrations write, to hit their pages.",
    )
    engine: Mapping[str, Any] | str = _knob.field(
        "",
        "a table, or a path",
        "Tiers to use instead of the page store: a table of an engine, or the path of a TOML file with one. A table "
        "without tiers has other settings of the page store's engine: {'shadow_check': 0}.",
        _check_engine,
    )
    daemon_url: str = _knob.text(*DAEMON_URL)
    weights_version: str = _knob.text(
        *VERSION_KNOB[:3], "Version of the model's weights: a text that changes with them."
    )

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> CacheConfig:
        """Make the configuration from the parameters of an adapter.

        Keys that LMCache reads itself are left out; ``None`` means the default.

        Raises:
            ConfigError: a key is unknown, or a value invalid; a :class:`ValueError`, as LMCache expects.
        """
        said = {name: value for name, value in mapping.items() if name not in _OF_LMCACHE and value is not None}
        config = _knob.from_mapping(said, cls)
        if config.weights_version and config.key_names == "published":
            raise ConfigError(
                "weights_version", config.weights_version, "must be empty: published names contain no version"
            )
        config.engine_config(1)  # check an engine table now, not when it is first needed
        return config

    @classmethod
    def help(cls) -> str:
        """Return the description of each key, one per line."""
        return "\n".join(
            f"- {field.name} ({field.metadata['bound']}; default {field.default!r}): {field.metadata['reason']}"
            for field in attrs.fields(cls)
        )

    @property
    def timeout(self) -> float:
        """Seconds that a lookup may take."""
        return self.timeout_ms / 1000 * _PATIENCE

    @property
    def capacity_bytes(self) -> int:
        """Capacity against which LMCache measures the use.

        It is 0 if unknown, as with an engine table.
        """
        return int(self.pool_size_gb * (1 << 30)) if self._is_page_store else 0

    def engine_config(self, page_bytes: int) -> EngineConfig:
        """Return the engine's configuration for pages of this size.

        Raises:
            ConfigError: the table or the file is invalid.
        """
        if isinstance(self.engine, str) and self.engine:
            if self.daemon_url:
                raise ConfigError("daemon_url", self.daemon_url, f"must be empty if engine is a file: {self.engine}")
            return EngineConfig.from_toml(Path(self.engine), section="engine")
        said = self._table
        if self._is_page_store:
            said = {**said, "tiers": {"maru": self._maru(page_bytes)}}
        table = located(said, self.daemon_url, "adapter_params")
        return EngineConfig.from_mapping(as_batch_cache(table, self.timeout, self.timeout), section="engine")

    def open(self, page_bytes: int) -> OpenEngine:
        """Open the engine.

        Waits until each tier is there or known to be away.

        Raises:
            Exception: as :func:`offload.from_thread.open_engine` raises; not because a tier is away.
        """
        source = MemoryObjects(page_bytes)
        engine = from_thread.open_engine(attrs.evolve(self.engine_config(page_bytes), source=source))
        return OpenEngine(engine.start(), source)

    def find_page_bytes(self, keys: Sequence[Key]) -> int:
        """Ask the page store's server for the page size of these keys.

        It is that of the first stored one.

        Returns 0 if it has none of them. Other tiers cannot be asked before the size of their blocks is known.

        Raises:
            maru.MaruError: the server did not answer.
        """
        if not self._is_page_store:
            return 0
        names = KeyNaming.of(self._tier_names).names(keys)
        knobs: dict[str, Any] = {"server_url": self.server_url} if self.server_url else {}
        with MaruHandler(timeout_ms=self.timeout_ms, pool_size=0, eager_map=False, **knobs) as handler:
            for found in handler.batch_retrieve(names):
                if found is not None:
                    with found:
                        return found.length
        return 0

    # --- below ----------------------------------------------------------------------------------------------------

    @property
    def _is_page_store(self) -> bool:
        is_file = isinstance(self.engine, str) and self.engine != ""
        return not (is_file or self.daemon_url or "tiers" in self._table or self._table.get("daemon_url"))

    @property
    def _table(self) -> Mapping[str, Any]:
        return self.engine if isinstance(self.engine, Mapping) else {}

    @property
    def _tier_names(self) -> TierKeyNames:
        return "text" if self.key_names == "published" else "hex"

    def _maru(self, page_bytes: int) -> dict[str, Any]:
        tier: dict[str, Any] = {
            "type": "maru",
            "pool_size_gb": self.pool_size_gb,
            "chunk_size_bytes": self.chunk_size_bytes or page_bytes,
            "timeout_ms": self.timeout_ms,
            "checksums": self.checksums,
        }
        if self.server_url:
            tier["server_url"] = self.server_url
        if self.instance_id:
            tier["instance_id"] = self.instance_id
        tier["key_names"] = self._tier_names
        return tier
