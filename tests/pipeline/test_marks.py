"""Pending marks: one set per destination, atomic, and gone with the destination."""

import gc
import random
import weakref

from backends.testing import FakeTier
from offload._pipeline.marks import PendingMarks, marks_of


def test_the_first_one_gets_the_mark():
    marks = PendingMarks()
    assert not marks.mark([b"a", b"b"])
    assert set(marks.mark([b"b", b"c"])) == {b"b"}
    assert len(marks) == 3


def test_a_key_may_come_again_after_its_release():
    marks = PendingMarks()
    marks.mark([b"a", b"b"])
    marks.release([b"a"])
    assert not marks.mark([b"a"])
    assert set(marks.mark([b"b"])) == {b"b"}


def test_releasing_nothing_and_marking_nothing():
    marks = PendingMarks()
    assert not marks.mark([])
    marks.release([])
    assert len(marks) == 0


def test_against_a_naive_model():
    dice = random.Random(1)
    keys = [b"%d" % i for i in range(12)]
    marks = PendingMarks()
    held = []
    for _ in range(2_000):
        if dice.random() < 0.5:
            asked = dice.sample(keys, dice.randrange(6))
            lost = set(marks.mark(asked))
            taken = {key for hand in held for key in hand}
            assert lost == taken.intersection(asked)
            held.append([key for key in asked if key not in lost])
        elif held:
            marks.release(held.pop(dice.randrange(len(held))))
        assert len(marks) == sum(map(len, held))


def test_all_pipelines_into_one_place_share_its_marks():
    one, other = FakeTier(), FakeTier()
    assert marks_of(one) is marks_of(one)
    assert marks_of(one) is not marks_of(other)


def test_the_marks_go_with_their_place():
    tier = FakeTier()
    marks = weakref.ref(marks_of(tier))
    del tier
    gc.collect()
    assert marks() is None
