"""A region by way of a resource manager: what it says, and what it does not."""

import contextlib
import errno
import os
import socket
import threading

import pytest

from maru import BadFrame, BadMessage, CannotMap, NoAnswer, NotOwner, ServerLost
from maru._client.operations import Map
from maru._client.regions import ask_for_access, fetch_region
from maru._wire import Handle
from maru._wire.resource_manager import (
    HEADER_BYTES,
    RmAccessRequest,
    RmAccessResponse,
    RmErrorResponse,
    RmFreeResponse,
    decode_rm_request,
    encode_rm,
    read_rm_header,
)

HANDLE = Handle(3, 0, 4096, 77)
SOON = 10.0


@contextlib.contextmanager
def answering(answer, pieces=1):
    """A resource manager that gives one answer: bytes, a message, or nothing (None: it hangs; b"": it hangs up)."""
    asked, over = [], threading.Event()

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(SOON)
            kind, length = read_rm_header(connection.recv(HEADER_BYTES, socket.MSG_WAITALL))
            asked.append(decode_rm_request(kind, connection.recv(length, socket.MSG_WAITALL)))
            if answer is None:
                over.wait(SOON)
            else:
                data = answer if isinstance(answer, bytes) else encode_rm(answer)
                step = max(1, -(-len(data) // pieces))
                for start in range(0, len(data), step):
                    connection.sendall(data[start : start + step])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield "{}:{}".format(*listener.getsockname()), asked
        finally:
            over.set()
            thread.join(SOON)


@pytest.mark.parametrize("pieces", [1, 9])
def test_it_is_told_the_handle_and_tells_where_the_region_is(tmp_path, pieces):
    (tmp_path / "maru_3.dat").touch(0o600)
    (tmp_path / "maru_3.dat").write_bytes(b"x" * 4096)
    told = RmAccessResponse(0, str(tmp_path / "maru_3.dat"), 0, 4096, "")
    with answering(told, pieces) as (address, asked):
        wanted = Map(3, 0, 4096, write=False, capability=None, handle=HANDLE)
        mapping = fetch_region(wanted, session=b"", descriptors="", rm_address=address, timeout=SOON)
    assert bytes(mapping.view(0, 3)) == b"xxx"
    assert not mapping.writable
    [request] = asked
    assert isinstance(request, RmAccessRequest)
    assert (request.handle.region_id, request.handle.length, request.handle.auth_token) == (3, 4096, 77)
    assert request.client_id == f"{socket.gethostname()}:{os.getpid()}"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (RmAccessResponse(-errno.ENOENT), CannotMap),
        (RmAccessResponse(-errno.EACCES), NotOwner),
        (RmErrorResponse(-errno.EINVAL, "no such thing"), CannotMap),
        (RmFreeResponse(0), BadMessage),
        (b"", ServerLost),
        (b"GET / HTTP/1.1\r\n\r\n", BadFrame),
        (encode_rm(RmAccessResponse(0, "/somewhere", 0, 4096, ""))[:-3], ServerLost),
        (RmAccessResponse(0, "/nowhere/at/all/maru_3.dat", 0, 4096, ""), CannotMap),
    ],
)
def test_whatever_else_it_answers_is_a_typed_error(answer, error):
    with answering(answer) as (address, _), pytest.raises(error):
        wanted = Map(3, 0, 4096, write=False, capability=None, handle=HANDLE)
        fetch_region(wanted, session=b"", descriptors="", rm_address=address, timeout=SOON)


def test_one_that_hangs_is_no_answer_and_one_that_is_not_there_is_lost():
    with answering(None) as (address, _), pytest.raises(NoAnswer):
        ask_for_access(address, HANDLE, 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
    with pytest.raises(ServerLost):
        ask_for_access(address, HANDLE, SOON)
    with pytest.raises(CannotMap, match="rm_address"):
        wanted = Map(3, 0, 4096, write=False, capability=None, handle=HANDLE)
        fetch_region(wanted, session=b"", descriptors="", rm_address="", timeout=SOON)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"path": "/somewhere/key"}, "neither named 'maru_3.dat' nor dax_path"),
        ({"path": "/somewhere/maru_4.dat"}, "neither named 'maru_3.dat' nor dax_path"),
        ({"length": 4095}, "the file has 4095 bytes, but 4096 were granted"),
    ],
)
def test_a_resource_manager_that_names_something_else_is_not_believed(tmp_path, told, text):
    """A file of ours that is no region is a key, or a journal: it would be written."""
    answer = RmAccessResponse(
        **{"status": 0, "path": str(tmp_path / "maru_3.dat"), "offset": 0, "length": 4096, **told}
    )
    with answering(answer) as (address, _), pytest.raises(CannotMap, match=text):
        fetch_region(
            Map(3, 0, 4096, write=True, capability=None, handle=HANDLE),
            session=b"",
            descriptors="",
            rm_address=address,
            timeout=SOON,
        )
