"""What the documentation shows is run, and where it points there is something.

- A ``python`` block runs in a fresh interpreter, in an empty directory, warnings as errors. With ``continued`` in its
  info string it runs behind the blocks before it on its page: as one program with them, named after its last block.
- A ``console`` block: lines ``$ offload ...`` run (what takes long is marked so), ``$ maru ...`` beside a server,
  ``$ maru-server ...`` and ``$ offload pinned-pool ...`` until they are ready, ``$ offload ping ...`` and the like beside a
  daemon; ``$ make ...`` must name a target.
- A ``toml`` block is a configuration that can be.
- A block with ``file=NAME`` or ``story`` is lived through with its page: ``test_documentation_stories.py``.
- ``no-run=gpu`` (or another of ``REASONS``) in the info string: the block is reported as skipped, with that reason.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from backends.pinned_pool import pinned_pool_config
from maru._config import client_config, server_config
from maru.configuration import Document
from offload import EngineConfig, config_from_toml
from offload.daemon import daemon_config
from offload.daemon._config import tenants_of
from tests.support.daemons import directory, host_only, serve
from tests.support.maru_processes import PATIENCE, Server, temporary_pool

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
REASONS = {
    "gpu": "needs a GPU",
    "root": "needs root",
    "download": "needs a large download",
}
OF_OPERATORS = {"ping", "describe", "query", "explain", "drain", "quarantine", "reload", "log-level", "doctor"}
LONG_COMMANDS = {"bench", "demo"}  # tested in their own right; here only with `make test-long`


class Block(NamedTuple):
    page: Path
    line: int
    info: list[str]
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    fence: str | None = None
    indent, start, info, lines = "", 0, list[str](), list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if fence is None:
            if opening := re.match(r"( *)(`{3,}|~{3,}|:{3,})\s*([^`]*)$", line):
                indent, fence = opening[1], opening[2]
                start, info, lines = number, opening[3].split(), []
        elif line.strip() == fence:
            found.append(Block(page, start, info, "\n".join(lines) + "\n"))
            fence = None
        else:
            lines.append(line.removeprefix(indent))
    assert fence is None, f"{page}:{start}: a block without an end"
    return found


def prose(page: Path) -> str:
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block.text, "")
    return re.sub(r"`[^`\n]*`", "", text)


def told_in_a_story(block: Block) -> bool:
    """Whether it is tried out with the others of its page, in ``test_documentation_stories.py``."""
    return "story" in block.info or any(word.startswith("file=") for word in block.info)


BLOCKS = [block for page in PAGES for block in blocks(page) if not told_in_a_story(block)]


def marks(block: Block) -> list[pytest.MarkDecorator]:
    reasons = [word.removeprefix("no-run=") for word in block.info if word.startswith("no-run")]
    return [pytest.mark.skip(reason=f"{block.name} {REASONS[reason]}") for reason in reasons]


def python_programs() -> list[object]:
    programs = []
    for page in PAGES:
        chains: list[list[Block]] = []
        for block in blocks(page):
            if block.info[:1] == ["python"] and not told_in_a_story(block):
                if "continued" in block.info:
                    chains[-1].append(block)
                else:
                    chains.append([block])
        for chain in chains:
            program = ""
            for block in chain:  # the blank lines make a traceback point at the line of the page
                program += "\n" * (block.line - program.count("\n")) + block.text
            skips = [mark for block in chain for mark in marks(block)]
            programs.append(pytest.param(chain[-1], program, marks=skips, id=chain[-1].name))
    return programs


def console_lines(command: str) -> list[object]:
    lines = []
    for block in BLOCKS:
        if block.info[:1] not in (["console"], ["sh"]):
            continue
        text = block.text.replace("\\\n", " ")
        for line in text.splitlines():
            if line.startswith(f"$ {command} "):
                long = [pytest.mark.long] if LONG_COMMANDS & set(line.split()) else []
                lines.append(pytest.param(line[2:], marks=[*marks(block), *long], id=f"{block.name} {line[2:]}"))
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_imports_nothing_private(page: Path) -> None:
    private = re.compile(r"^\s*(?:from|import) +(?:offload|backends|maru)[\w.]*\._\w+", re.MULTILINE)
    assert not private.findall(page.read_text())


@pytest.mark.parametrize(("block", "program"), python_programs())
def test_python_block_runs(block: Block, program: str, tmp_path: Path) -> None:
    file = tmp_path / f"{block.page.stem}.py"
    file.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{block.name}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The directory of a daemon."""
    with a_daemon() as path:
        yield path


@contextmanager
def a_daemon() -> Iterator[str]:
    with directory() as path, serve(path, host_only(path)):
        yield path


@pytest.mark.parametrize("line", console_lines("offload"))
def test_command_runs(line: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with ExitStack() as stack:
        run_command(line, tmp_path, request, stack)


def run_command(line: str, tmp_path: Path, request: pytest.FixtureRequest, stack: ExitStack) -> None:
    if "$OFFLOAD_TRACE" in line and "OFFLOAD_TRACE" not in os.environ:
        pytest.skip("OFFLOAD_TRACE is not set")
    if line.startswith("offload pinned-pool"):
        environ = {"OFFLOAD_PINNED_POOL__PORT": "0", "OFFLOAD_PINNED_POOL__RUNTIME_DIR": str(tmp_path / "sockets")}
        run_until_ready([sys.executable, "-m", *shlex.split(line)], tmp_path, environ)
        return
    if line.startswith("offload serve") and "--check" not in line:
        with temporary_pool() as directory:  # in memory, and of a short name
            environ = {"OFFLOAD_DAEMON__RUNTIME_DIR": str(directory)}
            run_until_ready([sys.executable, "-m", *shlex.split(line)], tmp_path, environ)
        return
    environ = dict(os.environ)
    if line.split()[1] in OF_OPERATORS:
        # One that is ended serves no other command: with several workers the order of a page is not kept.
        ends = line.split()[1] == "drain"
        environ["OFFLOAD_DAEMON__RUNTIME_DIR"] = (
            stack.enter_context(a_daemon()) if ends else request.getfixturevalue("served")
        )
    line = line.replace("offload", f"{shlex.quote(sys.executable)} -m offload", 1)
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def page_store() -> Iterator[Server]:
    with temporary_pool() as pool, Server(pool) as server:
        yield server


@pytest.mark.parametrize("line", console_lines("maru"))
def test_page_store_command_runs(line: str, page_store: Server, tmp_path: Path) -> None:
    environ = {**os.environ, "MARU_CLIENT__SERVER_URL": page_store.ipc}
    line = line.replace("maru", f"{shlex.quote(sys.executable)} -m maru", 1)
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("line", console_lines("maru-server"))
def test_server_gets_ready_and_ends(line: str, tmp_path: Path) -> None:
    environ = {**os.environ, "MARU_SERVER__PORT": "0"}
    program = "import sys; sys.argv[0] = 'maru-server'; from maru.server_cli import main; main()"
    with temporary_pool() as pool:
        environ.setdefault("MARU_SERVER__POOL_PATH", str(pool))
        run_until_ready([sys.executable, "-c", program, *shlex.split(line)[1:]], tmp_path, environ)


def run_until_ready(command: list[str], cwd: Path, environ: dict[str, str]) -> None:
    """Run a server until it says that it is ready, and see it end."""
    environ = {**os.environ, **environ}
    with subprocess.Popen(command, cwd=cwd, env=environ, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            first = running.stdout.readline()
            if "--print-config" not in command:
                assert "is ready at" in first
                running.send_signal(signal.SIGTERM)
            running.stdout.read()
            assert running.wait(PATIENCE) == 0
        finally:
            running.kill()


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=block.name) for block in BLOCKS if block.info[:1] == ["toml"]]
)
def test_configuration_can_be(block: Block) -> None:
    loaders = {
        "pipeline": config_from_toml,
        "engine": EngineConfig.from_toml,
        "server": server_config,
        "client": client_config,
        "pinned_pool": pinned_pool_config,
        "daemon": lambda text, others, environ: daemon_config(Document("a page", text), environ=environ),
        "tenants": lambda text, others, environ: tenants_of(Document("a page", text), "a page"),
    }
    tables = set(tomllib.loads(block.text))
    assert tables <= set(loaders), f"{block.name}: nobody reads {tables - set(loaders)}"
    for table in tables:
        loaders[table](block.text, others=tables - {table}, environ={})


@pytest.mark.parametrize("line", console_lines("make"))
def test_make_target_exists(line: str) -> None:
    done = subprocess.run(["make", "--dry-run", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_command_goes_unchecked() -> None:
    """A block of another language, or a line of another command, must say why it is not run."""
    data = {"text", "toml", "ini", "json", "mermaid", "dot"}
    data |= {"yaml", "dockerfile"}  # `tests/daemon/test_container.py` runs what they say
    for block in BLOCKS:
        language = block.info[0] if block.info else ""
        assert language, f"{block.name}: a block without a language"
        if marks(block) or language.startswith("{") or language in data | {"python"}:
            continue
        assert language in {"console", "sh"}, f"{block.name}: {language} is neither run nor known as data"
        for line in block.text.splitlines():
            if line.startswith("$ "):
                assert line.split()[1] in {"offload", "maru", "maru-server", "make"}, (
                    f"{block.name}: nothing runs {line!r}"
                )


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_relative_links_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", prose(page)) + re.findall(r"^\[[^\]]+\]:\s*(\S+)", prose(page), re.M)
    for target in targets:
        path = target.partition("#")[0]
        if path and not re.match(r"[a-z]+:", target):
            assert (page.parent / path).exists(), f"{page.name} points to {target}"
