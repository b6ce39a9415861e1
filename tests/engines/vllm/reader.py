"""A reader of KV events in a process of its own: it asks for all that was told, and decodes it with vLLM's own structs.

Run by the tests beside it, with the interpreter of an environment that has vLLM. Its last line is the answer: what can be
found, by medium, and the numbers of the batches.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher


def main() -> None:
    said = json.loads(sys.stdin.read())
    held: dict[str, list[str]] = {}
    numbers, sizes = [], set()
    for number, batch in told(said["answers"]):
        numbers.append(number)
        for event in batch.events:
            if isinstance(event, BlockStored):
                sizes.add((event.medium, event.block_size))
                known = held.setdefault(str(event.medium), [])
                known += [one for one in map(named, event.block_hashes) if one not in known]
            elif isinstance(event, BlockRemoved):
                known = held.setdefault(str(event.medium), [])
                held[str(event.medium)] = [one for one in known if one not in map(named, event.block_hashes)]
            else:
                assert isinstance(event, AllBlocksCleared)
                held = {}
    print(json.dumps({"held": held, "numbers": numbers, "sizes": sorted(sizes)}))


def named(block_hash: Any) -> str:
    """By default vLLM tells 64 bits of a hash, as a number."""
    return block_hash.hex() if isinstance(block_hash, bytes) else str(block_hash)


def told(endpoint: str) -> list[tuple[int, Any]]:
    """All batches, as vLLM's own subscribers ask for them."""
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    batches = []
    while True:
        assert socket.poll(60_000), "no answer"
        _, _, number, payload = socket.recv_multipart()
        if number == ZmqEventPublisher.END_SEQ:
            socket.close(0)
            return batches
        batches.append((int.from_bytes(number, "big"), decode(payload)))


if __name__ == "__main__":
    main()
