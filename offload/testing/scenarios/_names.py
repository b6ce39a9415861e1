"""Names as a list with ranges: ``"a{0..3}, b"`` is a0, a1, a2, a3 and b. Pure.

Rule 1. Names are separated by commas; spaces around them do not matter. No name at all is the empty list.
Rule 2. A range is of numbers and counts up; both its ends belong to it. As many digits as its first end has with a leading
        zero, each number has: ``"k{08..10}"`` is k08, k09, k10. Several ranges in a name are all combinations.
Rule 3. A name has no space, comma or brace in it, since an event is written ``"<name> <what happened>"``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

MOST: Final = 1 << 20
"""Names that one list may stand for: more is a slip of the pen."""

_RANGE: Final = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_NAME: Final = re.compile(r"(?:[^\s{},]|\{[0-9]{1,18}\.\.[0-9]{1,18}\})+")
_COUNTED: Final = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})")


@lru_cache(maxsize=4_096)  # the same few lists are asked for again and again while a scenario runs
def expand(names: str) -> tuple[str, ...]:
    """All names of a list, in order; a name that is there twice comes twice.

    Raises:
        ValueError: it is no such list; the text says where and what would be one.
    """
    if not names.strip():
        return ()
    parts = [_part(word.strip(), names) for word in names.split(",")]
    if sum([math.prod(map(len, ranges)) for _, ranges, _ in parts]) > MOST:
        raise ValueError(f"{_short(names)} stands for more than {MOST:,} names")
    found: list[str] = []
    for texts, ranges, width in parts:
        for numbers in itertools.product(*ranges):
            counted = [
                f"{number:0{digits}d}{text}" for number, digits, text in zip(numbers, width, texts[1:], strict=True)
            ]
            found.append(texts[0] + "".join(counted))
    return tuple(found)


def compress(names: Iterable[str]) -> str:
    """A list that expands to these names, with ranges where three or more of them count up."""
    words: list[str] = []
    for run in _runs(names):
        if len(run) < 3:
            words += run
        else:
            stem, first = _counted(run[0])
            words.append(f"{stem}{{{first}..{first + len(run) - 1}}}")
    return ", ".join(words)


def _part(word: str, names: str) -> tuple[list[str], list[range], list[int]]:
    """One name of a list: the texts around its ranges, the ranges, and how many digits each has at least."""
    if not word:
        raise ValueError(f"{_short(names)} has a comma without a name beside it")
    if _NAME.fullmatch(word) is None:
        raise ValueError(f"{_short(word)} is no name: it has no space in it, and braces only as in 'a{{0..3}}'")
    pieces = _RANGE.split(word)  # text, low, high, text, low, high, text ...
    ends = [(low, high) for low, high in zip(pieces[1::3], pieces[2::3], strict=True)]
    for low, high in ends:
        if int(low) > int(high):
            raise ValueError(f"{_short(word)} counts down: say {{{high}..{low}}}")
    ranges = [range(int(low), int(high) + 1) for low, high in ends]
    return pieces[0::3], ranges, [len(low) if low.startswith("0") else 0 for low, _ in ends]


def _runs(names: Iterable[str]) -> list[list[str]]:
    """The names in pieces within which only the number at the end counts up."""
    runs: list[list[str]] = []
    wanted: tuple[str, int] | None = None
    for name in names:
        counted = _counted(name)
        if counted[1] >= 0 and counted == wanted:
            runs[-1].append(name)
        else:
            runs.append([name])
        wanted = (counted[0], counted[1] + 1)
    return runs


def _counted(name: str) -> tuple[str, int]:
    """What stands before the number at the end, and the number; -1 where there is none."""
    match = _COUNTED.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, -1)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def shown(keys: Iterable[bytes], separator: str = ",") -> str:
    """Keys as text for a reader; bytes that are no text are escaped."""
    return separator.join([key.decode(errors="backslashreplace") for key in keys])
