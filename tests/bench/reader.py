"""A process of ``python -m tests.bench index``: looks keys up over the shared index, and counts its processor time.

    python tests/bench/reader.py ADDRESS KEYS SECONDS

It says so in one line at its end, so that several of them, started together, run side by side.
"""

from __future__ import annotations

import json
import sys
import time

from maru import MaruConfig
from maru.bench._keys import keys_of
from maru.blocking import MaruHandler

_AT_ONCE = 100
"""Lookups between two looks at the clock."""


def main() -> None:
    """Look the first so many keys up again and again, for so many seconds."""
    address, n, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    keys = keys_of(n)
    with MaruHandler(MaruConfig(server_url=address, pool_size=0)) as handler:
        assert all(handler.batch_exists(keys)), "they are not there"
        asked, lookups = handler.statistics().counters.asked_anyway, 0
        ends, began = time.monotonic() + seconds, time.process_time()
        while time.monotonic() < ends:
            for _ in range(_AT_ONCE):
                handler.batch_exists(keys)
            lookups += _AT_ONCE
        spent = time.process_time() - began
        asked = handler.statistics().counters.asked_anyway - asked
    print(json.dumps({"us": spent / lookups * 1e6, "lookups": lookups, "asked": asked}), flush=True)


if __name__ == "__main__":
    main()
