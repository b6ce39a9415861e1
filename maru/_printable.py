"""Text of peers as one line: it can begin no line of a log, and say nothing to a terminal.

Rule 1. A name from a peer is escaped where it comes in: whatever shows it later need not think of it.
Rule 2. A program that writes a log escapes every message once more (:class:`LineFormatter`), and a console every cell: an error
        may carry a peer's words.
"""

from __future__ import annotations

import logging


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
