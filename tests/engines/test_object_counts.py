"""The count that tests of crashes rest on sees what a leak leaves behind."""

import attrs

from tests.support.object_counts import count, grown


@attrs.define(eq=False)
class Kept:
    """An object with a table of plain values, which the garbage collector does not list by itself."""

    table: dict[int, int] = attrs.Factory(dict)
    names: set[str] = attrs.Factory(set)


Kept.__module__ = "maru.kept"


def test_a_count_sees_one_more_object_and_one_more_entry_of_a_table():
    kept = [Kept()]
    before = count()
    kept.append(Kept())
    assert grown(before, count())["maru.kept.Kept"] == 1
    kept[0].table[1] = 1
    kept[0].names.add("a")
    assert grown(before, count())["entries of tables"] == 2
    kept.pop()
    kept[0].table.clear()
    kept[0].names.clear()
    assert grown(before, count()) == {}
