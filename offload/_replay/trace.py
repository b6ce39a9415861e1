"""Reads a request trace: JSON lines, as Mooncake publishes them.

It may be compressed by gzip. Errors name the line and the field.

    {"timestamp": 27, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 17]}

One line per request. A hash id names a block of the prompt together with everything before it, so that equal leading
ids are a common prefix. Fields that are not named here are ignored.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Literal, TypeAlias

import msgspec

from maru.base.files import open_input

from .._errors import OffloadError

_GZIP = b"\x1f\x8b"

TimeUnit: TypeAlias = Literal["ms", "s"]
_ENOUGH = 10
_MOST_PER_SECOND = 300.0
"""Most requests a second in a trace that is in milliseconds.

Published traces have 2 to 30; read as milliseconds, one in seconds has a thousand times as many.
"""
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Millis = Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # some 30,000 years


class Request(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: _Millis
    """Time of the request, in milliseconds from the start of the trace."""
    input_length: _Count
    """Tokens of the prompt."""
    output_length: _Count
    """Tokens of the answer."""
    hash_ids: tuple[_Count, ...]
    """The blocks of the prompt, all different."""


class TraceError(OffloadError, ValueError):
    """A trace that cannot be read.

    The text names the file, the line and the field.
    """

    def __init__(self, file: str, line: int, field: str, problem: str) -> None:
        super().__init__(f"{file}, line {line}: {field}: {problem}" if field else f"{file}, line {line}: {problem}")
        self.file = file
        self.line = line
        self.field = field
        """Name of the field, with its position if any.

        Empty if the line as a whole is wrong.
        """


def read_trace(path: str | os.PathLike[str], limit: int | None = None, time_unit: TimeUnit = "ms") -> list[Request]:
    """Read the requests of a file, or the first ``limit`` ones.

    Blank lines are skipped. ``time_unit`` is that of the file's timestamps.

    Raises:
        TraceError: a line is no request, or the file is no whole gzip file.
        OSError: the file cannot be read.
    """
    with _open(Path(path)) as lines:
        requests = islice(parse_trace(lines, os.fspath(path)), limit)
        if time_unit == "ms":
            return list(requests)
        return [msgspec.structs.replace(request, timestamp=1e3 * request.timestamp) for request in requests]


def requests_per_second(requests: Sequence[Request]) -> float:
    """Return the requests per second; 0 if all come at once.

    It is that of its timestamps as they are read.
    """
    span = max(request.timestamp for request in requests) - min(request.timestamp for request in requests)
    return 1e3 * len(requests) / span if span else 0.0


def looks_like_seconds(requests: Sequence[Request]) -> bool:
    """Return whether these timestamps in milliseconds are rather in seconds.

    No service has requests so often.
    """
    return len(requests) >= _ENOUGH and requests_per_second(requests) > _MOST_PER_SECOND


def parse_trace(lines: Iterable[bytes], file: str) -> Iterator[Request]:
    """Parse lines into requests; ``file`` is the name used in errors.

    Raises:
        TraceError: a line is no request, or the input is truncated.
    """
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield parse_request(line, file, number)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(file, number + 1, "", f"the file is damaged: {error}") from error


def parse_request(line: bytes, file: str, number: int) -> Request:
    """Parse one line into a request.

    Raises:
        TraceError: it is not JSON, a field is missing or out of range, or a hash id occurs twice.
    """
    try:
        request = _DECODER.decode(line)
    except msgspec.DecodeError as error:  # a ValidationError is one
        field, problem = _explain(str(error))
        raise TraceError(file, number, field, problem) from error
    except UnicodeDecodeError as error:
        raise TraceError(file, number, "", f"not UTF-8: {error.reason}") from error
    if len(set(request.hash_ids)) != len(request.hash_ids):
        seen: set[int] = set()
        twice = next(each for each in request.hash_ids if each in seen or seen.add(each))  # type: ignore[func-returns-value]
        raise TraceError(file, number, "hash_ids", f"{twice} is named twice")
    return request


_DECODER = msgspec.json.Decoder(Request)
_AT = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")


def _explain(message: str) -> tuple[str, str]:
    """Split a decoder's message into the field and the complaint."""
    if missing := _MISSING.search(message):
        return missing[1], "missing"
    if at := _AT.search(message):
        return at[1], message[: at.start()]
    return "", message


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    # Opened once: bytes read from a pipe to inspect it would be gone.
    with open_input(path) as file:
        if file.peek(2)[:2] != _GZIP:
            yield file
            return
        with gzip.open(file, "rb") as lines:
            yield lines  # type: ignore[misc]
