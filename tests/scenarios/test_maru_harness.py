"""What the harness has of the page store: the process, what is refused, the command; and that it bites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from maru import HeldBatch, MaruHandler, NoAnswer
from maru._client.operations.state import ClientState
from offload.cli import main
from offload.testing.scenarios import (
    NeedsProcesses,
    NotForReal,
    Report,
    Scenario,
    ScenarioError,
    play,
    play_real,
    read,
    read_text,
    to_toml,
)
from offload.testing.scenarios import _page_store_tier as maru_tiers
from offload.testing.scenarios._files import SUFFIX
from offload.testing.scenarios._page_store import NoPageStore, PageStore
from offload.testing.scenarios._page_store_tier import PageStoreTier

CATALOGUE = Path(__file__).parent


def left_behind() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"offload-maru-{os.getpid()}-")}


def good(scenario: Scenario) -> Report:
    report = play_real(scenario)
    assert report.good, (report.violations, report.trace)
    return report


# --- what it is made of -------------------------------------------------------------------------------------------


def test_a_server_is_killed_stopped_started_and_ends_by_itself() -> None:
    store = PageStore(4 << 20)
    try:
        endpoint = store.endpoint
        assert store.alive and endpoint.startswith("ipc:///")
        assert os.stat(store.directory).st_mode & 0o077 == 0  # nobody else's
        store.kill()
        assert not store.alive
        store.launch()
        store.wait_ready()
        assert (store.endpoint, store.starts) == (endpoint, 2)
        store.stand_still()
        store.stand_still()
    finally:
        wrong = store.end()  # also one that stands still
    assert wrong == ""
    assert not os.path.exists(store.directory)
    assert store.end() == ""


def test_a_server_that_does_not_come_up_says_why_and_leaves_nothing() -> None:
    before = left_behind()
    with pytest.raises(NoPageStore, match="no-such-option"):
        PageStore(4 << 20, "--no-such-option")
    assert left_behind() == before


@pytest.mark.parametrize("call", ["__aenter__", "alloc_pages", "batch_put"])
def test_a_first_answer_that_is_late_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A machine that is busy for longer than the patience of a scenario: nothing of the scenario has begun yet."""
    calls, really = [], getattr(MaruHandler, call)

    async def late(self: MaruHandler, *args: Any) -> Any:
        calls.append(call)
        if call != "__aenter__" or len(calls) > 1:
            answer = await really(self, *args)
        if len(calls) == 1:
            raise NoAnswer("it came too late")
        return answer

    monkeypatch.setattr(MaruHandler, call, late)
    good(read_text(to_toml(SMALL).replace('kind = "maru"', 'kind = "maru"\nholds = "old.{0..1}"')))
    assert len(calls) >= 2


def test_a_server_that_died_by_itself_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = PageStoreTier.settle

    async def settle_and_kill(self: PageStoreTier) -> None:
        await settle(self)
        self.model.store.kill()

    monkeypatch.setattr(PageStoreTier, "settle", settle_and_kill)
    report = play_real(SMALL)
    assert [(one.rule, "ended by itself: -9" in one.text) for one in report.violations] == [("crash", True)]


# --- what cannot be -----------------------------------------------------------------------------------------------

SMALL = read_text("""
name = "small"
limit_ms = 30000
[tier.host]
kind = "maru"
capacity = 8
[[step]]
store = { id = "a", per = 2 }
[[expect]]
status = { a = "COMPLETE" }
""")


def test_virtual_time_cannot_play_it_and_says_how_it_is_played() -> None:
    with pytest.raises(NeedsProcesses, match=r"^tier\.host\.kind: .*add --real") as caught:
        play(SMALL)
    assert caught.value.tier == "host"


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ('[[fault]]\nat_ms = 1\ndo = "torn"', "fault[0].do: 'torn' is not possible in a page store"),
        ('[[fault]]\nat_ms = 1\ndo = "fail"\nkeys = "a.0"', "fault[0].do: in a page store a whole copy fails"),
        ('[pipeline.main]\nto = "host"\n[pipeline.up]\nfrom = "host"\nto = "device"', "from which no pipeline starts"),
        (
            '[tier.other]\nat_once = 0.5\n[pipeline.main]\nto = "host"',
            "tier.other.at_once: applies to the questions of an engine",
        ),
        (
            '[tier.other]\n[pipeline.main]\nto = "other"\npolicies = [{ do = "lock", at_once = 1.0 }]',
            "pipeline.main.policies[0].at_once: applies to a policy that waits",
        ),
        ('[tier.other]\nlease_ms = 100\n[pipeline.main]\nto = "host"', "tier.other.lease_ms: is about page stores"),
        (
            '[pipeline.main]\nto = "host"\npolicies = [{ do = "present", keys = "a.0" }]',
            "pipeline.main.policies[0].keys: a page store is asked by the filter",
        ),
    ],
)
def test_what_makes_no_sense_with_a_page_store_is_said_with_its_place(more: str, complaint: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        read_text(to_toml(SMALL) + more)
    assert complaint in str(caught.value)


def test_a_page_store_evicts_in_one_way() -> None:
    with pytest.raises(ScenarioError, match="evicts the least recently used keys"):
        read_text(to_toml(SMALL).replace('kind = "maru"', 'kind = "maru"\neviction = "adaptive"'))


def test_blocks_that_are_there_are_filtered_by_asking_the_store() -> None:
    text = (
        to_toml(SMALL)
        + """
[pipeline.main]
to = "host"
policies = [{ do = "present" }]
[[step]]
at_ms = 300
store = { id = "b", keys = "a.{0..1}, new", per = 3 }
"""
    )
    report = good(
        read_text(text.replace("status = {", 'result = { b = { completed = 1, reasons = ["present"] } }\nstatus = {'))
    )
    assert report.counts["copied"] == 3


# --- the command --------------------------------------------------------------------------------------------------


def run(*args: object) -> Any:
    return CliRunner().invoke(main, ["scenario", "run", *map(str, args)])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "store.scenario.toml").write_text(to_toml(SMALL))
    plain = msgspec.structs.replace(SMALL, tier={}, name="plain", not_for_real="it hangs on one tick.")
    (tmp_path / "plain.scenario.toml").write_text(to_toml(plain))
    return tmp_path


def test_without_real_a_page_store_is_left_out_of_a_directory_and_refused_alone(files: Path) -> None:
    done = run(files)
    assert done.exit_code == 0, done.output
    assert "--  small" in done.output and "needs --real: host is a page store" in done.output
    alone = run(files / "store.scenario.toml")
    assert alone.exit_code == 2
    assert "add --real" in alone.output


def test_with_real_a_file_that_cannot_hold_there_answers_why(files: Path) -> None:
    done = run("--real", files)
    assert done.exit_code == 0, done.output
    assert "ok  small" in done.output and "--  plain" in done.output and "it hangs on one tick." in done.output
    alone = run("--real", files / "plain.scenario.toml")
    assert alone.exit_code == 0 and "it hangs on one tick." in alone.output
    as_json = json.loads(run("--real", "--json", files / "plain.scenario.toml").stdout)
    assert as_json["left_out"] == [{"file": str(files / "plain.scenario.toml"), "why": "it hangs on one tick."}]


def test_play_real_raises_what_a_file_says_of_itself(files: Path) -> None:
    with pytest.raises(NotForReal, match=r"^not_for_real: it hangs on one tick"):
        play_real(read(files / "plain.scenario.toml"))


def test_pytest_plays_a_file_with_a_page_store_for_real(tmp_path: Path) -> None:
    (tmp_path / "good.scenario.toml").write_text(to_toml(SMALL))
    (tmp_path / "bad.scenario.toml").write_text(to_toml(SMALL).replace('"COMPLETE"', '"CANCELLED"'))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "--seed 0 --real" in done.stdout


# --- planted: that it bites ---------------------------------------------------------------------------------------


def planted(name: str, monkeypatch: pytest.MonkeyPatch, owner: Any, attribute: str, fault: Any) -> set[str]:
    monkeypatch.setattr(owner, attribute, fault)
    scenario = msgspec.structs.replace(read(CATALOGUE / f"{name}{SUFFIX}"), limit_ms=4_000)  # who never ends is left
    return {violation.rule for violation in play_real(scenario).violations}


def test_planted_a_lease_that_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pins of a reader stay: its pages can never be deleted again."""
    monkeypatch.setattr(maru_tiers, "_REST_TIMEOUT", 4.0)
    rules = planted("maru-server-stands-still", monkeypatch, HeldBatch, "release", lambda self: _KEPT.append(self))
    assert "I1" in rules


def test_planted_pages_that_are_free_under_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold that holds nothing: what is read the second time is gone, or another block."""
    held = MaruHandler.hold_pages

    async def let_go_at_once(self: MaruHandler, keys: Any) -> HeldBatch:
        batch = await held(self, keys)
        pins, batch._pins = batch._pins, []
        self._driver.give_back(pins)
        return batch

    monkeypatch.setattr(HeldBatch, "check", lambda self: None)
    rules = planted("maru-lease-held-over-an-eviction", monkeypatch, MaruHandler, "hold_pages", let_go_at_once)
    assert rules & {"model", "bytes"}


def test_planted_pages_of_who_was_cancelled_that_are_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maru_tiers, "_REST_TIMEOUT", 4.0)
    rules = planted("maru-cancelled-in-every-hold", monkeypatch, ClientState, "free", lambda self, pages: None)
    assert rules & {"I1", "hang"}


_KEPT: list[Any] = []
