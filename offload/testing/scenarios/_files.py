"""Scenario files: read from TOML with error lines, written as readable TOML.

Rule 1. Nothing is ignored: an unknown name is an error that proposes the nearest known one.
Rule 2. A scenario that :func:`check` rejects is not read. Every error is a :class:`ScenarioError`: file, line, path
        within the file, mistake, and correction.
Rule 3. ``read_text(to_toml(s)) == s``, and a value equal to its default is not written.

``tomllib`` does not report on which line a value begins; :func:`lines_of` finds that out. Since ``tomllib`` has
accepted the document before, it needs to know only where a string, an array or an inline table ends. A path is a tuple
of keys and of positions: ``("fault", 2, "who")``.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from maru.base.files import read_file

from ._check import check
from ._fields import with_defaults
from ._program import Problem, Scenario, Seam
from ._program import ScenarioError as ScenarioError
from ._schema import schema_errors

TomlPath: TypeAlias = tuple[str | int, ...]

_BLANK: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE: Final = re.compile(r"[ \t]*")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR: Final = re.compile(r"[^,\]}#\r\n]+")
_STRINGS: Final = tuple(
    (quotes, re.compile(pattern, re.DOTALL))
    for quotes, pattern in (
        ('"""', r'"""(?:\\.|[^\\])*?"""(?:"{1,2})?'),  # it may end in quotes of its own
        ("'''", r"'''.*?'''(?:'{1,2})?"),
        ('"', r'"((?:\\.|[^"\\\n])*)"'),
        ("'", r"'([^'\n]*)'"),
    )
)
_ESCAPE: Final = re.compile(r'\\(u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[btnfre"\\])')
_ESCAPED: Final = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b", '"': '"', "\\": "\\"}


def lines_of(text: str) -> Mapping[TomlPath, int]:
    """Return the line, from 1, of each value and table.

    The document must be valid.
    """
    return _Scan(text).run()


def parse_path(path: str) -> TomlPath:
    """Parse a path as errors write it.

    For example ``fault[2].who``, ``expect[0].status."a b"``.
    """
    found: list[str | int] = []
    for match in re.finditer(r'\[(\d+)\]|"((?:\\.|[^"\\])*)"|([^.\[\]"]+)', path):
        index, quoted, bare = match.groups()
        if index is not None:
            found.append(int(index))
        elif quoted is not None:
            found.append(re.sub(r"\\(.)", r"\1", quoted))
        else:
            found.append(bare)
    return tuple(found)


def nearest_line(lines: Mapping[TomlPath, int], path: TomlPath) -> int:
    """Return the line of a path, or of the closest enclosing part.

    The line is 1 if there is none.
    """
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return 1


class _Scan:
    """Scan of a valid document that records the line of every value."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._counted = 0
        """Position up to which lines are counted."""
        self._lines: dict[TomlPath, int] = {}
        self._elements: dict[TomlPath, int] = {}
        """Number of tables in each array of tables so far."""
        self._base: TomlPath = ()

    def run(self) -> dict[TomlPath, int]:
        text = self._text
        while True:
            self._skip(_BLANK)
            if self._at >= len(text):
                return self._lines
            if text.startswith("[", self._at):
                self._header()
            else:
                self._pair(self._base)

    def _header(self) -> None:
        twice = self._text.startswith("[[", self._at)
        self._at += 1 + twice
        *parents, last = self._key()
        base: TomlPath = ()
        for key in parents:
            base = self._into((*base, key))
        base = (*base, last)
        if twice:
            self._note(base)
            self._elements[base] = self._elements.get(base, 0) + 1
            base = (*base, self._elements[base] - 1)
        else:
            base = self._into(base)
        self._note(base)
        self._base = base
        self._at += 1 + twice

    def _into(self, path: TomlPath) -> TomlPath:
        """Return the table that a header's part means: an array's last one."""
        self._note(path)
        return (*path, self._elements[path] - 1) if path in self._elements else path

    def _pair(self, base: TomlPath) -> None:
        for key in self._key():
            base = (*base, key)
            self._note(base)
        self._at += 1  # =
        self._skip(_SPACE)
        self._value(base)

    def _key(self) -> list[str]:
        """Read a dotted key and the spaces after it; return its parts."""
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            if self._text[self._at] in "\"'":
                parts.append(self._string())
            else:
                match = _BARE_KEY.match(self._text, self._at)
                assert match is not None, "the document is not valid"
                parts.append(match[0])
                self._at = match.end()
            self._skip(_SPACE)
            if not self._text.startswith(".", self._at):
                return parts
            self._at += 1

    def _value(self, path: TomlPath) -> None:
        match self._text[self._at]:
            case "[":
                self._array(path)
            case "{":
                self._inline_table(path)
            case '"' | "'":
                self._string()
            case _:
                self._skip(_SCALAR)

    def _array(self, path: TomlPath) -> None:
        self._at += 1
        position = 0
        while True:
            self._skip(_BLANK)
            if self._text[self._at] == "]":
                self._at += 1
                return
            if self._text[self._at] == ",":
                self._at += 1
                continue
            self._note((*path, position))
            self._value((*path, position))
            position += 1

    def _inline_table(self, path: TomlPath) -> None:
        self._at += 1
        while True:
            self._skip(_BLANK)
            if self._text[self._at] == "}":
                self._at += 1
                return
            if self._text[self._at] == ",":
                self._at += 1
                continue
            self._pair(path)

    def _string(self) -> str:
        """Skip a string; return its content if it is on one line.

        Only such a string can be a key; the content of others is not needed.
        """
        for quotes, pattern in _STRINGS:
            if self._text.startswith(quotes, self._at):
                match = pattern.match(self._text, self._at)
                assert match is not None, "the document is not valid"
                self._at = match.end()
                if quotes == '"':
                    return _ESCAPE.sub(_unescaped, match[1])
                return match[1] if quotes == "'" else ""
        raise AssertionError("no string here")

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _note(self, path: TomlPath) -> None:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        self._lines.setdefault(path, self._line)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return _ESCAPED.get(code) or chr(int(code[1:], 16))


# --- reading ----------------------------------------------------------------------------------------------------------


SUFFIX: Final = ".scenario.toml"
"""Suffix of a scenario file's name."""


def read(
    path: str | os.PathLike[str], seams: Collection[Seam] | None = None, *, hooks: Collection[str] | None = None
) -> Scenario:
    """Read the scenario of a file.

    Args:
        path: path of the file.
        seams: see :func:`check`.
        hooks: see :func:`check`.

    Raises:
        ScenarioError: it cannot be read, it is not TOML, no scenario, or one that makes no sense.
    """
    name = os.fspath(path)
    try:
        text = read_file(path).decode()
    except OSError as error:
        raise ScenarioError(name, None, "", f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ScenarioError(name, line, "", "is not UTF-8: save it as such") from error
    return read_text(text, name, seams, hooks=hooks)


def read_text(
    text: str,
    name: str = "<text>",
    seams: Collection[Seam] | None = None,
    *,
    hooks: Collection[str] | None = None,
) -> Scenario:
    """Read the scenario of a text; see :func:`read`.

    ``name`` is the file name that errors mention.
    """
    document = _parse(text, name)
    try:
        scenario = msgspec.convert(document, Scenario)
    except msgspec.ValidationError as error:
        found = list(schema_errors(document))
        raise _error(text, name, found or [Problem("", str(error))]) from None
    problems = check(scenario, seams, hooks=hooks)
    if problems:
        raise _error(text, name, problems)
    return scenario


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        at = _AT.search(said)
        line = int(at[1]) if at and at[1] else text.count("\n") + 1
        raise ScenarioError(name, line, "", f"is not TOML: {_AT.sub('', said)}") from error
    except RecursionError as error:
        raise ScenarioError(name, None, "", "is nested too deeply for a scenario") from error


_AT: Final = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def _error(text: str, name: str, problems: list[Problem]) -> ScenarioError:
    """Return one error for all problems, in the order of the file."""
    lines = lines_of(text.replace("\r\n", "\n"))
    placed = sorted([(nearest_line(lines, parse_path(one.path)), i) for i, one in enumerate(problems)])
    (line, first), *others = placed
    more = [f"{name}:{line}: {problems[i].path}: {problems[i].text}" for line, i in others]
    return ScenarioError(name, line, problems[first].path, problems[first].text, more)


# --- writing ----------------------------------------------------------------------------------------------------------


WIDTH: Final = 100
"""Maximum number of columns in a line."""

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_WHEN: Final = ("at_ms", "at_hook", "of", "visit")
_TABLES: Final = ("tier", "pipeline")
_ARRAYS: Final = ("step", "fault", "expect")


def to_toml(scenario: Scenario) -> str:
    """Return the scenario as TOML."""
    document = {"format": scenario.format, **msgspec.to_builtins(with_defaults(scenario))}
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
    """Yield the lines of a table, without its header.

    Values that do not fit on one line come last, as tables below it.
    """
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
    """Return a value on one line."""
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
