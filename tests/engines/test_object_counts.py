"""The count that tests of crashes rest on sees what a leak leaves behind."""

import attrs
import pytest

from tests.support.object_counts import count, grown


@attrs.define(eq=False)
class Kept:
    """An object with a table of plain values, which the garbage collector does not list by itself."""

    table: dict[int, int] = attrs.Factory(dict)
    names: set[str] = attrs.Factory(set)


@attrs.define(eq=False, slots=False)
class KeptByName(Kept):
    """Another one, whose attributes have names in a table of their own."""


Kept.__module__ = KeptByName.__module__ = "maru.kept"


@pytest.mark.parametrize("kind", [Kept, KeptByName])
def test_a_count_sees_one_more_object_and_one_more_entry_of_a_table(kind):
    kept = [kind()]
    count()  # lets go of what earlier tests have left
    before = count()
    kept.append(kind())
    assert grown(before, count())[f"maru.kept.{kind.__name__}"] == 1
    kept[0].table[1] = 1
    kept[0].names.add("a")
    assert count()["entries of tables"] - before["entries of tables"] == 2
    kept.pop()
    kept[0].table.clear()
    kept[0].names.clear()
    assert grown(before, count()) == {}
