"""The command ``offload pinned-pool``: what it says, where its knobs come from, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from backends.pinned_pool import PinnedPoolClient, PinnedPoolConfigError, knobs, pinned_pool_config
from offload.cli import main
from tests.support.maru_processes import PATIENCE
from tests.support.pinned_pools import CHUNK, ServerProcess


def run(*args: str) -> str:
    done = CliRunner().invoke(main, ["pinned-pool", *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_help_has_every_knob() -> None:
    text = " ".join(run("--help").split())
    for knob in knobs():
        assert f"--{knob.name.removeprefix('pinned_pool.').replace('_', '-')}" in text
        assert knob.variable in "".join(text.split()) or knob.variable in text
    assert "Serve pinned host memory" in text


def test_printed_configuration_gives_itself_again(tmp_path: Path) -> None:
    text = run("--print-config", "--chunk-size", "64k", "--pool-memory-size", "7", "--no-shared-memory")
    config = pinned_pool_config(text, environ={})
    assert (config.chunk_size, config.pool_memory_size, config.shared_memory) == (CHUNK, 7, False)
    file = tmp_path / "pool.toml"
    file.write_text(text + "[server]\nport = 1\n")
    assert run("--config", str(file), "--print-config") == text


def test_option_wins_over_environment_over_file(tmp_path: Path) -> None:
    source = '[pinned_pool]\nport = 1\nmax_clients = 2\nchunk_size = "1 MiB"\n'
    environ = {"OFFLOAD_PINNED_POOL__MAX_CLIENTS": "20", "OFFLOAD_PINNED_POOL__CHUNK_SIZE": "2 MiB"}
    config = pinned_pool_config(source, environ=environ, options={"pinned_pool.chunk_size": ("--chunk-size", "4096")})
    assert (config.port, config.max_clients, config.chunk_size) == (1, 20, 4096)
    with pytest.raises(PinnedPoolConfigError, match="did you mean"):
        pinned_pool_config("[pinned_pool]\nprot = 1\n", environ={})


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--port", "x"], "--port"),
        (["--host", "0.0.0.0"], "must be of this host"),
        (["--chunk-size", "5000"], "power of two"),
        (["--config", "/nowhere/at/all"], "No such file"),
    ],
)
def test_what_cannot_be_is_said(args: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["pinned-pool", *args])
    assert done.exit_code != 0
    assert said in done.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_line_when_ready_and_an_end_when_told(number: signal.Signals) -> None:
    with ServerProcess() as process:
        assert process.ready["event"] == "ready"
        assert process.ready["pid"] == process.process.pid
        assert (process.ready["pool_memory_size"], process.ready["chunk_size"]) == (64, CHUNK)
        assert Path(process.ready["descriptors"]).is_socket()
        client = PinnedPoolClient(process.address)
        client.allocate_pool_memory(32 << 20)
        process.send(number)
        out, err = process.process.communicate(timeout=PATIENCE)
        assert process.process.returncode == 0
        assert out == ""
        lines = [json.loads(line) for line in err.splitlines()]
        assert any("leaving" in line["message"] for line in lines)
        assert not Path(process.ready["descriptors"]).exists()
        client.close()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_within_a_second(number: signal.Signals) -> None:
    """Where nobody else computes."""
    with ServerProcess() as process:
        client = PinnedPoolClient(process.address)
        client.allocate_pool_memory(32 << 20)
        begun = time.monotonic()
        process.send(number)
        process.process.communicate(timeout=PATIENCE)
        assert time.monotonic() - begun < 1.0
        client.close()


def test_port_in_use_is_said() -> None:
    with ServerProcess() as process:
        command = [sys.executable, "-m", "offload", "pinned-pool", "--port", str(process.ready["port"])]
        command += ["--runtime-dir", os.path.dirname(process.ready["descriptors"])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 3
        assert done.stderr.startswith("offload pinned-pool: cannot listen at ")
        assert "Traceback" not in done.stderr


def test_nothing_of_it_imports_torch() -> None:
    program = "import sys, backends.pinned_pool, backends.pinned_pool._command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
