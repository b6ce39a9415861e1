"""Files named on a command line: none is lost by a mistake, none is waited for, and private ones are closed to others."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner, Result

import maru.server_cli
import offload.cli
from offload import ConfigError
from offload.recorder import FlightRecorder

ROOT: Final = Path(__file__).parents[2]
TRACE: Final = '{"timestamp": 27, "input_length": 2048, "output_length": 1, "hash_ids": [0, 14]}\n'
PLAIN: Final = 'format = 1\nname = "plain"\n[[step]]\nstore = { id = "a{0..2}" }\n'
VICTIM: Final = "precious\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "plain.scenario.toml").write_text(PLAIN)
    (tmp_path / "victim").write_text(VICTIM)
    os.mkfifo(tmp_path / "pipe")
    with FlightRecorder(tmp_path / "ring") as recorder:
        recorder.note("rule", "a text")
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(offload.cli.main, arguments)


WRITES: Final = (
    ("replay", "trace.jsonl", "--record"),
    ("scenario", "run", "plain.scenario.toml", "--junit"),
    ("scenario", "run", "plain.scenario.toml", "--trace"),
    ("scenario", "run", "plain.scenario.toml", "--save-trace"),
    ("scenario", "explore", "plain.scenario.toml", "--only", "x", "--save"),
    ("scenario", "shrink", "plain.scenario.toml", "--out"),
    ("scenario", "from-incident", "ring", "--out"),
    ("incident", "save", "ring", "--out"),
    ("serve", "--check", "--flight-recorder"),
)
"""Every option that names a file to write, but for --picture, which has to end in .svg."""


@pytest.mark.parametrize("arguments", WRITES, ids=lambda arguments: " ".join(arguments))
def test_another_kind_of_file_is_kept(here: Path, arguments: tuple[str, ...]) -> None:
    done = invoke(*arguments, "victim")
    assert done.exit_code == 2, done.output
    assert "victim already exists" in done.stderr
    assert "name a new file" in done.stderr
    assert (here / "victim").read_text() == VICTIM


@pytest.mark.parametrize("arguments", WRITES, ids=lambda arguments: " ".join(arguments))
def test_a_named_pipe_is_not_waited_for(here: Path, arguments: tuple[str, ...]) -> None:
    done = invoke(*arguments, "pipe")
    assert done.exit_code == 2, done.output
    assert "neither a file nor a device" in done.stderr


def test_a_picture_replaces_only_a_picture(here: Path) -> None:
    (here / "victim.svg").write_text(VICTIM)
    done = invoke("replay", "trace.jsonl", "--compare-eviction", "--picture", "victim.svg")
    assert done.exit_code == 2
    assert "victim.svg already exists, and is not a picture" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--check", "pipe"),
        ("incident", "save", "pipe"),
        ("incident", "show", "pipe"),
        ("scenario", "run", "pipe"),
        ("scenario", "from-incident", "pipe"),
        ("describe", "--config", "pipe"),
    ],
    ids=" ".join,
)
def test_a_named_pipe_is_not_read(here: Path, arguments: tuple[str, ...]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    assert "pipe" in done.stderr


def test_a_device_without_an_end_is_not_read_to_it(here: Path) -> None:
    assert "has more than" in invoke("incident", "show", "/dev/zero").stderr


def test_an_open_pipe_is_read_and_written(here: Path) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"[daemon]\nlease = 0.0\n")
        os.close(writing)
        assert "daemon.lease = 0.0" in invoke("serve", "--check", f"/dev/fd/{reading}").stderr
    finally:
        os.close(reading)
    reading, writing = os.pipe()
    try:
        done = invoke("scenario", "run", "plain.scenario.toml", "--junit", f"/dev/fd/{writing}")
        assert done.exit_code == 0, done.output
        assert os.read(reading, 5) == b"<?xml"
    finally:
        os.close(reading)
        os.close(writing)


def test_a_file_of_its_kind_is_replaced(here: Path) -> None:
    for _ in range(2):
        assert invoke("scenario", "run", "plain.scenario.toml", "--junit", "out.xml").exit_code == 0
    assert (here / "out.xml").read_text().startswith("<?xml ")


@pytest.mark.parametrize("text", [("[daemon]\na = " + "[" * 5_000)])
def test_a_deeply_nested_file_is_refused(here: Path, text: str) -> None:
    (here / "deep.toml").write_text(text)
    done = invoke("serve", "--check", "deep.toml")
    assert done.exit_code == 2
    assert "nested too deeply" in done.stderr
    done = CliRunner().invoke(maru.server_cli.main, ["--config", "deep.toml", "--print-config"])
    assert done.exit_code == 2


# --- recordings ---------------------------------------------------------------------------------------------------


def test_a_recorder_keeps_a_file_that_is_none(here: Path) -> None:
    for _ in range(2):  # the second start moved the first victim's copy away
        with pytest.raises(ConfigError, match="victim already exists, and is not a recording"):
            FlightRecorder("victim")
        assert (here / "victim").read_text() == VICTIM
        assert not (here / "victim.before").exists()


def test_a_recorder_keeps_what_has_the_name_of_its_last_ring(here: Path) -> None:
    (here / "ring.before").write_text(VICTIM)
    with pytest.raises(ConfigError, match=r"ring\.before already exists"):
        FlightRecorder("ring")
    assert (here / "ring.before").read_text() == VICTIM
    assert (here / "ring").exists()


def test_a_saved_recording_is_closed_to_others(here: Path) -> None:
    before = os.umask(0o022)
    try:
        with FlightRecorder(here / "other") as recorder:
            recorder.save(here / "saved.incident")
        (here / "open.incident").touch(0o644)
        assert invoke("incident", "save", "ring", "--out", "open.incident").exit_code == 0
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((here / name).stat().st_mode) for name in ("other", "saved.incident", "open.incident")]
    assert modes == [0o600] * 3


def test_a_recorder_saves_over_no_other_file(here: Path) -> None:
    with FlightRecorder() as recorder, pytest.raises(FileExistsError, match="not a recording"):
        recorder.save("victim")
    assert (here / "victim").read_text() == VICTIM


# --- everywhere ---------------------------------------------------------------------------------------------------


def options_of(command: click.Command, path: str) -> Iterator[tuple[str, click.Option]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from options_of(found, f"{path} {name}")
    else:
        yield from ((path, option) for option in command.params if isinstance(option, click.Option))


def test_all_options_that_write_are_tried() -> None:
    kinds = {
        (*path.split()[1:], option.opts[0])
        for path, option in options_of(offload.cli.main, "offload")
        if getattr(option.type, "func", None) is not None
        and option.type.func.__qualname__ == "output_file.<locals>.file"
    }
    tried = {tuple(word for word in one if "." not in word and word not in ("x", "ring", "--only")) for one in WRITES}
    assert kinds == (tried - {("serve", "--check", "--flight-recorder")}) | {("replay", "--picture")}
    serve = offload.cli.main.get_command(click.Context(offload.cli.main), "serve")
    assert serve is not None
    assert "flight_recorder" in {option.name for option in serve.params}


WRITERS: Final = {"write_text", "write_bytes"}
OURS: Final = {
    "maru/base/files.py": "the helper",
    "offload/_demo/command.py": "into a directory of its own",
    "offload/bench/_daemon.py": "the same",
    "offload/testing/scenarios/_real_world.py": "the same",
    "maru/_pool/state_directory.py": "by a descriptor, in a directory that is ours",
    "maru/transport/_keys.py": "a new file only",
}


def test_files_are_written_by_one_helper() -> None:
    found = set()
    for package in ("offload", "backends", "maru"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                words = [*node.args[1:2], *[one.value for one in node.keywords if one.arg == "mode"]]
                modes = {one.value for one in words if isinstance(one, ast.Constant) and isinstance(one.value, str)}
                if name in WRITERS or (name == "open" and any(set("wax") & set(mode) for mode in modes)):
                    found.add(str(path.relative_to(ROOT)))
    assert found == OURS.keys()


def test_an_empty_file_is_replaced(here: Path) -> None:
    (here / "empty").touch()
    assert invoke("scenario", "run", "plain.scenario.toml", "--junit", "empty").exit_code == 0
    assert (here / "empty").read_text().startswith("<?xml ")


def test_a_write_that_fails_leaves_the_file_that_was_there(here: Path) -> None:
    before = (here / "plain.scenario.toml").read_bytes()
    code = (
        "import resource, signal; from maru.base.files import SCENARIO\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
        "SCENARIO.write('plain.scenario.toml', b'format = 1\\n' + bytes(4096))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert (here / "plain.scenario.toml").read_bytes() == before
    assert not list(here.glob("*.tmp"))


@pytest.mark.parametrize("arguments", [("replay", "pipe"), ("size", "pipe", "--tokens", "1K")], ids=" ".join)
def test_a_named_pipe_is_not_waited_for_to_be_read(here: Path, arguments: tuple[str, ...]) -> None:
    done = invoke(*arguments)
    assert done.exit_code in {2, 3} and "is a named pipe" in done.output
