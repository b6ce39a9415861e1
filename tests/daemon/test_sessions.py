"""What a session holds, and the order in which it is given back."""

import random

import pytest

from offload.daemon._sessions import HeldKeys, Limits, Sessions, Stage
from offload.daemon._tenants import Tenants, stored_keys


def sessions(**limits):
    return Sessions(Limits(**limits))


def test_copies_go_before_holds_those_before_pages_and_pages_before_memory():
    every = sessions()
    session = every.begin(b"peer", "engine", "", 0.0)
    session.requests[1] = session.holds[1] = session.announced[1] = session.memories[1] = object()
    session.caches.add(1)
    every.end(session, "a test")
    order = []
    for stage, give_back in [
        (Stage.COPIES, session.requests.clear),
        (Stage.HOLDS, session.holds.clear),
        (Stage.PAGES, session.announced.clear),
        (Stage.MEMORY, lambda: (session.caches.clear(), session.memories.clear())),
    ]:
        assert session.due is stage
        give_back()
        order.append(stage)
    assert session.due is Stage.OVER
    every.forget(session)
    assert len(every) == 0 and every.given_back == 1


def test_a_session_that_has_ended_is_found_by_its_token_until_nothing_is_left_of_it():
    every = sessions()
    session = every.begin(b"peer", "engine", "", 0.0)
    session.holds[1] = object()
    told = []
    session.when_over.append(lambda: told.append("over"))
    assert every.end(session, "a test") and not every.end(session, "again")
    assert every.of(b"peer") is None and every.by_token(session.token) is session
    with pytest.raises(AssertionError):
        every.forget(session)
    session.holds.clear()
    every.forget(session)
    assert every.by_token(session.token) is None and told == ["over"]


def test_unproven_requests_are_named_after_their_session():
    every = sessions()
    clean, left = every.begin(b"1", "", "", 0.0), every.begin(b"2", "", "", 0.0)
    left.unproven |= {7, 3}
    for session in (clean, left):
        every.end(session, "a test")
        every.forget(session)
    assert every.unproven(left.token) == every.unproven(left.token) == [3, 7]
    assert every.unproven(clean.token) == every.unproven(bytes(16)) == []


def test_a_forgotten_record_makes_unknown_tokens_unproven(monkeypatch):
    monkeypatch.setattr("offload.daemon._sessions._REMEMBERED", 2)
    every = sessions()
    tokens = []
    for number in range(3):
        session = every.begin(b"peer", "", "", 0.0)
        session.unproven = {1} if number else set(range(1, 2_000))
        every.end(session, "a test")
        every.forget(session)
        tokens.append(session.token)
    assert [every.unproven(token) for token in tokens] == [[0], [1], [1]]
    assert every.unproven(bytes(16)) == [0]


def test_there_are_at_most_so_many_sessions_those_that_are_given_back_included():
    every = sessions(sessions=2)
    first = every.begin(b"1", "", "", 0.0)
    every.begin(b"2", "", "", 0.0)
    every.end(first, "a test")
    assert every.begin(b"3", "", "", 0.0) is None and every.turned_away == 1
    every.forget(first)
    assert every.begin(b"3", "", "", 0.0) is not None


def test_a_place_is_left_for_each_tenant_without_a_session():
    sessions, tenants = Sessions(Limits(sessions=4)), ("a", "b")
    assert all(sessions.begin(bytes([at]), "", "a", 0.0, 1, tenants) for at in range(3))
    assert sessions.begin(b"3", "", "a", 0.0, 1, tenants) is None and sessions.turned_away == 1
    assert sessions.begin(b"4", "", "b", 0.0, 1, tenants) is not None


def test_places_that_are_left_are_at_most_half():
    sessions, tenants = Sessions(Limits(sessions=4)), [str(at) for at in range(100)]
    taken = [sessions.begin(bytes([at]), "", "0", 0.0, 1, tenants) for at in range(3)]
    assert [one is not None for one in taken] == [True, True, False]


def test_a_connection_has_one_session():
    every = sessions()
    every.begin(b"peer", "", "", 0.0)
    with pytest.raises(ValueError):
        every.begin(b"peer", "", "", 0.0)


def test_a_session_keeps_the_lease_that_it_was_told():
    every = sessions(lease=10.0)
    old = every.begin(b"1", "", "", 0.0)
    every.limits = Limits(lease=2.0)
    new = every.begin(b"2", "", "", 0.0)
    assert every.expired(5.0) == [new]
    assert every.expired(11.0) == [old, new]


def test_an_engine_that_is_silent_for_longer_than_its_lease_is_named():
    every = sessions(lease=10.0)
    silent, heard = every.begin(b"1", "", "", 0.0), every.begin(b"2", "", "", 0.0)
    heard.heard = 5.0
    assert every.expired(10.0) == []
    assert every.expired(12.0) == [silent]
    every.end(silent, "silent")
    assert every.expired(12.0) == []


def test_a_tenant_is_known_by_its_credential_and_without_tenants_all_are_one():
    assert Tenants().of(b"anything") == ""
    tenants = Tenants({"a": b"secret of a", "b": b"secret of b"})
    assert tenants.of(b"secret of b") == "b"
    assert tenants.of(b"") is None and tenants.of(b"secret") is None


def test_keys_of_one_tenant_cannot_be_said_by_another():
    (of_a,), (of_b,) = stored_keys("a", [b"key"]), stored_keys("b", [b"key"])
    assert of_a != of_b and len(of_a) == len(of_b)
    assert stored_keys("", [b"key"]) == [b"key"]
    with pytest.raises(ValueError):
        stored_keys("a", [b"x" * 440])


def test_keys_that_are_held_often_count_once_until_their_last_hold_has_gone():
    dice = random.Random(4)
    for _ in range(50):
        held, holds = HeldKeys(), {}
        for number in range(40):
            if holds and dice.random() < 0.4:
                gone = dice.choice([*holds])
                held.remove(gone, iter(holds.pop(gone).items()))
            holds[number] = {tier: dice.choices("abcdefgh", k=dice.randrange(5)) for tier in ("host", "disk")}
            if dice.random() < 0.7:
                held.add(number, iter(holds[number].items()))
            counted = {key for hold, runs in holds.items() if hold in held for key in runs["disk"]}
            wanted, most = dice.sample("abcdefghij", 5), dice.randrange(10)
            fits = [at for at in range(6) if len(counted | set(wanted[:at])) <= most or not at]
            assert held.fitting("disk", wanted, most) == max(fits)
