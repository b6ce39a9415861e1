"""Which systems can follow virtual time: those that have no thread and no event loop of their own."""

from __future__ import annotations

from .._files.complaints import ScenarioError
from .._program import Scenario


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


def check_virtual(factory: object, scenario: Scenario | None = None) -> None:
    """Insist that this factory's system can be run in virtual time, and this scenario.

    Raises:
        NeedsRealTime: the system cannot.
        NeedsProcesses: the scenario cannot.
    """
    if scenario is not None and (store := page_store_of(scenario)):
        raise NeedsProcesses(store)
    needs = getattr(factory, "needs_real_time", "")
    if needs:
        raise NeedsRealTime(needs)


def page_store_of(scenario: Scenario) -> str:
    """The tier that is a page store, if there is one."""
    return next((name for name, spec in scenario.tier.items() if spec.kind == "maru"), "")
