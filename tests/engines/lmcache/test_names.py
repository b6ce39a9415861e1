"""Names of objects: every field counts, and the published text is as published."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.abc import MAX_KEY_BYTES
from offload.engines.lmcache import object_key_to_string
from offload.engines.lmcache._names import naming, parse_object_key, rows
from tests.engines.lmcache.keys import ObjectKey, chunks

PLAIN = ObjectKey(b"\x01\xff", "org/model", 0x02010201, 3)

OTHERS = [
    ObjectKey(b"\x01\xfe", "org/model", 0x02010201, 3),
    ObjectKey(b"\x01\xff", "org/other", 0x02010201, 3),
    ObjectKey(b"\x01\xff", "org/model", 0x02000200, 3),
    ObjectKey(b"\x01\xff", "org/model", 0x02010201, 4),
    ObjectKey(b"\x01\xff", "org/model", 0x02010201, 3, "alice"),
]

texts = st.text(st.characters(exclude_characters="@", exclude_categories=("Cs",)), max_size=20)
object_keys = st.builds(ObjectKey, st.binary(max_size=32), texts, st.integers(0, 2**32 - 1), st.integers(0, 300), texts)


def test_the_published_text_names_model_rank_group_and_hash():
    assert object_key_to_string(PLAIN) == "org/model@02010201@3@01ff"


def test_the_published_text_ends_with_the_salt_where_there_is_one():
    assert object_key_to_string(OTHERS[-1]) == "org/model@02010201@3@01ff@alice"


@pytest.mark.parametrize("names", ["hashed", "published"])
@pytest.mark.parametrize("other", OTHERS)
def test_no_field_can_differ_without_another_key(names, other):
    assert naming(names)(PLAIN) != naming(names)(other)


@pytest.mark.parametrize("names", ["hashed", "published"])
@given(one=object_keys, other=object_keys)
def test_equal_keys_are_those_of_equal_objects(names, one, other):
    assert (naming(names)(one) == naming(names)(other)) == (one == other)


def test_a_hashed_key_is_the_same_in_every_process():
    assert naming("hashed")(PLAIN).hex() == "4512f4417f9f0d1a6eef35d2d1591fad52cc687c62fca9391bc2f2403733db52"


def test_a_published_name_that_is_too_long_is_hashed():
    long = ObjectKey(b"\x01", "m" * MAX_KEY_BYTES)
    assert len(naming("published")(long)) == 32
    assert naming("published")(long) != naming("published")(ObjectKey(b"\x02", "m" * MAX_KEY_BYTES))


def test_there_is_no_third_way_to_name():
    with pytest.raises(ValueError, match="key_names = 'hex': must be one of hashed, published"):
        naming("hex")


@given(object_keys.filter(lambda key: key.model_name))
def test_a_published_name_can_be_read_back(key):
    parsed = parse_object_key(object_key_to_string(key))
    assert naming("hashed")(parsed) == naming("hashed")(key)


def test_what_is_no_published_name_is_a_name_all_the_same():
    assert parse_object_key("any text").chunk_hash == b"any text"
    assert parse_object_key("m@1@2@no digits").chunk_hash == b"m@1@2@no digits"


@pytest.mark.parametrize(
    "other",
    [
        *("m@0x1@0@aabb", "m@01@0@aabb", "m@1@0@aabb", "m@+0000001@0@aabb", "m@0000_001@0@aabb", "m@00000001@00@aabb"),
        *("m@00000001@0@AABB", "m@00000001@0@aa bb", "m@00000001@0@aabb@", "m@-0000001@0@aabb", "m@00000001@-1@aabb"),
    ],
)
def test_different_names_are_different_objects(other: str):
    name = naming("hashed")
    assert name(parse_object_key(other)) != name(parse_object_key("m@00000001@0@aabb"))


@given(st.binary(max_size=8).map(bytes.hex))
def test_names_of_no_model_are_no_objects_of_another_form(digits: str):
    parsed = parse_object_key(f"@00000000@0@{digits}")
    assert parsed.chunk_hash == f"@00000000@0@{digits}".encode()


def test_a_row_is_what_differs_in_the_chunk_alone():
    keys = chunks(3) + chunks(3, kv_rank=1) + chunks(2, object_group_id=1) + chunks(1)
    assert rows(keys) == [range(0, 3), range(3, 6), range(6, 8), range(8, 9)]
    assert rows([]) == []


def test_objects_of_another_version_of_weights_have_other_names():
    [key] = chunks(1)
    names = [naming("hashed")(key), naming("hashed", "1")(key), naming("hashed", "2")(key)]
    assert len(set(names)) == 3
    assert naming("hashed", "1")(key) == names[1]
    with pytest.raises(ValueError, match="weights_version"):
        naming("published", "1")
