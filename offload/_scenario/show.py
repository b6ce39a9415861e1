"""``offload scenario show``: a scenario's program in words, in order of time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import click
import msgspec

from maru.base.commands import refuse
from offload.testing.scenarios._names import expand
from offload.testing.scenarios._program import (
    After,
    Expect,
    Fault,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
)

from ._options import json_option, one_file, usage_errors
from ._output import grid, plural, show

_NOT_KNOBS = {"source", "to", "policies", "chain", "optional_chain"}


@click.command("show")
@click.argument("file")
@click.option("--steps", is_flag=True, help="Print each step of the load, as it will run.")
@click.option(
    "--seed", type=click.IntRange(0, (1 << 63) - 1), metavar="N", help="Seed for the load, instead of the file's."
)
@json_option
def command(file: str, steps: bool, seed: int | None, as_json: bool) -> None:
    """Show the tiers, steps, faults and expectations of a scenario."""
    if not steps:
        refuse(("seed",), "needs --steps, which writes out the load")
    found = one_file(file)
    scenario = found.scenario
    if steps:
        from offload.testing.scenarios._loads import unroll

        with usage_errors():
            scenario = unroll(scenario, scenario.seed if seed is None else seed, found.base)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(scenario)).decode())
        return
    show(scenario.name)
    if scenario.about:
        show(f"  {scenario.about}")
    if scenario.upstream:
        show(f"  tells again: {', '.join(scenario.upstream)}")
    for title, rows in _sections(scenario):
        if rows:
            show("", title, grid(rows, indent=2))


def _sections(scenario: Scenario) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    yield "Tiers", [(name, _tier(spec)) for name, spec in scenario.tier.items()]
    yield "Pipelines", [row for name, spec in scenario.pipeline.items() for row in _pipeline(name, spec)]
    yield "What is done", [*_load(scenario), *[(f"{step.at_ms} ms", _step(step)) for step in _in_time(scenario.step)]]
    timed = sorted([fault for fault in scenario.fault if not fault.at_hook], key=lambda fault: fault.at_ms or 0)
    hooked = [fault for fault in scenario.fault if fault.at_hook]
    yield "What goes wrong", [(_when(fault), _fault(fault)) for fault in (*timed, *hooked)]
    yield "What must hold", list(itertools.chain.from_iterable(map(_expect, scenario.expect)))


def _in_time(steps: Sequence[Step]) -> list[Step]:
    return sorted(steps, key=lambda step: step.at_ms)


def _tier(spec: TierSpec) -> str:
    text = f"{plural(spec.capacity, 'block')} of {plural(spec.block_bytes, 'byte')}"
    if spec.latency_ms:
        text += f", a copy takes {spec.latency_ms} ms"
    if spec.bytes_per_ms:
        text += f", {spec.bytes_per_ms:,} bytes in a ms"
    if spec.holds:
        text += f", holds {spec.holds}"
    if spec.kind != "memory":
        text += f", {spec.kind}"
    return text if spec.checksums else f"{text}, without checksums"


def _pipeline(name: str, spec: PipelineSpec) -> Iterator[tuple[str, str]]:
    chain = f", and on through {', '.join(spec.chain)}" if spec.chain else ""
    if spec.optional_chain:
        chain += f", and on through {', '.join(spec.optional_chain)} if there is room"
    yield name, f"{spec.source} -> {spec.to}{chain}"
    knobs = {
        field: getattr(spec, field)
        for field in spec.__struct_fields__
        if field not in _NOT_KNOBS and getattr(spec, field) is not None
    }
    if knobs:
        yield "", ", ".join([f"{knob} = {value}" for knob, value in knobs.items()])
    for policy in spec.policies:
        yield "", f"policy: {_policy(policy)}"


def _policy(policy: PolicySpec) -> str:
    about = f" {policy.keys}" if policy.keys else " everything" if policy.do == "reject" else ""
    text = {
        "reject": f"reject{about} ({policy.reason})",
        "present": f"reject what {policy.tier or 'the destination'} has",
        "sleep": f"take {policy.ms} ms{about and f' over{about}'}",
        "raise": f"raise{about and f' over{about}'}",
        "lock": f"take a lock{about and f' for{about}'}",
        "cancel": f"cancel {policy.who}",
        "hang": f"never answer{about and f' about{about}'}",
    }[policy.do]
    if policy.ms and policy.do != "sleep":
        text += f", after {policy.ms} ms"
    return text if policy.p == 1.0 else f"{text}, with p = {policy.p:g}"


def _load(scenario: Scenario) -> Iterator[tuple[str, str]]:
    load = scenario.load
    if load is not None and load.mix is not None:
        mix = load.mix
        text = f"{plural(mix.containers, 'container')} of up to {plural(mix.most, 'block')} of {mix.keys:,} keys"
        yield f"0..{mix.over_ms} ms", f"{text}, drawn from the seed (--steps shows them)"
    if load is not None and load.trace is not None:
        yield "", f"up to {plural(load.trace.limit, 'request')} of {load.trace.path} (--steps shows them)"


def _step(step: Step) -> str:
    if step.store is not None:
        return _store(step.store)
    if step.load is not None:
        return f"load {step.load.keys}" + (f" from {step.load.tier}" if step.load.tier else "")
    for verb in ("evict", "delete"):
        part = getattr(step, verb)
        if part is not None:
            text = f"{verb} {part.keys}" + (f" from {part.tier}" if part.tier else "")
            return f"{text}, and put them back" if part.again else text
    if step.fire is not None:
        return f"fire {step.fire}"
    if step.drain is not None:
        return f"wait until {step.drain} has nothing left"
    if step.release is not None:
        return f"release what {step.release} has in quarantine"
    assert step.close is not None
    return {
        "leave": "leave the pipelines",
        "close": "shut down",
        "cancel": "cancel the scope around everything",
        "raise": "raise in the scope around everything",
    }[step.close.how]


def _store(store: StoreStep) -> str:
    labels = expand(store.id)
    each = " each" if len(labels) > 1 else ""
    keys = f" ({store.keys})" if store.keys else ""
    text = f"store {store.id}: {plural(store.per, 'block')}{each}{keys}, {store.kind}"
    if store.pipeline:
        text += f", through {store.pipeline}"
    if store.how == "now":
        text += ", without waiting for room"
    if store.after:
        text += (" after one of " if store.any_of else " after ") + " and ".join(map(_after, store.after))
    return text


def _after(after: After) -> str:
    if after.do == "never":
        return "what never holds"
    what = "it raises" if after.do == "raise" else "it holds"
    if after.event:
        return f"event {after.event}"
    return f"{after.ms} ms, when {what}" if after.ms is not None else f"what {what.removeprefix('it ')} already"


def _when(fault: Fault) -> str:
    if not fault.at_hook:
        return f"{fault.at_ms} ms"
    return f"at {fault.at_hook}"


def _fault(fault: Fault) -> str:
    words: list[str] = [fault.do]
    if fault.who:
        words.append(fault.who)
    if fault.keys:
        words.append(f"keys {fault.keys}")
    if fault.tier:
        words.append(f"of {fault.tier}")
    if fault.do in ("delay", "clock"):
        words.append(f"by {fault.ms} ms")
    if fault.for_ms != 1:
        words.append(f"for {fault.for_ms} ms")
    if fault.of or fault.visit != 1:
        about = f" about {fault.of}" if fault.of else ""
        words.append(f"(visit {fault.visit}{about})")
    if fault.p != 1.0:
        words.append(f"with p = {fault.p:g}")
    return " ".join(words)


def _expect(expect: Expect) -> Iterator[tuple[str, str]]:
    for field in expect.__struct_fields__:
        value = getattr(expect, field)
        if value is not None:
            yield field.replace("_", " "), _value(value)


def _value(value: object) -> str:
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict):
        return ", ".join(
            [f"{name}: {_value(item)}" if isinstance(item, dict) else f"{name} {item}" for name, item in plain.items()]
        )
    if isinstance(plain, list):
        return ", then ".join([_value(item) if isinstance(item, dict) else str(item) for item in plain])
    return str(plain)
