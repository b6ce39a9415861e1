"""A real Prometheus scrapes an engine, and every expression of the dashboard has an answer there.

Needs the programs `prometheus` and `promtool`, which Debian's package `prometheus` has.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from backends.base.slots import PagesDestination
from backends.memory import MemoryTier
from offload import NO_WAIT
from offload.from_thread import open_engine
from offload.instruments import StageTimes
from offload.metrics import EngineCollector, StageCollector
from tests.support import grafana_dashboard

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus: apt-get install prometheus"
)
SIZE = 1 << 10


@contextmanager
def scraped_engine() -> Iterator[tuple[CollectorRegistry, int]]:
    """An engine that has stored, found and missed blocks, and the port where its metrics are served."""
    source, times, registry = MemoryTier(1 << 20, SIZE), StageTimes(), CollectorRegistry()
    keys = [b"%d" % number for number in range(8)]
    for key in keys[:6]:
        source.put(key, bytes(SIZE))
    with open_engine(source, [MemoryTier(1 << 20, SIZE)], instruments=[times]) as engine:
        registry.register(EngineCollector(lambda: engine.statistics().engine))
        registry.register(StageCollector(times.statistics))
        server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        try:
            engine.store(source.weak(keys[:6]), precondition=NO_WAIT).result(10)
            with engine.lookup(keys) as hit:
                engine.load(hit, PagesDestination.over([bytearray(SIZE) for _ in range(len(hit))]))
            yield registry, server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@contextmanager
def prometheus(directory: Path, target: int) -> Iterator[str]:
    """A Prometheus that scrapes this port each 100 ms; its address. It ends with the test."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "global": {"scrape_interval": "100ms", "scrape_timeout": "100ms"},
        "scrape_configs": [{"job_name": "offload", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        "prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def ask(address: str, expression: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{address}/api/v1/query?{query}", timeout=10) as answer:
        told = json.load(answer)
    assert told["status"] == "success", told
    return told["data"]["result"]


def ask_until_there(address: str, expression: str) -> list[Any]:
    """The answer, as soon as there is one; the last after a minute."""
    end = time.monotonic() + 60
    while True:
        try:
            if found := ask(address, expression):
                return found
        except OSError:  # it is not up yet
            found = []
        if time.monotonic() > end:
            return found
        threading.Event().wait(0.1)


def expressions() -> list[str]:
    """All of the dashboard, as Grafana asks them."""
    whole = [line["expr"] for panel in grafana_dashboard.panels() for line in panel.get("targets", ())]
    return [text.replace("$__rate_interval", "10s").replace("$instance", ".+") for text in whole]


@needs_prometheus
def test_each_expression_of_the_dashboard_is_answered_by_a_prometheus_that_scrapes_an_engine(tmp_path: Path) -> None:
    with scraped_engine() as (_, port), prometheus(tmp_path, port) as address:
        # Two scrapes, so that there are rates.
        assert ask_until_there(address, "count_over_time(kv_offload_lookups_total[1m]) >= 2")
        assert ask(address, "kv_offload_hit_blocks_total / kv_offload_asked_blocks_total")[0]["value"][1] == "0.75"
        assert [text for text in expressions() if not ask(address, text)] == []


@needs_prometheus
def test_the_text_that_is_scraped_is_as_promtool_wants_it() -> None:
    with scraped_engine() as (registry, _):
        text = generate_latest(registry)
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_the_file_of_the_dashboard_is_what_its_table_makes() -> None:
    """`python -m tests.support.grafana_dashboard` writes it anew."""
    assert grafana_dashboard.FILE.read_text() == grafana_dashboard.rendered()


def test_no_two_panels_share_a_place_or_a_number() -> None:
    panels = list(grafana_dashboard.panels())
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
