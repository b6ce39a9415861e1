"""``python -m tests.bench NAME [--json] [--repeat N] [--quick]``, in the form of ``offload bench``."""

from __future__ import annotations

from typing import Final

from maru.bench.shown import group_of

BENCHES: Final = {
    "pipeline": "A container in a burst, alone and among many; watching it; the import.",
    "enqueue": "A store, in the thread of an engine without trio.",
    "cancel": "The confirmation of a cancel, wherever the container is.",
    "shadow": "Loads of which some are compared with what was stored, beside loads without that.",
    "recompute": "The time to the first token of an engine that chooses between loading and recomputing, beside either.",
    "index": "Lookups and loads over the shared index, beside messages; and the upkeep of the index.",
    "codec": "Encoding and decoding a message of 64 entries, beside a map per entry.",
    "ready": "The start of a server after kill -9, beside bare imports.",
}
"""The text of each bench, by the name of its command, which is also the name of its module."""

command = group_of(
    "python -m tests.bench",
    "tests.bench.",
    BENCHES,
    """Measure parts of the packages, each figure beside its limit and in the same run.

    They are for developers. The benches for users are commands: offload bench, maru bench.
    """,
)

if __name__ == "__main__":
    command(prog_name="python -m tests.bench")
