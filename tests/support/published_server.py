"""The published server and its resource manager. See :mod:`published`."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.support.published_wire import (
    IPC_HEADER,
    IPC_MAGIC,
    TIMEOUT,
    Ask,
    Ipc,
    handle_of,
    long,
    pack,
    receive,
    short,
    unpack,
)

_ALIGN = 2 << 20


class _Region:
    def __init__(self, handle: dict[str, int], owner: str, path: Path):
        self.handle, self.owner, self.path = handle, owner, path
        self.returned = False


class PublishedServer:
    """The server, over two dicts, with a resource manager over ``directory``: one thread for both.

    As the published one it evicts nothing, checks no offset, forgets everything at its end, and answers what it does not
    understand with sequence 0. It listens in that directory, where our clients believe it, unless told otherwise; the directory
    is closed to others. Set :attr:`mute` and requests take effect, but nobody is answered.
    """

    def __init__(self, directory: Path, address: str = "", capacity: int = 1 << 30):
        self.mute = False
        self.asked: Counter[int] = Counter()
        """How often each code was asked for."""
        self._directory, self._capacity = directory, capacity
        self._regions: dict[int, _Region] = {}
        self._region_ids = itertools.count(1)
        self._keys: dict[str, tuple[int, int, int]] = {}
        self._pins: Counter[str] = Counter()
        self._reports: list[dict[str, Any]] = []
        self._failure: BaseException | None = None
        with contextlib.ExitStack() as undo:
            self._context = undo.enter_context(zmq.Context())
            self._router = undo.enter_context(self._context.socket(zmq.ROUTER))
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.bind(address or f"ipc://{directory}/published.sock")
            self.address: str = self._router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            self._listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
            self._listener.setblocking(False)
            self.rm_address = "{}:{}".format(*self._listener.getsockname())
            self._stopping, self._stopped = map(undo.enter_context, socket.socketpair())
            self._undo = undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="published server", daemon=True)
        self._thread.start()

    def __enter__(self) -> PublishedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forgets everything, and leaves the regions' files where they are. Raises what ended the thread, if anything did."""
        self._stopping.send(b"!")
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), "the server's thread does not end"
        self._undo.close()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        connections: dict[int, socket.socket] = {}
        try:
            poller = zmq.Poller()
            for each in (self._router, self._listener, self._stopped):
                poller.register(each, zmq.POLLIN)
            while True:
                for ready, _ in poller.poll(1_000):
                    if ready is self._router:
                        self._serve_one()
                    elif ready == self._stopped.fileno():
                        return
                    elif ready == self._listener.fileno():
                        connection, _ = self._listener.accept()
                        connection.settimeout(TIMEOUT)
                        connections[connection.fileno()] = connection
                        poller.register(connection, zmq.POLLIN)
                    elif not self._serve_ipc(connections[ready]):
                        poller.unregister(connections[ready])
                        connections.pop(ready).close()
        except BaseException as exc:
            self._failure = exc
        finally:
            for connection in connections.values():
                connection.close()

    # --- metadata -----------------------------------------------------------------------------------------------------

    def _serve_one(self) -> None:
        *envelope, frame = self._router.recv_multipart()
        code, sequence, reply = 0, 0, {"error": "cannot decode"}
        with contextlib.suppress(ValueError, KeyError, TypeError, msgspec.MsgspecError):
            asked, number, body = unpack(frame)
            answer = self._ANSWERS[asked]  # an unknown code ends like an undecodable frame
            self.asked[asked] += 1
            reply = answer(self, **body)
            code, sequence = asked, number
        if not self.mute:
            self._router.send_multipart([*envelope, pack(code | 0x80, sequence, reply)])

    def _handshake(self, **_: Any) -> dict[str, Any]:
        return {"success": True, "rm_address": self.rm_address}

    def _heartbeat(self, **_: Any) -> dict[str, Any]:
        return {}

    def _shutdown(self, **_: Any) -> dict[str, Any]:
        return {"error": "not supported"}

    def _request_alloc(self, instance_id: str, size: int, **_: Any) -> dict[str, Any]:
        region = self._allocate(instance_id, size)
        if region is None:
            return {"success": False, "error": "out of memory"}
        return {"success": True, "handle": region.handle}

    def _return_alloc(self, instance_id: str, region_id: int, **_: Any) -> dict[str, Any]:
        region = self._regions.get(region_id)
        if region is None or region.owner != instance_id:
            return {"success": False}
        region.returned = True
        self._drop_if_done(region_id)
        return {"success": True}

    def _list_allocations(self, exclude_instance_id: str | None = None, **_: Any) -> dict[str, Any]:
        listed = [
            region.handle
            for region in self._regions.values()
            if not region.returned and (exclude_instance_id is None or region.owner != exclude_instance_id)
        ]
        return {"success": True, "allocations": listed}

    def _register(self, key: str, region_id: int, kv_offset: int, kv_length: int, **_: Any) -> dict[str, Any]:
        is_new = key not in self._keys
        if is_new:
            self._keys[key] = region_id, kv_offset, kv_length
        return {"success": True, "is_new": is_new}

    def _lookup(self, key: str, **_: Any) -> dict[str, Any]:
        found = self._keys.get(key)
        if found is None or found[0] not in self._regions:
            return {"found": False}
        region_id, offset, length = found
        return {"found": True, "handle": self._regions[region_id].handle, "kv_offset": offset, "kv_length": length}

    def _exists(self, key: str, **_: Any) -> dict[str, Any]:
        return {"exists": key in self._keys}

    def _delete(self, key: str, **_: Any) -> dict[str, Any]:
        if key not in self._keys or self._pins[key]:
            return {"success": False}
        self._drop_if_done(self._keys.pop(key)[0])
        return {"success": True}

    def _pin(self, key: str, **_: Any) -> dict[str, Any]:
        exists = key in self._keys
        self._pins[key] += exists
        return {"exists": exists}

    def _unpin(self, key: str, **_: Any) -> dict[str, Any]:
        if not self._pins[key]:
            return {"success": False}
        self._pins[key] -= 1
        return {"success": True}

    def _batch_register(self, entries: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        return {"success": True, "results": [self._register(**entry)["is_new"] for entry in entries]}

    def _batch_lookup(self, keys: list[str], **_: Any) -> dict[str, Any]:
        return {"entries": [self._lookup(key) for key in keys]}

    def _batch_exists(self, keys: list[str], **_: Any) -> dict[str, Any]:
        return {"results": [key in self._keys for key in keys]}

    def _batch_pin(self, keys: list[str], **_: Any) -> dict[str, Any]:
        present = list(itertools.takewhile(self._keys.__contains__, keys))
        self._pins.update(present)
        return {"results": [i < len(present) for i in range(len(keys))]}

    def _batch_unpin(self, keys: list[str], **_: Any) -> dict[str, Any]:
        return {"results": [self._unpin(key)["success"] for key in keys]}

    def _get_stats(self, **_: Any) -> dict[str, Any]:
        clients: dict[str, Any] = {}
        for report in self._reports:
            for client in ("_all", report["client_id"]):
                operations = clients.setdefault(client, {"operations": {}})["operations"]
                tally = operations.setdefault(report["op_type"], Counter())
                latency = report["latency_us"]
                tally.update({"count": 1, "total_bytes": report["size"], "latency_sum_us": latency})
                tally.update({f"{result}_count": report["result"] == result for result in ("hit", "miss")})
                tally["min_latency_us"] = min(tally.get("min_latency_us", latency), latency)
                tally["max_latency_us"] = max(tally["max_latency_us"], latency)
                tally["avg_latency_us"] = tally["latency_sum_us"] / tally["count"]
                for interval in ("count", "avg_us", "min_us", "max_us"):
                    tally[f"interval_{interval}"] = 0
        owners = {region.owner for region in self._regions.values()}
        allocated = sum(region.handle["length"] for region in self._regions.values())
        return {
            "kv_manager": {
                "total_entries": len(self._keys),
                "total_size": sum(length for _, _, length in self._keys.values()),
            },
            "allocation_manager": {
                "num_allocations": len(self._regions),
                "total_allocated": allocated,
                "active_clients": len(owners),
            },
            "stats_manager": {"clients": clients},
        }

    def _report_stats(self, entries: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        self._reports += entries
        return {"success": True}

    def _get_usage(self, **_: Any) -> dict[str, Any]:
        instances = []
        for owner in sorted({region.owner for region in self._regions.values()}):
            owned = {n: region.handle["length"] for n, region in self._regions.items() if region.owner == owner}
            used = sum(length for region_id, _, length in self._keys.values() if region_id in owned)
            allocated = sum(owned.values())
            instances.append({"instance_id": owner, "regions": len(owned), "allocated": allocated, "used": used})
        return {"instances": instances, "pool_total": self._capacity, "pool_free": self._free()}

    _ANSWERS = {  # noqa: RUF012
        Ask.REQUEST_ALLOC: _request_alloc,
        Ask.RETURN_ALLOC: _return_alloc,
        Ask.LIST_ALLOCATIONS: _list_allocations,
        Ask.REGISTER_KV: _register,
        Ask.LOOKUP_KV: _lookup,
        Ask.EXISTS_KV: _exists,
        Ask.DELETE_KV: _delete,
        Ask.PIN_KV: _pin,
        Ask.UNPIN_KV: _unpin,
        Ask.BATCH_REGISTER_KV: _batch_register,
        Ask.BATCH_LOOKUP_KV: _batch_lookup,
        Ask.BATCH_EXISTS_KV: _batch_exists,
        Ask.BATCH_PIN_KV: _batch_pin,
        Ask.BATCH_UNPIN_KV: _batch_unpin,
        Ask.GET_STATS: _get_stats,
        Ask.HEARTBEAT: _heartbeat,
        Ask.REPORT_STATS: _report_stats,
        Ask.GET_USAGE: _get_usage,
        Ask.HANDSHAKE: _handshake,
        Ask.SHUTDOWN: _shutdown,
    }

    # --- memory -------------------------------------------------------------------------------------------------------

    def _free(self) -> int:
        return self._capacity - sum(region.handle["length"] for region in self._regions.values())

    def _allocate(self, owner: str, size: int) -> _Region | None:
        length = -(-size // _ALIGN) * _ALIGN
        if length <= 0 or length > self._free():
            return None
        number = next(self._region_ids)
        path = self._directory / f"maru_{number}.dat"
        path.touch(0o600)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, length)
        handle = {"region_id": number, "offset": 0, "length": length, "auth_token": number * 0x9E3779B97F4A7C15 % 2**64}
        self._regions[number] = region = _Region(handle, owner, path)
        return region

    def _drop_if_done(self, region_id: int) -> None:
        region = self._regions.get(region_id)
        if region is not None and region.returned and all(key[0] != region_id for key in self._keys.values()):
            del self._regions[region_id]
            region.path.unlink()

    def _region_of(self, handle: bytes) -> _Region | None:
        region = self._regions.get(int.from_bytes(handle[:8], "little"))
        return region if region is not None and handle_of(region.handle) == handle else None

    def _serve_ipc(self, connection: socket.socket) -> bool:
        """One request; whether the connection is of further use."""
        try:
            magic, version, kind, length = IPC_HEADER.unpack(receive(connection, 12))
            if (magic, version) != (IPC_MAGIC, 2) or length > 8192:
                kind, body = Ipc.ERROR_RESP, struct.pack("<i", -71) + long(b"bad frame")
            else:
                kind, body = self._answer_ipc(kind, receive(connection, length))
            connection.sendall(IPC_HEADER.pack(IPC_MAGIC, 2, kind, len(body)) + body)
        except (OSError, struct.error):
            return False
        return kind != Ipc.ERROR_RESP

    def _answer_ipc(self, kind: int, body: bytes) -> tuple[int, bytes]:
        if kind == Ipc.STATS_REQ:
            path = str(self._directory).encode()
            pool = struct.pack("<IIQQQ", len(path), 1, self._capacity, self._free(), _ALIGN) + path
            return Ipc.STATS_RESP, struct.pack("<I", 1) + pool
        if kind == Ipc.ALLOC_REQ:
            size, n, _ = struct.unpack_from("<QII", body)
            (m,) = struct.unpack_from("<H", body, 16 + n)
            region = self._allocate(body[18 + n : 18 + n + m].decode(), size)
            if region is None:
                return Ipc.ALLOC_RESP, struct.pack("<iI4QQ", -12, 0, 0, 0, 0, 0, 0) + long(b"") + short(b"")
            head = struct.pack("<iI", 0, 1) + handle_of(region.handle) + struct.pack("<Q", size)
            return Ipc.ALLOC_RESP, head + long(str(region.path).encode()) + short(b"")
        if kind == Ipc.FREE_REQ:
            region = self._region_of(body[:32])
            (n,) = struct.unpack_from("<H", body, 32)
            if region is None or region.owner != body[34 : 34 + n].decode():
                return Ipc.FREE_RESP, struct.pack("<i", -22)
            region.returned = True
            self._drop_if_done(region.handle["region_id"])
            return Ipc.FREE_RESP, struct.pack("<i", 0)
        if kind == Ipc.GET_ACCESS_REQ:
            region = self._region_of(body[:32])
            if region is None:
                return Ipc.GET_ACCESS_RESP, struct.pack("<iIQQH", -2, 0, 0, 0, 0)
            span = struct.pack("<QQ", region.handle["offset"], region.handle["length"])
            return Ipc.GET_ACCESS_RESP, struct.pack("<i", 0) + long(str(region.path).encode()) + span + short(b"")
        return Ipc.ERROR_RESP, struct.pack("<i", -22) + long(b"unknown type")
