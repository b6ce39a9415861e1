"""The fields of a scenario's parts as a table: what each is called in a file, what its names are names of, its default. Pure.

:func:`places` visits every part of a scenario with its path, :func:`mentions` every name in a part with its role; what checks,
renames or shortens a scenario goes through these, and knows of no field by itself.

A field of :class:`PipelineSpec` has the name of its knob, but for times: there the last word of the knob is ``ms``
(``flush_ms`` is ``flush_interval``, ``transfer_ms`` is ``transfer_timeout``).

Rule. A knob that is not set has the default of ``PipelineConfig``, rounded to whole virtual milliseconds. But
``max_batch_size`` adapts to the budget and ``min_batch_size`` to ``max_batch_size``, so that a scenario that makes one small
need not set the other; and the safety net (``sweep_ms``) is a minute away, so that it hides nothing: what it would have to
find is a violation here.
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
"""Keys and positions, with the names of a file: ``("fault", 2, "who")``."""


# --- parts and the names in them ------------------------------------------------------------------------------------


@attrs.frozen
class Field:
    """One field of a kind of part."""

    name: str
    """Of the attribute."""
    said: str
    """As a file has it."""
    default: object
    """What it is where nothing is said; ``NODEFAULT`` where something must be."""
    role: str = ""
    """What its text is a name of, or its number; empty: nothing in particular."""
    key_role: str = ""
    """Where it is a table of names: what these are names of."""
    item_role: str = ""
    """Where it is a list of texts, or a table: what each of them is a name of."""
    parts: bool = False
    """Whether there may be parts in it."""


@functools.cache
def fields_of(kind: type[Part]) -> Sequence[Field]:
    """The fields of a kind of part, in order."""
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
    """A part of a scenario, and where it is."""

    path: Path
    part: Part
    above: Part | None = None
    """The part that it is in."""


def places(part: Part) -> list[Place]:
    """Every part of a scenario, itself first, in the order of the fields."""
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
    """What a part says that has a role, and is not the default: where, which role, and the text or the number."""
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
    """What a scenario has at a path; ``None`` where there is nothing."""
    for step in path:
        if isinstance(part, Part):
            part = getattr(part, _attribute(type(part), str(step)))
        elif isinstance(part, dict):
            part = part.get(step)
        else:
            part = part[step] if part is not None and isinstance(step, int) and step < len(part) else None
    return part


def with_value(part: Any, path: Path, value: Any) -> Any:
    """The same with another value at a path."""
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
    """A path as errors write it: ``fault[2].who``, ``tier."a b".holds``; positions are counted from 0."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{quoted(step)}" if text else quoted(step)
    return text


def nearest(name: str, known: Collection[str]) -> str:
    """How a complaint goes on after an unknown name: with the nearest one that is known, or with all of them."""
    names = [one for one in known if one]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    if not names:
        return ": there is none at all"
    return f", only {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


def quoted(name: str) -> str:
    """A key of a table as a path has it: bare where TOML allows it."""
    bare = name and all(one.isascii() and (one.isalnum() or one in "-_") for one in name)
    return name if bare else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


# --- default values -----------------------------------------------------------------------------------------------------


@functools.cache
def default_values(kind: type[Part]) -> Mapping[str, Any]:
    """The fields of a kind of part that have a default, and what it is."""
    return {
        info.name: info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()
        for info in msgspec.structs.fields(kind)
        if not info.required
    }


def is_set(part: Part, name: str) -> bool:
    """Whether a field is anything but its default."""
    return bool(getattr(part, name) != default_values(type(part))[name])


def with_defaults(value: Any) -> Any:
    """The same, with the defaults themselves wherever something equals one.

    msgspec leaves out what *is* the default. In a scenario that came from another process it only equals it.
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
    """The knobs of a class, each with the field that sets it."""
    return {
        one.name: f"{one.name.rpartition('_')[0]}_ms" if _is_time(one) else one.name
        for one in attrs.fields(cls)
        if not attrs.has(type(one.default))
    }


_BATCH: Final = _fields(BatchConfig)
_PIPELINE: Final = _fields(PipelineConfig)

FIELD_OF: Final[Mapping[str, str]] = {**_BATCH, **_PIPELINE}
"""The field of :class:`PipelineSpec` for each knob of ``PipelineConfig`` and of the ``BatchConfig`` in it."""


def config_of(spec: PipelineSpec) -> PipelineConfig:
    """The configuration that a scenario asks for.

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
    """What the spec says of the knobs of this class, and the rounded defaults of its times."""
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
    """The field of a knob that is out of its bounds, and what would be within; ``None``: none is."""
    try:
        config_of(spec)
    except KnobError as error:
        knob = error.knob.rpartition(".")[2]
        field = FIELD_OF[knob]
        bound = _in_ms(knob) if field.endswith("_ms") else error.bound
        return field, f"{getattr(spec, field)}: {bound}"
    return None


def _in_ms(knob: str) -> str:
    """The bound of a time in whole virtual milliseconds."""
    bound = next(one.bound for one in knobs() if one.name.rpartition(".")[2] == knob)
    words = bound.split()  # seconds from 0.001 to 60
    low, high = float(words[2]), float(words[4])
    return f"must be from {-int(-low // TICK)} to {int(high / TICK)} virtual milliseconds"
