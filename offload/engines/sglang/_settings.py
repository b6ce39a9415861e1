"""The settings in ``--hicache-storage-backend-extra-config``, and the engine that they describe. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from maru.configuration import Knobs

from ..._engine import EngineConfig
from ..._errors import ConfigError
from .._tables import DAEMON_URL, as_batch_cache, located
from .._weights import CHECK_REASON, VERSION_KNOB, WeightsCheck, weights_text

_knob: Final = Knobs("OFFLOAD", ConfigError)

SECTION: Final = "hicache_storage_backend_extra_config"
"""Name of the section that has the settings."""

_OF_SGLANG: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"})
"""Keys that SGLang reads itself for any backend, but passes on."""

_ANSWER: Final = 0.8
"""Share of a call's time that one tier may take.

So the engine has time to answer with the results of the others.
"""

_NO_TABLE: Final[Mapping[str, Any]] = MappingProxyType({})


def _check_table(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(attribute.name, value, "must be a table")


@attrs.frozen
class Settings:
    """The settings of the backend."""

    engine: Mapping[str, Any] = _knob.field(
        _NO_TABLE,
        "a table",
        "Tiers, as in the file of an engine: {'tiers': {'maru': {'type': 'maru', 'pool_size': '4 GiB'}}}.",
        _check_table,
    )
    daemon_url: str = _knob.text(*DAEMON_URL)
    lookup_timeout: float = _knob.seconds(1.0, 0.001, 60.0, "Time for a lookup; after that nothing counts as cached.")
    load_timeout: float = _knob.seconds(
        30.0, 0.01, 3_600.0, "Time for loading a batch of pages; missing pages are computed."
    )
    store_timeout: float = _knob.seconds(
        30.0, 0.01, 3_600.0, "Time for storing a batch of pages; unfinished pages are not cached."
    )
    model: str = _knob.text("", "a text", r"(?s).*", "Name and revision of the model. Empty: SGLang's name for it.")
    kv_dtype: str = _knob.text(
        "",
        "a text",
        r"(?s).*",
        "Data type of the KV, if SGLang's pool reports only bytes: fp8_e4m3 and fp8_e5m2 look alike.",
    )
    tenant: str = _knob.text(
        "", "a text", r"(?s).*", "Tenant that may find blocks stored here, in addition to the cache salt of a request."
    )
    weights_version: str = _knob.text(*VERSION_KNOB)
    weights_check: WeightsCheck = _knob.choice("sampled", WeightsCheck, CHECK_REASON)  # noqa: RUF009 - a knob, as all others

    @classmethod
    def read(cls, extra: Mapping[str, Any] | None) -> Settings:
        """Read the settings from the configuration that SGLang passes on.

        Raises:
            ConfigError: a name is unknown, a value invalid, or there are neither tiers nor a daemon.
        """
        said = {name: value for name, value in (extra or {}).items() if name not in _OF_SGLANG}
        settings = _knob.from_mapping(said, cls, section=SECTION)
        settings = attrs.evolve(settings, engine=located(settings.engine, settings.daemon_url, SECTION))
        settings.engine_config(1)  # check the table now, not when a pool is known
        return settings

    def engine_config(self, block_bytes: int) -> EngineConfig:
        """Return the engine's configuration for blocks of this size.

        A page of the page store is as large as a block, unless its tier has its own size, or has wrappers, which make
        it larger.

        Raises:
            ConfigError: a name is unknown, or a value invalid.
        """
        table = as_batch_cache(self.engine, self.lookup_timeout * _ANSWER, self.store_timeout * _ANSWER)
        tiers = table.get("tiers")
        if isinstance(tiers, Mapping):
            table["tiers"] = {name: _sized(tier, block_bytes) for name, tier in tiers.items()}
        return EngineConfig.from_mapping(table, section=f"{SECTION}.engine")

    def model_name(self, told: str | None) -> str:
        """Return the identity of the model.

        It is its configured name, or the fingerprint of the weights at SGLang's path.

        Raises:
            ConfigError: there is neither, and pages of two models would have one name.
        """
        name = self.model or told or ""
        if not name:
            raise ConfigError(f"{SECTION}.model", name, "must be set, since SGLang has no name for its model")
        if self.model and not self.weights_version and not os.path.exists(self.model):
            return name
        text = weights_text(name, version=self.weights_version, check=self.weights_check)
        return name if text == f"{name}@" else text

    def dtype_name(self, pool_dtype: object) -> str:
        """Return the dtype of the KV.

        Raises:
            ConfigError: the pool has only bytes, and their dtype is not configured.
        """
        told = str(pool_dtype).removeprefix("torch.")
        if told in ("uint8", "int8") and not self.kv_dtype:
            raise ConfigError(
                f"{SECTION}.kv_dtype", self.kv_dtype, f"must be set, as in fp8_e4m3: SGLang's pool is of {told}"
            )
        return f"{told}/{self.kv_dtype}"


def _sized(tier: Any, block_bytes: int) -> Any:
    if not isinstance(tier, Mapping) or tier.get("type") != "maru" or tier.get("wrappers"):
        return tier
    return {"chunk_size_bytes": block_bytes, **tier}
