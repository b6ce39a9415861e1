"""A recording as lines of text, for an operator. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from .recording import Entry, Recording
from .records import (
    AnyRecord,
    BatchReached,
    CancelRequested,
    Deleted,
    Enqueued,
    HealthChanged,
    LeftBlocks,
    Loaded,
    LookedUp,
    Noted,
    Reached,
    Settled,
    Thinned,
    hashes_of,
)


def summary_of(recording: Recording) -> str:
    """Return the amount of records, and of missing ones, in a line."""
    text = f"{len(recording.entries):,} records of {recording.seconds:.3g} s by process {recording.pid}"
    for amount, what in ((recording.forgotten, "forgotten before them"), (recording.lost, "lost between them")):
        if amount:
            text += f", {amount:,} {what}"
    return f"{text}, the last one cut off" if recording.torn else text


def lines_of(recording: Recording, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the description, then a line for each of these entries.

    The line has the entry's time on the wall.
    """
    for tier in recording.description.tiers:
        yield f"tier {tier.name}: {tier.kind}, {tier.capacity:,} blocks of {tier.block_bytes:,} bytes"
    for one in recording.description.pipelines:
        onward = f", on through {', '.join(one.chain)}" if one.chain else ""
        yield f"pipeline {one.name}: {one.source} -> {one.to}{onward}"
    names = [one.name for one in recording.description.pipelines]
    for entry in entries:
        at = recording.started + entry.at - recording.began
        yield f"{_moment(at)}  {_line(entry.record, names)}"


def _moment(at: float) -> str:
    try:
        return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at % 1 * 1e6):06d}"
    except (OverflowError, ValueError, OSError):  # from a damaged recording
        return f"{at:.6g} s"


def _line(record: AnyRecord, names: Sequence[str]) -> str:
    match record:
        case Enqueued(pipeline, number, blocks, size, waits, keys):
            after = ", with a precondition" if waits else ""
            return f"{_who(names, pipeline, number)} enqueued: {size} {blocks} blocks{after} {_keys(keys)}"
        case Reached(pipeline, number, stage):
            return f"{_who(names, pipeline, number)} {stage}"
        case BatchReached(pipeline, event, numbers):
            return f"{_name(names, pipeline)} {event}: {', '.join(map(str, numbers))}"
        case Settled():
            return _settled(record, names)
        case CancelRequested(pipeline, number):
            return f"{_who(names, pipeline, number)} cancel requested"
        case LookedUp(keys, asked, segments, unavailable, left):
            found = ", ".join([f"{blocks} in {tier}" for tier, blocks in segments]) or "nothing"
            lacking = "".join([f", {tier} unavailable ({error})" for tier, error in unavailable])
            return f"lookup of {asked}: {found}{lacking}{_left(left)} {_keys(keys)}"
        case Loaded(_, asked, loaded, seconds, error, left):
            failed = f", then {error}" if error and left is None else ""
            return f"load: {loaded} of {asked} in {seconds * 1e3:.3g} ms{failed}{_left(left)}"
        case Deleted(keys, asked):
            return f"delete of {asked} {_keys(keys)}"
        case HealthChanged(tier, state):
            return f"breaker of {tier}: {state}"
        case Noted(rule, text):
            return f"NOTED {rule}{f': {text}' if text else ''}"
        case Thinned(seconds, containers, batches):
            return f"counted only, for {seconds:.3g} s: {containers:,} containers in {batches:,} batches"


def _left(left: LeftBlocks | None) -> str:
    """Return the blocks that were left to be computed, with both estimates."""
    if left is None:
        return ""
    why = "" if left.why == "recompute" else f", given up as {left.why}"
    loading = "not known" if left.load_seconds is None else f"{left.load_seconds * 1e3:.3g} ms"
    return (
        f"{why}, {left.blocks} from position {left.start} ({left.tier}) left to be computed: loading {loading}, "
        f"computing {left.recompute_seconds * 1e3:.3g} ms"
    )


def _settled(record: Settled, names: Sequence[str]) -> str:
    parts = [f"{_who(names, record.pipeline, record.number)} {record.status}: {record.completed} of {record.size}"]
    parts += [f"{len(keys) // 8} filtered ({reason})" for reason, keys in record.filtered]
    parts += [f"{len(keys) // 8} failed ({error})" for error, keys in record.failed]
    if record.evicted:
        parts.append(f"{len(record.evicted) // 8} evicted")
    if record.error:
        parts.append(record.error)
    return ", ".join(parts)


def _name(names: Sequence[str], pipeline: int) -> str:
    return names[pipeline] if pipeline < len(names) else f"pipeline {pipeline}"


def _who(names: Sequence[str], pipeline: int, number: int) -> str:
    return f"{_name(names, pipeline)}#{number}"


def _keys(column: bytes) -> str:
    shown = " ".join(hashes_of(column[:32]))
    return f"[{shown}{' ...' if len(column) > 32 else ''}]"
