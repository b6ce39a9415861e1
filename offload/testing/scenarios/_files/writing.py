"""A scenario as a file that people like to read. Pure: ``read_text(to_toml(s)) == s``.

Rule 1. What is as it is without being said is not said.
Rule 2. First what everything is about (name, seed), then the house, then what is done in the order of the program, what goes
        wrong, and what must hold. A step and a fault begin with their time.
Rule 3. What fits on a line stands on one; what does not becomes a table of its own, or a list with a line for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from .._program import Scenario
from .plain import plain

WIDTH: Final = 100
"""Columns that a line may have."""

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_WHEN: Final = ("at_ms", "at_hook", "of", "visit")
_TABLES: Final = ("tier", "pipeline")
_ARRAYS: Final = ("step", "fault", "expect")


def to_toml(scenario: Scenario) -> str:
    """The text of a file that is read as this scenario."""
    document = {"format": scenario.format, **msgspec.to_builtins(plain(scenario))}
    parts = [list(_entries({name: one for name, one in document.items() if name not in _SECTIONS}, ""))]
    for name in _TABLES:
        parts += [
            [f"[{name}.{_key(one)}]", *_entries(table, f"{name}.{_key(one)}")]
            for one, table in document.get(name, {}).items()
        ]
    if "load" in document:
        load = document["load"]
        parts += [[f"[load.{name}]", *_entries(table, f"load.{name}")] for name, table in load.items()] or [["[load]"]]
    for name in _ARRAYS:
        for table in document.get(name, ()):
            if name == "step":
                table = {"at_ms": 0, **table}
            first = {key: table[key] for key in _WHEN if key in table}
            parts.append([f"[[{name}]]", *_entries({**first, **table}, name)])
    return "\n\n".join(["\n".join(lines) for lines in parts]) + "\n"


_SECTIONS: Final = (*_TABLES, "load", *_ARRAYS)


def _entries(table: Mapping[str, Any], header: str) -> Iterator[str]:
    """The lines of a table, without its header; what does not fit on one comes last, as tables below it."""
    later: list[tuple[str, Mapping[str, Any]]] = []
    for name, value in table.items():
        line = f"{_key(name)} = {_value(value)}"
        if isinstance(value, str) and "\n" in value:
            yield f'{_key(name)} = """'
            yield f'{_escaped(value, multiline=True)}"""'
        elif len(line) <= WIDTH or not value:
            yield line
        elif isinstance(value, dict):
            later.append((name, value))
        elif isinstance(value, list):
            yield f"{_key(name)} = ["
            yield from [f"    {_value(one)}," for one in value]
            yield "]"
        else:
            yield line
    for name, value in later:
        yield f"[{header}.{_key(name)}]"
        yield from _entries(value, f"{header}.{_key(name)}")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{_escaped(value)}"'
    if isinstance(value, dict):
        return f"{{ {', '.join([f'{_key(name)} = {_value(one)}' for name, one in value.items()])} }}" if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)  # an int, or a float; TOML spells inf and nan as Python does


_SHORT: Final = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_SPECIAL: Final = re.compile(r'[\x00-\x1f"\\\x7f]')
_SPECIAL_BETWEEN_LINES: Final = re.compile(r'[\x00-\x09\x0b-\x1f\\\x7f]|"(?="|\Z)')


def _escaped(text: str, *, multiline: bool = False) -> str:
    pattern = _SPECIAL_BETWEEN_LINES if multiline else _SPECIAL
    return pattern.sub(lambda match: _SHORT.get(match[0]) or f"\\u{ord(match[0]):04x}", text)
