"""Scenario files are read strictly, and every error has its line."""

# ruff: noqa: E501  # what an error says stands here on one line, as it does on a screen

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.testing.scenarios import (
    Fault,
    PipelineSpec,
    Scenario,
    ScenarioError,
    Step,
    StoreStep,
    TierSpec,
    generate,
    play,
    read,
    read_text,
    to_toml,
)
from offload.testing.scenarios._files import lines_of, nearest_line, parse_path
from offload.testing.scenarios._strategy import scenarios
from offload.testing.scenarios._systems import SEAMS

EXAMPLE = """\
format = 1
name = "S20 cancel one of four in a batch"
seed = 7
[tier.host]
capacity = 64
latency_ms = 2
[pipeline.main]
to = "host"
flush_ms = 2
[[step]]
at_ms = 0
store = { id = "a{0..3}", keys = "k{0..3}", per = 1 }
[[fault]]
at_hook = "sweep_claim_gap"
who = "a2"
do = "cancel"
[[expect]]
status = { a0 = "COMPLETE", a1 = "COMPLETE", a2 = "CANCELLED", a3 = "COMPLETE" }
[[expect]]
count = { copied = 3, batches = 1 }
[[expect]]
order = ["a2 confirmed", "a0 settled"]
"""


def error_of(text):
    with pytest.raises(ScenarioError) as caught:
        read_text(text, "x.scenario.toml")
    return caught.value


def test_a_file_is_read_into_the_values_that_python_would_build(tmp_path):
    (tmp_path / "x.scenario.toml").write_text(EXAMPLE)
    scenario = read(tmp_path / "x.scenario.toml")
    assert scenario == Scenario(
        name="S20 cancel one of four in a batch",
        seed=7,
        tier={"host": TierSpec(latency_ms=2)},
        pipeline={"main": PipelineSpec(to="host", flush_ms=2)},
        step=[Step(store=StoreStep(id="a{0..3}", keys="k{0..3}"))],
        fault=[Fault(do="cancel", at_hook="sweep_claim_gap", who="a2")],
        expect=scenario.expect,
    )
    assert [sorted(one.status or one.count or one.order) for one in scenario.expect] == [
        ["a0", "a1", "a2", "a3"], ["batches", "copied"], ["a0 settled", "a2 confirmed"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("instead_of", "say", "error"),
    [
        ('to = "host"', 'to = "hots"', "8: pipeline.main.to: there is no tier 'hots'; did you mean 'host'?"),
        ("flush_ms", "flus_ms", "9: pipeline.main.flus_ms: there is no 'flus_ms' in pipeline.main; did you mean 'flush_ms'?"),
        ("flush_ms = 2", "flush_ms = 70000", "9: pipeline.main.flush_ms: 70000: must be from 0 to 61440 virtual milliseconds"),
        ("= 64", '= "64"', "5: tier.host.capacity: must be a whole number from 1 to 16777216, not '64'"),
        ("= 64", "= 0", "5: tier.host.capacity: must be a whole number from 1 to 16777216, not 0"),
        ("= 64", "= true", "5: tier.host.capacity: must be a whole number from 1 to 16777216, not true"),
        ("= 64", "= 6.5", "5: tier.host.capacity: must be a whole number from 1 to 16777216, not 6.5"),
        ("= 64", "= 1979-05-27", '5: tier.host.capacity: must be a whole number from 1 to 16777216, not "1979-05-27"'),
        ("latency_ms = 2", "checksums = 1", "6: tier.host.checksums: must be true or false, not 1"),
        ("seed = 7", "seed = -1", "3: seed: must be a whole number from 0 to 9223372036854775807, not -1"),
        ("seed = 7", "seed = nan", "3: seed: must be a whole number from 0 to 9223372036854775807, not nan"),
        ("format = 1", "format = 2", "1: format: cannot be 2, only 1"),
        ("per = 1", "per = 2", "12: step[0].store.keys: 4 keys do not deal out to 4 containers of per = 2: set per = 1, or name 8 keys"),
        ('"k{0..3}"', '"k{0..3"', "12: step[0].store.keys: 'k{0..3' is not a name: it must have no spaces, and braces only as in 'a{0..3}'"),
        ('store = { id = "a{0..3}"', "store = { id = 3", "12: step[0].store.id: must be a text, in quotes, not 3"),
        ('who = "a2"', 'who = "a9"', "15: fault[0].who: there is no container 'a9'; did you mean 'a3'?"),
        ('do = "cancel"', 'do = "cancl"', "16: fault[0].do: cannot be 'cancl'; did you mean 'cancel'?"),
        ('do = "cancel"', "", "13: fault[0]: 'do' is missing: set do = ..."),
        ('do = "cancel"', 'do = "cancel"\np = 2', "17: fault[0].p: must be a number from 0 to 1.0, not 2"),
        ("[[fault]]", "[[faults]]", "13: faults: there is no 'faults' in a scenario; did you mean 'fault'?"),
        ("[[fault]]", "[fault]", "13: fault: must be a list, in brackets, not a table"),
        ("[tier.host]", "[[tier.host]]", "4: tier.host: must be a table (of kind, capacity, ...), not a list"),
        ('order = ["a2 confirmed", "a0 settled"]', 'order = "a2"', "22: expect[2].order: must be a list, in brackets, not 'a2'"),
        ("a2 confirmed", "a2 confirmd", "22: expect[2].order[0]: there is no event 'confirmd'; did you mean 'confirmed'?"),
        ('a2 = "CANCELLED"', 'a2 = "GONE"', "18: expect[0].status.a2: cannot be 'GONE', only ABANDONED, CANCELLED, COMPLETE, FAILED, REFUSED"),
        ("copied = 3", "copid = 3", "20: expect[1].count.copid: 'copid' is not counted; did you mean 'copied'?"),
        ("copied = 3", "copied = -3", "20: expect[1].count.copied: must be a whole number from 0 to 4294967296, not -3"),
        ('name = "S20', 'nam = "S20', "2: nam: there is no 'nam' in a scenario; did you mean 'name'?"),
        ("seed = 7", "seed = 07", "3: is not TOML: Expected newline or end of document after a statement"),
        ("[pipeline.main]", "[tier.host]", "7: is not TOML: Cannot declare ('tier', 'host') twice"),
    ],
)  # fmt: skip
def test_an_error_says_line_path_what_is_wrong_and_the_way_out(instead_of, say, error):
    assert instead_of in EXAMPLE
    assert str(error_of(EXAMPLE.replace(instead_of, say, 1))) == f"x.scenario.toml:{error}"


def test_an_error_has_its_parts():
    error = error_of(EXAMPLE.replace('who = "a2"', 'who = "a9"'))
    assert (error.file, error.line, error.path) == ("x.scenario.toml", 15, "fault[0].who")
    assert error.text.startswith("there is no container")
    assert error.others == ()


def test_several_errors_come_in_the_order_of_the_file():
    error = error_of(EXAMPLE.replace('who = "a2"', 'who = "a9"').replace("= 2\n", '= "x"\n').replace("copied", "cop"))
    assert error.line == 6
    assert error.others == (
        "x.scenario.toml:9: pipeline.main.flush_ms: must be a whole number from 0 to 1099511627776, not 'x'",
    )
    error = error_of(EXAMPLE.replace('who = "a2"', 'who = "a9"').replace("copied", "cop"))
    assert error.line == 15
    assert [one.split(": ")[0] for one in error.others] == ["x.scenario.toml:20"]


def test_a_file_that_ends_too_early_is_said_to_end():
    assert error_of('name = "x"\nstep = [').line == 2


def test_what_cannot_be_read_is_an_error_of_its_own_kind(tmp_path):
    with pytest.raises(ScenarioError, match=r"missing\.scenario\.toml: cannot be read: No such file"):
        read(tmp_path / "missing.scenario.toml")
    with pytest.raises(ScenarioError, match="cannot be read: Is a directory"):
        read(tmp_path)
    (tmp_path / "latin").write_bytes(b'name = "x"\nabout = "\xe9"\n')
    with pytest.raises(ScenarioError, match="latin:2: is not UTF-8"):
        read(tmp_path / "latin")


def test_what_is_nested_far_too_deeply_is_no_scenario():
    assert "nested too deeply" in str(error_of("a = " + "[" * 100_000)) or "not TOML" in str(
        error_of("a = " + "[" * 100_000)
    )


def test_line_ends_of_windows_do_not_move_the_lines(tmp_path):
    (tmp_path / "x").write_bytes(EXAMPLE.replace('"a2"\n', '"a9"\n').replace("\n", "\r\n").encode())
    with pytest.raises(ScenarioError, match="x:15: fault"):
        read(tmp_path / "x")


def test_a_file_for_another_system_is_read_with_its_seams_and_hooks():
    theirs = EXAMPLE.replace("sweep_claim_gap", "theirs")
    assert "there is no hook 'theirs'" in str(error_of(theirs))
    assert read_text(theirs, seams=SEAMS).fault[0].at_hook == "theirs"
    with pytest.raises(
        ScenarioError, match=r"14: fault\[0\]\.at_hook: the system lacks the seam 'hook': one that has it calls"
    ):
        read_text(theirs, "x", seams=[])


JUNK = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["do", "id", "a", "keys"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_value_in_the_wrong_place_is_one_typed_error_or_none(data):
    """Put junk in the place of any value of a valid document: the error names that place, or something around it."""
    import msgspec

    from offload.testing.scenarios._schema import schema_errors

    document = msgspec.to_builtins(data.draw(scenarios()))
    table, key, path = document, "", ""
    for _ in range(data.draw(st.integers(1, 5))):
        inner = table[key] if key != "" else table
        if not isinstance(inner, dict | list) or not inner:
            break
        table = inner
        key = data.draw(st.sampled_from(sorted(table) if isinstance(table, dict) else range(len(table))))
        path = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".lstrip(".")
    table[key] = data.draw(JUNK)
    try:
        msgspec.convert(document, Scenario)
    except msgspec.ValidationError:
        found = list(schema_errors(document))
        assert found
        assert all(one.path.startswith(path) for one in found)
    else:
        assert list(schema_errors(document)) == []


# --- lines --------------------------------------------------------------------------------------------------------

ALL_OF_TOML = '''\
# a comment with = and [brackets] and "quotes
title = "x # no comment"           # 2
"quoted key" = 'literal \\ # "'     # 3
'it is' = 1                        # 4
dotted.key."of three" = true       # 5
dotted . other = 1979-05-27 07:32:00  # 6
multi = """
[not.a.header]
key = "no"
\\"""" # 10
literal = \'\'\'
[[nor.this]]
it\'s \'\' quoted\'\'\'\'\' # 13
after = 1.5e3                      # 14
array = [                          # 15
    1, # one, and ] no end
    [ 2, "]" ],                    # 17
    { a = 3, "b c" = [ { d = 4 } ] }, # 18
]
inline = { x = 1, y.z = "}", w = [], v = {} } # 20

[table]                            # 22
key = 1                            # 23
[ table . "sub table" ]            # 24
key = 2                            # 25
[[many]]                           # 26
a = 1                              # 27
[many.below]                       # 28
b = 2                              # 29
[[many.more]]                      # 30
[[many.more]]                      # 31
c = 3                              # 32
[[many]]                           # 33
[[many.more]]                      # 34
c = """""" # 35
"\\u0041\\t" = 4 # 36
'''


def paths_of(value, path=()):
    """Every path of a document."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in below:
        yield (*path, key)
        yield from paths_of(inner, (*path, key))


def test_every_construct_of_toml_has_its_line():
    lines = lines_of(ALL_OF_TOML)
    assert set(lines) == set(paths_of(tomllib.loads(ALL_OF_TOML)))
    expected = {
        ("title",): 2, ("quoted key",): 3, ("it is",): 4, ("dotted", "key", "of three"): 5, ("dotted",): 5,
        ("dotted", "other"): 6, ("multi",): 7, ("literal",): 11, ("after",): 14, ("array",): 15, ("array", 0): 16,
        ("array", 1): 17, ("array", 1, 1): 17, ("array", 2, "b c", 0, "d"): 18, ("inline", "y", "z"): 20,
        ("table",): 22, ("table", "key"): 23, ("table", "sub table"): 24, ("table", "sub table", "key"): 25,
        ("many",): 26, ("many", 0): 26, ("many", 0, "a"): 27, ("many", 0, "below", "b"): 29, ("many", 0, "more", 0): 30,
        ("many", 0, "more", 1, "c"): 32, ("many", 1): 33, ("many", 1, "more", 0): 34, ("many", 1, "more", 0, "c"): 35,
        ("many", 1, "more", 0, "A\t"): 36,
    }  # fmt: skip
    assert {path: lines[path] for path in expected} == expected


def agree(text):
    """What is there in the first n lines has one of these for its line: told by reading only these."""
    lines, told = lines_of(text), text.split("\n")
    seen = 0
    cuts = range(0, len(told) + 1, len(told) // 40 + 1)
    for n in cuts:
        try:
            document = tomllib.loads("\n".join(told[:n]))
        except tomllib.TOMLDecodeError:  # it ends within a value
            continue
        seen += 1
        assert set(paths_of(document)) == {path for path, line in lines.items() if line <= n}
    assert seen > len(cuts) // 3


def test_lines_agree_with_reading_only_the_beginning_of_a_file():
    agree(ALL_OF_TOML)
    agree(EXAMPLE)
    for seed in range(5):
        agree(to_toml(generate(seed)))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_lines_agree_for_any_file_that_we_write(scenario):
    agree(to_toml(scenario))


def test_a_path_is_found_by_its_text_or_by_what_is_around_it():
    assert parse_path('expect[0].status."a b"') == ("expect", 0, "status", "a b")
    assert parse_path('tier."a\\"b.c"') == ("tier", 'a"b.c')
    lines = lines_of(EXAMPLE)
    assert nearest_line(lines, parse_path("fault[0].ms")) == 13
    assert nearest_line(lines, parse_path("load.mix")) == 1


# --- the documentation --------------------------------------------------------------------------------------------


def documented():
    """The files of the page about files, as its reader has them in the end."""
    files: dict[str, str] = {}
    page = (Path(__file__).parents[2] / "docs/scenario-files.md").read_text()
    for info, text in re.findall(r"^```toml (.*)\n((?:.*\n)*?)```$", page, re.MULTILINE):
        name = info.split()[0].removeprefix("file=")
        files[name] = files.get(name, "") * ("continued" in info) + text
    return files


def test_every_file_of_the_documentation_is_read_but_the_one_that_is_wrong():
    files = documented()
    assert len(files) > 2
    for name, text in files.items():
        if name.startswith("wrong"):
            with pytest.raises(ScenarioError, match=r"wrong.*:7: fault\[0\]\.at_hook"):
                read_text(text, name)
        else:
            scenario = read_text(text, name)
            assert play(scenario).violations == ()
