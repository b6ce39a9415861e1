"""The page store in the harness: a real server, killed, stopped and robbed of its answers, judged by the same oracle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offload.testing.scenarios import Report, Scenario, play_real, read, read_text, to_toml
from offload.testing.scenarios._files import SUFFIX

CATALOGUE = Path(__file__).parent
FILES = sorted(CATALOGUE.glob(f"maru-*{SUFFIX}"))
SCENARIOS = {path.name.removesuffix(SUFFIX): read(path) for path in FILES}
BRIEF = {"maru-server-killed", "maru-lost-answers", "maru-full", "maru-engine-server-dies"}
"""Of each kind of fault one. The plugin plays all of them beside this, and here they take too long for every run."""


def left_behind() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"offload-maru-{os.getpid()}-")}


def good(scenario: Scenario, **rest: Any) -> Report:
    report = play_real(scenario, base=CATALOGUE, **rest)
    assert report.good, (report.violations, report.trace)
    return report


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BRIEF else [pytest.mark.long]) for name in SCENARIOS]
)
def test_it_holds_with_a_real_server_and_leaves_nothing(name: str) -> None:
    before = left_behind()
    report = good(SCENARIOS[name])
    assert report.planned == 0 or report.counts["fired"] > 0
    assert left_behind() <= before


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_file_says_what_would_be_lost_and_is_written_as_it_is_read(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario.name.startswith("Maru: ")
    assert 60 <= len(scenario.about) <= 260 and scenario.about.endswith(".")
    assert read_text(to_toml(scenario)) == scenario


def test_every_file_with_a_page_store_is_called_so() -> None:
    assert len(SCENARIOS) >= 12
    for path in CATALOGUE.glob(f"*{SUFFIX}"):
        stores = [name for name, spec in read(path).tier.items() if spec.kind == "maru"]
        assert bool(stores) == path.name.startswith("maru-"), path.name
