"""Every knob of a pipeline: its default, its bound, and the reason for both. Pure, but for the reading of a file.

Rule 1. A knob is checked when its class is made, wherever the value came from: what exists is valid.
Rule 2. What is wrong is said as a :class:`~offload._errors.ConfigError`: the knob, the value, the bound, and where it
was set.
Rule 3. An unknown name is an error that names the nearest known one. Nothing is ignored.

In a file, a pipeline is one table (``[pipeline]``), and what is nested here is nested there. The environment wins over
the file: ``OFFLOAD_``, then the same path in capitals, with two underscores for each dot::

    [pipeline]                                    OFFLOAD_PIPELINE__POLICY_TIMEOUT=0.5
    policy_timeout = 0.1

    [pipeline.batch_config]                       OFFLOAD_PIPELINE__BATCH_CONFIG__MAX_BATCH_SIZE=128
    max_batch_size = 64

The documentation's table and the command line's help are made from :func:`knobs`.
"""

# ruff: noqa: RUF009  # the functions called in the class bodies make fields
from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import attrs
import msgspec

from backends.abc import WhenFull

from ._errors import ConfigError

OnPolicyError: TypeAlias = Literal["filter", "fail"]
OnOverflow: TypeAlias = Literal["wait", "drop"]

C = TypeVar("C", bound=attrs.AttrsInstance)

_DAY = 86_400.0
_MOST_BLOCKS = 1 << 24


# --- what a knob is made of ---------------------------------------------------------------------------------------


def _knob(default: object, bound: str, holds: Callable[[Any], bool], reason: str) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not holds(value):
            raise ConfigError(attribute.name, value, f"must be {bound}")

    return attrs.field(default=default, validator=check, metadata={"bound": bound, "reason": reason})


def _count(default: int, low: int, high: int, reason: str) -> Any:
    def holds(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return _knob(default, f"an integer from {low} to {high}", holds, reason)


def _seconds(default: float, low: float, high: float, reason: str) -> Any:
    def holds(value: object) -> bool:  # a nan is in no range
        return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

    return _knob(default, f"seconds from {low:g} to {high:g}", holds, reason)


def _choice(default: str, choices: Any, reason: str) -> Any:
    words: tuple[str, ...] = get_args(choices)

    def holds(value: object) -> bool:
        return isinstance(value, str) and value in words

    return _knob(default, f"one of {', '.join(words)}", holds, reason)


def _part(default: attrs.AttrsInstance, reason: str) -> Any:
    kind = type(default)
    return _knob(default, f"a {kind.__name__}", lambda value: isinstance(value, kind), reason)


# --- the knobs ----------------------------------------------------------------------------------------------------


@attrs.frozen
class BatchConfig:
    """When a batch is full, and when it is late. The reason for each bound and default is in :func:`knobs`."""

    max_batch_size: int = _count(
        64,
        1,
        65_536,
        "Blocks in a batch: enough to pay for one copy call, few enough that a cancel rarely comes too late.",
    )
    min_batch_size: int = _count(
        8, 1, 65_536, "Blocks that are worth a copy at once; fewer wait for company. At most max_batch_size."
    )
    flush_interval: float = _seconds(
        0.01,
        0.0,
        60.0,
        "How long fewer may wait for company. 0: leave once a slot is free. Below 1 ms no timer is real.",
    )

    def __attrs_post_init__(self) -> None:
        if self.min_batch_size > self.max_batch_size:
            raise ConfigError(
                "min_batch_size", self.min_batch_size, f"must be at most max_batch_size, {self.max_batch_size}"
            )


@attrs.frozen
class PipelineConfig:
    """Everything that can be set on a pipeline. The reason for each bound and default is in :func:`knobs`."""

    batch_config: BatchConfig = _part(BatchConfig(), "When a batch leaves.")
    policy_timeout: float = _seconds(
        0.1, 0.001, 3_600.0, "How long all policies that wait may take over one container. One deadline costs 9 us."
    )
    on_policy_error: OnPolicyError = _choice(
        "filter",
        OnPolicyError,
        "What a policy that raises or overruns does to a container: keeps its blocks back, or fails it.",
    )
    max_waiting_policies: int = _count(
        64, 1, 4_096, "Containers whose policies wait at once, so that a slow one holds nobody back; each is a task."
    )
    precondition_timeout: float = _seconds(
        300.0, 0.001, _DAY, "How long a forward pass may take. Never for ever: what waits holds blocks."
    )
    sweep_interval: float = _seconds(
        0.01, 0.001, 60.0, "How often a safety net looks for cancelled containers. It should find none, and counts."
    )
    max_concurrent_transfers: int = _count(
        1, 1, 64, "Batches copied at once. Each takes a thread; two nearly fill a memory bus."
    )
    on_destination_full: WhenFull = _choice(
        "wait", WhenFull, "What a full destination means: wait for room, evict, store the part that fits, or fail."
    )
    destination_timeout: float = _seconds(
        30.0,
        0.001,
        _DAY,
        "How long to wait for room there. A waiting reservation holds a transfer slot and nothing else.",
    )
    transfer_timeout: float = _seconds(
        60.0,
        0.001,
        _DAY,
        "How long a copy may take before its end counts as unproven and what it touches is quarantined.",
    )
    drain_timeout: float = _seconds(
        10.0,
        0.0,
        _DAY,
        "How long shutdown waits for copies under way. Where it is shorter than transfer_timeout, it wins.",
    )
    budget_blocks: int = _count(
        4_096,
        1,
        _MOST_BLOCKS,
        "Blocks between enqueue and settled, the only bound of the queues inside. At least max_batch_size.",
    )
    on_overflow: OnOverflow = _choice(
        "wait",
        OnOverflow,
        "What enqueue does when the budget is used up: wait, or drop new weak stores and count them.",
    )

    def __attrs_post_init__(self) -> None:
        if self.batch_config.max_batch_size > self.budget_blocks:
            raise ConfigError(
                "batch_config.max_batch_size",
                self.batch_config.max_batch_size,
                f"must be at most budget_blocks, {self.budget_blocks}: such a batch could never fill",
            )


@attrs.frozen
class Knob:
    """One knob, for documentation and for help."""

    name: str
    """Its path, as in a file: ``pipeline.batch_config.max_batch_size``."""
    variable: str
    """The environment variable that sets it."""
    default: object
    """What it is when nobody sets it."""
    bound: str
    """What it may be, in words."""
    reason: str
    """What it does, and why it has this default and bound."""


def knobs(cls: type[attrs.AttrsInstance] = PipelineConfig, *, section: str = "pipeline") -> tuple[Knob, ...]:
    """Every knob of a configuration class and of the classes nested in it, in the order in which they are declared."""
    return tuple(_knobs(cls, section))


def _knobs(cls: type[attrs.AttrsInstance], section: str) -> Iterator[Knob]:
    for field in attrs.fields(cls):
        name = f"{section}.{field.name}"
        if attrs.has(type(field.default)):
            yield from _knobs(type(field.default), name)
        else:
            yield Knob(name, _variable(name), field.default, field.metadata["bound"], field.metadata["reason"])


def _variable(name: str) -> str:
    return f"OFFLOAD_{name.upper().replace('.', '__')}"


# --- loading ------------------------------------------------------------------------------------------------------


def from_mapping(mapping: Mapping[str, Any], cls: type[C] = PipelineConfig, *, section: str = "") -> C:  # type: ignore[assignment]
    """A configuration from nested mappings, as a TOML or JSON parser gives them. What is not named keeps its default.

    Args:
        mapping: knobs by name.
        cls: the configuration class.
        section: the path of this mapping in its file, put before names in errors.

    Raises:
        ConfigError: an unknown name, or a value out of its bound.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(section or cls.__name__, mapping, "must be a table")
    fields = attrs.fields_dict(cls)
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        path = _join(section, name)
        if name not in fields:
            raise ConfigError(path, value, _unknown(str(name), fields))
        part = type(fields[name].default)
        values[name] = (
            from_mapping(value, part, section=path) if attrs.has(part) and not isinstance(value, part) else value
        )
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(_join(section, error.knob), error.value, error.bound) from None


def config_from_toml(
    source: str | os.PathLike[str],
    *,
    section: str = "pipeline",
    others: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
) -> PipelineConfig:
    """A configuration from a TOML file and the environment, which wins.

    Args:
        source: a path (``pathlib.Path``), or TOML as a text.
        section: the table to read; it need not be there.
        others: tables of the file that somebody else reads. Any further one is an error.
        environ: the environment; by default that of this process.

    Raises:
        ConfigError: not TOML, an unknown name, or a value out of its bound; with file and line, or the variable.
        OSError: the file cannot be read.
    """
    origin, text = ("TOML", source) if isinstance(source, str) else (os.fspath(source), "")
    try:
        if not isinstance(source, str):
            text = Path(source).read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(origin, _excerpt(text), f"not TOML: {error}") from error
    outermost, *_ = path = section.split(".")
    variables: dict[str, str] = {}
    try:
        for name, value in document.items():
            if name != outermost and name not in others:
                raise ConfigError(name, value, _unknown(name, [outermost, *others]))
        table = _table(document, path)
        for name, variable, value in _overrides(section, os.environ if environ is None else environ):
            variables[name] = variable
            *parents, last = name.split(".")[len(path) :]
            _table(table, parents)[last] = value
        return from_mapping(table, section=section)
    except ConfigError as error:
        if error.knob in variables:
            raise ConfigError(variables[error.knob], error.value, error.bound) from None
        line = _line_of(text, error.knob.split("."))
        if line is None:
            raise
        raise ConfigError(error.knob, error.value, f"{error.bound} ({origin}, line {line})") from None


def _overrides(section: str, environ: Mapping[str, str]) -> Iterator[tuple[str, str, object]]:
    """Name, variable and value of every knob of the section that the environment sets."""
    known = {knob.variable: knob for knob in knobs(section=section)}
    prefix = f"{_variable(section)}__"
    for variable in sorted(environ):
        if not variable.startswith(prefix):
            continue
        text = environ[variable]
        knob = known.get(variable)
        if knob is None:
            raise ConfigError(variable, text, _unknown(variable, known))
        try:
            yield knob.name, variable, msgspec.convert(text, type(knob.default), strict=False)
        except msgspec.ValidationError:
            raise ConfigError(variable, text, f"must be {knob.bound}") from None


def _table(document: Any, path: Iterable[str]) -> Any:
    """The table at this path, made where it is missing."""
    walked = ""
    for name in path:
        walked = _join(walked, name)
        document = document.setdefault(name, {})
        if not isinstance(document, dict):
            raise ConfigError(walked, document, "must be a table")
    return document


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known := list(known), n=1, cutoff=0.5)
    return (
        f"there is no such name; did you mean {near[0]}?" if near else f"there is no such name, only {', '.join(known)}"
    )


def _excerpt(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


_HEADER: Final = re.compile(r"\s*\[\s*([\w.\s\"'-]+?)\s*\]")
_PAIR: Final = re.compile(r"\s*([\w.\s\"'-]+?)\s*=")


def _line_of(text: str, path: list[str]) -> int | None:
    """Where a name is set. ``None`` where that is hard to tell (an inline table): an error reads well without."""
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            here = table = _split(header[1])
        elif pair := _PAIR.match(line):
            here = table + _split(pair[1])
        else:
            continue
        if here == path:
            return number
    return None


def _split(dotted: str) -> list[str]:
    return [name.strip().strip("\"'") for name in dotted.split(".")]
