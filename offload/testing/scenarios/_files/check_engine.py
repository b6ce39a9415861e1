"""Whether the engine of a scenario can be opened, and is asked only for what it does. Pure."""

from __future__ import annotations

from typing import Final

from .._program import EngineSpec
from .complaints import Complaints, quoted

ENGINE_FIGURES: Final = ("well", "faults", "asked_in_vain", "left_out", "promoted")
"""What is said of a tier of an engine beside the figures of the pipeline into it.

``well``: 1 while it is asked, 0 where it is left alone. ``faults``: in a row. ``asked_in_vain``: questions that met a peer that
was dead or stood still. ``left_out``: lookups without it. ``promoted``: blocks, of the engine as a whole."""


def check_engine(c: Complaints) -> None:
    """An engine, where there is one."""
    engine = c.scenario.engine
    if engine is None:
        return
    _tiers(c, engine)
    if engine.first_wait_ms > engine.longest_wait_ms:
        c.wrong("engine.first_wait_ms", f"must be at most longest_wait_ms = {engine.longest_wait_ms}")
    if len(c.scenario.pipeline) > 1:
        c.wrong("pipeline", "an engine makes its pipelines itself: name one, for the knobs of all")
    for name, spec in c.scenario.pipeline.items():
        for field in ("policies", "chain"):
            if getattr(spec, field):
                c.wrong(
                    f"pipeline.{quoted(name)}.{field}", "an engine has its own, what is there already: leave it out"
                )
    for i, step in enumerate(c.scenario.step):
        if step.close is not None and step.close.how == "close":
            c.wrong(f"step[{i}].close.how", "an engine ends with its block: say leave, or cancel")
        if step.store is not None and step.store.how != "wait":
            c.wrong(f"step[{i}].store.how", "an engine is asked to store one after the other: leave it out")
        if step.store is not None and step.store.pipeline not in ("", *engine.tiers[:1]):
            c.wrong(f"step[{i}].store.pipeline", "an engine stores into its first tier: leave it out")
    for i, fault in enumerate(c.scenario.fault):
        if fault.do == "shut_down":
            c.wrong(f"fault[{i}].do", "an engine ends with its block: say cancel_host")


def _tiers(c: Complaints, engine: EngineSpec) -> None:
    if not engine.tiers:
        c.wrong("engine.tiers", 'is empty: name at least one tier, as in ["host", "disk"]')
    for i, tier in enumerate(engine.tiers):
        path = f"engine.tiers[{i}]"
        if tier == "device":
            c.wrong(path, "'device' is where blocks come from: name the others")
        elif tier in engine.tiers[:i]:
            c.wrong(path, f"{tier!r} is named twice: once is enough")
        elif tier not in c.tiers:
            c.one(path, tier, c.tiers, "tier")
        elif i + 1 < len(engine.tiers) and tier in c.scenario.tier and c.scenario.tier[tier].kind == "maru":
            c.wrong(path, f"{tier!r} is a page store, from which no pipeline starts: let it be the last")
