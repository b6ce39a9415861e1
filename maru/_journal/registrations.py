"""Columns of a registering request, live or replayed from its record. Pure."""

from __future__ import annotations

from .._directory import Columns
from .._wire import BatchRegisterRequest, RegisterRequest, StoreRequest, decode_request
from ..base.errors import BadMessage

_REGISTERING = (RegisterRequest, BatchRegisterRequest, StoreRequest)


def columns_of(request: RegisterRequest | BatchRegisterRequest | StoreRequest) -> Columns:
    """Return the columns of a registering request."""
    if type(request) is StoreRequest:
        return Columns(
            request.regions,
            request.keys,
            request.offsets,
            request.lengths,
            request.checksums,
            request.attempt,
            request.depths,
        )
    if type(request) is BatchRegisterRequest:
        entries = request.entries
        return Columns(
            [entry.region_id for entry in entries],
            [entry.key for entry in entries],
            [entry.kv_offset for entry in entries],
            [entry.kv_length for entry in entries],
        )
    assert type(request) is RegisterRequest
    return Columns(request.region_id, [request.key], [request.kv_offset], request.kv_length)


def recorded_columns(code: int, payload: bytes) -> Columns:
    """Return the columns of a ``Registered`` record.

    Raises:
        BadMessage: these bytes are no request that registers.
    """
    request = decode_request(code, payload)
    if not isinstance(request, _REGISTERING):
        raise BadMessage(f"code {code:#04x} is not a registering request")
    return columns_of(request)
