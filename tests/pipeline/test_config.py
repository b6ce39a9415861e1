import contextlib
import math
import os
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru.configuration import Knob
from offload import BatchConfig, ConfigError, OffloadError, PipelineConfig, config_from_toml, knobs
from offload._config import from_mapping

# Every knob, the values at its bounds, and values that it cannot have.
COUNTS = {
    "max_batch_size": (1, 65_536),
    "min_batch_size": (1, 65_536),
    "max_waiting_policies": (1, 4_096),
    "max_concurrent_transfers": (1, 64),
    "budget_blocks": (1, 1 << 24),
}
SECONDS = {
    "flush_interval": (0, 60),
    "policy_timeout": (0.001, 3_600),
    "precondition_timeout": (0.001, 86_400),
    "sweep_interval": (0.001, 60),
    "destination_timeout": (0.001, 86_400),
    "transfer_timeout": (0.001, 86_400),
    "drain_timeout": (0, 86_400),
    "route_share": (0.001, 1),
    "route_patience": (0, 3_600),
}
CHOICES = {
    "on_policy_error": {"filter", "fail"},
    "on_destination_full": {"wait", "evict", "partial", "fail"},
    "on_overflow": {"wait", "drop"},
}
NO_NUMBER = [True, False, None, "8", [8], 8j]
BAD = [
    *((name, bad) for name, (low, high) in COUNTS.items() for bad in [low - 1, high + 1, 8.0, math.nan, *NO_NUMBER]),
    *(
        (name, bad)
        for name, (low, high) in SECONDS.items()
        for bad in [low - 0.001, high * 1.001, -1, math.nan, math.inf, -math.inf, *NO_NUMBER]
    ),
    *((name, bad) for name in CHOICES for bad in ["", "WAIT", "other", 3, None, ["wait"], True]),
    *(("batch_config", bad) for bad in [None, 3, {}, {"max_batch_size": 8}, PipelineConfig, BatchConfig]),
]
GOOD = [
    *((name, good) for name, bounds in (COUNTS | SECONDS).items() for good in bounds),
    *((name, good) for name, words in CHOICES.items() for good in sorted(words)),
]


def owner(name):
    return BatchConfig if name in attrs.fields_dict(BatchConfig) else PipelineConfig


def make(name, value):
    """A configuration in which this knob alone can be wrong."""
    company = {}
    if name == "max_batch_size" and value == 1:
        company = {"min_batch_size": 1}
    elif name == "min_batch_size" and isinstance(value, int) and not isinstance(value, bool) and value <= 65_536:
        company = {"max_batch_size": 65_536}
    elif name == "budget_blocks" and value == 1:
        company = {"batch_config": BatchConfig(max_batch_size=1, min_batch_size=1)}
    return owner(name)(**company, **{name: value})


def test_the_defaults_are_those_of_the_documentation():
    assert PipelineConfig() == PipelineConfig(
        batch_config=BatchConfig(max_batch_size=64, min_batch_size=8, flush_interval=0.01),
        policy_timeout=0.1,
        sweep_interval=0.01,
        max_concurrent_transfers=1,
        precondition_timeout=300.0,
        on_policy_error="filter",
        on_destination_full="wait",
        destination_timeout=30.0,
        transfer_timeout=5.0,
        transfer_bytes_per_second=50_000_000,
        drain_timeout=10.0,
        budget_blocks=4096,
        on_overflow="wait",
        max_waiting_policies=64,
        route_share=0.5,
        route_patience=1.0,
    )


def test_every_knob_is_tested_here():
    names = {field.name for cls in (BatchConfig, PipelineConfig) for field in attrs.fields(cls)}
    assert names == {*COUNTS, *SECONDS, *CHOICES, "batch_config", "transfer_bytes_per_second"}


def test_bytes_per_second_take_units():
    assert PipelineConfig(transfer_bytes_per_second="1 MiB").transfer_bytes_per_second == 1 << 20  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="transfer_bytes_per_second = -1: must be bytes from"):
        PipelineConfig(transfer_bytes_per_second=-1)


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_knob_takes_the_values_at_its_bounds(name, value):
    assert getattr(make(name, value), name) == value


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_knob_refuses_what_is_out_of_bounds_or_of_another_type(name, value):
    with pytest.raises(ConfigError) as refused:
        make(name, value)
    error = refused.value
    assert (error.knob, error.value) == (name, value) or value != value  # a nan equals nothing
    assert name in str(error)
    assert repr(value) in str(error)
    assert error.bound in str(error)
    assert error.bound.startswith("must be ")


def test_a_config_error_is_an_offload_error_and_a_value_error():
    with pytest.raises(OffloadError):
        BatchConfig(max_batch_size=0)
    with pytest.raises(ValueError):
        BatchConfig(max_batch_size=0)


def test_an_integer_will_do_for_seconds():
    assert PipelineConfig(policy_timeout=1).policy_timeout == 1


def test_min_batch_size_must_not_exceed_max_batch_size():
    assert BatchConfig(max_batch_size=8, min_batch_size=8)
    with pytest.raises(ConfigError, match="min_batch_size = 9: must be at most max_batch_size, 8"):
        BatchConfig(max_batch_size=8, min_batch_size=9)


def test_a_batch_must_fit_into_the_budget():
    assert PipelineConfig(budget_blocks=64)
    with pytest.raises(ConfigError, match=r"batch_config\.max_batch_size = 64: must be at most budget_blocks, 63"):
        PipelineConfig(budget_blocks=63)


def test_a_configuration_cannot_be_changed_and_a_changed_copy_is_checked():
    config = PipelineConfig()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.budget_blocks = 1
    with pytest.raises(ConfigError):
        attrs.evolve(config, budget_blocks=1)
    assert hash(config) == hash(PipelineConfig())


# --- from mappings ------------------------------------------------------------------------------------------------


def test_what_a_mapping_does_not_name_keeps_its_default():
    assert from_mapping({}) == PipelineConfig()
    assert from_mapping({"batch_config": {"max_batch_size": 32}}) == PipelineConfig(BatchConfig(max_batch_size=32))
    assert from_mapping({"batch_config": BatchConfig(max_batch_size=32)}) == PipelineConfig(BatchConfig(32))
    assert from_mapping({"max_batch_size": 9}, BatchConfig) == BatchConfig(max_batch_size=9)


def test_an_unknown_name_is_an_error_that_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"policy_timout = 1: .*did you mean policy_timeout"):
        from_mapping({"policy_timout": 1})
    with pytest.raises(ConfigError, match=r"batch_config\.max_batch = 1: .*did you mean max_batch_size"):
        from_mapping({"batch_config": {"max_batch": 1}})
    with pytest.raises(ConfigError, match=r"zzz = 1: .*only max_batch_size, min_batch_size, flush_interval"):
        from_mapping({"zzz": 1}, BatchConfig)


def test_an_error_in_a_mapping_names_the_whole_path():
    with pytest.raises(ConfigError) as refused:
        from_mapping({"batch_config": {"max_batch_size": 0}}, section="pipeline")
    assert refused.value.knob == "pipeline.batch_config.max_batch_size"
    with pytest.raises(ConfigError, match=r"pipeline\.batch_config\.max_batch_size = 64: must be at most budget"):
        from_mapping({"budget_blocks": 8}, section="pipeline")


@pytest.mark.parametrize("value", [None, 3, "text", []])
def test_what_is_no_mapping_is_refused(value):
    with pytest.raises(ConfigError, match=r"PipelineConfig = .*: must be a table"):
        from_mapping(value)
    with pytest.raises(ConfigError, match=r"batch_config = .*: must be a table"):
        from_mapping({"batch_config": value})


NAMES = st.sampled_from([field.name for cls in (BatchConfig, PipelineConfig) for field in attrs.fields(cls)])
VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["wait", "fail"])
)


@given(
    st.dictionaries(
        NAMES | st.text(max_size=5) | st.integers(), VALUES | st.dictionaries(NAMES | st.text(max_size=3), VALUES)
    )
)
def test_any_mapping_gives_a_configuration_or_a_config_error(mapping):
    with contextlib.suppress(ConfigError):
        config = from_mapping(mapping)
        assert config.batch_config.min_batch_size <= config.batch_config.max_batch_size <= config.budget_blocks


# --- from TOML ----------------------------------------------------------------------------------------------------

TOML = """\
# a pipeline
[pipeline]
policy_timeout = 0.5
on_overflow = "drop"

[pipeline.batch_config]
max_batch_size = 128
"""
READ = PipelineConfig(BatchConfig(max_batch_size=128), policy_timeout=0.5, on_overflow="drop")


def test_toml_is_read_from_a_text_and_from_a_path(tmp_path):
    path = tmp_path / "offload.toml"
    path.write_text(TOML)
    assert config_from_toml(TOML, environ={}) == READ
    assert config_from_toml(path, environ={}) == READ
    assert config_from_toml("", environ={}) == PipelineConfig()


@pytest.mark.parametrize(
    "toml",
    [
        "pipeline.batch_config.max_batch_size = 128",
        "[pipeline]\nbatch_config.max_batch_size = 128",
        "[pipeline]\nbatch_config = {max_batch_size = 128}",
        "pipeline = {batch_config = {max_batch_size = 128}}",
    ],
)
def test_every_spelling_of_a_nested_table_is_read(toml):
    assert config_from_toml(toml, environ={}) == PipelineConfig(BatchConfig(max_batch_size=128))


def refused(*args, **kwargs):
    with pytest.raises(ConfigError) as error:
        config_from_toml(*args, **kwargs)
    return str(error.value)


@pytest.mark.parametrize(
    ("toml", "line"),
    [
        ("\n[pipeline]\npolicy_timeout = -1", 3),
        ("[pipeline]\n\nbatch_config.max_batch_size = 0 # why not", 3),
        ("[pipeline . batch_config]\n'max_batch_size' = 0", 2),
        ("[pipeline]\npolicy_timout = 1", 2),
        ("[pipline]\npolicy_timeout = 1", 1),
        ("\npipeline = 3", 2),
        ("[pipeline]\nbatch_config = 3", 2),
        ("# [pipeline]\n[other]\npolicy_timeout = 1\n[pipeline]\npolicy_timeout = -1", 5),
    ],
)
def test_an_error_in_a_file_names_file_and_line(tmp_path, toml, line):
    path = tmp_path / "offload.toml"
    path.write_text(toml)
    assert f"({path}, line {line})" in refused(path, environ={}, others=["other"])


def test_an_error_that_no_line_can_be_found_for_still_names_the_knob():
    assert "pipeline.policy_timeout = -1: must be" in refused("pipeline = {policy_timeout = -1}", environ={})


def test_a_table_that_nobody_reads_is_an_error_and_one_of_others_is_not():
    assert "did you mean pipeline?" in refused("[pipeline]\n[pipelines]", environ={})
    assert config_from_toml("[pipeline]\n[tiers.host]\nsize = 3", environ={}, others=["tiers"]) == PipelineConfig()


def test_a_section_of_another_name_is_read():
    toml = "[pipelines.host.batch_config]\nmax_batch_size = 128\n[pipelines.disk]\npolicy_timeout = 9"
    environ = {"OFFLOAD_PIPELINES__HOST__POLICY_TIMEOUT": "1.5", "OFFLOAD_PIPELINE__POLICY_TIMEOUT": "7"}
    config = config_from_toml(toml, section="pipelines.host", environ=environ)
    assert config == PipelineConfig(BatchConfig(max_batch_size=128), policy_timeout=1.5)


def test_what_is_no_toml_is_refused(tmp_path):
    path = tmp_path / "offload.toml"
    path.write_text("[pipeline")
    assert refused(path, environ={}).startswith(f"{path} = '[pipeline': not TOML:")
    assert "not TOML" in refused("offload.toml", environ={})  # a path as a text
    assert "..." in refused("x" * 100, environ={})
    assert "not TOML" in refused("x = " + "9" * 5000, environ={})
    path.write_bytes(b"\xff")
    assert refused(path, environ={}).startswith(f"{path} = '': not TOML:")


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        config_from_toml(tmp_path / "none.toml")


# --- from the environment -----------------------------------------------------------------------------------------


def test_the_environment_wins_over_the_file():
    environ = {"OFFLOAD_PIPELINE__BATCH_CONFIG__MAX_BATCH_SIZE": "32", "OFFLOAD_PIPELINE__ON_OVERFLOW": "wait"}
    assert config_from_toml(TOML, environ=environ) == PipelineConfig(BatchConfig(max_batch_size=32), policy_timeout=0.5)


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("OFFLOAD_PIPELINE__BUDGET_BLOCKS", "1000")
    assert config_from_toml("").budget_blocks == 1000
    assert config_from_toml("", environ={}).budget_blocks == 4096


def test_variables_of_others_are_left_alone():
    environ = {"OFFLOAD_TRACE": "x", "OFFLOAD_PIPELINES__X": "x", "offload_pipeline__x": "x", "PATH": "x"}
    assert config_from_toml("", environ=environ) == PipelineConfig()


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.name)
def test_every_knob_has_a_variable_and_says_its_default_there(knob):
    assert config_from_toml("", environ={knob.variable: str(knob.default)}) == PipelineConfig()
    message = refused("", environ={knob.variable: "no such value"})
    assert message.startswith(f"{knob.variable} = 'no such value': must be {knob.bound}")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OFFLOAD_PIPELINE__POLICY_TIMEOUT", "nan"),
        ("OFFLOAD_PIPELINE__POLICY_TIMEOUT", ""),
        ("OFFLOAD_PIPELINE__POLICY_TIMEOUT", "-1"),
        ("OFFLOAD_PIPELINE__BATCH_CONFIG__MAX_BATCH_SIZE", "true"),
        ("OFFLOAD_PIPELINE__BATCH_CONFIG__MAX_BATCH_SIZE", "0"),
        ("OFFLOAD_PIPELINE__BATCH_CONFIG__MAX_BATCH_SIZE", "9" * 5000),
    ],
)
def test_a_bad_variable_is_named(variable, value):
    message = refused("", environ={variable: value})
    assert message.startswith(f"{variable} = ")
    assert ": must be " in message


def test_a_misspelt_variable_is_an_error_that_names_the_nearest_one():
    message = refused("", environ={"OFFLOAD_PIPELINE__POLICY_TIMOUT": "1"})
    assert "did you mean OFFLOAD_PIPELINE__POLICY_TIMEOUT?" in message
    assert "no such name" in refused("", environ={"OFFLOAD_PIPELINE__BATCH_CONFIG": "1"})


# --- the list -----------------------------------------------------------------------------------------------------


def test_knobs_lists_every_knob_once_with_bound_and_reason():
    listed = knobs()
    names = [knob.name for knob in listed]
    assert len(set(names)) == len(names)
    assert set(names) == {
        *(f"pipeline.batch_config.{field.name}" for field in attrs.fields(BatchConfig)),
        *(f"pipeline.{field.name}" for field in attrs.fields(PipelineConfig) if field.name != "batch_config"),
    }
    for knob in listed:
        assert knob.bound
        assert knob.reason.endswith(".")
        assert "\n" not in knob.reason


def test_a_knob_tells_its_variable_and_default():
    first = knobs()[0]
    assert attrs.evolve(first, bound="", reason="") == Knob(
        "pipeline.batch_config.max_batch_size", "OFFLOAD_PIPELINE__BATCH_CONFIG__MAX_BATCH_SIZE", 64, "", ""
    )
    assert [knob.name for knob in knobs(BatchConfig, section="b")] == [
        "b.max_batch_size",
        "b.min_batch_size",
        "b.flush_interval",
    ]


def test_a_path_is_any_path_like(tmp_path):
    class Like(os.PathLike):
        def __fspath__(self):
            return str(Path(tmp_path, "offload.toml"))

    Path(Like()).write_text(TOML)
    assert config_from_toml(Like(), environ={}) == READ
