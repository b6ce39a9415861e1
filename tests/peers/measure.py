"""Drives one store and the floor in turn, with the same requests, and writes what came as JSON. A process for each store.

python -m tests.peers.measure store --out results --rounds 3
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import trio

from offload.replay import Baseline, Driven, Request, drive, keys_of, make_places, read_trace

from .published_store import why_no_checkout
from .setting import Setting, Unavailable
from .subjects import SUBJECTS

AT_ONCE = 25
"""Requests that one side is sent before the other has its turn: what the machine does beside hits both."""
PACKAGES = ("trio-offload", "lmcache", "mooncake-transfer-engine-non-cuda", "redis", "torch", "trio")
NAMESPACE = "TRIO_OFFLOAD_PEERS_NAMESPACE"


def requests_of(trace: str, limit: int) -> list[Request]:
    """The first requests of a trace; of a synthetic one, if none is named."""
    return read_trace(trace, limit) if trace else synthetic(limit)


def most_blocks(requests: Sequence[Request]) -> int:
    """Of the largest request."""
    return max(len(request.hash_ids) for request in requests)


def synthetic(n: int) -> list[Request]:
    """Conversations: each request is one of the last forty, and some blocks more; or a new one."""
    rng, fresh = random.Random(1), 0
    requests: list[Request] = []
    for number in range(n):
        goes_on = requests and rng.random() < 0.5
        talk = list(rng.choice(requests[-40:]).hash_ids) if goes_on else []
        more = rng.randrange(4, 40)
        talk += range(fresh, fresh + more)
        fresh += more
        requests.append(Request(number, 512 * len(talk), 100, tuple(talk)))
    return requests


async def one_round(name: str, setting: Setting, requests: Sequence[Request]) -> dict[str, Any]:
    """All requests once, through a new store and a new floor."""
    subject = SUBJECTS[name]
    floor, theirs, at_floor = Baseline(setting.blocks, setting.block_bytes), Driven(), Driven()
    place = make_places(1, setting.most_blocks, setting.block_bytes)
    processor = 0.0
    async with subject.open()(setting) as (cache, places):
        for number, start in enumerate(range(0, len(requests), AT_ONCE)):
            part = requests[start : start + AT_ONCE]
            for ours_now in (number % 2 == 0, number % 2 == 1):
                if ours_now:
                    began = time.process_time()
                    await drive(cache, part, places, theirs, keys_of)
                    processor += time.process_time() - began
                else:
                    await drive(floor, part, place, at_floor, keys_of)
    blocks = sum(len(request.hash_ids) for request in requests)
    return {
        "seconds": theirs.elapsed, "floor_seconds": at_floor.elapsed, "processor_seconds": processor, "blocks": blocks,
        "hits": theirs.hits, "floor_hits": at_floor.hits, "stores": theirs.stores, "floor_stores": at_floor.stores,
        "wrong": theirs.wrong + at_floor.wrong,
    }  # fmt: skip


def measure(asked: argparse.Namespace, kib: int) -> dict[str, Any]:
    """Some rounds of one store at one size of blocks; or why there are none."""
    requests = requests_of(asked.trace, asked.requests)
    most, in_flight = most_blocks(requests), SUBJECTS[asked.subject].in_flight
    setting = Setting(asked.capacity_mib << 20, kib << 10, most, in_flight, asked.maru_checkout)
    result: dict[str, Any] = {
        "subject": asked.subject, "kib": kib, "capacity_bytes": setting.capacity_bytes, "requests": len(requests),
        "trace": Path(asked.trace).name or "synthetic", "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors", "python": platform.python_version(),
        "versions": _versions(), "load": os.getloadavg()[0], "rounds": [], "why_not": "",
    }  # fmt: skip
    try:
        for _ in range(asked.rounds):
            result["rounds"].append(trio.run(one_round, asked.subject, setting, requests))
    except* (Unavailable, ImportError) as group:
        result["why_not"] = "; ".join(str(error) for error in _leaves(group))
    return result


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _versions() -> dict[str, str]:
    known = {}
    for package in PACKAGES:
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return known


def in_a_namespace() -> None:
    """Go on in a network namespace with nothing but its loopback interface: what listens there is reached by nobody else."""
    if os.environ.get(NAMESPACE):
        return
    os.environ[NAMESPACE] = "1"
    command = 'ip link set lo up && exec "$@"'
    arguments = ["unshare", "-Urn", "bash", "-c", command, "bash", sys.executable, "-m", "tests.peers.measure"]
    try:
        subprocess.run([*arguments[:2], "true"], check=True, capture_output=True)
        os.execvp(arguments[0], [*arguments, *sys.argv[1:]])
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"a private network namespace (unshare -Urn) is needed, and cannot be made: {error}"
        ) from error


def main() -> None:
    """Measure one store, and write a file for each size of blocks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("subject", choices=sorted(SUBJECTS))
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1_500)
    parser.add_argument("--capacity-mib", type=int, default=1_024)
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--trace", default=os.environ.get("OFFLOAD_TRACE", ""))
    parser.add_argument("--maru-checkout", default="", help="the root of a checkout of the published Maru")
    asked = parser.parse_args()
    if asked.maru_checkout:
        asked.maru_checkout = str(Path(asked.maru_checkout).resolve())
        if why := why_no_checkout(asked.maru_checkout):
            parser.error(f"--maru-checkout: {why}")
    if SUBJECTS[asked.subject].environment == "mooncake":
        in_a_namespace()
    asked.out.mkdir(parents=True, exist_ok=True)
    for kib in asked.kib:
        result = measure(asked, kib)
        (asked.out / f"{asked.subject}.{kib}.json").write_text(json.dumps(result, indent=1))
        ratios = [one["seconds"] / one["floor_seconds"] for one in result["rounds"]]
        told = result["why_not"] or ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{asked.subject}, {kib} KiB: {told} of the floor", flush=True)


if __name__ == "__main__":
    main()
