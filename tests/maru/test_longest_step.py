"""No message, however large, holds up a page store's server: each step handles a bounded number of keys."""

from __future__ import annotations

import pytest

from maru._wire import KEYS_AT_ONCE, MAX_KEYS
from tests.support import longest_step


def test_each_message_is_handled_in_bounded_steps():
    steps, errors = longest_step.measure(keys=6 * MAX_KEYS, sessions=8)
    assert {name: keys for name, keys in steps.keys.items() if keys > KEYS_AT_ONCE} == {}
    assert errors == {"SHUTDOWN": ["refused"]}
    # Each was worked off, and not merely refused.
    handled = {
        "STORE",
        "FIND",
        "BATCH_LOOKUP_KV",
        "BATCH_EXISTS_KV",
        "BATCH_PIN_KV",
        "BATCH_UNPIN_KV",
        "UNPIN",
        "PINS",
        "RESOLVE",
    }
    assert {name: steps.keys[name] for name in handled} == dict.fromkeys(handled, KEYS_AT_ONCE)
    assert steps.keys["RECLAIM"] and steps.keys["DROP"] and steps.keys["REQUEST_ALLOC"]


@pytest.mark.long
def test_no_step_with_a_million_keys_is_long():
    assert longest_step.main([]) == 0
