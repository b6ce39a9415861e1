"""The catalogue of scenarios: every row has its file, every file plays well, and nothing in it goes wrong for nothing."""

import re
from collections import Counter
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from offload.instruments import HOOKS
from offload.testing.scenarios import play, read, read_text, to_toml
from offload.testing.scenarios._files import SUFFIX
from offload.testing.scenarios._program import FaultKind

HERE = Path(__file__).parent
CATALOGUE = HERE
TRACK_RECORD = HERE.parents[1] / "docs" / "track-record.md"
SEEDS, MORE_SEEDS = range(1, 4), range(4, 11)

ROWS = range(1, 58)
TOLD_ELSEWHERE = {
    54: "a lock that expires needs a lease that several instances share",
    55: "a race for a lock needs several instances",
    57: "the fuzz: test_fuzz.py",
}
"""Rows without a file, and why."""
NOT_IN_THE_FORMAT = {
    6: "an answer in the very tick of the deadline may go either way; `status` names one",
    27: "a handle that is dropped: the users of a scenario keep theirs",
    35: "BaseException, KeyboardInterrupt: `fail`, `torn` and `peer_death` raise an OSError, alone or in a group",
    49: "the scope is cancelled before the pipeline opens: a scenario begins when it is open",
    50: "more blocks at once than the budget: such a file is refused when it is read",
}
"""Cases of a row that has a file but are told in Python only (test_catalogue_in_python.py), and why."""

FILES = sorted(path for path in CATALOGUE.glob(f"*{SUFFIX}") if not path.name.startswith("maru-"))
"""Those with a page store play with --real only: test_maru.py."""
SCENARIOS = {path.name.removesuffix(SUFFIX): read(path) for path in FILES}
by_file = pytest.mark.parametrize("name", SCENARIOS)


def rows_of(name):
    found = re.match(r"s(\d\d)", name)
    return {int(found[1])} if found else set()


# --- what there is ------------------------------------------------------------------------------------------------


def test_every_row_has_its_file_or_its_reason():
    told = set().union(*[rows_of(name) for name in SCENARIOS])
    assert sorted(set(ROWS) - told) == sorted(TOLD_ELSEWHERE)
    assert told >= set(NOT_IN_THE_FORMAT)


def test_names_are_unique_and_begin_with_the_row():
    titles = [scenario.name for scenario in SCENARIOS.values()]
    assert len(set(titles)) == len(titles)
    for name, scenario in SCENARIOS.items():
        row = name.partition("-")[0]
        assert not rows_of(name) or scenario.name.startswith(f"{row.upper()[:3]}{row[3:]} "), name


@by_file
def test_a_file_says_what_would_be_lost(name):
    assert 60 <= len(SCENARIOS[name].about) <= 260
    assert SCENARIOS[name].about.endswith(".")
    assert SCENARIOS[name].expect


def test_every_hook_and_every_fault_is_used():
    faults = [fault for scenario in SCENARIOS.values() for fault in scenario.fault]
    assert set(HOOKS) - {fault.at_hook for fault in faults} == set()
    assert set(get_args(FaultKind)) - {fault.do for fault in faults} == set()


# --- that it holds ------------------------------------------------------------------------------------------------


@by_file
def test_it_plays_well_under_its_own_seed_and_others(name):
    plays_well(name, [SCENARIOS[name].seed, *SEEDS])


@pytest.mark.long
@by_file
def test_it_plays_well_under_more_seeds(name):
    plays_well(name, MORE_SEEDS)


def plays_well(name, seeds):
    for seed in seeds:
        report = play(SCENARIOS[name], seed, base=CATALOGUE)
        assert not report.violations, (seed, report.violations)


CHANGES_NOTHING = {"s02b-happy-weak": "what goes wrong in it finds nothing that it may take: that is the claim"}


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.fault])
def test_without_what_goes_wrong_its_expectations_do_not_hold(name):
    """Or else they would not show that anything was withstood."""
    harmless = msgspec.structs.replace(SCENARIOS[name], fault=[])
    report = play(harmless, base=CATALOGUE)
    broken = {violation.rule for violation in report.violations}
    if name in CHANGES_NOTHING:
        assert broken == set(), "it does show: take it off the list"
    else:
        assert broken == {"expect"}


@by_file
def test_written_and_read_again_it_is_the_same(name):
    assert read_text(to_toml(SCENARIOS[name])) == SCENARIOS[name]


# --- the track record ---------------------------------------------------------------------------------------------


def record():
    """The tables of the page: each issue with the files that tell it; none where it cannot be told."""
    found = {}
    for line in TRACK_RECORD.read_text().splitlines():
        if line.startswith("| ") and "#" in line:
            issues, *rest = [cell.strip() for cell in line.strip("|").split("|")]
            files = re.findall(r"`([\w-]+)`", rest[1]) if len(rest) == 3 else []
            for issue in issues.split(", "):
                assert issue not in found, f"{issue} is there twice"
                found[issue] = files
    return found


def test_the_track_record_and_the_files_agree():
    told = {}
    for name, scenario in SCENARIOS.items():
        for issue in scenario.upstream:
            told.setdefault(issue, []).append(name)
    assert {issue: sorted(files) for issue, files in record().items() if files} == {
        issue: sorted(files) for issue, files in told.items()
    }


def test_every_file_of_the_track_record_names_its_issue():
    named = Counter(name for files in record().values() for name in files)
    assert sorted(named) == sorted(name for name in SCENARIOS if name.startswith("up-"))
