"""Scenarios: a program, a clock, a seed, and expectations.

A :class:`Scenario` is read from a file or built in Python, :func:`play` runs it in virtual time, and the
:class:`Report` lists the events and the violations. Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

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
    from ._files import read as read
    from ._files import read_text as read_text
    from ._files import to_toml as to_toml
    from ._check import check as check
    from ._program import ScenarioError as ScenarioError
    from ._program import Problem as Problem
    from ._schema import schema as schema
    from ._names import expand as expand
    from ._generate import generate as generate
    from ._loads import unroll as unroll
    from ._play import play as play
    from ._real_run import play_real as play_real
    from ._systems import NotForReal as NotForReal
    from ._workers import play_many as play_many
    from ._players import Playing as Playing
    from ._summary import Played as Played
    from ._trace import Report as Report
    from ._trace import Moment as Moment
    from ._trace import Violation as Violation
    from ._shrink import shrink as shrink
    from ._perfetto import trace_events as trace_events
    from ._pipeline_system import open_pipelines as open_pipelines
    from ._incident import from_incident as from_incident
    from ._incident import NothingRecorded as NothingRecorded
    from ._systems import Factory as Factory
    from ._systems import World as World
    from ._systems import System as System
    from ._systems import Ticket as Ticket
    from ._systems import Outcome as Outcome
    from ._systems import Refused as Refused
    from ._sync_system import from_sync as from_sync
    from ._sync_system import SyncWorld as SyncWorld
    from ._asyncio_system import from_asyncio as from_asyncio
    from ._asyncio_system import AsyncioWorld as AsyncioWorld
    from ._thread_system import from_threads as from_threads
    from ._thread_system import ThreadWorld as ThreadWorld
    from ._systems import NeedsRealTime as NeedsRealTime
    from ._systems import NeedsProcesses as NeedsProcesses
    from ._ledger import judged_pipeline as judged_pipeline
    from ._clock import run as run
    from ._clock import deterministic as deterministic

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
    "read": "._files",
    "read_text": "._files",
    "to_toml": "._files",
    "check": "._check",
    "ScenarioError": "._program",
    "Problem": "._program",
    "schema": "._schema",
    "expand": "._names",
    "generate": "._generate",
    "unroll": "._loads",
    "play": "._play",
    "play_real": "._real_run",
    "NotForReal": "._systems",
    "play_many": "._workers",
    "Playing": "._players",
    "Played": "._summary",
    "Report": "._trace",
    "Moment": "._trace",
    "Violation": "._trace",
    "shrink": "._shrink",
    "trace_events": "._perfetto",
    "open_pipelines": "._pipeline_system",
    "from_incident": "._incident",
    "NothingRecorded": "._incident",
    "Factory": "._systems",
    "World": "._systems",
    "System": "._systems",
    "Ticket": "._systems",
    "Outcome": "._systems",
    "Refused": "._systems",
    "from_sync": "._sync_system",
    "SyncWorld": "._sync_system",
    "from_asyncio": "._asyncio_system",
    "AsyncioWorld": "._asyncio_system",
    "from_threads": "._thread_system",
    "ThreadWorld": "._thread_system",
    "NeedsRealTime": "._systems",
    "NeedsProcesses": "._systems",
    "judged_pipeline": "._ledger",
    "run": "._clock",
    "deterministic": "._clock",
}

lazily(__name__, _HOMES)
