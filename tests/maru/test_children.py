"""Python processes that the product starts import nothing from the working directory."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.published import Ask, PublishedClient

ROOT = Path(__file__).parents[2]
MODULES = [file for package in ("offload", "backends", "maru") for file in sorted((ROOT / package).rglob("*.py"))]
SERVER = [sys.executable, "-P", "-c", "from maru.server_cli import main; main()"]


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, id=str(module.relative_to(ROOT)))
        for module in MODULES
        if "sys.executable" in module.read_text()
    ],
)
def test_each_python_child_is_started_without_its_directory(module):
    text = module.read_text()
    assert len(re.findall(r'sys\.executable,\s*"-[IP]"', text)) == text.count("sys.executable"), (
        'give the interpreter "-P" first: otherwise it imports from the working directory'
    )


def test_a_package_in_the_working_directory_is_not_run(tmp_path):
    planted, mark = tmp_path / "maru", tmp_path / "ran"
    planted.mkdir()
    (planted / "__init__.py").write_text(f"open({str(mark)!r}, 'a')\n")
    options = ["--pool-path", str(tmp_path / "pool"), "--capacity-bytes", "16MiB", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen([*SERVER, "--json", *options], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"tcp://127\.0\.0\.1:\d+", server.stdout.readline())[0]
            with PublishedClient(address) as client:  # the relay serves it
                client.ask(Ask.HANDSHAKE)
        finally:
            server.send_signal(signal.SIGTERM)
    assert not mark.exists()
