"""Scenarios: a program, a clock, a seed, and what must hold.

A :class:`Scenario` is read from a file or built in Python, :func:`play` runs it in virtual time, and the :class:`Report` says
what happened and what of it was wrong. Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from maru._lazy import lazily

if TYPE_CHECKING:
    from ._program import Scenario as Scenario
    from ._program import TierSpec as TierSpec
    from ._program import PipelineSpec as PipelineSpec
    from ._program import PolicySpec as PolicySpec
    from ._program import EngineSpec as EngineSpec
    from ._program import Step as Step
    from ._program import StoreStep as StoreStep
    from ._program import LoadStep as LoadStep
    from ._program import KeysStep as KeysStep
    from ._program import CloseStep as CloseStep
    from ._program import After as After
    from ._program import Load as Load
    from ._program import Mix as Mix
    from ._program import TraceLoad as TraceLoad
    from ._program import Fault as Fault
    from ._program import Expect as Expect
    from ._program import Counts as Counts
    from ._program import Window as Window
    from ._program import TICK as TICK
    from ._files.reading import read as read
    from ._files.reading import read_text as read_text
    from ._files.writing import to_toml as to_toml
    from ._files.checking import check as check
    from ._files.complaints import ScenarioError as ScenarioError
    from ._files.complaints import Problem as Problem
    from ._files.schema import schema as schema
    from ._names import expand as expand
    from ._making.generating import generate as generate
    from ._making.loads import unroll as unroll
    from ._playing.playing import play as play
    from ._for_real.real import play_real as play_real
    from ._for_real.real import NotForReal as NotForReal
    from ._many.many import play_many as play_many
    from ._many.many import Playing as Playing
    from ._many.summing import Played as Played
    from ._report import Report as Report
    from ._report import Moment as Moment
    from ._report import Violation as Violation
    from ._shrinking.shrinking import shrink as shrink
    from ._pictures.timeline import timeline as timeline
    from ._pictures.perfetto import trace_events as trace_events
    from ._contract import Factory as Factory
    from ._contract import World as World
    from ._contract import System as System
    from ._contract import Ticket as Ticket
    from ._contract import Outcome as Outcome
    from ._contract import Refused as Refused
    from ._playing.synchronous_systems import from_sync as from_sync
    from ._playing.synchronous_systems import SyncWorld as SyncWorld
    from ._for_real.asyncio_systems import from_asyncio as from_asyncio
    from ._for_real.asyncio_systems import AsyncioWorld as AsyncioWorld
    from ._for_real.threaded_systems import from_threads as from_threads
    from ._for_real.threaded_systems import ThreadWorld as ThreadWorld
    from ._playing.colours import NeedsRealTime as NeedsRealTime
    from ._playing.colours import NeedsProcesses as NeedsProcesses
    from ._judging.judged import judged_pipeline as judged_pipeline
    from ._determinism import run as run
    from ._determinism import deterministic as deterministic

_HOMES = {
    "Scenario": "._program",
    "TierSpec": "._program",
    "PipelineSpec": "._program",
    "PolicySpec": "._program",
    "EngineSpec": "._program",
    "Step": "._program",
    "StoreStep": "._program",
    "LoadStep": "._program",
    "KeysStep": "._program",
    "CloseStep": "._program",
    "After": "._program",
    "Load": "._program",
    "Mix": "._program",
    "TraceLoad": "._program",
    "Fault": "._program",
    "Expect": "._program",
    "Counts": "._program",
    "Window": "._program",
    "TICK": "._program",
    "read": "._files.reading",
    "read_text": "._files.reading",
    "to_toml": "._files.writing",
    "check": "._files.checking",
    "ScenarioError": "._files.complaints",
    "Problem": "._files.complaints",
    "schema": "._files.schema",
    "expand": "._names",
    "generate": "._making.generating",
    "unroll": "._making.loads",
    "play": "._playing.playing",
    "play_real": "._for_real.real",
    "NotForReal": "._for_real.real",
    "play_many": "._many.many",
    "Playing": "._many.many",
    "Played": "._many.summing",
    "Report": "._report",
    "Moment": "._report",
    "Violation": "._report",
    "shrink": "._shrinking.shrinking",
    "timeline": "._pictures.timeline",
    "trace_events": "._pictures.perfetto",
    "Factory": "._contract",
    "World": "._contract",
    "System": "._contract",
    "Ticket": "._contract",
    "Outcome": "._contract",
    "Refused": "._contract",
    "from_sync": "._playing.synchronous_systems",
    "SyncWorld": "._playing.synchronous_systems",
    "from_asyncio": "._for_real.asyncio_systems",
    "AsyncioWorld": "._for_real.asyncio_systems",
    "from_threads": "._for_real.threaded_systems",
    "ThreadWorld": "._for_real.threaded_systems",
    "NeedsRealTime": "._playing.colours",
    "NeedsProcesses": "._playing.colours",
    "judged_pipeline": "._judging.judged",
    "run": "._determinism",
    "deterministic": "._determinism",
}

lazily(__name__, _HOMES)
