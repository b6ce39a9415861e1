"""The JSON schema, and what is said of each field."""

import json
from typing import get_args

import msgspec
import pytest

from offload.testing.scenarios import _program, generate, schema
from offload.testing.scenarios._schema import PARTS, about, described

SAY_IT_ALL = {
    "Scenario": {"format", "name", "seed", "load", "step", "fault", "expect"},
    "TierSpec": {"block_bytes", "checksums"},
    "PipelineSpec": {"from", "to", "policies"},
    "Load": {"mix", "trace"},
    "LoadStep": {"id", "tier", "keys"},
    "Step": {"at_ms", "store", "load", "close", "delete", "evict", "drain"},
    "TraceLoad": {"skip"},
    "Counts": {"completed", "filtered", "failed", "evicted"},
    "Window": {"at_least_ms", "at_most_ms"},
    "Expect": {"at_most", "at_least", "time"},
    "Mix": {"kinds"},
}
"""Fields whose name and type say what they are."""


def test_it_is_json_of_a_kind_that_editors_have():
    assert json.loads(json.dumps(schema())) == schema()
    assert schema()["$schema"].endswith("draft-07/schema#")
    assert schema()["required"] == ["name"]


def test_every_table_and_every_field_is_in_it():
    tables = {"Scenario": schema(), **schema()["$defs"]}
    assert sorted(tables) == sorted([cls.__name__ for cls in PARTS])
    for cls in PARTS:
        names = [field.encode_name for field in msgspec.structs.fields(cls)]
        assert list(tables[cls.__name__]["properties"]) == names
        assert tables[cls.__name__]["additionalProperties"] is False
        assert tables[cls.__name__]["description"]


def test_every_table_of_the_program_is_described():
    tables = [cls for cls in vars(_program).values() if isinstance(cls, type) and issubclass(cls, _program.Part)]
    assert set(PARTS) == set(tables) - {_program.Part}
    assert all(about(cls) for cls in PARTS)


@pytest.mark.parametrize("cls", PARTS, ids=lambda cls: cls.__name__)
def test_every_field_says_what_it_means(cls):
    silent = {field.name for field in described(cls) if not field.text}
    assert silent <= SAY_IT_ALL.get(cls.__name__, set())


def test_the_knobs_of_a_pipeline_say_what_the_knobs_say_in_the_names_of_a_file():
    texts = {field.name: field.text for field in described(_program.PipelineSpec)}
    assert texts["policy_ms"].startswith("Time for the async policies")
    assert "transfer_ms" in texts["drain_ms"] and "transfer_timeout" not in texts["drain_ms"]


def test_every_kind_of_fault_has_its_row():
    from offload.testing.scenarios._schema import fault_rows

    assert [do for do, _, _ in fault_rows()] == list(get_args(_program.FaultKind))
    assert ("evict", "keys leave a source", "``tier``, ``keys``, ``again``") in fault_rows()
    text = next(field.text for field in described(_program.Fault) if field.name == "do")
    assert "stall: copies that begin wait until it is over." in text


def test_what_need_not_be_said_cannot_be_null():
    assert '"null"' not in json.dumps(schema())


def test_every_reference_leads_somewhere():
    made = schema()
    text = json.dumps(made)
    names = {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}
    assert names == set(made["$defs"])


def test_what_is_generated_has_the_types_of_the_schema():
    made = schema()
    for seed in range(30):
        _fits(msgspec.to_builtins(generate(seed)), made, made["$defs"])
    with pytest.raises(AssertionError):
        _fits({"name": "x", "fault": [{"do": "cancl"}]}, made, made["$defs"])


def _fits(value, rule, defs):
    """As much of a validator as our schema needs."""
    if "$ref" in rule:
        rule = defs[rule["$ref"].rpartition("/")[2]]
    if "anyOf" in rule:
        assert any(_does_fit(value, one, defs) for one in rule["anyOf"])
        return
    if "enum" in rule:
        assert value in rule["enum"]
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    if "type" in rule:
        assert isinstance(value, kinds[rule["type"]])
    assert rule.get("minimum", value) <= value if "minimum" in rule else True
    assert rule.get("maximum", value) >= value if "maximum" in rule else True
    if isinstance(value, list):
        for one in value:
            _fits(one, rule["items"], defs)
    if isinstance(value, dict):
        assert set(rule.get("required", ())) <= set(value)
        for name, one in value.items():
            below = rule.get("properties", {}).get(name, rule.get("additionalProperties"))
            assert below
            _fits(one, below, defs)


def _does_fit(value, rule, defs):
    try:
        _fits(value, rule, defs)
    except AssertionError:
        return False
    return True
