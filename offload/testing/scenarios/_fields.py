"""Fields of a scenario's parts: names, roles and defaults. Pure.

:func:`places` visits every part of a scenario with its path, :func:`mentions` every name in a part with its role; code
that checks, renames or shortens a scenario uses these, and knows no field by itself.

A field of :class:`PipelineSpec` has the name of its knob, except for times: their last word is replaced by ``ms``
(``flush_ms`` is ``flush_interval``, ``transfer_ms`` is ``transfer_timeout``).

Rule. A knob that is not set has the default of ``PipelineConfig``, rounded to whole virtual milliseconds. But
``max_batch_size`` adapts to the budget and ``min_batch_size`` to ``max_batch_size``, so that a scenario that makes one
small need not set the other; and the safety net (``sweep_ms``) is a minute away, so that it hides nothing: anything
left for it to find is a violation here.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import attrs
import msgspec
from msgspec import inspect as types

from maru.base.errors import KnobError
from offload._config import BatchConfig, PipelineConfig, knobs

from ._program import TICK, Part, PipelineSpec

Path: TypeAlias = tuple[str | int, ...]
"""Keys and positions, named as in a file: ``("fault", 2, "who")``."""


# --- parts and the names in them ------------------------------------------------------------------------------------


@attrs.frozen
class Field:
    """One field of a kind of part."""

    name: str
    """Name of the attribute."""
    said: str
    """Name in a file."""
    default: object
    """Default value; ``NODEFAULT`` if the field is required."""
    role: str = ""
    """Role of the field's text or number; empty: none."""
    key_role: str = ""
    """Role of the names, if the field is a table of names."""
    item_role: str = ""
    """Role of each element of a list of texts or a table."""
    parts: bool = False
    """Whether the field may contain parts."""


@functools.cache
def fields_of(kind: type[Part]) -> Sequence[Field]:
    """Return the fields of a kind of part, in order."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    defaults = default_values(kind)
    return [
        Field(one.name, one.encode_name, defaults.get(one.name, msgspec.NODEFAULT), *_roles(one.type))
        for one in info.fields
    ]


def _roles(kind: types.Type) -> tuple[str, str, str, bool]:
    role = ""
    while True:
        match kind:
            case types.Metadata(type=inner, extra=extra):
                role = role or (extra or {}).get("role", "")
                kind = inner
            case types.UnionType(types=several):
                kind = next(one for one in several if not isinstance(one, types.NoneType))
            case types.DictType(key_type=key, value_type=value):
                of_value = _roles(value)
                return "", _roles(key)[0], of_value[0], of_value[3]
            case types.ListType(item_type=item):
                of_item = _roles(item)
                return "", "", of_item[0], of_item[3]
            case _:
                return role, "", "", isinstance(kind, types.StructType)


@functools.cache
def _with_parts(kind: type[Part]) -> Sequence[Field]:
    return [field for field in fields_of(kind) if field.parts]


@functools.cache
def _with_roles(kind: type[Part]) -> Sequence[Field]:
    return [field for field in fields_of(kind) if field.role or field.key_role or field.item_role]


class Place(NamedTuple):
    """A part of a scenario and its path."""

    path: Path
    part: Part
    above: Part | None = None
    """Part that contains this one."""


def places(part: Part) -> list[Place]:
    """Return every part of a scenario, itself first, in field order."""
    found: list[Place] = []
    _add_places(found, part, (), None)
    return found


def _add_places(found: list[Place], part: Part, path: Path, above: Part | None) -> None:
    found.append(Place(path, part, above))
    for field in _with_parts(type(part)):
        value = getattr(part, field.name)
        if isinstance(value, Part):
            _add_places(found, value, (*path, field.said), part)
        elif value:
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(one, Part):
                    _add_places(found, one, (*path, field.said, key), part)


def mentions(place: Place) -> Iterator[tuple[Path, str, Any]]:
    """Yield a part's values with a role, except default values.

    Each comes as its path, its role, and the text or the number.
    """
    for field in _with_roles(type(place.part)):
        value = getattr(place.part, field.name)
        if value == field.default:
            continue
        if field.role:
            yield (*place.path, field.said), field.role, value
            continue
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            path = (*place.path, field.said, key)
            if field.key_role:
                yield path, field.key_role, key
            if field.item_role:
                yield path, field.item_role, one


def value_at(part: Any, path: Path) -> Any:
    """Return a scenario's value at a path; ``None`` if there is none."""
    for step in path:
        if isinstance(part, Part):
            part = getattr(part, _attribute(type(part), str(step)))
        elif isinstance(part, dict):
            part = part.get(step)
        else:
            part = part[step] if part is not None and isinstance(step, int) and step < len(part) else None
    return part


def with_value(part: Any, path: Path, value: Any) -> Any:
    """Return a copy of a part with another value at a path."""
    if not path:
        return value
    first, *rest = path
    inner = with_value(value_at(part, (first,)), tuple(rest), value)
    if isinstance(part, Part):
        return msgspec.structs.replace(part, **{_attribute(type(part), str(first)): inner})
    if isinstance(part, dict):
        return {**part, first: inner}
    assert isinstance(first, int)
    return [*part[:first], inner, *part[first + 1 :]]


def _attribute(kind: type[Part], said: str) -> str:
    return next(field.name for field in fields_of(kind) if field.said == said)


def path_text(path: Path) -> str:
    """Return a path as errors write it; positions are counted from 0.

    For example ``fault[2].who``, ``tier."a b".holds``.
    """
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{quoted(step)}" if text else quoted(step)
    return text


def nearest(name: str, known: Collection[str]) -> str:
    """Return the end of a complaint about an unknown name.

    It proposes the nearest known name, or lists all of them.
    """
    names = [one for one in known if one]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    if not names:
        return ": there is none at all"
    return f", only {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


def quoted(name: str) -> str:
    """Return a table's key for a path: bare if TOML allows."""
    bare = name and all(one.isascii() and (one.isalnum() or one in "-_") for one in name)
    return name if bare else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


# --- default values -----------------------------------------------------------------------------------------------------


@functools.cache
def default_values(kind: type[Part]) -> Mapping[str, Any]:
    """Return the defaults of a kind of part, by field."""
    return {
        info.name: info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()
        for info in msgspec.structs.fields(kind)
        if not info.required
    }


def is_set(part: Part, name: str) -> bool:
    """Return whether a field differs from its default."""
    return bool(getattr(part, name) != default_values(type(part))[name])


def with_defaults(value: Any) -> Any:
    """Return a copy with the default itself for each equal value.

    msgspec leaves out values that *are* the default. In a scenario that came from another process they are only equal.
    """
    if isinstance(value, list):
        return [with_defaults(item) for item in value]
    if isinstance(value, dict):
        return {name: with_defaults(item) for name, item in value.items()}
    if not isinstance(value, Part):
        return value
    defaults = default_values(type(value))
    changed = {}
    for field in value.__struct_fields__:
        old = getattr(value, field)
        changed[field] = defaults[field] if field in defaults and defaults[field] == old else with_defaults(old)
    return msgspec.structs.replace(value, **changed)


# --- knobs ------------------------------------------------------------------------------------------------------------


SWEEP: Final = 60.0


def _is_time(attribute: attrs.Attribute[Any]) -> bool:
    return isinstance(attribute.default, float) and not attribute.name.endswith("_share")


def _fields(cls: type[attrs.AttrsInstance]) -> dict[str, str]:
    """Return a class's knobs, each with the field that sets it."""
    return {
        one.name: f"{one.name.rpartition('_')[0]}_ms" if _is_time(one) else one.name
        for one in attrs.fields(cls)
        if not attrs.has(type(one.default))
    }


_BATCH: Final = _fields(BatchConfig)
_PIPELINE: Final = _fields(PipelineConfig)

FIELD_OF: Final[Mapping[str, str]] = {**_BATCH, **_PIPELINE}
"""Field of :class:`PipelineSpec` for each knob.

The knobs are those of ``PipelineConfig`` and of the ``BatchConfig`` in it.
"""


def config_of(spec: PipelineSpec) -> PipelineConfig:
    """Return the configuration that a scenario asks for.

    Raises:
        ConfigError: a knob is out of its bounds. Its ``knob`` is the knob's own name: see :data:`FIELD_OF`.
    """
    batch, rest = _said(BatchConfig, _BATCH, spec), _said(PipelineConfig, _PIPELINE, spec)
    rest.setdefault("sweep_interval", SWEEP)
    usual = BatchConfig()
    batch.setdefault("max_batch_size", max(1, min(usual.max_batch_size, rest.get("budget_blocks", 1 << 30))))
    batch.setdefault("min_batch_size", max(1, min(usual.min_batch_size, batch["max_batch_size"])))
    return PipelineConfig(batch_config=BatchConfig(**batch), **rest)


def _said(cls: type[attrs.AttrsInstance], names: Mapping[str, str], spec: PipelineSpec) -> dict[str, Any]:
    """Return this class's knobs that are set, and rounded default times."""
    knobs: dict[str, Any] = {}
    for one in attrs.fields(cls):
        if one.name not in names:
            continue
        said = getattr(spec, names[one.name])
        if said is not None:
            knobs[one.name] = said * TICK if _is_time(one) else said
        elif _is_time(one) and one.name != "sweep_interval":
            knobs[one.name] = round(one.default / TICK) * TICK
    return knobs


def wrong_knob(spec: PipelineSpec) -> tuple[str, str] | None:
    """Return the field of an invalid knob, and its bounds.

    ``None``: no knob is out of its bounds.
    """
    try:
        config_of(spec)
    except KnobError as error:
        knob = error.knob.rpartition(".")[2]
        field = FIELD_OF[knob]
        bound = _in_ms(knob) if field.endswith("_ms") else error.bound
        return field, f"{getattr(spec, field)}: {bound}"
    return None


def _in_ms(knob: str) -> str:
    """Return the bound of a time in whole virtual milliseconds."""
    bound = next(one.bound for one in knobs() if one.name.rpartition(".")[2] == knob)
    words = bound.split()  # seconds from 0.001 to 60
    low, high = float(words[2]), float(words[4])
    return f"must be from {-int(-low // TICK)} to {int(high / TICK)} virtual milliseconds"
