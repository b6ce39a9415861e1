"""On which line of a TOML document each value begins: what ``tomllib`` does not say, and an error should. Pure.

Rule. The document is valid: ``tomllib`` has read it before. Therefore this needs to know where a string, an array, or an
inline table ends, and nothing of what is in them.

A path is a tuple of keys and of positions: ``("fault", 2, "who")``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, TypeAlias

Path: TypeAlias = tuple[str | int, ...]

_BLANK: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE: Final = re.compile(r"[ \t]*")
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
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


def lines_of(text: str) -> Mapping[Path, int]:
    """The line, from 1, of every value of a valid document, and of every table."""
    return _Scan(text).run()


def parse_path(path: str) -> Path:
    """A path as errors write it: ``fault[2].who``, ``expect[0].status."a b"``."""
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


def nearest_line(lines: Mapping[Path, int], path: Path) -> int:
    """The line of what a path names, or of the closest thing around it; 1 where there is none."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return 1


class _Scan:
    """A walk through a document."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._counted = 0
        """Up to where lines are counted."""
        self._lines: dict[Path, int] = {}
        self._elements: dict[Path, int] = {}
        """How many tables an array of tables has so far."""
        self._base: Path = ()

    def run(self) -> dict[Path, int]:
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
        base: Path = ()
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

    def _into(self, path: Path) -> Path:
        """The table that a part of a header means: of an array of tables, the last one."""
        self._note(path)
        return (*path, self._elements[path] - 1) if path in self._elements else path

    def _pair(self, base: Path) -> None:
        for key in self._key():
            base = (*base, key)
            self._note(base)
        self._at += 1  # =
        self._skip(_SPACE)
        self._value(base)

    def _key(self) -> list[str]:
        """The parts of a dotted key; behind it, and the spaces after it."""
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            if self._text[self._at] in "\"'":
                parts.append(self._string())
            else:
                match = _BARE.match(self._text, self._at)
                assert match is not None, "the document is not valid"
                parts.append(match[0])
                self._at = match.end()
            self._skip(_SPACE)
            if not self._text.startswith(".", self._at):
                return parts
            self._at += 1

    def _value(self, path: Path) -> None:
        match self._text[self._at]:
            case "[":
                self._array(path)
            case "{":
                self._inline_table(path)
            case '"' | "'":
                self._string()
            case _:
                self._skip(_SCALAR)

    def _array(self, path: Path) -> None:
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

    def _inline_table(self, path: Path) -> None:
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
        """Step behind a string. What is in it, of one in a single line: only such a one can be a key."""
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

    def _note(self, path: Path) -> None:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        self._lines.setdefault(path, self._line)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return _ESCAPED.get(code) or chr(int(code[1:], 16))
