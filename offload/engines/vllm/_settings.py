"""The settings in ``kv_connector_extra_config``. Pure.

The names of :class:`MaruSettings` are the published ones of the page store's connector, and so are their defaults,
except for the server (this user's own, over a socket) and the page (as large as a chunk is).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, TypeAlias

import attrs

from maru.configuration import Knobs

from ..._engine import EngineConfig
from ..._engine.config import DAEMON_TIER
from ..._errors import ConfigError
from .._tables import DAEMON_URL, as_cache, located
from .._weights import CHECK_REASON, FILE_KNOB, VERSION_KNOB, WeightsCheck
from ._published import PublishedNames

_knob: Final = Knobs("OFFLOAD", ConfigError)
_log = logging.getLogger("vllm.offload")

SECTION: Final = "kv_connector_extra_config"
"""Name of the section that has the settings."""

_SHARED: Final[Mapping[str, Mapping[str, Any]]] = {"maru": {"pool_size": 0}, DAEMON_TIER: {}}
"""Types of tiers that processes share, with settings for a reader.

A process that only looks up opens them like this: it takes no region.
"""
_KINDS: Final[Mapping[str, str]] = {"memory": "host", "maru": "host", "file": "disk"}
"""Name of a tier's place in vLLM's metrics, by its type."""
KeyNames: TypeAlias = Literal["hashed", "published-blake2b", "published-md5"]
"""Naming of pages.

Hashed for chunks of all layers, or published, as in :mod:`._published`.
"""
_NO_TABLE: Final[Mapping[str, Any]] = MappingProxyType({})
_CHUNK_TOKENS: Final = (
    256,
    1,
    1 << 20,
    "Tokens in a chunk, the unit of storing and finding: a multiple of vLLM's block_size, or rounded down to one. "
    "Smaller chunks share more of a prefix, larger ones cost less per token.",
)
_LOOKUP_TIMEOUT: Final = (
    1.0,
    0.001,
    60.0,
    "Time that a request waits for the lookup; after that it is computed.",
)
_LOAD_TIMEOUT: Final = (
    30.0,
    0.01,
    3_600.0,
    "Time for a load; after that it is ended, and the missing blocks are computed.",
)


def _check_table(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(attribute.name, value, "must be a table")


@attrs.frozen
class Settings:
    """The settings of both halves."""

    room_knob: ClassVar[str] = "capacity_bytes of a tier in engine"
    """Name of the knob to raise if there is no room."""

    engine: Mapping[str, Any] = _knob.field(
        _NO_TABLE,
        "a table",
        "Tiers, as in the file of an engine: {'tiers': {'host': {'type': 'memory', 'capacity_bytes': '4 GiB'}}}.",
        _check_table,
    )
    daemon_url: str = _knob.text(*DAEMON_URL)
    chunk_tokens: int = _knob.integer(*_CHUNK_TOKENS)
    lookup_timeout: float = _knob.seconds(*_LOOKUP_TIMEOUT)
    load_timeout: float = _knob.seconds(*_LOAD_TIMEOUT)
    tenant: str = _knob.text(
        "", "a text", r"(?s).*", "Tenant that may find blocks stored here, in addition to the cache salt of a request."
    )
    weights_version: str = _knob.text(*VERSION_KNOB)
    weights_version_file: str = _knob.text(*FILE_KNOB)
    weights_check: WeightsCheck = _knob.choice("sampled", WeightsCheck, CHECK_REASON)  # noqa: RUF009 - a knob, as all others

    @classmethod
    def read(cls, extra: Mapping[str, Any], block_size: int, block_bytes: int, layers: int = 1) -> Settings:
        """Read the table of ``OffloadConnector``.

        Args:
            extra: the table.
            block_size: tokens in a block of vLLM.
            block_bytes: bytes of a block in all layers of a worker.
            layers: number of these layers.

        Raises:
            ConfigError: a name is unknown, a value invalid, or there are no tiers.
        """
        settings = _knob.from_mapping(extra, cls, section=SECTION)
        return attrs.evolve(
            settings,
            engine=located(settings.engine, settings.daemon_url, SECTION),
            chunk_tokens=_aligned(settings.chunk_tokens, block_size, "chunk_tokens"),
        )

    @property
    def published_names(self) -> PublishedNames | None:
        """Names of published connectors' pages, if these are stored."""
        return None

    @property
    def tiers(self) -> Mapping[str, Any]:
        """The tiers by name; a daemon is one."""
        return self.engine_config().tiers

    def engine_config(self) -> EngineConfig:
        """Return the configuration of a worker's engine; see :func:`opened_config`."""
        return opened_config(self.engine, f"{SECTION}.engine")

    def reader_config(self) -> EngineConfig:
        """Return the configuration of a scheduler's engine, which only looks up.

        It is used if the workers are other processes.

        Raises:
            ConfigError: no tier is shared between processes, so that a scheduler could never find its workers' chunks.
        """
        tiers = {
            name: {**tier, **_SHARED[tier["type"]]}
            for name, tier in self.tiers.items()
            if isinstance(tier, Mapping) and tier.get("type") in _SHARED
        }
        if not tiers:
            raise ConfigError(
                f"{SECTION}.engine.tiers",
                list(self.tiers),
                "must have one of type maru, since the workers of this engine are other processes than its scheduler; or set "
                "daemon_url in place of engine",
            )
        return EngineConfig.from_mapping({"on_enter_failure": "miss", "tiers": tiers})


@attrs.frozen
class PublishedSettings(Settings):
    """The settings of both halves, with the pages of published connectors."""

    published_names: PublishedNames = attrs.field(default="published-blake2b", kw_only=True)


@attrs.frozen
class MaruSettings:
    """The published parameters of ``MaruKVConnector``."""

    room_knob: ClassVar[str] = "maru_pool_size, or capacity_bytes of the server"

    maru_server_url: str = _knob.text("", "tcp://host:port or ipc://path, or empty", r"(?s).*", "URL of the server.")
    maru_pool_size: int = _knob.size(1 << 30, 0, 1 << 40, "Bytes of this instance's pages: 4G, 500M.")
    maru_chunk_size: int = _knob.size(
        0, 0, 1 << 34, "Bytes of a page. 0, or less than a chunk of KV: the size of a chunk."
    )
    maru_instance_id: str = _knob.text(
        "", "a text", r"(?s).*", "Instance ID of the owner of the pages. Empty: a random name."
    )
    maru_eager_map: bool = _knob.flag(True, "Map the regions of other instances when connecting.")
    maru_kv_chunk_tokens: int = _knob.integer(*_CHUNK_TOKENS)
    maru_key_names: KeyNames = _knob.choice(  # noqa: RUF009 - a knob, as all others
        "hashed",
        KeyNames,
        "Names of pages: a hash of all inputs of their bytes, or kv_{hash}_L{n} of published connectors, with a page "
        "per layer, and the hash of their release.",
    )
    checksums: bool = _knob.flag(True, "Store a checksum with each page, and verify it on load.")
    engine: Mapping[str, Any] = _knob.field(
        _NO_TABLE, "a table", "Other settings of the engine, without tiers: {'shadow_check': 0}.", _check_table
    )
    lookup_timeout: float = _knob.seconds(*_LOOKUP_TIMEOUT)
    load_timeout: float = _knob.seconds(*_LOAD_TIMEOUT)
    tenant: str = _knob.text(
        "", "a text", r"(?s).*", "Tenant that may find blocks stored here, in addition to the cache salt of a request."
    )
    weights_version: str = _knob.text(*VERSION_KNOB)
    weights_version_file: str = _knob.text(*FILE_KNOB)
    weights_check: WeightsCheck = _knob.choice("sampled", WeightsCheck, CHECK_REASON)  # noqa: RUF009 - a knob, as all others

    @classmethod
    def read(cls, extra: Mapping[str, Any], block_size: int, block_bytes: int, layers: int = 1) -> Settings:
        """Read the table as settings with one tier, the page store.

        See :meth:`Settings.read`.

        Raises:
            ConfigError: a name is unknown, a value invalid, or not one page fits the pool.
        """
        said = _knob.from_mapping(extra, cls, section=SECTION)
        names: PublishedNames | None = None if said.maru_key_names == "hashed" else said.maru_key_names
        if names is not None and said.tenant:
            raise ConfigError(f"{SECTION}.tenant", said.tenant, "must be empty: published pages have no tenant")
        for knob in ("weights_version", "weights_version_file"):
            if names is not None and getattr(said, knob):
                raise ConfigError(
                    f"{SECTION}.{knob}", getattr(said, knob), "must be empty: published names contain no version"
                )
        if "tiers" in said.engine or said.engine.get("daemon_url"):
            raise ConfigError(
                f"{SECTION}.engine",
                dict(said.engine),
                "must name only the page store's tier: OffloadConnector supports other tiers",
            )
        chunk_tokens = _aligned(said.maru_kv_chunk_tokens, block_size, "maru_kv_chunk_tokens")
        page_blocks = chunk_tokens // block_size
        tier: dict[str, Any] = {
            "type": "maru",
            "pool_size": said.maru_pool_size,
            "chunk_size_bytes": said._page_bytes(
                page_blocks * (block_bytes if names is None else block_bytes // layers),
                "of all layers" if names is None else "of one layer",
            ),
            "eager_map": said.maru_eager_map,
            "checksums": said.checksums,
        }
        if said.maru_server_url:
            tier["server_url"] = said.maru_server_url
        if said.maru_instance_id:
            tier["instance_id"] = said.maru_instance_id
        read: dict[str, Any] = {
            "chunk_tokens": chunk_tokens,
            "lookup_timeout": said.lookup_timeout,
            "load_timeout": said.load_timeout,
            "weights_version": said.weights_version,
            "weights_version_file": said.weights_version_file,
            "weights_check": said.weights_check,
        }
        engine = {**said.engine, "tiers": {"maru": tier}}
        if names is not None:
            tier["key_names"] = "text"
            return PublishedSettings(engine, published_names=names, **read)
        return Settings(engine, tenant=said.tenant, **read)

    def _page_bytes(self, chunk_bytes: int, whose: str) -> int:
        """Return the size of a page, which holds one chunk of KV.

        The chunk has all layers, or one.
        """
        if 0 < self.maru_chunk_size < chunk_bytes:
            _log.warning(
                "maru_chunk_size %d is smaller than a chunk of KV %s, %d bytes: pages of that size are used",
                self.maru_chunk_size,
                whose,
                chunk_bytes,
            )
        page = max(self.maru_chunk_size, chunk_bytes)
        if self.maru_pool_size and self.maru_pool_size < page:
            raise ConfigError(
                f"{SECTION}.maru_pool_size",
                self.maru_pool_size,
                f"must hold a page of {page} bytes, a chunk of KV {whose}; lower maru_kv_chunk_tokens if it is too large",
            )
        return page


@attrs.frozen
class SpecSettings:
    """The settings of ``OffloadSpec``: a table ``offload``, and vLLM's memory size.

    The table is next to the names that vLLM itself reads.
    """

    cpu_bytes_to_use: int = _knob.size(0, 0, 1 << 44, "Host memory of this instance, for all its workers: 8 GiB.")
    huge_pages: bool = _knob.flag(
        True,
        "Put pages of 2 MiB under host memory in the background, if the kernel makes them on request (Linux 6.1). "
        "Off: small pages.",
    )
    engine: Mapping[str, Any] = _knob.field(
        _NO_TABLE,
        "a table",
        "Tiers below host memory, as in the file of an engine: {'tiers': {'maru': {'type': 'maru', 'pool_size': "
        "'16G'}}}.",
        _check_table,
    )
    daemon_url: str = _knob.text(*DAEMON_URL)
    lookup_timeout: float = _knob.seconds(*_LOOKUP_TIMEOUT)
    load_timeout: float = _knob.seconds(*_LOAD_TIMEOUT)
    tenant: str = _knob.text(
        "", "a text", r"(?s).*", "Tenant that may find blocks stored here, in addition to the cache salt of a request."
    )
    weights_version: str = _knob.text(*VERSION_KNOB)
    weights_version_file: str = _knob.text(*FILE_KNOB)
    weights_check: WeightsCheck = _knob.choice("sampled", WeightsCheck, CHECK_REASON)  # noqa: RUF009 - a knob, as all others

    @classmethod
    def read(cls, extra: Mapping[str, Any], row_bytes: int) -> SpecSettings:
        """Read the settings from the whole table; the other names are vLLM's.

        Args:
            extra: the table.
            row_bytes: bytes of a chunk, of all workers.

        Raises:
            ConfigError: a name in ``offload`` is unknown, a value invalid, there are no tiers, or not one chunk fits.
        """
        table = extra.get("offload", _NO_TABLE)
        if not isinstance(table, Mapping):
            raise ConfigError(f"{SECTION}.offload", table, "must be a table")
        said = {**table, **{name: extra[name] for name in ("cpu_bytes_to_use",) if name in extra}}
        settings = _knob.from_mapping(said, cls, section=f"{SECTION}.offload")
        settings = attrs.evolve(settings, engine=located(settings.engine, settings.daemon_url, f"{SECTION}.offload"))
        if settings.cpu_bytes_to_use < row_bytes:
            raise ConfigError(
                f"{SECTION}.cpu_bytes_to_use",
                settings.cpu_bytes_to_use,
                f"must hold a chunk of {row_bytes} bytes; lower blocks_per_chunk if it is too large",
            )
        return settings

    def engine_config(self) -> EngineConfig:
        """Return the configuration of the scheduler's engine; see :func:`opened_config`."""
        return opened_config(self.engine, f"{SECTION}.offload.engine")


def opened_config(engine: Mapping[str, Any], section: str) -> EngineConfig:
    """Return the configuration of an engine, with the defaults of a cache.

    Raises:
        ConfigError: a name is unknown, or a value invalid.
    """
    return EngineConfig.from_mapping(as_cache(engine), section=section)


def hit_sources(config: EngineConfig) -> dict[str, str]:
    """Return each tier's place as vLLM's metrics name it.

    ``host``, ``disk``, or ``external_unspecified`` if it is not known.
    """
    types = {name: tier.get("type") if isinstance(tier, Mapping) else tier for name, tier in config.tiers.items()}
    return {name: _KINDS.get(f"{kind}", "external_unspecified") for name, kind in types.items()}


def _aligned(chunk_tokens: int, block_size: int, knob: str) -> int:
    """Return the tokens of a chunk, rounded down to whole blocks.

    At least one block; logs a warning if the number changes.
    """
    aligned = max(block_size, chunk_tokens // block_size * block_size)
    if aligned != chunk_tokens:
        _log.warning("%s %d not aligned to block_size %d, adjusted to %d", knob, chunk_tokens, block_size, aligned)
    return aligned
