"""Configuration of all packages: knobs, and the sources that set them.

A package declares its knobs with a :class:`Knobs` of its own, as fields of frozen attrs classes, each with a default, a
bound and the reason for both. :meth:`Knobs.load` reads all sources. Pure, except for the reading of a file.

Rule 1. A knob is checked when its class is made, from any source: every instance is valid.
Rule 2. An error raises the package's :class:`~maru.base.errors.KnobError`, with the knob, the value, the bound, and the
        place where it was set.
Rule 3. An unknown name is an error that names the nearest known one. Nothing is ignored.
Rule 4. An argument wins over the environment, which wins over the file, which wins over the default.

A class is one table of a file, and a class nested in it a table in that table. A variable is the prefix of the package,
then the same path in capitals, with two underscores for each dot: ``[pipeline.batch_config] max_batch_size`` is
``OFFLOAD_PIPELINE__BATCH_CONFIG__MAX_BATCH_SIZE``.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar, get_args

import attrs
import msgspec

from .base.errors import KnobError
from .base.files import read_file

C = TypeVar("C", bound=attrs.AttrsInstance)


@attrs.frozen
class Knob:
    """A setting with its default, bound and reason, for documentation and help."""

    name: str
    """Path, as in a file: ``pipeline.batch_config.max_batch_size``."""
    variable: str
    """Environment variable that sets it."""
    default: object
    """Value if no source sets it."""
    bound: str
    """Allowed values, in words."""
    reason: str
    """Effect, and the reason for this default and bound."""


@attrs.frozen
class Knobs:
    """Declaration, listing and loading of the settings of one package."""

    prefix: str
    """Beginning of its environment variables, without the underscore."""
    error: type[KnobError]
    """Error to raise for an invalid value."""

    # -- declaring -------------------------------------------------------------------------------------------------

    def integer(self, default: int, low: int, high: int, reason: str) -> Any:
        """Declare a knob that is an integer in a range."""
        return self._field(default, f"an integer from {low} to {high}", _is_int(low, high), reason)

    def seconds(self, default: float, low: float, high: float, reason: str) -> Any:
        """Declare a knob that is a time in seconds, in a range.

        Its value is a float or an integer.
        """
        return self._field(
            default, f"seconds from {low:g} to {high:g}", _is_number(low, high), reason, as_seconds, hint=_SECONDS_HINT
        )

    def timeout(self, default: float, low: float, high: float, reason: str) -> Any:
        """Declare a knob that is a time in a range, or ``inf``.

        ``inf`` (in Python also ``None``) means no limit.
        """
        holds = _is_number(low, high)
        return self._field(
            default,
            f"seconds from {low:g} to {high:g}, or inf",
            lambda value: holds(value) or value == math.inf,
            reason,
            lambda value: math.inf if value is None else as_seconds(value),
            hint=_SECONDS_HINT,
        )

    def fraction(self, default: float, low: float, high: float, reason: str) -> Any:
        """Declare a knob that is a fraction of a whole."""
        return self._field(default, f"a share from {low:g} to {high:g}", _is_number(low, high), reason)

    def size(self, default: int, low: int, high: int, reason: str) -> Any:
        """Declare a knob in bytes, in a range.

        Its value is an integer or a text with a unit (``"64 MiB"``).
        """
        bound = f"bytes from {as_size(low)} to {as_size(high)}"
        return self._field(default, bound, _is_int(low, high), reason, as_bytes, hint=_SIZE_HINT)

    def flag(self, default: bool, reason: str) -> Any:
        """Declare a knob that is true or false."""
        return self._field(default, "true or false", lambda value: isinstance(value, bool), reason)

    def text(self, default: str, bound: str, pattern: str, reason: str, empty: Callable[[], str] = lambda: "") -> Any:
        """Declare a knob that is a text matching a pattern.

        ``bound`` describes the pattern. ``None`` is the empty text. ``empty`` returns the value that the empty text has
        where the program runs.
        """
        matches = re.compile(pattern).fullmatch

        def holds(value: object) -> bool:
            return isinstance(value, str) and matches(value) is not None

        return self._field(default, bound, holds, reason, lambda value: empty() if value in (None, "") else value)

    def texts(self, default: tuple[str, ...], bound: str, pattern: str, reason: str) -> Any:
        """Declare a knob of any number of texts that match a pattern.

        Its value is a list, or a text separated by commas.
        """
        matches = re.compile(pattern).fullmatch

        def holds(value: object) -> bool:
            return isinstance(value, tuple) and all(isinstance(text, str) and matches(text) for text in value)

        return self._field(default, bound, holds, reason, _as_texts)

    def choice(self, default: str, choices: Any, reason: str) -> Any:
        """Declare a knob that is one word of a ``Literal``."""
        words: tuple[str, ...] = get_args(choices)

        def holds(value: object) -> bool:
            return isinstance(value, str) and value in words

        return self._field(default, f"one of {', '.join(words)}", holds, reason)

    def table(self, default: attrs.AttrsInstance, reason: str) -> Any:
        """Declare a nested configuration class: a table in the table.

        It has knobs of its own.
        """
        kind = type(default)
        return self._field(default, f"a {kind.__name__}", lambda value: isinstance(value, kind), reason)

    def optional(self, default: int | None, low: int, high: int, reason: str) -> Any:
        """Declare a knob that is an integer in a range, or ``None``.

        ``None`` means no limit.
        """
        holds = _is_int(low, high)
        bound = f"an integer from {low} to {high}, or None"
        return self._field(default, bound, lambda value: value is None or holds(value), reason)

    def field(
        self,
        default: object,
        bound: str,
        reason: str,
        check: Callable[..., None],
        converter: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Declare a knob of any other kind, with its own check.

        The check is an attrs validator that raises the package's error.
        """
        metadata = {"bound": bound, "reason": reason}
        return attrs.field(default=default, converter=converter, validator=check, metadata=metadata)

    def _field(
        self,
        default: object,
        bound: str,
        holds: Callable[[Any], bool],
        reason: str,
        converter: Callable[[Any], Any] | None = None,
        hint: str = "",
    ) -> Any:
        def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
            if not holds(value):
                raise self.error(attribute.name, value, f"must be {bound}{hint if isinstance(value, str) else ''}")

        return self.field(default, bound, reason, check, converter)

    # -- listing ---------------------------------------------------------------------------------------------------

    def of(self, cls: type[attrs.AttrsInstance], section: str) -> Iterator[Knob]:
        """Yield every setting of a class and of its nested classes.

        The settings are in the order of declaration.
        """
        for field in attrs.fields(cls):
            name = f"{section}.{field.name}"
            if attrs.has(type(field.default)):
                yield from self.of(type(field.default), name)
            else:
                variable, told = self.variable(name), field.metadata
                yield Knob(name, variable, field.default, told["bound"], told["reason"])

    def variable(self, name: str) -> str:
        """Return the environment variable of a knob."""
        return f"{self.prefix}_{name.upper().replace('.', '__')}"

    # -- loading ---------------------------------------------------------------------------------------------------

    def from_mapping(self, mapping: Mapping[str, Any], cls: type[C], *, section: str = "") -> C:
        """Load a configuration from nested mappings of a TOML or JSON parser.

        Missing names keep their defaults.

        Args:
            mapping: knobs by name.
            cls: the configuration class.
            section: the path of this mapping in its file, put before names in errors.

        Raises:
            KnobError: an unknown name, or a value out of its bound.
        """
        if not isinstance(mapping, Mapping):
            raise self.error(section or cls.__name__, mapping, "must be a table")
        fields = attrs.fields_dict(cls)
        values: dict[str, Any] = {}
        for name, value in mapping.items():
            path = _join(section, name)
            if name not in fields:
                raise self.error(path, value, _unknown(str(name), fields))
            part = type(fields[name].default)
            values[name] = (
                self.from_mapping(value, part, section=path)
                if attrs.has(part) and not isinstance(value, part)
                else value
            )
        try:
            return cls(**values)
        except KnobError as error:
            raise self.error(_join(section, error.knob), error.value, error.bound) from None

    def load(
        self,
        cls: type[C],
        source: str | os.PathLike[str] | Document = "",
        *,
        section: str,
        others: Collection[str] = (),
        environ: Mapping[str, str] | None = None,
        options: Mapping[str, tuple[str, object]] | None = None,
    ) -> C:
        """Load a configuration from a file, the environment and arguments.

        The last one takes precedence.

        Args:
            cls: the configuration class.
            source: a path (``pathlib.Path``) of a TOML file, TOML as a text, or the result of :meth:`read`.
            section: the table to read; it need not be there.
            others: tables of the file that are read elsewhere. Any further one is an error.
            environ: the environment; by default that of this process.
            options: by the name of the knob, its name in an error (``--port``) and its value; a text is parsed like a
                variable of the environment.

        Raises:
            KnobError: not TOML, an unknown name, or a value out of its bound; with file and line, variable, or option.
            OSError: the file cannot be read.
        """
        read = source if isinstance(source, Document) else self.read(source)
        document = read.parse()
        outermost, *_ = path = section.split(".")
        where: dict[str, str] = {}
        try:
            for name, value in document.items():
                if name != outermost and name not in others:
                    raise self.error(name, value, _unknown(name, [outermost, *others]))
            table = self._table(document, path)
            known = tuple(self.of(cls, section))
            for name, place, value in [
                *self._variables(known, section, os.environ if environ is None else environ),
                *self._options(known, options or {}),
            ]:
                where[name] = place
                *parents, last = name.split(".")[len(path) :]
                self._table(table, parents)[last] = value
            return self.from_mapping(table, cls, section=section)
        except KnobError as error:
            if error.knob in where:
                raise self.error(where[error.knob], error.value, error.bound) from None
            line = _line_of(read.text, error.knob.split("."))
            if line is None:
                raise
            raise self.error(error.knob, error.value, f"{error.bound} ({read.name}, line {line})") from None

    def read(self, source: str | os.PathLike[str]) -> Document:
        """Read a TOML file, with its name for errors.

        Args:
            source: a path (``pathlib.Path``), or TOML as a text.

        Raises:
            KnobError: not TOML.
            OSError: the file cannot be read.
        """
        name, text = ("TOML", source) if isinstance(source, str) else (os.fspath(source), "")
        try:
            if not isinstance(source, str):
                text = read_file(source).decode()
            document = Document(str(name), text)
            document.parse()
        except ValueError as error:
            raise self.error(str(name), _excerpt(text), f"not TOML: {error}") from error
        except RecursionError as error:
            raise self.error(
                str(name), _excerpt(text), "not read: its lists or tables are nested too deeply"
            ) from error
        return document

    def _variables(
        self, known: Iterable[Knob], section: str, environ: Mapping[str, str]
    ) -> Iterator[tuple[str, str, object]]:
        """Yield name, variable and value of every knob set by the environment.

        Only the knobs of the section are considered.
        """
        by_variable = {knob.variable: knob for knob in known}
        prefix = f"{self.variable(section)}__"
        for variable in sorted(environ):
            if not variable.startswith(prefix):
                continue
            knob = by_variable.get(variable)
            if knob is None:
                raise self.error(variable, environ[variable], _unknown(variable, by_variable))
            yield knob.name, variable, _read(knob, environ[variable])

    def check_variables(self, sections: Iterable[str], environ: Mapping[str, str] | None = None) -> None:
        """Refuse a variable whose table is nearly one of a program's.

        It would be ignored.

        Raises:
            KnobError: there is such a variable; the text has the variable that was perhaps meant.
        """
        environ = os.environ if environ is None else environ
        tables = [section.upper() for section in sections]
        for variable in sorted(environ):
            start, middle, rest = variable.partition("__")
            table = start.removeprefix(f"{self.prefix}_")
            if not middle or table == start or table in tables:
                continue
            import difflib  # needed only for a variable of another table

            near = difflib.get_close_matches(table, tables, n=1, cutoff=0.8)
            if near:
                meant = f"{self.prefix}_{near[0]}__{rest}"
                raise self.error(variable, environ[variable], f"there is no such table; did you mean {meant}?")

    def _options(
        self, known: Iterable[Knob], options: Mapping[str, tuple[str, object]]
    ) -> Iterator[tuple[str, str, object]]:
        by_name = {knob.name: knob for knob in known}
        for name, (option, value) in options.items():
            yield name, option, _read(by_name[name], value) if isinstance(value, str) else value

    def checks_names(self, cls: type[C]) -> type[C]:
        """Make a configuration class suggest the nearest knob for a misspelt one.

        Files and variables do the same.
        """
        made: Any = cls.__init__

        @functools.wraps(made)
        def init(config: C, *args: Any, **values: Any) -> None:
            known = attrs.fields_dict(cls)
            for name, value in values.items():
                if name not in known:
                    raise self.error(name, value, _unknown(name, known))
            made(config, *args, **values)

        cls.__init__ = init  # type: ignore[assignment, method-assign]
        return cls

    def _table(self, document: Any, path: Iterable[str]) -> Any:
        """Return the table at this path; make it if it is missing."""
        so_far = ""
        for name in path:
            so_far = _join(so_far, name)
            document = document.setdefault(name, {})
            if not isinstance(document, dict):
                raise self.error(so_far, document, "must be a table")
        return document


# --- sizes --------------------------------------------------------------------------------------------------------

_UNITS: Final = ("", "KiB", "MiB", "GiB", "TiB")
_SIZE: Final = re.compile(r"([0-9]{1,18})\s*(?:([KMGT])(?:i?B)?)?", re.IGNORECASE)


def as_bytes(value: Any) -> Any:
    """Parse a text such as ``"64 MiB"`` or ``"2g"`` into bytes.

    All units are powers of 1,024. Other values are returned unchanged.
    """
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    number, unit = match.groups()
    return int(number) << (10 * " KMGT".index(unit.upper()) if unit else 0)


_SIZE_HINT: Final = ", as a whole number with or without a unit: 1536 MiB"
_SECONDS_HINT: Final = ", as a number with or without a unit: 10 ms, 1.5 s, 2 min"

_DURATION: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(us|ms|s|min|h|d)", re.ASCII)
_SECONDS_IN: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}


def as_seconds(value: Any) -> Any:
    """Parse a text such as ``"10 ms"`` or ``"2min"`` into seconds.

    Other values are returned unchanged.
    """
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(match[1]) * _SECONDS_IN[match[2]] if match is not None else value


def as_size(count: int) -> str:
    """Format bytes in the largest unit that leaves an integer: ``64 MiB``."""
    power = 0
    while count and count % 1024 == 0 and power < len(_UNITS) - 1:
        count, power = count // 1024, power + 1
    return f"{count} {_UNITS[power]}".strip()


# --- helpers ------------------------------------------------------------------------------------------------------


def _as_texts(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(word for word in map(str.strip, value.split(",")) if word)
    return tuple(value) if isinstance(value, list) else value


def _is_int(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(low: float, high: float) -> Callable[[object], bool]:
    # a nan is in no range
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _read(knob: Knob, text: str) -> object:
    """Convert a text to the type of a knob.

    If that fails, the text is returned, for the knob to refuse.
    """
    try:
        return msgspec.convert(text, type(knob.default), strict=False)
    except msgspec.ValidationError:
        return text


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the most similar known name, or all of them.

    An error about an unknown name shows the result.
    """
    import difflib  # needed only for an error

    near = difflib.get_close_matches(name, known := list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"only {', '.join(known)}"


def _unknown(name: str, known: Iterable[str]) -> str:
    near = suggestion(name, known)
    return f"there is no such name{',' if near.startswith('only') else ';'} {near}"


def _excerpt(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


_HEADER: Final = re.compile(r"\s*(\[\[?)\s*([\w.\s\"'-]+?)\s*\]")
_PAIR: Final = re.compile(r"\s*([\w.\s\"'-]+?)\s*=")


@attrs.frozen
class Document:
    """A parsed TOML file, with line numbers for errors."""

    name: str
    """Name of the file, or ``TOML``."""
    text: str = attrs.field(repr=False)

    def parse(self) -> dict[str, Any]:
        """Return the tables of the file, as a new copy.

        The caller may change it.
        """
        if not self.text:
            return {}
        import tomllib  # takes 4 ms, which a server without a file saves before it is ready

        return tomllib.loads(self.text)

    def place(self, path: str) -> str:
        """Return the position of a setting for errors.

        ``(kv.toml, line 7)``; for a missing one, that of its table.
        """
        line = _line_of(self.text, path.split("."))
        return f"({self.name}, line {line})" if line is not None else f"({self.name})"


def _line_of(text: str, path: list[str]) -> int | None:
    """Return the line of a name, or else of its innermost table.

    Such a name is missing, or in an inline table.
    """
    exactly = _line_at(text, path)
    return exactly if exactly is not None or len(path) < 2 else _line_of(text, path[:-1])


def _line_at(text: str, path: list[str]) -> int | None:
    table: list[str] = []
    lists: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            here = table = _split(header[2])
            if len(header[1]) == 2:  # another item of a list of tables
                *_, last = table
                table[-1] = f"{last}[{lists[header[2]]}]"
                lists[header[2]] += 1
        elif pair := _PAIR.match(line):
            here = table + _split(pair[1])
        else:
            continue
        if here == path:
            return number
    return None


def _split(dotted: str) -> list[str]:
    return [name.strip().strip("\"'") for name in dotted.split(".")]
