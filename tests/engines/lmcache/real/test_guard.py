"""LMCache's adapter and first level, raised in each function below each method: LMCache sees no error and no wrong byte."""

from contextlib import suppress
from types import FunctionType

import pytest
from lmcache.v1.distributed.error import L1Error

from offload.engines._guard import GUARD_ATTRIBUTE
from offload.engines.lmcache import MaruL1Manager, MaruL2Adapter, MaruMemoryAllocator
from tests.engines.lmcache.real.memory import Driver, bytes_of, keys_of, memory_object
from tests.engines.lmcache.real.test_adapter import MEMORY, open_adapter
from tests.engines.lmcache.real.test_l1 import LAYOUT, first_level
from tests.engines.raising import ERRORS, raise_in_call
from tests.support.maru_processes import Server, eventually, temporary_pool

KEYS = keys_of(3)


@pytest.mark.parametrize("adapter", [MaruL2Adapter, MaruL1Manager, MaruMemoryAllocator])
def test_each_public_method_is_guarded(adapter):
    methods = {name: one for name, one in vars(adapter).items() if isinstance(one, FunctionType) and name[0] != "_"}
    assert methods
    assert all(hasattr(one, GUARD_ATTRIBUTE) for one in methods.values())


@pytest.mark.parametrize("error", ERRORS)
def test_each_task_ends_with_right_bytes(error):
    stored = [memory_object() for _ in KEYS]
    with open_adapter(MEMORY) as adapter:
        driver = Driver(adapter)
        driver.store(KEYS, stored)
        for n in range(400):
            loaded = [memory_object(fill=False) for _ in KEYS]
            raised = []
            for call in (
                lambda: adapter.submit_store_task(KEYS, stored),
                lambda: adapter.submit_lookup_and_lock_task(KEYS, {}),
                lambda loaded=loaded: adapter.submit_load_task(KEYS, loaded),
            ):
                with raise_in_call(n, error) as raising:
                    task = call()
                raised.append(raising.where)
                results = {}

                def ended(task=task, results=results):
                    results.update(adapter.pop_completed_store_tasks())
                    for query in (adapter.query_lookup_and_lock_result, adapter.query_load_result):
                        if (result := query(task)) is not None:
                            results[task] = result
                    return task in results

                assert eventually(ended, 10), raising.where
                assert list(results) == [task]
            came = [results[task].test(at) for at in range(3)]
            assert all(bytes_of(loaded[at]) == bytes_of(stored[at]) for at in range(3) if came[at]), raised
            with raise_in_call(n, error) as raising:
                adapter.submit_unlock(KEYS)
            raised.append(raising.where)
            with raise_in_call(n, error) as raising:
                assert isinstance(adapter.report_status(), dict)
                with suppress(ValueError):  # which the interface names
                    assert adapter.list_l2_keys().entries is not None
                assert adapter.get_usage() is not None
            raised.append(raising.where)
            if not any(raised):
                break
        else:
            raise AssertionError("there is no end of functions")
        assert n > 20 and came == [True] * 3
        assert eventually(lambda: adapter.report_status()["locked_key_count"] == 0, 10)


@pytest.mark.parametrize("error", ERRORS)
def test_first_level_answers_by_codes(error):
    with temporary_pool() as pool, Server(pool) as server, first_level(server) as level:
        keys = keys_of(2)
        assert level.register_kv_layout(LAYOUT)
        for n in range(200):
            raised = []
            for call in (
                lambda: level.reserve_write(keys, [False] * 2, LAYOUT),
                lambda: level.finish_write(keys),
                lambda: level.reserve_read(keys),
                lambda: level.unsafe_read(keys),
                lambda: level.finish_read(keys),
                lambda: level.delete(keys),
            ):
                with raise_in_call(n, error) as raising:
                    answers = call()
                assert list(answers) == keys
                assert all(isinstance(one if isinstance(one, L1Error) else one[0], L1Error) for one in answers.values())
                raised.append(raising.where)
            level.finish_read(keys, 99)
            level.finish_write_and_delete(keys)
            if not any(raised):
                break
        else:
            raise AssertionError("there is no end of functions")
        assert n > 5
        assert level.report_status()["read_locked_count"] == level.report_status()["write_locked_count"] == 0


@pytest.mark.parametrize("error", ERRORS)
def test_errors_give_back_nothing_of_earlier_calls(error):
    with temporary_pool() as pool, Server(pool) as server, first_level(server) as level:
        keys = keys_of(2)
        assert level.register_kv_layout(LAYOUT)
        level.reserve_write(keys, [False] * 2, LAYOUT)
        with raise_in_call(0, error) as raising:
            level.reserve_write(keys, [False] * 2, LAYOUT)
        assert raising.where == "_l1.py:reserve_write"
        assert set(level.finish_write(keys).values()) == {L1Error.SUCCESS}, "its pages were given back"
        level.reserve_read(keys)
        for call in (level.reserve_read, level.finish_write_and_reserve_read):
            with raise_in_call(0, error):
                call(keys)
            assert [one[0] for one in level.unsafe_read(keys).values()] == [L1Error.SUCCESS] * 2, (
                "its locks were given back"
            )
