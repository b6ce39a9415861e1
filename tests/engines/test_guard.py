"""The guard of adapters: what an inference engine sees where a hook raises."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from offload.engines._guard import GUARD_ATTRIBUTE, NOTHING, Hook, guard_faults, guarded, nothing
from offload.engines.lmcache import MaruConnector
from tests.engines.lmcache.caches import in_memory
from tests.engines.raising import ERRORS, raise_in_call
from tests.engines.sglang.backends import (  # first, as it stands in for SGLang where that is not installed
    HiCacheOffload,
    LayerFirstPool,
    extra_config,
    hashes,
    open_backend,
    tokens,
)
from tests.support.maru_processes import eventually


def adapter_that_raises(error: BaseException | None, log: list[str]) -> Any:
    hooks = {
        "found": Hook(lambda one, count: [False] * count, lambda one, count: log.append(f"put right {count}")),
        "wrong": Hook(nothing, passes=(ValueError,)),
    }

    @guarded(hooks)
    class Adapter:
        def found(self, n: int) -> list[bool]:
            if error is not None:
                raise error
            return [True] * n

        def wrong(self) -> None:
            raise ValueError("said so")

        def _below(self) -> None:
            pass

    return Adapter()


@pytest.mark.parametrize("kind", [*ERRORS, OSError, StopIteration, AssertionError, type("Own", (Exception,), {})])
def test_exception_of_hook_is_answered_and_counted(kind: type[Exception], caplog: pytest.LogCaptureFixture):
    log: list[str] = []
    adapter = adapter_that_raises(kind("text"), log)
    with caplog.at_level(logging.WARNING):
        assert [adapter.found(2), adapter.found(3)] == [[False] * 2, [False] * 3]
    assert log == ["put right 2", "put right 3"]
    assert sum(guard_faults(adapter).snapshot().values()) == 2
    assert len([record for record in caplog.records if "found" in record.getMessage()]) == 1


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_exits_pass_once_things_are_put_right(kind: type[BaseException]):
    log: list[str] = []
    with pytest.raises(kind):
        adapter_that_raises(kind(), log).found(2)
    assert log == ["put right 2"]


def test_arguments_by_name_reach_answers_by_position():
    log: list[str] = []
    assert adapter_that_raises(OSError(), log).found(n=2) == [False] * 2
    assert log == ["put right 2"]


def test_things_are_put_right_at_second_attempt():
    attempts: list[int] = []

    def put_right(adapter: object) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise MemoryError

    @guarded({"found": Hook(lambda adapter: 0, put_right)})
    class Adapter:
        def found(self) -> int:
            raise OSError

    assert Adapter().found() == 0
    assert len(attempts) == 2


def test_exception_that_interface_names_passes():
    with pytest.raises(ValueError, match="said so"):
        adapter_that_raises(None, []).wrong()


def test_hook_without_entry_is_an_error():
    with pytest.raises(TypeError, match="another"):

        @guarded({"known": NOTHING})
        class Adapter:
            def known(self) -> None:
                pass

            def another(self) -> None:
                pass


@pytest.mark.parametrize("adapter", [MaruConnector, HiCacheOffload])
def test_each_public_method_of_adapter_is_guarded(adapter: type):
    methods = {name: method for name, method in vars(adapter).items() if callable(method) and not name.startswith("_")}
    assert methods
    assert all(hasattr(method, GUARD_ATTRIBUTE) for method in methods.values())


# --- raised in each function below each hook --------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS)
def test_sglang_sees_no_error_and_no_wrong_page(error: type[BaseException]):
    keys, pool = hashes(3), LayerFirstPool()
    for page in range(3):
        pool.fill(page)
    with open_backend(pool, extra_config()) as backend:
        for n in range(400):
            places = torch.cat([tokens(3 + at) for at in range(3)])
            pool.page(3).zero_()
            with raise_in_call(n, error) as raising:
                stored = backend.batch_set_v1(keys, tokens(0, 1, 2))
                there = backend.batch_exists(keys)
                loaded = backend.batch_get_v1(keys, places)
                answers = (backend.exists(keys[0]), backend.get(keys[0]), backend.batch_get(keys), backend.set(keys[0]))
                assert isinstance(backend.report_status(), dict)
            assert len(stored) == len(loaded) == 3 and there in range(4), raising.where
            assert answers[1:] == (None, [None] * 3, False)
            assert loaded == sorted(loaded, reverse=True), "a prefix"
            for at, has_come in enumerate(loaded):
                assert not has_come or torch.equal(pool.page(at), pool.page(3 + at)), raising.where
            if not raising.where:
                break
        else:
            raise AssertionError("there is no end of functions")
        assert n > 20
        assert backend.batch_get_v1(keys, places) == [True] * 3
        assert eventually(lambda: backend.report_status()["stores_under_way"] == 0, 10)
        engine = backend._pool.storage._engine  # type: ignore[attr-defined]
        assert eventually(lambda: engine.statistics().unreleased_hits == 0, 10)


@pytest.mark.parametrize("error", ERRORS)
def test_native_connector_completes_each_operation_once(error: type[BaseException]):
    names, size = [f"org/model@01000100@0@{at:016x}" for at in range(3)], 4096
    connector = MaruConnector(**in_memory(chunk_size_bytes=size))
    stored = [bytearray([at + 1]) * size for at in range(3)]

    def completed(number: int) -> Any:
        found: list[Any] = []
        assert eventually(lambda: found.extend(connector.drain_completions()) or found, 10)  # type: ignore[func-returns-value]
        [completion] = found
        assert completion[0] == number
        return completion

    completed(connector.submit_batch_set(names, list(map(memoryview, stored))))
    try:
        for n in range(400):
            loaded = [bytearray(size) for _ in range(3)]
            with raise_in_call(n, error) as raising:
                numbers = [connector.submit_batch_set(names, list(map(memoryview, stored)))]
            completed(numbers[0])
            with raise_in_call(n, error) as looking:
                number = connector.submit_batch_exists(names)
            completed(number)
            with raise_in_call(n, error) as loading:
                number = connector.submit_batch_get(names, list(map(memoryview, loaded)))
            came = completed(number)[3] or [False] * 3
            assert all(loaded[at] == stored[at] for at in range(3) if came[at]), loading.where
            if not (raising.where or looking.where or loading.where):
                break
        else:
            raise AssertionError("there is no end of functions")
        assert n > 10
        assert came == [True] * 3
        assert eventually(lambda: connector.report_status()["locked_key_count"] == 0)
    finally:
        connector.close()
