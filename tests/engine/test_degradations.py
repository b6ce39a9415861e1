"""Degradations: facts in, sentences out, with what has begun and what has ended."""

from __future__ import annotations

import pytest

from offload._health.degradations import NAMES, RECENT, DegradationWatch, RoomFact, ServiceFacts

WELL = ServiceFacts(rooms={}, descriptors=(10, 100), unlinked=())


@pytest.mark.parametrize(
    ("facts", "key", "words"),
    [
        (ServiceFacts(broken={"disk": "OSError: gone"}), "broken_tier disk", ("left alone", "OSError: gone")),
        (
            ServiceFacts(rooms={"disk": RoomFact("/kv", 5_000, 16_384)}),
            "full_disk disk",
            ("/kv is full, with 4 KiB left", "tier disk", "free some"),
        ),
        (ServiceFacts(failed_blocks={"disk": 1_200}), "failing_route disk", ("1,200 blocks", "offload explain")),
        (ServiceFacts(dropped_blocks={"disk": 64}), "dropping_route disk", ("64 blocks", "disk, which", "route_share")),
        (
            ServiceFacts(quarantined={"disk": 2}),
            "quarantined_copies disk",
            ("2 copies into disk", "quarantine release"),
        ),
        (ServiceFacts(late_policies={"host": 3}), "late_policies host", ("3 stores into host", "policy_timeout")),
        (ServiceFacts(journal="No space left"), "stuck_journal", ("(No space left)", "free space")),
        (ServiceFacts(descriptors=(950, 1_000)), "few_descriptors", ("950 of 1,000", "LimitNOFILE")),
        (ServiceFacts(unlinked=("/run/d.sock",)), "unlinked_files /run/d.sock", ("was removed", "start")),
    ],
)
def test_each_has_a_name_and_a_sentence(facts: ServiceFacts, key: str, words: tuple[str, ...]) -> None:
    watch = DegradationWatch()
    (began,), ended = watch.look(facts, 0.0)
    assert (began.key, ended) == (key, [])
    assert all(word in began.text for word in words), began.text
    assert ": " in began.text  # the way out stands behind it
    assert watch.look(facts, 1.0) == ([], [])  # said once
    assert watch.counts() == {name: int(name == began.name) for name in NAMES}
    began_now, (over,) = watch.look(WELL, RECENT + 2.0)
    assert (began_now, over.key) == ([], key)
    assert watch.current == {}


def test_nothing_is_wrong_where_all_is_well() -> None:
    watch = DegradationWatch()
    facts = ServiceFacts(
        failed_blocks={"host": 0},
        dropped_blocks={"host": 0},
        quarantined={"host": 0},
        late_policies={"host": 0},
        rooms={"disk": RoomFact("/kv", 16_384, 16_384)},
        descriptors=(90, 100),
        unlinked=(),
    )
    assert watch.look(facts, 0.0) == ([], [])
    assert set(watch.counts().values()) == {0}


def test_a_counter_that_grows_is_one_degradation() -> None:
    watch = DegradationWatch()
    events = [watch.look(ServiceFacts(failed_blocks={"disk": n}), at) for n, at in [(5, 0.0), (7, 50.0), (7, 100.0)]]
    assert [len(began) for began, _ in events] == [1, 0, 0]
    assert "7 blocks" in watch.current["failing_route disk"].text
    assert watch.look(ServiceFacts(failed_blocks={"disk": 7}), 111.0)[1] != []
    (again,), _ = watch.look(ServiceFacts(failed_blocks={"disk": 9}), 120.0)
    assert "2 blocks" in again.text  # those of before are over


def test_what_is_not_known_ends_nothing() -> None:
    watch = DegradationWatch()
    watch.look(ServiceFacts(rooms={"disk": RoomFact("/kv", 0, 1)}, unlinked=("/x",)), 0.0)
    assert watch.look(ServiceFacts(), 1.0) == ([], [])
    assert len(watch.look(WELL, 2.0)[1]) == 2
