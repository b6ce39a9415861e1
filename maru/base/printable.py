"""Text of peers as one line: it can begin no line of a log, and say nothing to a terminal.

Rule 1. A name from a peer is escaped where it comes in: whatever shows it later need not think of it.
Rule 2. A program that writes a log escapes every message once more (:class:`LineFormatter`), and a console every cell: an error
        may carry a peer's words.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec

_OF_RECORDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def printable(text: str) -> str:
    """Escape control characters, line ends, marks of direction and lone surrogates, as Python writes them in a literal."""
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text])


def printable_lines(text: str) -> str:
    """Do the same, and keep the ends of lines."""
    return "\n".join([printable(line) for line in text.split("\n")])


class LineFormatter(logging.Formatter):
    """Formats a record as one line, with a traceback indented below it: every line that is not indented begins a record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # the name is that of logging
        """Escape what the message is made of."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Indent a traceback."""
        text: str = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join([f"  {printable(line)}" for line in text.split("\n")])


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, and what was given as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
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
    """Encode a line of a log; any value that JSON has no form for as its text."""
    return msgspec.json.encode(line, enc_hook=str).decode()
