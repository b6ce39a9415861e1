"""Wrong options, variables and files: each is refused in one line that names what was typed, and what would be right."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import maru
import maru.cli
import maru.server_cli
import offload
import offload.cli
from backends.pinned_pool import PinnedPoolConfig
from maru.blocking import MaruHandler
from offload.daemon import DaemonConfig
from tests.support.other_user import needs_root, other_user

ROOT = Path(__file__).parents[2]
PROGRAMS = {"offload": offload.cli.main, "maru": maru.cli.main, "maru-server": maru.server_cli.main}
NOBODY = "--runtime-dir nobody"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(line: str, **environ: str) -> tuple[int, str]:
    program, *arguments = line.split()
    done = CliRunner().invoke(PROGRAMS[program], arguments, env=environ)
    return done.exit_code, done.stderr or done.output


@pytest.mark.parametrize(
    "line",
    [
        f"offload ping --timeout VALUE {NOBODY}",
        f"offload describe --timeout VALUE {NOBODY}",
        "offload top --once --interval VALUE",
        "offload incident show ring --last VALUE",
        "offload scenario from-incident ring --last VALUE",
        "offload scenario run x --real --pace VALUE",
        "offload replay x --laps 2 --rename VALUE",
        "maru describe --timeout VALUE",
        "maru ping --interval VALUE",
        "maru top --once --interval VALUE",
        "offload serve --check --lease VALUE",
        "offload serve --check --drain-timeout VALUE",
        "maru-server --print-config --session-lease VALUE",
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x", "1e400"])
def test_a_number_that_is_none_is_refused(line: str, value: str) -> None:
    code, said = invoke(line.replace("VALUE", value))
    assert code == 2, said
    assert any(word in said for word in line.split() if word.startswith("--")), said
    assert "Traceback" not in said


def test_ranges_of_numbers_have_no_nan() -> None:
    """click's own range lets nan in: one of ours is used everywhere."""
    for package in ("offload", "backends", "maru"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    assert node.func.attr != "FloatRange", path
                if isinstance(node, ast.keyword) and node.arg == "type" and isinstance(node.value, ast.Name):
                    assert node.value.id != "float", path


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10 ms", 0.01), ("1500ms", 1.5), ("1.5 s", 1.5), ("2min", 120.0), ("1 h", 3_600.0), ("250 us", 0.00025)],
)
def test_a_duration_may_have_a_unit(text: str, seconds: float) -> None:
    assert offload.PipelineConfig(policy_timeout=max(0.001, seconds)).policy_timeout == max(0.001, seconds)
    if seconds >= 0.1:
        assert DaemonConfig(lease=text).lease == seconds  # type: ignore[arg-type]
    else:
        with pytest.raises(offload.ConfigError, match="lease"):
            DaemonConfig(lease=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["10", "ms", "1,5 s", "10 msec", "-1 s", "1e3 s", "٤ s", "", "inf s", "1 ms 2"])
def test_a_text_that_is_no_duration_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(offload.ConfigError, match=r"10 ms, 1\.5 s, 2 min"):
        DaemonConfig(drain_timeout=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1.5 GiB", "1,5 GiB", "4 ZiB", "-1", "", "0x1000", "GiB", "4 GiB 3"])
def test_a_text_that_is_no_size_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(offload.ConfigError, match="1536 MiB"):
        DaemonConfig(host_bytes=text)  # type: ignore[arg-type]


def test_an_option_takes_a_duration_with_a_unit() -> None:
    code, said = invoke("offload serve --print-config --lease 1500ms")
    assert (code, "daemon.lease = 1.5" in said) == (0, True)


@pytest.mark.parametrize(
    ("variable", "line", "meant"),
    [
        ("OFFLOAD_DEAMON__LEASE", "offload serve --check", "OFFLOAD_DAEMON__LEASE"),
        ("OFFLOAD_ENGIN__PROMOTE", "offload serve --check", "OFFLOAD_ENGINE__PROMOTE"),
        ("MARU_SEVER__PORT", "maru-server --print-config", "MARU_SERVER__PORT"),
        ("MARU_CLEINT__SERVER_URL", "maru describe", "MARU_CLIENT__SERVER_URL"),
    ],
)
def test_a_misspelt_variable_is_refused(variable: str, line: str, meant: str) -> None:
    code, said = invoke(line, **{variable: "1"})
    assert code == 2
    assert variable in said and f"did you mean {meant}?" in said


def test_variables_of_others_are_left_alone() -> None:
    code, said = invoke(
        "offload serve --check", OFFLOAD_TRACE="x", OFFLOAD_MINE__KNOB="1", OFFLOAD_PINNED_POOL__PORT="1"
    )
    assert code == 0, said


@pytest.mark.parametrize(
    ("config", "knob", "meant"),
    [
        (maru.MaruConfig, "pool_size_gb", "pool_size"),
        (maru.ServerConfig, "capacity", "capacity_bytes"),
        (offload.PipelineConfig, "budget", "budget_blocks"),
        (offload.BatchConfig, "max_batch", "max_batch_size"),
        (offload.EngineConfig, "tier", "tiers"),
        (DaemonConfig, "leese", "lease"),
        (PinnedPoolConfig, "prt", "port"),
    ],
)
def test_a_knob_that_is_none_is_named_with_the_nearest(config: type, knob: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"{knob} = 1: there is no such name; did you mean {meant}\?"):
        config(**{knob: 1})


def test_a_handler_names_the_nearest_knob() -> None:
    with pytest.raises(maru.ConfigError, match="did you mean pool_size"):
        maru.MaruHandler(pool_size_gb=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tier bogus", ("--tier bogus", "no kind of tier")),
        ("--tier file:", ("--tier 'file:'", "file:DIR")),
        ("--tier {type=", ("--tier '{type='", "neither JSON")),
        ("--tier maru:http://x", ("--tier", "http://x")),
        ("--capacity 1B", ("--capacity", "must hold a block of")),
        ("--capacity 1MiB --capacity 2MiB", ("--capacity", "1 tiers, but 2 capacities")),
        ("--policy sometimes", ("--policy 'sometimes'", "pass-all")),
        ("--compare-eviction --capacities x", ("--capacities 'x'", "5%")),
    ],
)
def test_a_replay_names_the_option_that_is_wrong(here: Path, options: str, words: tuple[str, ...]) -> None:
    (here / "t.jsonl").write_text('{"timestamp": 27, "input_length": 7322, "output_length": 4, "hash_ids": [0, 14]}\n')
    code, said = invoke(f"offload replay t.jsonl {options}")
    assert code == 2, said
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("offload scenario fuzz --seeds 0..1 --system x", ("--system", "module:factory")),
        ("maru describe --server ipc://" + "x" * 300, ("--server",)),
        ("maru describe --server http://x", ("--server", "http://x")),
    ],
)
def test_a_command_names_the_option_that_is_wrong(line: str, words: tuple[str, ...]) -> None:
    code, said = invoke(line)
    assert code == 2, said
    assert all(word in said for word in words), said
    assert len(said) < 800


def test_a_server_that_is_not_there_is_named_once() -> None:
    with pytest.raises(maru.NoAnswer) as error:
        MaruHandler(server_url="tcp://127.0.0.1:1", pool_size="8 MiB", timeout_ms=100).connect()
    said = str(error.value)
    assert said.startswith("No server answers at tcp://127.0.0.1:1: start a server")
    assert said.count("127.0.0.1:1:") == 1 and "not connected" not in said


def test_a_pool_without_a_page_is_refused() -> None:
    code, said = invoke("maru-server --print-config --capacity-bytes 1MiB")
    assert code == 2
    assert "at least 2 MiB" in said
    assert invoke("maru-server --print-config --capacity-bytes 2MiB")[0] == 0


def test_every_program_has_a_version() -> None:
    for program in PROGRAMS:
        code, said = invoke(f"{program} --version")
        assert (code, said.split()[0]) == (0, "trio-offload")


@pytest.mark.parametrize("line", ["serve --help", "pinned-pool -h", "--help"])
def test_help_takes_few_descriptors(line: str) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    done = subprocess.run(
        [sys.executable, "-m", "offload", *line.split()], capture_output=True, text=True, preexec_fn=few, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage")


def test_long_values_are_cut_in_errors() -> None:
    code, said = invoke("offload serve --check --log-level " + "x" * 5_000)
    assert code == 2
    assert len(said) < 600 and "--log-level" in said and "debug, info" in said


@needs_root
@pytest.mark.parametrize("command", ["describe", "ping", "drain", "top"])
def test_another_user_is_told_so(command: str) -> None:
    """A socket that may not be seen is another thing than one that is not there."""
    with tempfile.TemporaryDirectory() as directory:  # closed to others, as that of a daemon
        script = (
            "import sys, offload.daemon._operator_commands, offload.status._top\n"
            "from click.testing import CliRunner\nfrom offload.cli import main\nbecome_other_user()\n"
            "done = CliRunner().invoke(main, sys.argv[1:])\nprint(done.exit_code, done.stderr)\n"
        )
        with other_user(script, command, "--runtime-dir", directory) as process:
            said = process.communicate(timeout=60)[0]
    assert said.startswith("3 ")
    assert "Permission denied" in said and "run this as the daemon's user" in said
