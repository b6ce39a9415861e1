"""Faults planted into wrappers: the tests that look for them find each."""

from collections.abc import Callable
from typing import Any

import pytest
import trio

from backends.wrappers import UnknownTenant
from tests.backends import test_wrappers_cancel as cancel
from tests.backends import test_wrappers_codecs as codecs
from tests.backends import test_wrappers_source as source
from tests.backends import test_wrappers_tier as tier
from tests.support.planted import wrappers as P

# --- who finds them -----------------------------------------------------------------------------------------------

Finder = Callable[..., Any]
PLANTED: list[tuple[Finder, Finder, tuple[Any, ...]]] = [
    (P.a_nonce_is_used_again, codecs.test_nonces_are_all_different, ()),
    (P.a_nonce_counts_from_the_start_of_the_process, codecs.test_nonces_are_all_different, ()),
    (P.the_key_is_not_authenticated, lambda: tier.swapped_blocks_are_misses("aes", repaired=True), ()),
    (P.the_key_is_not_authenticated, lambda: tier.swapped_blocks_are_misses("zstd-aes", repaired=True), ()),
    (P.the_key_is_not_in_the_checksum, lambda: tier.swapped_blocks_are_misses("zstd", repaired=False), ()),
    (P.the_checksum_is_of_the_plain_bytes, tier.no_wrapper_sees_what_was_not_verified, ()),
    (P.the_body_is_not_in_the_checksum, tier.every_byte_changed_is_a_miss, ("fp8",)),
    (P.lengths_are_believed, tier.no_length_is_believed, ()),
    (P.one_staging_is_for_all, cancel.copies_at_the_same_time_do_not_meet, ()),
    (P.of_two_tenants_the_first_wins, tier.test_whoever_claims_anothers_key_at_the_same_time_gets_nothing, ()),
    (
        P.whose_a_block_is_is_asked_when_it_is_decoded,
        tier.test_whoever_claims_anothers_key_at_the_same_time_gets_nothing,
        (),
    ),
    (P.what_is_foreign_is_forgotten, lambda tmp: tier.test_a_block_is_its_tenants("memory", tmp), ("tmp_path",)),
    (P.what_cannot_be_decoded_stays, tier.every_byte_changed_is_a_miss, ("zstd",)),
    (P.what_was_refused_is_left_lying_there, tier.every_byte_changed_is_a_miss, ("zstd",)),
    (
        P.what_was_refused_is_left_lying_there,
        tier.test_what_lies_behind_the_stored_bytes_is_zero_and_means_nothing,
        (),
    ),
    (P.sources_are_believed, tier.test_a_source_that_knows_its_block_to_be_damaged_fails_that_one_alone, ()),
    (P.anybody_is_encrypted_for, tier.test_a_tenant_without_a_secret_fails_alone, ()),
    (P.the_name_below_is_the_key, tier.test_blocks_of_two_chains_do_not_meet_in_one_place, ()),
    (P.a_scale_is_of_the_whole_block, codecs.test_rows_are_scaled_each_for_itself, ()),
    (P.values_are_cut_off_instead_of_rounded, codecs.test_it_is_what_plain_arithmetic_says, ("float16", 8)),
    (P.what_is_not_finite_is_not_looked_for, codecs.test_what_is_not_finite_is_told_and_spoils_nothing_else, ()),
    (P.guards_are_not_counted, source.two_holds_are_two, ()),
]


@pytest.mark.parametrize(
    ("fault", "finder", "args"),
    [pytest.param(*case, id=f"{case[0].__name__}-{number}") for number, case in enumerate(PLANTED)],
)
async def test_a_planted_fault_is_found(fault, finder, args, monkeypatch, tmp_path):
    args = tuple(tmp_path if arg == "tmp_path" else arg for arg in args)
    await run(finder, args)  # it finds nothing where nothing is
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, UnknownTenant)):
        await run(finder, args)


async def run(finder, args):
    with trio.fail_after(60):
        result = finder(*args)
        if result is not None:
            await result
