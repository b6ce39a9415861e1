"""``offload scenario ...``: what a person and a machine see, and the exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
from click.testing import CliRunner, Result

from offload.cli import main

CATALOGUE = Path(__file__).parent
CACHES = "tests.support.scenario_caches"
TESTS = str(Path(__file__).parents[1] / "support")
FOUR = """
format = 1
name = "cancel one of four"
about = "The others are stored."
seed = 7
[tier.host]
latency_ms = 2
[pipeline.main]
to = "host"
flush_ms = 2
[[step]]
at_ms = 0
store = { id = "a{0..3}", keys = "k{0..3}", per = 1 }
[[fault]]
at_hook = "sweep_claim_gap"
who = "a2"
do = "cancel"
[[expect]]
status = { a0 = "COMPLETE", a2 = "CANCELLED" }
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(TESTS)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "four.scenario.toml").write_text(FOUR)
    (tmp_path / "wrong.scenario.toml").write_text(FOUR.replace('a0 = "COMPLETE"', 'a0 = "FAILED"'))
    (tmp_path / "slow.scenario.toml").write_text(FOUR.replace("latency_ms = 2", "latency_ms = 3"))
    return tmp_path


def scenario(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(main, ["scenario", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done


def said(*arguments: object, code: int = 0) -> Any:
    return json.loads(scenario(*arguments, "--json", code=code).stdout)


# --- run ----------------------------------------------------------------------------------------------------------


def test_more_seeds_than_anybody_lives_to_see_are_refused(tmp_path: Path) -> None:
    output = scenario("run", "four.scenario.toml", "--seeds", "0..999999999999999999", code=2).output
    assert "has more than 1,000,000,000,000 seeds" in output


def test_a_scenario_that_holds_is_ok(here: Path) -> None:
    output = scenario("run", "four.scenario.toml").output
    assert output.startswith("ok  cancel one of four\n")
    assert "COMPLETE 3, CANCELLED 1" in output
    assert "1 of 1 hit something alive: cancel at sweep_claim_gap 1" in output
    assert "4 ms virtual" in output


def test_what_goes_wrong_is_said_with_the_one_line_that_repeats_it(here: Path) -> None:
    output = scenario("run", "wrong.scenario.toml", code=1).output
    assert output.startswith("WRONG  cancel one of four\n")
    assert "expect  expect[0].status.a0" in output
    [line] = [line for line in output.splitlines() if "repeat it" in line]
    command = line.partition("repeat it: ")[2].split()
    assert command == ["offload", "scenario", "run", "wrong.scenario.toml", "--seed", "7"]
    assert scenario(*command[2:], code=1).output.splitlines()[0] == "WRONG  cancel one of four"


def test_a_directory_is_all_the_scenarios_in_it(here: Path) -> None:
    document = said("run", ".", code=1)
    assert [file["file"] for file in document["files"]] == [
        "four.scenario.toml",
        "slow.scenario.toml",
        "wrong.scenario.toml",
    ]
    assert [file["good"] for file in document["files"]] == [True, True, False]
    assert document["seeds"] == 3 and not document["good"]
    assert document["violations"][0]["repeat"] == "offload scenario run wrong.scenario.toml --seed 7"


def test_the_document_has_what_was_promised(here: Path) -> None:
    document = said("run", "four.scenario.toml", "--seeds", "0..9")
    assert document["seeds"] == 10
    assert (document["first_seed"], document["last_seed"]) == (0, 9)
    assert document["faults"] == {
        "planned": 10,
        "fired": 10,
        "by_kind": {"cancel at sweep_claim_gap": {"planned": 10, "fired": 10}},
    }
    assert document["violations"] == []
    assert len(document["trace_hash"]) == 32
    assert "hook pre_claim" in document["reached"]
    assert "seconds" in document and "never_reached" in document


def test_the_trace_hash_does_not_depend_on_the_processes(here: Path) -> None:
    hashes = {
        said("run", "four.scenario.toml", "--seeds", "0..19", *options)["trace_hash"]
        for options in ((), ("--processes", 1), ("--processes", 2))
    }
    assert len(hashes) == 1
    assert said("run", "four.scenario.toml", "--seeds", "0..18")["trace_hash"] not in hashes


def test_junit_has_a_suite_for_each_file(here: Path) -> None:
    scenario("run", ".", "--seeds", "0..2", "--junit", "out.xml", code=1)
    root = Xml.parse(here / "out.xml").getroot()
    assert [(suite.get("name"), suite.get("tests"), suite.get("failures")) for suite in root] == [
        ("four.scenario.toml", "3", "0"),
        ("slow.scenario.toml", "3", "0"),
        ("wrong.scenario.toml", "3", "3"),
    ]


def test_traces_are_of_one_run(here: Path) -> None:
    scenario("run", "four.scenario.toml", "--trace", "o.json", "--save-trace", "o.trace")
    assert json.loads((here / "o.json").read_text())
    assert (here / "o.trace").read_text().startswith("# offload trace 1")
    output = scenario("run", "four.scenario.toml", "--seeds", "0..3", "--trace", "o.json", code=2).output
    assert "--trace shows one run, not 4" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing.scenario.toml"], "there is no such file"),
        (["four"], "did you mean four.scenario.toml?"),
        (["empty"], "no scenario in this directory"),
        (["four.scenario.toml", "--seeds", "9..1"], "counts down: write 1..9"),
        (["four.scenario.toml", "--seeds", "ten"], "write A..B, both included"),
        (["four.scenario.toml", "--seed", "1", "--seeds", "1..2"], "exclude each other"),
        (["four.scenario.toml", "--system", "nothing"], "use module:factory"),
        (["four.scenario.toml", "--system", "no_such_cache:open"], "there is no module no_such_cache"),
        (["four.scenario.toml", "--trace", "no/such/dir.json"], "no/such/dir.json: there is no directory no/such"),
        (["senseless.scenario.toml"], "senseless.scenario.toml:6: fault[0].who"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_told_and_ends_with_2(here: Path, arguments: list[str], complaint: str) -> None:
    (here / "empty").mkdir()
    (here / "senseless.scenario.toml").write_text(
        'format = 1\nname = "x"\n[[fault]]\nat_ms = 1\ndo = "cancel"\nwho = "nobody"\n'
    )
    assert complaint in scenario("run", *arguments, code=2).output


def test_another_system_is_played_with(here: Path) -> None:
    (here / "plain.scenario.toml").write_text(
        'format = 1\nname = "plain"\n[tier.host]\nlatency_ms = 2\n[[step]]\nstore = { id = "a{0..2}" }\n'
        '[[step]]\nat_ms = 9\nload = { keys = "a0.0" }\n[[fault]]\nat_ms = 0\ndo = "flip"\nkeys = "a0.0"\n'
    )
    assert scenario("run", "plain.scenario.toml", "--system", f"{CACHES}:careful").output.startswith("ok")
    output = scenario("run", "plain.scenario.toml", "--system", f"{CACHES}:trusting", code=1).output
    assert "bytes" in output
    assert f"--system {CACHES}:trusting" in output


def test_a_fault_whose_seam_a_system_lacks_is_an_error_at_its_line(here: Path) -> None:
    output = scenario("run", "four.scenario.toml", "--system", f"{CACHES}:deaf", code=2).output
    assert "four.scenario.toml:1" in output and "fault[0].at_hook: the system lacks the seam 'hook'" in output


def test_the_catalogue_is_listed_and_shown(here: Path) -> None:
    listed = said("list", CATALOGUE)
    assert len(listed) == len(list(CATALOGUE.glob("*.scenario.toml"))) > 0
    assert all(entry["name"] and entry["containers"] >= 0 for entry in listed)
    for entry in listed:
        assert scenario("show", entry["file"]).output.startswith(entry["name"])


# --- show, list, schema -------------------------------------------------------------------------------------------


def test_show_tells_the_program_in_words(here: Path) -> None:
    output = scenario("show", "four.scenario.toml").output
    assert "store a{0..3}: 1 block each (k{0..3}), weak" in output
    assert "at sweep_claim_gap  cancel a2" in output
    assert "a copy takes 2 ms" in output
    assert "a0 COMPLETE" in output


def test_show_steps_writes_out_the_load(here: Path) -> None:
    (here / "mix.scenario.toml").write_text('format = 1\nname = "mix"\n[load.mix]\ncontainers = 5\n')
    assert "5 containers of up to 6 blocks" in scenario("show", "mix.scenario.toml").output
    assert scenario("show", "mix.scenario.toml", "--steps").output.count("store ") == 5
    document = json.loads(scenario("show", "mix.scenario.toml", "--steps", "--json").output)
    assert len([step for step in document["step"] if "store" in step]) == 5


def test_list_says_what_there_is(here: Path) -> None:
    output = scenario("list").output
    assert "cancel one of four" in output and "The others are stored." in output
    assert output.rstrip().endswith("3 scenarios")


def test_schema_is_json(here: Path) -> None:
    assert "properties" in json.dumps(json.loads(scenario("schema").output))


# --- fuzz ---------------------------------------------------------------------------------------------------------


def test_fuzz_is_the_same_for_any_number_of_processes(here: Path) -> None:
    one, two = (said("fuzz", "--seeds", "0..29", "--processes", processes) for processes in (1, 2))
    assert one["trace_hash"] == two["trace_hash"]
    assert one["seeds"] == 30 and one["faults"]["fired"] > 100
    assert one["good"] and one["violations"] == []


def test_fuzz_tells_what_was_done_and_reached(here: Path) -> None:
    output = scenario("fuzz", "--seeds", "0..19").output
    for words in (
        "0..19 (20)",
        "seeds a minute",
        "hit something alive",
        "cancel_waiter",
        "hooks reached",
        "trace hash",
    ):
        assert words in output
    assert "ok: nothing was wrong in 20 seeds" in output


def test_fuzz_goes_on_for_a_time(here: Path) -> None:
    document = said("fuzz", "--for", "1s", "--seeds", "100..1000000")
    assert document["first_seed"] == 100
    assert document["last_seed"] == 100 + document["seeds"] - 1


def test_what_fuzz_finds_is_kept_and_shrinks(here: Path) -> None:
    """The pipelines of a worker cannot be patched from here, so that a cache of the tests goes wrong."""
    document = said("fuzz", "--seeds", "0..9", "--system", f"{CACHES}:hasty", "--keep", "found", code=1)
    assert document["saved"]
    first = document["violations"][0]
    assert first["repeat"].startswith(f"offload scenario fuzz --seeds {first['seed']}..{first['seed']}")
    assert sorted(str(path.relative_to(here)) for path in (here / "found").iterdir()) == sorted(document["saved"])
    small = said(
        "shrink",
        document["saved"][0],
        "--system",
        f"{CACHES}:hasty",
        "--out",
        "small.scenario.toml",
        # In real time, of which a run that waits for a processor takes any amount: given up, it would be another violation.
        "--watchdog",
        "10min",
        "--budget",
        "10min",
    )
    assert small["steps"]["after"] < small["steps"]["before"]
    assert small["repeat"] == f"offload scenario run small.scenario.toml --system {CACHES}:hasty"
    assert '\nabout = "Breaks ' in (here / "small.scenario.toml").read_text()
    scenario(*small["repeat"].split()[2:], code=1)


def test_what_goes_well_is_not_shrunk(here: Path) -> None:
    assert "there is nothing to shrink" in scenario("shrink", "four.scenario.toml", code=2).output
    assert "name a FILE" in scenario("shrink", code=2).output


def test_shrink_shows_what_it_saves(here: Path) -> None:
    output = scenario("shrink", "wrong.scenario.toml", code=0).output
    assert (here / "regression-7.scenario.toml").exists()
    assert "offload scenario run regression-7.scenario.toml" in output
    assert 'a0 = "FAILED"' in output


def test_an_interrupt_ends_fuzz_with_what_was_found(here: Path) -> None:
    command = [sys.executable, "-m", "offload", "scenario", "fuzz", "--for", "10min", "--json"]
    # A shell has what it runs in the background ignore the signal, and children inherit that.
    command = ["env", "--default-signal=INT", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0) as running:
        while not (children := _workers(running.pid)):
            assert running.poll() is None
        os.killpg(running.pid, signal.SIGINT)
        output, errors = running.communicate(timeout=300)
    assert running.returncode == 130, errors
    document = json.loads(output)
    assert document["interrupted"] and not document["good"]
    assert errors == b"offload: ended by SIGINT\n"
    assert not any(child.exists() for child in children)


def _workers(pid: int) -> list[Path]:
    children = [Path("/proc") / child for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    found = []
    for child in children:
        with contextlib.suppress(OSError):  # something short-lived, which is gone already
            if b"_serve" in (child / "cmdline").read_bytes():
                found.append(child)
    return found


# --- diff ---------------------------------------------------------------------------------------------------------


def test_diff_finds_where_two_seeds_part(here: Path) -> None:
    document = said("diff", "four.scenario.toml", "--seed", 1, "--seed", 2, code=1)
    assert document["parting"]["left"] != document["parting"]["right"]
    output = scenario("diff", "four.scenario.toml", "--seed", 1, "--seed", 2, code=1).output
    assert f"they differ from event {document['parting']['event']} on:" in output
    assert said("diff", "four.scenario.toml", "--seed", 1, "--seed", 1)["same"]


def test_diff_compares_with_a_saved_trace(here: Path) -> None:
    scenario("run", "four.scenario.toml", "--save-trace", "run.trace")
    assert "the same" in scenario("diff", "four.scenario.toml", "run.trace").output
    told = scenario("diff", "slow.scenario.toml", "run.trace", code=1).output
    assert "they differ from event" in told and "on: at_ms" in told


@pytest.mark.parametrize("arguments", [["four.scenario.toml"], ["four.scenario.toml", "--seed", "1"]])
def test_diff_needs_two_runs(here: Path, arguments: list[str]) -> None:
    assert "two runs are needed" in scenario("diff", *arguments, code=2).output


# --- explore ------------------------------------------------------------------------------------------------------


def test_explore_tries_every_cancel_at_every_hook(here: Path) -> None:
    document = said("explore", "four.scenario.toml")
    assert document["variants"] == sum(
        sum(count for count in cell.values()) for row in document["table"]["cancel"].values() for cell in row.values()
    )
    assert document["table"]["cancel"]["pre_claim"]["a0"] == {"CANCELLED": 1}
    assert document["table"]["cancel"]["xfer_start"]["a0"] == {"COMPLETE": 1}
    assert document["good"]
    output = scenario("explore", "four.scenario.toml").output
    assert "sweep_claim_gap" in output and "37 variants, 0 wrong" in output


def test_explore_takes_other_actions_and_pairs(here: Path) -> None:
    every = said("explore", "four.scenario.toml", "--actions", "cancel,shut_down,evict,cancel_host")
    assert every["variants"] == 4 * 37
    assert set(every["table"]) == {"cancel", "shut_down", "evict", "cancel_host"}
    (here / "two.scenario.toml").write_text('format = 1\nname = "two"\n[[step]]\nstore = { id = "a{0..1}" }\n')
    single = said("explore", "two.scenario.toml")["variants"]
    assert said("explore", "two.scenario.toml", "--pairs")["variants"] > single
    assert "'sleep' is not an action" in scenario("explore", "four.scenario.toml", "--actions", "sleep", code=2).output


def test_what_explore_finds_can_be_repeated_and_saved(here: Path) -> None:
    (here / "plain.scenario.toml").write_text('format = 1\nname = "plain"\n[[step]]\nstore = { id = "a{0..2}" }\n')
    arguments = ["plain.scenario.toml", "--actions", "cancel_host", "--system", f"{CACHES}:hasty"]
    document = said("explore", *arguments, code=1)
    command = document["violations"][0]["repeat"].split()[2:]
    again = said(*command, "--save", "spot.scenario.toml", code=1)
    assert again["variants"] == 1
    assert again["violations"][0]["rule"] == document["violations"][0]["rule"]
    scenario("run", "spot.scenario.toml", "--system", f"{CACHES}:hasty", code=1)
    assert "is not a spot" in scenario("explore", arguments[0], *arguments[3:], "--only", "here", code=2).output
    assert "--actions" in scenario("explore", *arguments, "--only", "here", code=2).output


# --- check --------------------------------------------------------------------------------------------------------


def test_check_says_which_promises_a_cache_keeps(here: Path) -> None:
    document = said("check", f"{CACHES}:careful", "--for", "1s", "--processes", 1)
    verdicts = {promise["name"]: promise["verdict"] for promise in document["promises"]}
    assert document["seams"] == ["hook", "copy", "after"]
    assert "reserve" in document["lacking"]
    assert set(verdicts.values()) == {"ok", "not tested"}
    assert document["good"] and not (here / "scenario-check").exists()


def test_check_saves_what_repeats_each_violation(here: Path) -> None:
    output = scenario("check", f"{CACHES}:trusting", "--for", "1s", "--processes", 1, code=1).output
    assert "a flipped bit is never handed out" in output
    assert "Seams that it lacks" in output
    [line] = [line for line in output.splitlines() if "flip-1" in line]
    command = line.partition("repeat it: ")[2].split()
    assert scenario(*command[2:], code=1).output.startswith("WRONG")


def test_check_replaces_nothing_that_an_earlier_run_has_saved(here: Path) -> None:
    arguments = "check", f"{CACHES}:trusting", "--for", "1s", "--processes", 1
    scenario(*arguments, code=1)
    saved = sorted((here / "scenario-check").iterdir())
    for place in saved:
        place.write_text(place.read_text() + "# edited\n")
    scenario(*arguments, code=1)
    assert all("# edited" in place.read_text() for place in saved)


def test_check_survives_a_cache_that_hangs_for_real(here: Path) -> None:
    limits = "--for", "1s", "--watchdog", "1s", "--processes", 1
    output = scenario("check", f"{CACHES}:spinning", *limits, code=1).output
    assert "livelock" in output and "load" in output


def test_check_of_what_cannot_be_opened_says_so(here: Path) -> None:
    output = scenario("check", f"{CACHES}:broken", "--for", "1s", code=1).output
    assert "no memory for a cache" in output
    assert "stores nothing" in output


# --- the house ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "fuzz", "shrink", "diff", "explore", "check", "list", "show", "schema"])
def test_every_command_has_help(name: str) -> None:
    assert scenario(name, "--help").output.startswith("Usage:")
    assert name in scenario("--help").output


def test_help_imports_nothing_heavy() -> None:
    program = """
import sys
from click.testing import CliRunner
from offload.cli import main
assert CliRunner().invoke(main, ["scenario", "--help"]).exit_code == 0
loaded = {"torch", "numpy", "rich", "trio", "offload.testing.scenarios._play"} & set(sys.modules)
assert not loaded - {"trio"}, loaded
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
