"""Faults planted into real servers and clients: the tests that look for them find each. (Long: each is a test that fails.)"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.maru import test_compat as compat
from tests.maru import test_faults as faults
from tests.maru import test_hostile as hostile
from tests.maru import test_kill as kill
from tests.maru import test_sharing as sharing
from tests.support import maru_actors, maru_processes
from tests.support.maru_processes import Server, temporary_pool
from tests.support.planted import AREAS, Fault, replaced_by
from tests.support.planted import faults as planted_faults
from tests.support.planted import maru as plants


def killed(pool):
    with Server(pool, "--segment-bytes", "64KiB") as server:
        kill.kill_under_load(server, 60, seed=3, check_every=5)


BOTH = [{"face": face} for face in maru_actors.FACES]
ONE = [{"face": "blocking"}]
P = plants
F = faults

# What is planted, and where (clients of this process, actors, servers), and which test is to find it, with which arguments.
PLANTED: list[tuple[Any, str, Callable[..., Any], list[dict[str, Any]]]] = [
    (
        P.pages_of_unanswered_stores_are_free,
        "client",
        F.test_fault_1_a_store_that_timed_out_shows_nobody_another_keys_bytes,
        BOTH,
    ),
    (
        P.pages_of_unanswered_stores_are_free,
        "client",
        F.test_fault_1_what_a_published_server_did_not_answer_is_never_used_again,
        BOTH,
    ),
    (P.fences_are_forgotten, "server", F.test_fault_1_a_store_that_arrives_after_its_page_was_reused_is_refused, [{}]),
    (P.pins_hold_nothing, "server", F.test_fault_2_a_view_under_a_pin_does_not_change_whatever_others_do, BOTH),
    (
        P.a_lease_that_is_over_is_not_noticed,
        "actor",
        F.test_fault_2_a_reader_that_was_stopped_for_longer_than_its_lease_knows_that_its_view_is_lost,
        BOTH,
    ),
    (
        P.checksums_are_not_looked_at,
        "client",
        F.test_fault_2_bytes_that_are_not_what_was_stored_are_not_handed_out,
        BOTH,
    ),
    (P.views_can_be_written, "client", F.test_fault_3_a_reader_can_write_nothing, BOTH),
    (
        (P.everything_is_mapped_to_be_written, P.descriptors_are_for_writing),
        "actor+server",
        F.test_fault_3_a_reader_that_writes_all_the_same_dies_of_it,
        BOTH,
    ),
    (
        (P.everything_is_mapped_to_be_written, P.descriptors_are_for_writing),
        "actor+server",
        sharing.test_a_reader_cannot_write,
        [{**one, "way": "scribble", "end": None} for one in BOTH],
    ),
    (P.whoever_asks_may_write, "server", F.test_fault_3_a_reader_can_write_nothing, BOTH),
    (P.pages_do_not_come_back, "server", F.test_fault_4_what_others_delete_is_stored_again_and_no_page_is_lost, BOTH),
    (
        P.pages_of_duplicates_are_kept,
        "client",
        F.test_fault_5_keys_that_are_named_twice_or_there_already_cost_no_page,
        BOTH,
    ),
    (
        P.pages_of_unanswered_stores_are_lost,
        "client",
        F.test_fault_6_a_batch_that_timed_out_says_so_and_leaks_no_page,
        BOTH,
    ),
    (P.a_timeout_is_a_miss, "client", F.test_fault_7_whatever_is_not_answered_is_no_answer, BOTH),
    (P.late_pins_are_kept, "client", F.test_fault_7_a_pin_whose_answer_was_lost_is_given_back, BOTH),
    (
        P.pins_outlive_their_session,
        "server",
        F.test_fault_7_a_pin_of_whoever_never_speaks_again_ends_with_its_lease,
        BOTH,
    ),
    (P.nothing_is_written_down, "server", F.test_fault_8_a_restart_keeps_every_key_and_stores_go_on_for_real, BOTH),
    (
        P.what_a_server_forgot_is_not_stored_again,
        "client",
        F.test_fault_8_a_server_that_has_forgotten_everything_is_told_again_and_no_store_is_a_lie,
        BOTH,
    ),
    (P.it_is_never_quiet, "server", F.test_fault_8_a_view_outlives_a_restart_or_says_that_it_did_not, BOTH),
    (P.leases_do_not_end, "server", F.test_fault_9_pins_and_regions_of_a_killed_client_go_with_its_lease, BOTH),
    (
        P.connections_do_not_end,
        "server",
        F.test_fault_9_a_killed_published_client_leaves_nothing_behind_but_for_its_grace,
        [{}],
    ),
    (
        P.memory_is_reserved_on_the_loop,
        "server",
        F.test_fault_10_a_stalled_pool_stalls_who_waits_for_memory_and_nobody_else,
        BOTH,
    ),
    (
        P.close_waits_for_an_answer,
        "client",
        F.test_fault_11_close_ends_soon_whatever_the_server_does,
        [{**one, "how": "stopped"} for one in BOTH],
    ),
    (
        P.a_torn_tail_bricks_the_start,
        "server",
        F.test_fault_12_a_torn_journal_costs_at_most_what_was_never_acknowledged,
        [{}],
    ),
    (
        P.a_torn_tail_bricks_the_start,
        "server",
        F.test_fault_12_a_damaged_journal_stops_no_start_and_nothing_wrong_is_found,
        [{}],
    ),
    (
        P.statistics_walk_through_all_keys,
        "client",
        F.test_fault_13_neither_statistics_nor_freeing_looks_at_all_keys,
        [{}],
    ),
    (
        P.freeing_walks_through_all_keys,
        "client",
        F.test_fault_13_neither_statistics_nor_freeing_looks_at_all_keys,
        [{}],
    ),
    (
        P.statistics_tell_every_key,
        "server",
        F.test_fault_13_what_statistics_say_is_as_long_for_many_keys_as_for_few,
        [{}],
    ),
    (
        P.nothing_is_evicted,
        "server",
        F.test_fault_14_a_full_owner_evicts_what_was_used_least_recently_and_never_what_is_pinned,
        BOTH,
    ),
    (
        P.the_newest_goes_first,
        "server",
        F.test_fault_14_a_full_owner_evicts_what_was_used_least_recently_and_never_what_is_pinned,
        BOTH,
    ),
    (
        P.pins_hold_nothing,
        "server",
        F.test_fault_14_a_full_owner_evicts_what_was_used_least_recently_and_never_what_is_pinned,
        BOTH,
    ),
    (P.nothing_is_evicted, "server", F.test_fault_14_watermarks_and_quotas_evict_ahead_of_need, BOTH),
    (
        P.offsets_are_not_looked_at,
        "server",
        F.test_fault_15_impossible_registrations_are_refused,
        [{"what": "a negative offset"}, {"what": "a length over the end"}],
    ),
    (
        P.anybody_registers_anywhere,
        "server",
        F.test_fault_15_impossible_registrations_are_refused,
        [{"what": "a region of somebody else"}],
    ),
    (P.a_store_asks_first, "client", F.test_fault_16_a_store_is_one_request_whatever_becomes_of_it, BOTH),
    (P.every_batch_has_a_marker, "client", F.test_fault_17_a_key_costs_one_page_and_nothing_else, BOTH),
    (P.keys_hold_no_namespace, "client", F.test_fault_17_equal_keys_of_two_models_or_tenants_never_meet, BOTH),
    (P.sigterm_takes_its_time, "server", F.test_fault_18_sigterm_ends_the_server_within_a_second, [{"load": "idle"}]),
    # kills
    (P.answers_leave_before_they_are_written_down, "server", killed, [{}]),
    (P.deletions_are_not_written_down, "server", killed, [{}]),
    (P.returns_are_forgotten_with_the_restart, "server", killed, [{}]),
    (P.pages_of_unanswered_stores_are_free, "client", killed, [{}]),
    (P.pages_of_unanswered_stores_are_lost, "client", killed, [{}]),
    (P.it_is_never_quiet, "server", killed, [{}]),
    (
        P.what_nobody_knows_is_not_swept,
        "server",
        kill.test_clients_killed_in_turn_leave_orphans_that_are_read_and_then_make_room,
        ONE,
    ),
    (
        P.leases_do_not_end,
        "server",
        kill.test_clients_killed_in_turn_leave_orphans_that_are_read_and_then_make_room,
        ONE,
    ),
    # hostile
    (P.every_frame_is_kept, "server", hostile.test_a_hundred_thousand_mutated_frames_harm_nobody, [{}]),
    (P.one_bad_frame_ends_the_server, "server", hostile.test_a_hundred_thousand_mutated_frames_harm_nobody, [{}]),
    (
        P.connections_do_not_end,
        "server",
        hostile.test_a_thousand_connections_that_come_and_go_leave_nothing_behind,
        [{}],
    ),
    (
        P.an_unreadable_frame_costs_nothing,
        "server",
        hostile.test_an_invalid_header_costs_its_sender_the_session_and_nobody_else,
        [{}],
    ),
    (
        P.capabilities_are_not_looked_at,
        "server",
        hostile.test_a_capability_is_good_for_its_region_its_epoch_and_its_session_only,
        [{}],
    ),
    (
        P.capabilities_have_no_epoch,
        "server",
        hostile.test_a_capability_is_good_for_its_region_its_epoch_and_its_session_only,
        [{}],
    ),
    (P.files_are_for_everybody, "server", hostile.test_files_and_sockets_are_for_their_owner_alone, [{}]),
    # sharing
    (P.what_is_read_is_copied, "actor", sharing.test_a_readers_view_is_the_writers_memory, BOTH),
    # published clients under our rules
    (
        P.published_keys_are_not_protected,
        "server",
        compat.test_keys_of_a_connected_published_owner_are_neither_evicted_nor_deleted_by_others,
        ONE,
    ),
    (
        P.silence_ends_published_clients,
        "server",
        compat.test_silence_does_not_end_a_published_client_and_its_connection_does,
        [{}],
    ),
    (
        P.connections_do_not_end,
        "server",
        compat.test_silence_does_not_end_a_published_client_and_its_connection_does,
        [{}],
    ),
    (
        P.published_readers_have_no_grace,
        "server",
        compat.test_a_key_that_a_published_client_looked_up_is_not_evicted_for_a_while,
        ONE,
    ),
    (P.pages_do_not_come_back, "server", compat.test_pages_of_ours_that_a_published_client_deletes_come_back, ONE),
]
CASES = [
    pytest.param(
        faults_ if isinstance(faults_, tuple) else (faults_,),
        where.split("+"),
        test,
        arguments,
        id="-".join(
            [
                where,
                (faults_[0] if isinstance(faults_, tuple) else faults_).__name__,
                test.__name__,
                *map(str, arguments.values()),
            ]
        ),
    )
    for faults_, where, test, many in PLANTED
    for arguments in many
]
NOT_BY_ACCIDENT = (AssertionError, pytest.fail.Exception)
"""What a test says that finds a fault. Anything else it may have stumbled over by accident."""
STUMBLES: dict[Any, type[BaseException]] = {  # but for these, where it is right
    P.one_bad_frame_ends_the_server: TimeoutError,
    P.memory_is_reserved_on_the_loop: TimeoutError,
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=f"{area}-{fault.__name__}") for area in AREAS for fault in planted_faults(area)],
)
def test_what_a_fault_replaces_is_there(fault: Fault) -> None:
    """Of all areas. A fault whose names have moved changes nothing, or something else, and what looks for it finds nothing."""
    assert replaced_by(fault)


@pytest.mark.long
@pytest.mark.parametrize(("planted", "places", "test", "arguments"), CASES)
def test_it_is_found(planted, places, test, arguments, monkeypatch, tmp_path):
    """The test passes without the fault (it does, in its own file), and fails with it."""
    monkeypatch.setattr(maru_processes, "PATIENCE", 4.0)
    for fault, where in zip(planted, places, strict=True):
        if where == "client":
            fault(monkeypatch)
        else:
            monkeypatch.setitem(maru_processes.PLANTED, where, f"tests.support.planted:plant:{fault.__name__}")
    allowed = (*NOT_BY_ACCIDENT, STUMBLES.get(planted[0], AssertionError))
    with temporary_pool() as pool, pytest.raises(allowed) as found:
        run(test, {"pool": pool, "tmp_path": tmp_path, "monkeypatch": monkeypatch, **arguments}, arguments)
    print(f"found: {found.value!r:.200}")


def run(test: Callable[..., Any], given: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Call a test with what pytest would have given it."""
    wanted = inspect.signature(test).parameters
    if "shared" in wanted:
        with (
            Server(given["pool"]) as server,
            maru_actors.PublishedOwner(server.ipc, "a") as owner,
            maru_actors.PublishedOwner(server.ipc, "b") as other,
        ):
            test((server, owner, other), **arguments)
    elif "served" in wanted:
        with Server(given["pool"]) as server:
            test(server, **arguments)
    else:
        test(**{name: given[name] for name in wanted})
