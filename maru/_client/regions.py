"""Mapping of regions, by a descriptor or by a resource manager's path.

Our server hands out descriptors. Blocking: it opens, maps and, if the region is our own, puts every page in place. Call
it in a thread, or where blocking is acceptable. If a call is abandoned, its mapping ends with its result: an unused
mapping unmaps itself.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from .._index import BoardWriter, IndexReader
from .._pool.index_files import map_board, map_index
from .._wire.resource_manager import (
    HEADER_BYTES,
    RmAccessRequest,
    RmAccessResponse,
    RmErrorResponse,
    RmHandle,
    decode_rm_response,
    encode_rm,
    read_rm_header,
)
from ..base.descriptors import DescriptorRequest, fetch_board_descriptor, fetch_descriptor, fetch_index_descriptor
from ..base.errors import BadMessage, CannotMap, NoAnswer, NotOwner, ServerLost, UntrustedServer
from ..base.forks import watch_forks
from ..base.listeners import find_tcp_listener
from ..base.memory.mapping import Mapping, map_region
from ..base.peers import why_untrusted
from ..base.region_file import region_file_name
from .operations import BoardPins, Map, MapIndex

if TYPE_CHECKING:
    from .._wire import Handle


INDEX_TIME: Final = 0.5
"""Most seconds for fetching an index.

Meanwhile the waiting task could ask by message; and closing its handler must not take long.
"""


def fetch_region(
    wanted: Map | MapIndex, *, session: bytes, descriptors: str, rm_address: str, timeout: float, device: str = ""
) -> Mapping | tuple[IndexReader, BoardPins | None]:
    """Map the region or index that an operation needs, if permitted.

    Args:
        wanted: the region, and the capability or handle to ask for it; or the shared index and a board.
        session: the token of the session that has the capability.
        descriptors: our server's socket that hands out descriptors.
        rm_address: ``host:port`` of a resource manager, asked if there is no capability.
        timeout: for the request; mapping takes as long as it takes.
        device: the path of the device that the configuration names.

    Raises:
        NotOwner: the region is to be written, and belongs to another owner.
        NotAnIndex: the server hands out an index that is none.
        CannotMap: it is gone, there is no memory behind it, or it is no file that may be mapped.
        NoAnswer: no answer came in time.
        ServerLost: no server is there to ask.
    """
    if isinstance(wanted, MapIndex):
        return fetch_index(wanted, session, descriptors, min(timeout, INDEX_TIME))
    if wanted.capability is not None:
        request = DescriptorRequest(
            session, wanted.region_id, wanted.offset, wanted.length, wanted.write, wanted.capability
        )
        fd, offset, length = fetch_descriptor(descriptors, request, timeout)
        try:
            # An open descriptor of a device shows servers that a process may write or read there: see
            # `maru._pool.writers`.
            keep = wanted.write or bool(device and not os.path.isdir(device))
            return map_region(fd, length, offset, write=wanted.write, pin=None, keep=keep, device=device)
        finally:
            os.close(fd)
    if not rm_address:
        raise CannotMap(f"region {wanted.region_id}: the server named no resource manager, and rm_address is not set")
    access = ask_for_access(rm_address, wanted.handle, timeout)
    check_access(access, wanted.handle, device)
    return map_region(access.path, wanted.length, access.offset, write=wanted.write, pin=None, device=device)


def fetch_index(
    wanted: MapIndex, session: bytes, descriptors: str, timeout: float
) -> tuple[IndexReader, BoardPins | None]:
    """Map the shared index, and a board unless there is one.

    Raises as :func:`fetch_region`.
    """
    fd = fetch_index_descriptor(descriptors, session, timeout)
    try:
        reader = IndexReader(map_index(fd))
    finally:
        os.close(fd)
    if not wanted.with_board:
        return reader, None
    fd = fetch_board_descriptor(descriptors, session, timeout)
    try:
        board = BoardWriter(map_board(fd))
    finally:
        os.close(fd)
    pins = BoardPins(board, threading.Lock(), wanted.era, wanted.counters)
    watch_forks(pins, BoardPins.after_fork)  # or else a child would release pins that its parent holds
    return reader, pins


def check_access(access: RmAccessResponse, handle: Handle, device: str) -> None:
    """Raise unless a resource manager names memory that can be that region's.

    Pure. A file of ours that has another name than a region's is a key or a journal, for example. It is not written.

    Raises:
        CannotMap: it names another file, or less than was granted.
    """
    name = region_file_name(handle.region_id)
    if access.length < handle.length:
        raise CannotMap(
            f"region {handle.region_id}: the file has {access.length} bytes, but {handle.length} were granted"
        )
    if access.path != device and os.path.basename(access.path) != name:
        raise CannotMap(
            f"region {handle.region_id}: {access.path!r} is not mapped: it is neither named {name!r} nor dax_path"
        )


def ask_for_access(rm_address: str, handle: Handle, timeout: float) -> RmAccessResponse:
    """Ask the resource manager at ``host:port`` where a region is.

    Raises:
        UntrustedServer: it is another user's process. (Its answer is checked as well: see :func:`check_access`.)
    """
    host, _, port = rm_address.rpartition(":")
    deadline = time.monotonic() + timeout
    shown = RmHandle(handle.region_id, handle.offset, handle.length, handle.auth_token)
    request = encode_rm(RmAccessRequest(shown, f"{socket.gethostname()}:{os.getpid()}"))
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            connection.sendall(request)
            kind, length = read_rm_header(_receive(connection, HEADER_BYTES, deadline))
            answer = decode_rm_response(kind, _receive(connection, length, deadline))
            why = why_untrusted(find_tcp_listener(host, int(port)), os.geteuid())
    except TimeoutError as exc:
        raise NoAnswer(f"the resource manager at {rm_address} did not answer within {timeout:g} s") from exc
    except OSError as exc:
        raise ServerLost(f"the resource manager at {rm_address}: {exc}") from exc
    if why:
        raise UntrustedServer(f"rm_address = {rm_address!r}: {why}. Start the resource manager as this user")
    if isinstance(answer, RmErrorResponse):
        raise CannotMap(f"region {handle.region_id}: {answer.message}")
    if not isinstance(answer, RmAccessResponse):
        raise BadMessage(f"the resource manager answered with a {type(answer).__name__}")
    if answer.status:
        reason = os.strerror(-answer.status)
        if -answer.status in (errno.EACCES, errno.EPERM):
            raise NotOwner(f"region {handle.region_id}: {reason}")
        raise CannotMap(f"region {handle.region_id}: {reason}")
    return answer


def _receive(connection: socket.socket, n: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while n:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(n)
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts.append(part)
        n -= len(part)
    return b"".join(parts)
