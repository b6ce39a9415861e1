"""What is inside an exception group."""

from __future__ import annotations

import pytest
import trio

from maru.exception_groups import holds, leaves, raise_unwrapped, unwrap

A, B, C = ValueError("a"), OSError("b"), KeyError("c")


def test_leaves_are_in_order_however_deep() -> None:
    assert leaves(ExceptionGroup("", [A, ExceptionGroup("", [B, ExceptionGroup("", [C])])])) == [A, B, C]
    assert leaves(A) == [A]


def test_a_kind_is_found_however_deep() -> None:
    group = ExceptionGroup("", [A, ExceptionGroup("", [B])])
    assert holds(group, OSError) and holds(group, (KeyError, ValueError)) and holds(B, OSError)
    assert not holds(group, KeyError)
    assert not holds(A, ExceptionGroup)


def test_only_what_is_alone_is_unwrapped() -> None:
    two = ExceptionGroup("", [A, B])
    assert unwrap(ExceptionGroup("", [ExceptionGroup("", [A])])) is A
    assert unwrap(ExceptionGroup("", [two])) is two
    assert unwrap(A) is A


def test_an_error_that_comes_alone_keeps_its_cause() -> None:
    alone = ValueError("alone")
    alone.__cause__ = B
    with pytest.raises(ValueError, match="alone") as raised, raise_unwrapped():
        raise ExceptionGroup("", [alone])
    assert raised.value is alone and alone.__cause__ is B


def test_what_is_not_alone_leaves_as_it_came() -> None:
    group = ExceptionGroup("", [A, B])
    with pytest.raises(ExceptionGroup) as raised, raise_unwrapped():
        raise group
    assert raised.value is group


async def test_a_copy_in_a_nursery_that_is_cancelled_holds_cancelled() -> None:
    seen: list[BaseException] = []
    with trio.CancelScope() as scope:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                scope.cancel()
        except BaseException as error:
            seen.append(error)
            raise
    assert isinstance(seen[0], BaseExceptionGroup) and holds(seen[0], trio.Cancelled)
