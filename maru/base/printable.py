"""Text of peers escaped to one line, for logs and terminals.

Escaped, it cannot begin a line of a log, or control a terminal.

Rule 1. A name from a peer is escaped when it is received, so that no later use needs to escape it.
Rule 2. A program that writes a log escapes every message again (:class:`LineFormatter`), and a console every cell: an
        error may contain a peer's text.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec

_OF_RECORDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def printable(text: str) -> str:
    """Escape control characters, line ends, direction marks and lone surrogates.

    The escapes are those of a Python literal.
    """
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text])


def printable_lines(text: str) -> str:
    """Escape a text as :func:`printable` does, but keep its line ends."""
    return "\n".join([printable(line) for line in text.split("\n")])


class LineFormatter(logging.Formatter):
    """Formatter of a log record as one line, then an indented traceback.

    So every line that is not indented begins a record.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # the name is that of logging
        """Escape the message before formatting it."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Format a traceback, indented and escaped."""
        text: str = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join([f"  {printable(line)}" for line in text.split("\n")])


class JsonFormatter(logging.Formatter):
    """Formatter of a log record as one JSON object.

    It has the time, level, logger, message and the fields of ``extra``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; see `logging.Formatter.format`."""
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((name, value) for name, value in vars(record).items() if name not in _OF_RECORDS)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return as_json(line)


def as_json(line: dict[str, Any]) -> str:
    """Encode a log line as JSON.

    A value without a JSON form is encoded as its text.
    """
    return msgspec.json.encode(line, enc_hook=str).decode()
