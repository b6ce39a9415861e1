"""Why a document is no scenario: every value that does not fit where it stands, in words for whoever wrote it. Pure.

``msgspec`` says of one value that it does not fit, and of a value in a table of names not even of which. This walks the same
types, which are the classes of :mod:`_program`, and says it of each.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from .._program import Scenario
from .complaints import Problem, nearest, quoted


def misfits(document: Any) -> Iterator[Problem]:
    """What is wrong with a document, taken as a scenario."""
    yield from _walk(document, inspect.type_info(Scenario), "")


def _walk(value: Any, wanted: inspect.Type, path: str) -> Iterator[Problem]:
    match wanted:
        case inspect.Metadata(type=inner):
            yield from _walk(value, inner, path)
        case inspect.UnionType(types=types):  # each of ours is "this, or not said", and what a file says is said
            yield from _alternatives(value, [one for one in types if not isinstance(one, inspect.NoneType)], path)
        case inspect.StructType():
            yield from _table(value, wanted, path)
        case inspect.ListType(item_type=inner):
            if not isinstance(value, list):
                yield Problem(path, f"must be a list, in brackets, not {_shown(value)}")
            else:
                for i, one in enumerate(value):
                    yield from _walk(one, inner, f"{path}[{i}]")
        case inspect.DictType(value_type=inner):
            if not isinstance(value, dict):
                yield Problem(path, f"must be a table of names, not {_shown(value)}")
            else:
                for name, one in value.items():
                    yield from _walk(one, inner, _below(path, quoted(name)))
        case _:
            yield from _plain(value, wanted, path)


def _alternatives(value: Any, types: list[inspect.Type], path: str) -> Iterator[Problem]:
    found = [list(_walk(value, one, path)) for one in types]
    if all(found):
        yield from found[0]


def _table(value: Any, wanted: inspect.StructType, path: str) -> Iterator[Problem]:
    fields = {field.encode_name: field for field in wanted.fields}
    if not isinstance(value, dict):
        example = ", ".join([name for name, field in fields.items() if field.required] or list(fields)[:2])
        yield Problem(path, f"must be a table (of {example}, ...), not {_shown(value)}")
        return
    meant: list[str] = []
    for name, one in value.items():
        if name in fields:
            yield from _walk(one, fields[name].type, _below(path, name))
        else:
            where = f"in {path}" if path else "in a scenario"
            meant += difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            yield Problem(_below(path, quoted(name)), f"there is no {name!r} {where}{nearest(name, fields)}")
    for name, field in fields.items():
        if field.required and name not in value and name not in meant:
            yield Problem(path, f"{name!r} is missing: say {name} = ...")


def _plain(value: Any, wanted: inspect.Type, path: str) -> Iterator[Problem]:
    text = ""
    match wanted:
        case inspect.LiteralType(values=words):
            if value not in words or isinstance(value, bool):
                near = nearest(value, [str(word) for word in words]) if isinstance(value, str) else ""
                near = near or f", only {', '.join(map(str, words))}"
                text = f"cannot be {_shown(value)}{near}"
        case inspect.IntType() | inspect.FloatType():
            whole = isinstance(wanted, inspect.IntType)
            fine = type(value) is int or (isinstance(value, float) and not whole)
            if not (fine and _within(value, wanted)):
                text = f"must be a {'whole ' if whole else ''}number{_bounds(wanted)}, not {_shown(value)}"
        case inspect.StrType():
            if not isinstance(value, str):
                text = f"must be a text, in quotes, not {_shown(value)}"
        case inspect.BoolType():
            if not isinstance(value, bool):
                text = f"must be true or false, not {_shown(value)}"
    if text:
        yield Problem(path, text)


def _within(value: float, wanted: inspect.IntType | inspect.FloatType) -> bool:
    return (
        (wanted.ge is None or value >= wanted.ge)
        and (wanted.le is None or value <= wanted.le)
        and (wanted.gt is None or value > wanted.gt)
        and value == value  # a nan is in no range
    )


def _bounds(wanted: inspect.IntType | inspect.FloatType) -> str:
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
