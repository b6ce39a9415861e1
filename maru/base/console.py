"""Output of commands: one JSON document, or lines and tables for people.

No other module makes a console.

Rule 1. Text is printed literally: it is not searched for markup or emoji, since names come from outside. Colours come
        as :class:`rich.text.Text`.
Rule 2. A line is never broken, so that a command can be copied from it as one; the terminal may wrap it.
Rule 3. A number that identifies something (an epoch, a session, a checksum) is hexadecimal text in JSON, since it may
        have 64 bits, of which many readers keep 53. Counts and measurements are numbers.
Rule 4. No control character of a text reaches a terminal: names and reasons come from peers, also by way of a server.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from .all_bytes import read_some
from .printable import printable_lines

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

_UNREAD = 160


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console without markup.

    In a file or a pipe without a given width, a path should be on one line, rather than broken at 80 columns.
    """
    from rich.console import Console

    class PrintableConsole(Console):
        """A console that escapes text from peers: see Rule 4."""

        def render_str(self, text: str, *args: Any, **kwargs: Any) -> Text:
            """Escape the text, then render it as rich does."""
            return super().render_str(printable_lines(text), *args, **kwargs)

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNREAD
    return PrintableConsole(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False, width=width)


def show(*parts: RenderableType) -> None:
    """Print tables and lines, without trailing blanks in a pipe."""
    from rich.text import Text

    sheet = console()
    with sheet.capture() as captured:
        for part in parts:
            sheet.print(part, soft_wrap=isinstance(part, str | Text))
    for line in captured.get().splitlines():
        click.echo(line if sheet.is_terminal else line.rstrip())


def say(text: str) -> None:
    """Print a line."""
    click.echo(printable_lines(text))


def print_json(answer: object) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(answer, indent=2))


def identifier(number: int | None) -> str | None:
    """Return an identifying number as JSON text: see Rule 3."""
    return None if number is None else f"{number:#018x}"


@contextmanager
def keys_pressed() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key.

    It returns an empty text if no key was pressed. Without a keyboard it only sleeps, and Ctrl-C interrupts it.
    """
    if not sys.stdin.isatty():

        def slept(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield slept
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return read_some(descriptor, 1).decode("ascii", "replace") if ready else ""

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
