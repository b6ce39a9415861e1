"""How commands end when they are asked to: one line, the exit code of the signal, no process and no file left.

Each is a real process, in the middle of its work: not after a time, but when what it works with is there to be seen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import pytest

PATIENCE: Final = 60.0
SHARED: Final = Path("/dev/shm")
CATALOGUE: Final = Path(__file__).parents[1] / "scenarios"
CODES: Final = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="looks for what is left in /dev/shm")


@attrs.define(eq=False)
class Running:
    """A command that has been started, in a group of its own, in a directory of its own."""

    process: subprocess.Popen[str]
    home: Path
    silent: socket.socket
    """Listens, and never answers."""

    @property
    def children(self) -> set[int]:
        """Processes that it has started, and those that these have started."""
        return set(_below(self.process.pid))

    @property
    def shared(self) -> list[Path]:
        """What it has in /dev/shm: the names carry its number."""
        return sorted(SHARED.glob(f"*-{self.process.pid}-*"))

    @property
    def temporary(self) -> list[Path]:
        """What it has among temporary files."""
        return sorted(temporary_files(self.home).iterdir())

    def accepted(self) -> bool:
        """Whether it has come to who listens."""
        try:
            self.silent.accept()[0].detach()
        except BlockingIOError:
            return False
        return True


def _below(parent: int) -> Iterator[int]:
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, children.read_text().split()):
                yield pid
                yield from _below(pid)


def temporary_files(home: Path) -> Path:
    """Return a command's TMPDIR.

    Its path is too long for a Unix socket in it.
    """
    return home / ("tmp" * 36)


Middle: TypeAlias = Callable[[Running], object]


@attrs.frozen
class Case:
    """A command, and how it is seen that it is in the middle of its work."""

    arguments: tuple[str, ...]
    middle: Middle
    program: str = "offload"
    needs: str = ""


def regions(running: Running) -> object:
    return [file for path in running.shared for file in path.glob("**/maru_*.dat")]


def children(running: Running) -> object:
    return running.children


REAL = "scenario", "run", "--real", "--pace", "1000"
LARGE: Final = """
format = 1
name = "goes wrong, and takes its time"
limit_ms = 100000
[tier.host]
[pipeline.main]
to = "host"
[load.mix]
containers = 2000
over_ms = 10000
[[expect]]
status = { m0 = "FAILED" }
"""
CASES: Final = {
    "replay, files": Case(
        ("replay", "long.jsonl", "--tier", "file:blocks"), lambda running: list(running.home.glob("blocks/**/*.kv"))
    ),
    "replay, a page store": Case(("replay", "long.jsonl", "--tier", "maru"), regions),
    "replay, eviction policies": Case(("replay", "long.jsonl", "--compare-eviction"), children),
    "demo": Case(("demo",), lambda running: running.children and regions(running), needs="torch"),
    "bench": Case(("bench", "pinned-pool"), children, needs="torch"),
    "fuzz": Case(("scenario", "fuzz", "--for", "1h", "--processes", "2"), lambda running: len(running.children) == 2),
    "run": Case(("scenario", "run", f"{CATALOGUE}/s25-many-cancels.scenario.toml", "--seeds", "0..9999999"), children),
    "run, real": Case((*REAL, f"{CATALOGUE}/s25-many-cancels.scenario.toml"), lambda running: running.temporary),
    "run, real, in a process": Case((*REAL, f"{CATALOGUE}/s35-unexpected-exception.scenario.toml"), children),
    "run, real, a page store": Case(
        (*REAL, f"{CATALOGUE}/maru-server-killed-under-a-store.scenario.toml"),
        lambda running: running.temporary and regions(running),
    ),
    "explore": Case(
        ("scenario", "explore", f"{CATALOGUE}/s25-many-cancels.scenario.toml", "--pairs", "--processes", "2"), children
    ),
    "check": Case(("scenario", "check", "tests.support.scenario_caches:careful", "--for", "1h"), children),
    "shrink": Case(("scenario", "shrink", "large.scenario.toml", "--watchdog", "1h"), children),
    "ping": Case(
        ("ping", "--server", "ipc://silent.sock", "--timeout", "600"), lambda running: running.accepted(), "maru"
    ),
    "top": Case(
        ("top", "--server", "ipc://silent.sock", "--timeout", "600"), lambda running: running.accepted(), "maru"
    ),
    "bench of the page store": Case(("bench", "rpc"), lambda running: running.children and running.shared, "maru"),
}


@contextlib.contextmanager
def started(case: Case, home: Path) -> Iterator[Running]:
    """A command, in a directory with what it needs. What is left of it in the end is killed and removed."""
    temporary_files(home).mkdir()
    _write_trace(home / "long.jsonl")
    (home / "large.scenario.toml").write_text(LARGE)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(home / "silent.sock"))
        silent.listen()
        silent.setblocking(False)
        environment = {
            **os.environ,
            "TMPDIR": str(temporary_files(home)),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        process = subprocess.Popen(
            # A shell has what it runs in the background ignore signals, and children inherit that.
            ["env", "--default-signal=INT,HUP,TERM", sys.executable, "-m", case.program, *case.arguments],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running = Running(process, home, silent)
        try:
            yield running
        finally:
            for pid in (process.pid, *running.children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()
            for path in running.shared:
                shutil.rmtree(path, ignore_errors=True)


def _write_trace(path: Path) -> None:
    """Requests enough for minutes: nothing of it is played to its end."""
    line = '{{"timestamp": {3}, "input_length": 1, "output_length": 1, "hash_ids": [{0}, {1}, {2}]}}'
    path.write_text("\n".join(line.format(3 * n, 3 * n + 1, 3 * n + 2, 30 * n) for n in range(60_000)))


def wait_for(condition: Callable[[], object], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.01)


ALWAYS: Final = {"replay, eviction policies", "fuzz"}
"""Commands that are ended by every signal in each test run; the others by SIGTERM, and by all with ``make test-long``."""


def endings() -> list[object]:
    return [
        pytest.param(
            name,
            number,
            id=f"{name}-{number.name}",
            marks=[] if number == signal.SIGTERM or name in ALWAYS else [pytest.mark.long],
        )
        for name in CASES
        for number in CODES
    ]


@pytest.mark.parametrize(("name", "number"), endings())
def test_a_command_ends_with_its_processes_and_files_and_one_line(
    name: str, number: signal.Signals, tmp_path: Path
) -> None:
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    with started(case, tmp_path) as running:
        process = running.process

        def in_the_middle() -> object:
            assert process.poll() is None, process.communicate()
            return case.middle(running)

        wait_for(in_the_middle, lambda: "it never came to its middle")
        children = running.children
        if number == signal.SIGTERM:
            process.send_signal(number)
        else:  # as a terminal does
            os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == CODES[number], (output, errors)
        said = [line for line in errors.splitlines() if "the machine is busy" not in line]
        assert said == [f"{case.program}: ended by {number.name}"]
        assert "Traceback" not in output
        assert not [pid for pid in children if _runs(pid)]
        assert not running.shared
        assert not running.temporary


def _runs(pid: int) -> bool:
    """Whether there is such a process, and it is more than an entry in a table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
