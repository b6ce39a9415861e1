"""Which systems can follow virtual time: those that have no thread and no event loop of their own."""

from __future__ import annotations

from .._files.complaints import ScenarioError


class NeedsRealTime(ScenarioError):
    """This system has threads or an event loop of its own, which do not follow virtual time: run it with ``--real``."""

    def __init__(self, colour: str) -> None:
        text = f"{colour} does not follow virtual time: add --real, or call play_real(...)"
        super().__init__("", None, "", f"a system of {text}")


def check_virtual(factory: object) -> None:
    """Insist that this factory's system can be run in virtual time.

    Raises:
        NeedsRealTime: it cannot.
    """
    needs = getattr(factory, "needs_real_time", "")
    if needs:
        raise NeedsRealTime(needs)
