"""The format of a scenario's file as data: a JSON schema for editors, and what the documentation says of each field.

Both are made from the classes of :mod:`_program` and from the docstrings in them; the knobs of a pipeline say what the knobs
of ``PipelineConfig`` say.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import attrs
import msgspec

from offload._config import knobs

from .. import _program
from .._program import (
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
    Scenario,
    Step,
    StoreStep,
    TierSpec,
    TraceLoad,
    Window,
)
from .knobs_of import FIELD_OF

PARTS: Final[tuple[type[msgspec.Struct], ...]] = (
    Scenario, TierSpec, PipelineSpec, PolicySpec, EngineSpec, Load, Mix, TraceLoad, Step, StoreStep, After, LoadStep, KeysStep,
    CloseStep, Fault, Expect, Counts, Window,
)  # fmt: skip
"""Every table of a file, in the order in which a reader meets them."""


@attrs.frozen
class FieldDoc:
    """One field of a table, in words."""

    name: str
    """As in a file."""
    kind: str
    """What it may be."""
    default: str
    """As one would write it; empty where there is none."""
    required: bool
    """Whether it must be there."""
    text: str
    """What it means."""


def schema() -> dict[str, Any]:
    """A JSON schema of a scenario's file, for editors: ``offload scenario schema`` prints it."""
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
    # Draft 7 is what editors have: there, nothing may stand beside a $ref, so the first table is the schema itself.
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **defs.pop("Scenario"),
        "title": "A scenario of trio-offload (*.scenario.toml)",
        "$defs": defs,
    }


def described(cls: type[msgspec.Struct]) -> Iterator[FieldDoc]:
    """What is said of each field of a table, in order."""
    texts = _docstrings()[cls.__name__]
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        text = texts.get(field.name) or _of_fault(cls, field.name) or _of_knob(cls, field.name) or _of_type(field.type)
        yield FieldDoc(field.encode_name, _kind(field.type), _default(field), field.required, text)


def about(cls: type[msgspec.Struct]) -> str:
    """What is said of a table."""
    return inspect.getdoc(cls) or ""


@lru_cache(maxsize=1)  # the source does not change while we run
def _docstrings() -> Mapping[str, Mapping[str, str]]:
    """What follows each field of each class as a text."""
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
    """The kinds of faults: the word, what happens, and the fields that it looks at."""
    rows = [line.strip().strip("|").split("|") for line in about(Fault).splitlines() if line.strip().startswith("|")]
    return [(do.strip(), what.strip(), on.strip()) for do, what, on in rows[2:]]


def _of_fault(cls: type[msgspec.Struct], name: str) -> str:
    if (cls, name) != (Fault, "do"):
        return ""
    return "What happens. " + " ".join([f"{do}: {what}." for do, what, _ in fault_rows()])


def _of_knob(cls: type[msgspec.Struct], name: str) -> str:
    if cls is not PipelineSpec:
        return ""
    reason = next((knob.reason for knob in knobs() if FIELD_OF[knob.name.rpartition(".")[2]] == name), "")
    return re.sub("|".join(FIELD_OF), lambda match: FIELD_OF[match[0]], reason)


def _of_type(kind: msgspec.inspect.Type) -> str:
    """What a type says of itself: names, milliseconds, a share."""
    match kind:
        case msgspec.inspect.Metadata(type=inner, extra_json_schema=extra):
            return (extra or {}).get("description", "") or _of_type(inner)
        case msgspec.inspect.UnionType(types=types):
            return next(filter(None, map(_of_type, types)), "")
    return ""


def _kind(kind: msgspec.inspect.Type) -> str:
    """A type in words."""
    match kind:
        case msgspec.inspect.Metadata(type=inner, extra_json_schema=extra):
            said = (extra or {}).get("description", "")
            return _NAMED.get(said) or _kind(inner)
        case msgspec.inspect.UnionType(types=types):
            words = [_kind(one) for one in types if not isinstance(one, msgspec.inspect.NoneType)]
            return " or ".join(dict.fromkeys(words))
        case msgspec.inspect.LiteralType(values=values):
            return " | ".join([f'"{one}"' if isinstance(one, str) else str(one) for one in values])
        case msgspec.inspect.IntType(ge=low, le=high):
            return f"whole number{_range(low, high)}"
        case msgspec.inspect.FloatType():
            return "number"
        case msgspec.inspect.BoolType():
            return "true | false"
        case msgspec.inspect.ListType(item_type=item):
            return f"list of {_kind(item)}"
        case msgspec.inspect.DictType(value_type=value):
            return f"table of {_kind(value)}"
        case msgspec.inspect.StructType(cls=cls):
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


def _default(field: msgspec.inspect.Field) -> str:
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default in (msgspec.NODEFAULT, None, ""):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f'"{default}"' if isinstance(default, str) else "" if default in ([], {}) else str(default)


def _no_null(property_: dict[str, Any]) -> None:
    """What need not be said is left out in TOML, which has no null."""
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
    """Without the marks of reStructuredText."""
    return " ".join(_LITERAL.sub(r"`\1`", text).split())
