"""Why a scenario cannot be played, as exceptions: each text says where, what is wrong, and the way out."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from offload._errors import OffloadError

from ._program import Scenario


@attrs.frozen
class Problem:
    """Something in a scenario that makes no sense."""

    path: str
    """Where: ``fault[2].who``, positions counted from 0."""
    text: str
    """What is wrong, and what to say instead."""


class ScenarioError(OffloadError, ValueError):
    """A scenario cannot be played: it is no such file, or it makes no sense. The text says where, what, and the way out."""

    def __init__(self, file: str, line: int | None, path: str, text: str, others: Iterable[str] = ()) -> None:
        place = f"{file}:{line}" if line is not None else file
        super().__init__(": ".join([part for part in (place, path, text) if part]))
        self.file = file
        """Its name; empty for one that was made in Python."""
        self.line = line
        """From 1; ``None`` where there is none."""
        self.path = path
        """Where in the scenario: ``fault[2].who``."""
        self.text = text
        """What is wrong, and the way out."""
        self.others: tuple[str, ...] = tuple(others)
        """What else is wrong, a line each."""


class NeedsRealTime(ScenarioError):
    """This system has threads or an event loop of its own, which do not follow virtual time: run it with ``--real``."""

    def __init__(self, colour: str) -> None:
        text = f"{colour} does not follow virtual time: add --real, or call play_real(...)"
        super().__init__("", None, "", f"a system of {text}")


class NeedsProcesses(ScenarioError):
    """This scenario has a page store, whose server is a process of its own: run it with ``--real``."""

    def __init__(self, tier: str) -> None:
        text = "a page store is a process of its own, with sockets, which do not follow virtual time: add --real"
        super().__init__("", None, f"tier.{tier}.kind", text)
        self.tier: str = tier


class NotForReal(ScenarioError):
    """A scenario that says itself why it cannot hold on the clock of the wall; ``text`` is what it says."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__("", None, "not_for_real", scenario.not_for_real)


class NoSuchSystem(ValueError):
    """There is no factory of that name; the text says what there is instead."""
