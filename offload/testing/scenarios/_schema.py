"""Format of a scenario's file: JSON schema, field documentation, and errors.

All three are made from the classes of :mod:`_program` and from the docstrings in them; the knobs of a pipeline have the
texts of the knobs of ``PipelineConfig``. ``msgspec`` reports only one mismatch, and for a value in a table of names not
even which; :func:`schema_errors` visits the same types and reports every one.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import attrs
import msgspec
from msgspec import inspect as types

from offload._config import knobs

from . import _program
from ._fields import FIELD_OF, nearest, quoted
from ._program import (
    FAULT_KINDS,
    KINDS,
    After,
    CloseStep,
    Counts,
    EngineSpec,
    Expect,
    Fault,
    KeysStep,
    Load,
    LoadStep,
    Mix,
    PipelineSpec,
    PolicySpec,
    Problem,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
    TraceLoad,
    Window,
)

PARTS: Final[tuple[type[msgspec.Struct], ...]] = (
    Scenario, TierSpec, PipelineSpec, PolicySpec, EngineSpec, Load, Mix, TraceLoad, Step, StoreStep, After, LoadStep, KeysStep,
    CloseStep, Fault, Expect, Counts, Window,
)  # fmt: skip
"""All tables of a file, in the order of the documentation."""


@attrs.frozen
class FieldDoc:
    """Documentation of one field of a table."""

    name: str
    """Name in a file."""
    kind: str
    """Allowed values."""
    default: str
    """Default as written in a file; empty if there is none."""
    required: bool
    """Whether the field must be set."""
    text: str
    """Meaning of the field."""


def schema() -> dict[str, Any]:
    """Return a JSON schema of a scenario's file, for editors.

    ``offload scenario schema`` prints it.
    """
    _, defs = msgspec.json.schema_components([Scenario], ref_template="#/$defs/{name}")
    texts = {cls.__name__: cls for cls in PARTS}
    for name, table in defs.items():
        cls = texts[name]
        table["description"] = _plain(_first_paragraph(inspect.getdoc(cls) or ""))
        for field in described(cls):
            property_ = table["properties"][field.name]
            if field.text:
                property_["description"] = _plain(field.text)
            _no_null(property_)
    # Draft 7 is the version of editors: it allows nothing next to a $ref, so the first table is the schema itself.
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **defs.pop("Scenario"),
        "title": "A scenario of trio-offload (*.scenario.toml)",
        "$defs": defs,
    }


def described(cls: type[msgspec.Struct]) -> Iterator[FieldDoc]:
    """Yield the documentation of each field of a table, in order."""
    texts = _docstrings()[cls.__name__]
    info = types.type_info(cls)
    assert isinstance(info, types.StructType)
    for field in info.fields:
        text = texts.get(field.name) or _of_kind(cls, field.name) or _of_knob(cls, field.name) or _of_type(field.type)
        yield FieldDoc(field.encode_name, _kind(field.type), _default(field), field.required, text)


def about(cls: type[msgspec.Struct]) -> str:
    """Return the documentation of a table."""
    return inspect.getdoc(cls) or ""


@lru_cache(maxsize=1)  # the source does not change during a run
def _docstrings() -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings of all fields, by class and field."""
    found: dict[str, dict[str, str]] = {}
    for cls in ast.parse(inspect.getsource(_program)).body:
        if isinstance(cls, ast.ClassDef):
            texts = found.setdefault(cls.name, {})
            for field, after in zip(cls.body, cls.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    match after:
                        case ast.Expr(value=ast.Constant(value=str(text))):
                            texts[field.target.id] = " ".join(text.split())
    return found


def fault_rows() -> list[tuple[str, str, str]]:
    """Return the kinds of faults: word, effect, and fields it reads."""
    return [(do, kind.text, ", ".join([f"``{field}``" for field in kind.looks_at])) for do, kind in FAULT_KINDS.items()]


def _of_kind(cls: Any, name: str) -> str:
    if name != "do" or cls not in KINDS:
        return ""
    begins = "What happens. " if cls is Fault else ""
    return begins + " ".join([f"{do}: {kind.text}." for do, kind in KINDS[cls].items()])


def _of_knob(cls: type[msgspec.Struct], name: str) -> str:
    if cls is not PipelineSpec:
        return ""
    reason = next((knob.reason for knob in knobs() if FIELD_OF[knob.name.rpartition(".")[2]] == name), "")
    return re.sub("|".join(FIELD_OF), lambda match: FIELD_OF[match[0]], reason)


def _of_type(kind: types.Type) -> str:
    """Return a type's own description: names, milliseconds, a share."""
    match kind:
        case types.Metadata(type=inner, extra_json_schema=extra):
            return (extra or {}).get("description", "") or _of_type(inner)
        case types.UnionType(types=several):
            return next(filter(None, map(_of_type, several)), "")
    return ""


def _kind(kind: types.Type) -> str:
    """Return a type in words."""
    match kind:
        case types.Metadata(type=inner, extra_json_schema=extra):
            said = (extra or {}).get("description", "")
            return _NAMED.get(said) or _kind(inner)
        case types.UnionType(types=several):
            words = [_kind(one) for one in several if not isinstance(one, types.NoneType)]
            return " or ".join(dict.fromkeys(words))
        case types.LiteralType(values=values):
            return " | ".join([f'"{one}"' if isinstance(one, str) else str(one) for one in values])
        case types.IntType(ge=low, le=high):
            return f"whole number{_range(low, high)}"
        case types.FloatType():
            return "number"
        case types.BoolType():
            return "true | false"
        case types.ListType(item_type=item):
            return f"list of {_kind(item)}"
        case types.DictType(value_type=value):
            return f"table of {_kind(value)}"
        case types.StructType(cls=cls):
            return cls.__name__
    return "text"


_NAMED: Final = {
    "virtual milliseconds, of 1/1024 s each": "ms",
    "names with ranges: 'a{0..3}, b' is a0, a1, a2, a3, b": "names",
    "a probability": "share",
}


def _range(low: int | None, high: int | None) -> str:
    if low in (None, 0):
        return ""
    return f" from {low}" if high is None else f" {low} to {high}"


def _default(field: types.Field) -> str:
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default in (msgspec.NODEFAULT, None, ""):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f'"{default}"' if isinstance(default, str) else "" if default in ([], {}) else str(default)


def _no_null(property_: dict[str, Any]) -> None:
    """Remove null from a property: TOML has none, and omits the field."""
    options = property_.get("anyOf")
    if options is not None and {"type": "null"} in options:
        options.remove({"type": "null"})
        if len(options) == 1 and "$ref" not in options[0]:
            del property_["anyOf"]
            description = property_.get("description")
            property_.update(options[0])
            if description:
                property_["description"] = description
    if property_.get("default", 0) is None:
        del property_["default"]
    if None in property_.get("enum", ()):
        property_["enum"] = [one for one in property_["enum"] if one is not None]


def _first_paragraph(text: str) -> str:
    return text.partition("\n\n")[0]


_LITERAL: Final = re.compile(r"``([^`]*)``")


def _plain(text: str) -> str:
    """Return a text without the markup of reStructuredText."""
    return " ".join(_LITERAL.sub(r"`\1`", text).split())


# --- documents that do not match the schema ---------------------------------------------------------------------------


def schema_errors(document: Any) -> Iterator[Problem]:
    """Yield the mismatches of a document with the scenario schema."""
    yield from _value_errors(document, types.type_info(Scenario), "")


def _value_errors(value: Any, wanted: types.Type, path: str) -> Iterator[Problem]:
    match wanted:
        case types.Metadata(type=inner):
            yield from _value_errors(value, inner, path)
        case types.UnionType(types=several):  # each of our unions is "this, or not set", and a value in a file is set
            yield from _union_errors(value, [one for one in several if not isinstance(one, types.NoneType)], path)
        case types.StructType():
            yield from _table_errors(value, wanted, path)
        case types.ListType(item_type=inner):
            if not isinstance(value, list):
                yield Problem(path, f"must be a list, in brackets, not {_shown(value)}")
            else:
                for i, one in enumerate(value):
                    yield from _value_errors(one, inner, f"{path}[{i}]")
        case types.DictType(value_type=inner):
            if not isinstance(value, dict):
                yield Problem(path, f"must be a table of names, not {_shown(value)}")
            else:
                for name, one in value.items():
                    yield from _value_errors(one, inner, _below(path, quoted(name)))
        case _:
            yield from _scalar_errors(value, wanted, path)


def _union_errors(value: Any, several: list[types.Type], path: str) -> Iterator[Problem]:
    found = [list(_value_errors(value, one, path)) for one in several]
    if all(found):
        yield from found[0]


def _table_errors(value: Any, wanted: types.StructType, path: str) -> Iterator[Problem]:
    fields = {field.encode_name: field for field in wanted.fields}
    if not isinstance(value, dict):
        example = ", ".join([name for name, field in fields.items() if field.required] or list(fields)[:2])
        yield Problem(path, f"must be a table (of {example}, ...), not {_shown(value)}")
        return
    meant: list[str] = []
    for name, one in value.items():
        if name in fields:
            yield from _value_errors(one, fields[name].type, _below(path, name))
        else:
            where = f"in {path}" if path else "in a scenario"
            meant += difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            yield Problem(_below(path, quoted(name)), f"there is no {name!r} {where}{nearest(name, fields)}")
    for name, field in fields.items():
        if field.required and name not in value and name not in meant:
            yield Problem(path, f"{name!r} is missing: set {name} = ...")


def _scalar_errors(value: Any, wanted: types.Type, path: str) -> Iterator[Problem]:
    text = ""
    match wanted:
        case types.LiteralType(values=words):
            if value not in words or isinstance(value, bool):
                near = nearest(value, [str(word) for word in words]) if isinstance(value, str) else ""
                near = near or f", only {', '.join(map(str, words))}"
                text = f"cannot be {_shown(value)}{near}"
        case types.IntType() | types.FloatType():
            whole = isinstance(wanted, types.IntType)
            fine = type(value) is int or (isinstance(value, float) and not whole)
            if not (fine and _within(value, wanted)):
                text = f"must be a {'whole ' if whole else ''}number{_bounds(wanted)}, not {_shown(value)}"
        case types.StrType():
            if not isinstance(value, str):
                text = f"must be a text, in quotes, not {_shown(value)}"
        case types.BoolType():
            if not isinstance(value, bool):
                text = f"must be true or false, not {_shown(value)}"
    if text:
        yield Problem(path, text)


def _within(value: float, wanted: types.IntType | types.FloatType) -> bool:
    return (
        (wanted.ge is None or value >= wanted.ge)
        and (wanted.le is None or value <= wanted.le)
        and (wanted.gt is None or value > wanted.gt)
        and value == value  # a nan is in no range
    )


def _bounds(wanted: types.IntType | types.FloatType) -> str:
    low = f" from {wanted.ge:g}" if wanted.ge is not None else f" above {wanted.gt:g}" if wanted.gt is not None else ""
    return f"{low} to {wanted.le}" if wanted.le is not None else f"{low} on" if wanted.ge is not None else low


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    text = repr(value) if isinstance(value, str | int | float) else msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}..."
