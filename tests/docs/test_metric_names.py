"""Series that a how-to page names are series that a daemon shows."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from backends.testing import FakeTier
from offload import EngineConfig, open_engine
from offload.daemon import DaemonConfig, open_daemon
from offload.instruments import StageTimes
from offload.metrics import ConfigCollector, DaemonCollector, EngineCollector, StageCollector

PAGES = sorted(Path(__file__).parents[2].glob("docs/how-to/*.md"))
NAME = re.compile(r"kv_offload_[a-z0-9_]*[a-z0-9](?![a-z0-9_])")
"""Not what begins many, and ends with an underscore."""
BY_TENANT = "kv_offload_daemon_tenant_"
"""Those of quotas are there with the first tenant: tests/daemon/test_quotas.py has them."""


async def shown(path):
    source, tiers = FakeTier(), EngineConfig(tiers={"host": FakeTier()})
    registry = CollectorRegistry()
    registry.register(ConfigCollector(tiers))
    registry.register(StageCollector(StageTimes().statistics))
    async with (
        open_engine(source, {"host": FakeTier(), "disk": FakeTier()}, chain="on_evict") as engine,
        open_daemon(DaemonConfig(runtime_dir=str(path)), tiers) as daemon,
    ):
        registry.register(EngineCollector(engine.statistics))
        registry.register(DaemonCollector(daemon.statistics))
        return set(NAME.findall(generate_latest(registry).decode()))


async def test_each_series_that_a_page_names_exists(tmp_path):
    series = await shown(tmp_path / "run")
    named = {name: page.name for page in PAGES for name in NAME.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 30
    assert {name: page for name, page in named.items() if name not in series and not name.startswith(BY_TENANT)} == {}
