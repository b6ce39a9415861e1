"""The identity of weights, for keys.

It is equal for each copy of a checkpoint, and changes when tensors are replaced.

A path is no identity: a fine-tuning run writes to it again, and KV that another process computed with the old weights
differs. So the key has a fingerprint of the files: names and sizes, ``config.json``, code in Python, the header of each
safetensors file, and the first and the middle 4 KiB of every tensor in it; of other formats 256 samples and the tail.
It has neither path nor time.

A change that leaves all of these as they were is detected only by a check of all bytes (``full``), and a change in
memory, as in a training loop, by none. For the latter there is a version: a text from the user, or a file with one that
the trainer writes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs

from maru.base.errors import is_scarcity

WeightsCheck: TypeAlias = Literal["sampled", "full"]
"""Part of a checkpoint that is read at the start.

Samples of each tensor, or everything.
"""

VERSION_KNOB: Final = (
    "",
    "a text",
    r"(?s).*",
    "Version of the model's weights: a text that changes with them. Empty: a fingerprint of their files.",
)
FILE_KNOB: Final = (
    "",
    "a path, or empty",
    r"(?s).*",
    "File with a version of the weights, which a trainer writes before requests continue after an update. Equal "
    "content shares stored blocks.",
)
CHECK_REASON: Final = (
    "Part of a local checkpoint that is read at the start to identify its weights: samples of each tensor, or all."
)

SAMPLE_BYTES: Final = 4096
_SAMPLES: Final = 256
"""Samples of a file whose tensors are not known."""
_PIECE: Final = 1 << 20
_LONGEST_HEADER: Final = 1 << 28
_LONGEST_VERSION: Final = 4096
_FORMATS: Final[Sequence[tuple[str, ...]]] = (
    # In this order, as engines look for them. If files of one format exist, those of later formats are not loaded.
    (".safetensors",),
    (".gguf",),
    (".bin", ".pt", ".pth", ".npz"),
)
_CONFIGS: Final = ("config.json", "params.json", "adapter_config.json", "hf_quant_config.json", "quantize_config.json")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")

_log = logging.getLogger("offload.engines")


class NoWeights(ValueError):
    """No file of weights exists, or one cannot be read."""


# --- of files ---------------------------------------------------------------------------------------------------------


def fingerprint(path: str, check: WeightsCheck = "sampled") -> str:
    """Return the fingerprint of a checkpoint: a directory, or one file.

    Raises:
        NoWeights: there are no weights, or they cannot be read.
    """
    try:
        digest = hashlib.blake2b(b"offload.weights/1", digest_size=20)
        files, configs = _files(path)
        for config in configs:
            _add(digest, os.path.basename(config), b"".join(_all_of(config)))
        for file in files:
            size = os.stat(file).st_size
            _add(digest, os.path.basename(file), str(size).encode())
            for piece in _all_of(file) if check == "full" else _sampled(file, size):
                _add(digest, "", piece)
    except OSError as error:
        raise NoWeights(f"the weights in {path!r} cannot be read: {error}") from error
    return f"{check} {digest.hexdigest()}"


def _add(digest: hashlib.blake2b, name: str, data: bytes) -> None:
    # Lengths, so that no other division of the same bytes has the same fingerprint.
    digest.update(b"%d:%d:" % (len(name.encode()), len(data)))
    digest.update(name.encode())
    digest.update(data)


def _files(path: str) -> tuple[list[str], list[str]]:
    """Return the files of weights, and the files that describe them.

    Both are sorted by name.
    """
    if os.path.isfile(path):
        return [path], []
    names = sorted(os.listdir(path))
    for suffixes in _FORMATS:
        found = [name for name in names if name.endswith(suffixes)]
        if found:
            # A checkpoint may bring the code that computes it (trust_remote_code).
            configs = [name for name in names if name in _CONFIGS or name.endswith(".py")]
            return [os.path.join(path, name) for name in found], [os.path.join(path, name) for name in configs]
    raise NoWeights(f"there are no weights in {path!r}")


def _all_of(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _sampled(path: str, size: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        header = _header(file.read(8), size)
        places = None
        if header:
            text = file.read(header)
            yield text
            places = _tensors(text, 8 + header, size)
        for start in places if places is not None else _spread(size):
            file.seek(start)
            yield file.read(SAMPLE_BYTES)


def _header(head: bytes, size: int) -> int:
    """Return the length of a safetensors header; 0 if it is none."""
    length = int.from_bytes(head, "little") if len(head) == 8 else 0
    return length if 2 <= length <= min(_LONGEST_HEADER, size - 8) else 0


def _tensors(text: bytes, data: int, size: int) -> list[int] | None:
    """Return the offsets of each tensor's samples.

    ``None`` if the header has no tensors.
    """
    try:
        header: Mapping[str, Any] = json.loads(text)
        spans = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
        places: list[int] = []
        for start, stop in spans:
            if not 0 <= start <= stop <= size - data:
                return None
            places += [data + start, data + max(start, (start + stop - SAMPLE_BYTES) // 2)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return places


def _spread(size: int) -> list[int]:
    """Return the offsets of a file's samples, evenly spaced.

    The last one is at its tail.
    """
    last = max(0, size - SAMPLE_BYTES)
    return sorted({last * at // (_SAMPLES - 1) for at in range(_SAMPLES)})


def hub_commit(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the commit of a model in this host's hub cache.

    Empty if unknown.
    """
    if not _HUB_NAME.fullmatch(name):
        return ""
    home = environ.get("HF_HOME") or os.path.join(
        environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    try:
        with open(os.path.join(cache, f"models--{name.replace('/', '--')}", "refs", "main"), "rb") as file:
            commit = file.read(64).decode("ascii", "replace").strip()
    except OSError as error:
        if is_scarcity(error):
            raise
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""


# --- for keys ---------------------------------------------------------------------------------------------------------


def weights_text(
    model: str, *, revision: str = "", version: str = "", check: WeightsCheck = "sampled", commit: str = ""
) -> str:
    """Return the text that identifies the weights in a key.

    Args:
        model: a path, or a name of the hub.
        revision: the requested revision.
        version: a text from the user that distinguishes the weights of this model.
        check: how much of a checkpoint is read.
        commit: of the hub, if the engine knows it.

    Raises:
        OSError: descriptors or memory lack to read the weights.
    """
    named = f"{model}@{revision}"
    if version:
        return f"{named}/version {version}"
    if os.path.exists(model):
        try:
            return f"weights {fingerprint(model, check)}"
        except NoWeights as error:
            if isinstance(error.__cause__, OSError | MemoryError) and is_scarcity(error.__cause__):
                raise error.__cause__ from None  # a bare name would find blocks of other weights
            _log_once(
                model, f"{error}: blocks are found by its path alone, also after it was replaced. Set weights_version"
            )
            return named
    commit = commit or (hub_commit(model) if not revision else "")
    return f"{model}@{commit}" if commit else named


def config_text(*configs: Mapping[str, Any], tokens: int = 0) -> str:
    """Return the digest of a model's effective configurations, for a key.

    These may differ from the configurations in its files: options replace single values, or name another file. Values
    that describe their origin are left out: names that begin with an underscore, and the version of the library.

    Args:
        configs: the configurations in effect.
        tokens: the longest sequence; beyond that of the training, some models have other positions from the first token
            on.
    """
    said = [_without_origin(config) for config in configs]
    if any(_has_long_positions(config, tokens) for config in said):
        said.append("long")
    text = json.dumps(said, sort_keys=True)
    return f"/config {hashlib.blake2b(text.encode(), digest_size=20).hexdigest()}"


def _without_origin(value: object) -> Any:
    """Return a configuration value for JSON, equal in each process."""
    if isinstance(value, Mapping):
        return {
            f"{name}": _without_origin(one)
            for name, one in value.items()
            if not f"{name}".startswith("_") and name != "transformers_version"
        }
    if isinstance(value, list | tuple):
        return [_without_origin(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_without_origin(one), sort_keys=True) for one in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "to_dict"):
        return _without_origin(value.to_dict())
    text = f"{value}"
    return text if " at 0x" not in text else _name_of(value)


def _has_long_positions(config: object, tokens: int) -> bool:
    """Return whether sequences of this length have their own positions (LongRoPE)."""
    if isinstance(config, list):
        return any(_has_long_positions(one, tokens) for one in config)
    if not isinstance(config, dict):
        return False
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
            trained = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
            if not isinstance(trained, int) or tokens > trained:
                return True
    return any(_has_long_positions(one, tokens) for one in config.values())


def _name_of(value: object) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


_SAID: Final[set[str]] = set()


def _log_once(model: str, text: str) -> None:
    if model not in _SAID:
        _SAID.add(model)
        _log.warning("%s", text)


@attrs.define(eq=False)
class Generation:
    """A generation of keys, which changes at a reset.

    Keys from before a reset are not found after it.

    After a reset each instance is alone, unless a trainer names the weights.
    """

    version_file: str = ""
    """File with a version of the weights, or empty."""
    _value: str = ""
    _is_due: bool = False

    def reset(self) -> None:
        """Begin a new generation.

        The version file is read at the next use, when the trainer has written it.
        """
        self._value = uuid.uuid4().hex
        self._is_due = bool(self.version_file)

    def current(self) -> str:
        """Return the text for keys: empty before the first reset."""
        if self._is_due:
            self._is_due = False
            version = self._read()
            if version:
                self._value = f"{VERSIONED}{version}"
        return self._value

    def _read(self) -> str:
        try:
            with open(self.version_file, "rb") as file:
                content = file.read(_LONGEST_VERSION + 1).strip()
        except OSError as error:
            _log.warning("weights_version_file cannot be read, so nothing is shared until the next reset: %s", error)
            return ""
        if not content or len(content) > _LONGEST_VERSION:
            _log.warning(
                "weights_version_file %s must have 1 to %d bytes; nothing is shared until the next reset",
                self.version_file,
                _LONGEST_VERSION,
            )
            return ""
        return hashlib.blake2b(content, digest_size=20).hexdigest()


VERSIONED: Final = "version "
"""Prefix of a generation that identifies the weights itself.

It replaces the identity of the weights that were loaded at the start.
"""


@attrs.define(eq=False)
class AdapterWeights:
    """The identities of adapters (LoRA), each read when its first request comes."""

    check: WeightsCheck = "sampled"
    _known: dict[tuple[int, str, str], str] = attrs.Factory(dict)

    def text(self, number: int, name: str, path: str, *, is_replaced: bool = False) -> str:
        """Return the text that identifies an adapter in a key.

        Args:
            number: the engine's id of it, a different one for each adapter that it loads.
            name: its name.
            path: the path of its files.
            is_replaced: whether the engine loads it again for this request.
        """
        place = (number, name, path)
        known = self._known.get(place)
        if known is None or is_replaced:
            if len(self._known) >= _MOST_ADAPTERS:
                self._known.clear()
            known = self._known[place] = weights_text(path, check=self.check)
        return known


_MOST_ADAPTERS: Final = 4096
