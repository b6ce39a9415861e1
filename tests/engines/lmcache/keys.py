"""Keys of objects as LMCache makes them, without LMCache."""

import attrs


@attrs.frozen
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "org/model"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


def chunks(n, start=0, **fields):
    return [ObjectKey(at.to_bytes(4, "big"), **fields) for at in range(start, start + n)]
