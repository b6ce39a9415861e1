"""An end as an exception, for callers that do not look at results."""

import pytest

from offload import DrainUnproven, Status, TransferCancelled, TransferFailed, TransferResult


def result(status, *, completed=(b"a",), failed=None, error=None):
    return TransferResult(status, completed, {}, failed or {}, (), error, {})


def test_a_complete_one_is_the_result_itself():
    one = result(Status.COMPLETE)
    assert one.raise_for_status() is one


def test_a_cancelled_one_says_that_nothing_was_copied():
    with pytest.raises(TransferCancelled, match="nothing was copied"):
        result(Status.CANCELLED, completed=()).raise_for_status()


def test_why_the_whole_failed_is_raised_as_it_is_without_the_frames_of_others():
    error = DrainUnproven("the end is unknown")
    one = result(Status.FAILED, error=error)
    depths = []
    for _ in range(3):
        with pytest.raises(DrainUnproven) as caught:
            one.raise_for_status()
        assert caught.value is error
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def test_blocks_that_failed_for_one_reason_have_it_as_the_cause():
    error = OSError("disk")
    with pytest.raises(TransferFailed, match="2 blocks failed, 1 are at the destination") as caught:
        result(Status.FAILED, failed={b"b": error, b"c": error}).raise_for_status()
    assert caught.value.__cause__ is error


def test_blocks_that_failed_for_several_reasons_have_a_group_as_the_cause():
    errors = [OSError("disk"), ValueError("size")]
    with pytest.raises(TransferFailed) as caught:
        result(Status.FAILED, failed={b"b": errors[0], b"c": errors[1]}).raise_for_status()
    assert isinstance(caught.value.__cause__, ExceptionGroup) and list(caught.value.__cause__.exceptions) == errors
