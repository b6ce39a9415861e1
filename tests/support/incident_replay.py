"""Hit a fault in a live process, read what its recorder has left, and play it again in virtual time.

python -m tests.support.incident_replay [FAULT ...]       a line for each fault
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import pytest

from offload._recorder.recording import Recording, read_ring
from offload._recorder.records import Noted
from offload.testing.scenarios import NothingRecorded, Report, Scenario, from_incident, play

from . import incident_faults

ROOT = Path(__file__).parents[2]
LAST = (None, 1.0, 0.2, 0.05, 0.02, 0.01)
"""Seconds at the end of the recording that are played, one after the other: the whole, then less of it."""


@attrs.frozen
class Hit:
    """A fault that was hit in a live process."""

    fault: str
    recording: Recording

    @property
    def rule(self) -> str:
        """What was broken."""
        return next(entry.record.rule for entry in reversed(self.recording.entries) if isinstance(entry.record, Noted))


def hit(fault: str, place: str, driver: str, seed: int, directory: Path) -> Hit | None:
    """Run a process under load until the fault is hit there; ``None``: it was not."""
    ring = directory / f"{fault}-{place}-{driver}-{seed}.ring"
    words = [sys.executable, "-m", "tests.support.incident_load", fault, place, driver, str(ring), str(seed)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 0:
        return None
    assert done.returncode == -signal.SIGKILL, done.stderr
    return Hit(fault, read_ring(ring.read_bytes(), str(ring)))


def replayed(one: Hit) -> tuple[Scenario, Report, Report]:
    """The scenario of a hit, played with the fault, and without: of the first part of the recording that breaks the same."""
    for last in LAST:
        try:
            scenario = from_incident(one.recording, name=one.fault, last=last)
        except NothingRecorded:  # a part so short that no store began in it
            break
        with pytest.MonkeyPatch.context() as patch:
            incident_faults.FAULTS[one.fault].patch(patch)
            broken = play(scenario)
        if same(one, broken) or one.rule == "hang":
            break
    return scenario, broken, play(scenario)


def same(one: Hit, broken: Report) -> bool:
    """Whether the replay breaks the rule that was broken live."""
    return one.rule in {violation.rule for violation in broken.violations}


def main(names: list[str]) -> None:
    """Print how each fault fared."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        for name in names or list(incident_faults.FAULTS):
            for driver in incident_faults.FAULTS[name].drivers:
                for place in ("memory", "file"):
                    print(f"{name} {place} {driver}:", _fare(name, place, driver, Path(directory)), flush=True)


def _fare(name: str, place: str, driver: str, directory: Path) -> str:
    one = hit(name, place, driver, 1, directory)
    if one is None:
        return "not hit"
    scenario, broken, sound = replayed(one)
    rules = sorted({violation.rule for violation in broken.violations})
    told = "replays" if same(one, broken) else "does not replay"
    clean = "clean without it" if sound.good else f"not clean without it: {sound.violations[0]}"
    return f"{one.rule}, {told} ({', '.join(rules)}), {len(scenario.step)} steps, {len(scenario.fault)} faults, {clean}"


if __name__ == "__main__":
    main(sys.argv[1:])
