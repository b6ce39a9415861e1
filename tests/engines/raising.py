"""Raises in one of our functions: the n-th that is called, in the thread that asks, of those in the packages of engines."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import offload.engines

_HERE = str(Path(offload.engines.__file__).parent)
_GUARD = f"{_HERE}/_guard.py"
_YIELD = dis.opmap["YIELD_VALUE"]
_CALLERS = {"_call_and_report", "end_one", "_run_callbacks", "insist"}
ERRORS: list[type[BaseException]] = [RuntimeError, MemoryError, RecursionError, ValueError, KeyError]


class Raising:
    """What was raised, and where."""

    def __init__(self) -> None:
        self.where = ""


@contextmanager
def raise_in_call(n: int, error: type[BaseException]) -> Iterator[Raising]:
    """Raise at the start of the n-th call. Which function that was, or none, stands in the result."""
    raising, left = Raising(), n

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_HERE) or code.co_filename == _GUARD:
            return
        if code.co_code[frame.f_lasti] == _YIELD:
            return  # a generator that is closed, at any time: nothing of it can raise there
        caller = frame.f_back
        if caller is not None and caller.f_code.co_name in _CALLERS:  # a callback, which has to be called to answer
            return
        left -= 1
        if left < 0 and not raising.where:
            sys.setprofile(None)
            raising.where = f"{Path(code.co_filename).name}:{code.co_name}"
            raise error(f"raised in {raising.where}")

    sys.setprofile(profile)
    try:
        yield raising
    finally:
        sys.setprofile(None)
