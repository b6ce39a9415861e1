"""What is written is read again as the same, and is pleasant to read."""

import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.testing.scenarios import (
    CloseStep,
    Counts,
    Expect,
    Fault,
    Load,
    Mix,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
    TraceLoad,
    Window,
    generate,
    read_text,
    to_toml,
)
from offload.testing.scenarios._files import WIDTH
from offload.testing.scenarios._strategy import scenarios

PRETTY = """\
format = 1
name = "S20 cancel one of four in a batch"
about = \"\"\"
The other three
go on.\"\"\"
seed = 7

[tier.host]
latency_ms = 2

[pipeline.main]
to = "host"
policies = [{ do = "reject", keys = "k0" }]
flush_ms = 2

[[step]]
at_ms = 0
store = { id = "a{0..3}", keys = "k{0..3}" }

[[step]]
at_ms = 9
close = {}

[[fault]]
at_hook = "sweep_claim_gap"
do = "cancel"
who = "a2"

[[expect]]
status = { a0 = "COMPLETE", a2 = "CANCELLED" }

[[expect]]
order = ["a2 confirmed", "a0 settled"]
"""


def test_a_file_looks_as_somebody_would_have_written_it():
    scenario = Scenario(
        name="S20 cancel one of four in a batch",
        about="The other three\ngo on.",
        seed=7,
        tier={"host": TierSpec(latency_ms=2)},
        pipeline={"main": PipelineSpec(to="host", flush_ms=2, policies=[PolicySpec(do="reject", keys="k0")])},
        step=[Step(store=StoreStep(id="a{0..3}", keys="k{0..3}")), Step(at_ms=9, close=CloseStep())],
        fault=[Fault(do="cancel", at_hook="sweep_claim_gap", who="a2")],
        expect=[
            Expect(status={"a0": "COMPLETE", "a2": "CANCELLED"}),
            Expect(order=["a2 confirmed", "a0 settled"]),
        ],
    )
    assert to_toml(scenario) == PRETTY
    assert read_text(PRETTY) == scenario


@pytest.mark.parametrize("hundred", [0, *[pytest.param(at, marks=pytest.mark.long) for at in range(1, 10)]])
def test_any_generated_program_survives(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        scenario = generate(seed)
        assert read_text(to_toml(scenario)) == scenario


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(scenarios(), st.text(), st.lists(st.text()), st.text(min_size=1))
def test_any_program_with_any_texts_survives(scenario, about, upstream, odd):
    import msgspec

    label = next(step.store.id for step in scenario.step if step.store)
    odd = "".join(odd.split()) or "-"  # a name has no space in it
    policies = [PolicySpec(do="reject", reason=odd)]
    scenario = msgspec.structs.replace(
        scenario,
        about=about,
        upstream=upstream,
        tier={**scenario.tier, odd: TierSpec()},
        pipeline={**scenario.pipeline, odd: PipelineSpec(to=odd, policies=policies)},
        expect=[Expect(status={label: "COMPLETE"}, metric={odd: {"batches": 2.5}}, found={odd: "a"})],
    )
    assert read_text(to_toml(scenario)) == scenario


def test_everything_that_need_not_fit_on_a_line_survives_on_several():
    labels = [f"container{i}" for i in range(20)]
    scenario = Scenario(
        name="n" * 200,
        upstream=[f"somebody #{i}" for i in range(30)],
        load=Load(mix=Mix(containers=3, kinds=["weak"] * 40, cancels=0.25), trace=TraceLoad(path="x", speed=2.5)),
        pipeline={"main": PipelineSpec(to="host", policies=[PolicySpec(do="sleep", ms=i) for i in range(9)])},
        step=[Step(store=StoreStep(id=", ".join(labels), keys=", ".join([f"k{i}" for i in range(40)]), per=2))],
        expect=[
            Expect(status=dict.fromkeys(labels, "COMPLETE")),
            Expect(result=dict.fromkeys(labels, Counts(completed=2, reasons=["a", "b"]))),
            Expect(order=[f"{label} settled" for label in labels]),
            Expect(time=[Window(event=f"{label} settled", at_least_ms=1) for label in labels]),
            Expect(metric={"main": {"batches": 1, "copied_bytes": 2}}, never=["container1 missed"]),
        ],
    )
    text = to_toml(scenario)
    assert read_text(text) == scenario
    too_long = [line for line in text.splitlines() if len(line) > WIDTH]
    assert [line.split(" = ")[0] for line in too_long] == ["name", "id", "keys"]  # texts are not broken


def test_a_load_that_says_nothing_is_still_there():
    assert tomllib.loads(to_toml(Scenario(name="x", load=Load())))["load"] == {}


ODD = [
    '"',
    '""',
    '"""',
    'a"""b',
    'end"',
    "\\",
    "a\\",
    "\r\n",
    "\t\x00\x7f",
    "\n",
    "\n\n",
    "é\u2028😀",
    '\n"',
    ' x \n "" y"',
]


@pytest.mark.parametrize("text", ODD)
def test_any_text_survives(text):
    scenario = Scenario(name=f"x{text}", about=text)
    assert read_text(to_toml(scenario)) == scenario
