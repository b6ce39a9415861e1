"""The fuzz of :mod:`fuzz`: many seeds, and that it is neither blind nor moody."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

SHORT, LONG = 1_000, 20_000

MUST_FIRE = [
    *[f"cancel at {hook}" for hook in fuzz.HOOKS],
    "cancel at a time",
    "cancel abandoned",
    "waiter abandoned",
    "evicted from the source",
    "lock taken",
    "policy raised",
    "pipeline full",
    "pipeline closed",
    "drain",
    *[f"ending: {how}" for how in ("leave", "aclose", "cancel", "raise")],
    *[f"tier: {what}" for what in ("error", "group", "unproven", "hang", "gate", "room", "too few", "too many")],
    *[f"end: {end}" for end in ("complete", "cancelled", "failed DrainUnproven", "failed DestinationFull")],
    "end: blocks evicted",
]


def test_every_invariant_holds_and_every_disturbance_fires():
    bad, fired = fuzz.play_many(range(SHORT))
    assert not bad, fuzz.complaint(bad)
    assert not [what for what in MUST_FIRE if not fired[what]]


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_every_invariant_holds_for_many_more(part):
    each = (LONG - SHORT) // 10
    bad, _ = fuzz.play_many(range(SHORT + part * each, SHORT + (part + 1) * each))
    assert not bad, fuzz.complaint(bad)


def digest_of(first, last):
    """What happened in some seeds, in short."""
    digest = hashlib.blake2b()
    for seed in range(first, last):
        report = fuzz.play(seed)
        digest.update(repr((seed, report.events, sorted(report.fired.items()), sorted(report.ends.items()))).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("seeds", [60, pytest.param(3_000, marks=pytest.mark.long)])
def test_a_seed_goes_the_same_way_in_another_process(seeds):
    script = f"import test_fuzz_pipeline as t; print(t.digest_of(0, {seeds}))"
    here = Path(__file__).parent
    found = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(here)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_a_failing_seed_prints_the_line_that_repeats_it(monkeypatch, capsys):
    monkeypatch.setattr(fuzz.Run, "judge_causes", lambda run: run.ledger.wrong("I9: planted"))
    bad, _ = fuzz.play_many([11])
    assert "repeat it: python tests/fuzz.py 11" in fuzz.complaint(bad)
    assert fuzz.main(["11"]) == 1
    assert "I9: planted" in capsys.readouterr().out
