"""Every message of the protocol as the bytes it is on the wire, written by hand from the specification.

Rows of code, body and message; :func:`frame` puts the header before a body. Nothing here is produced by the code under
test. `REQUESTS` and `REPLIES`, and `RM_REQUESTS` and `RM_RESPONSES` of the resource manager, are the corpus for fuzzing.
"""

import errno

from maru import _wire as wire
from maru._wire import Code
from maru._wire import resource_manager as rm

MIB = b"\xce\x00\x10\x00\x00"
EPOCH = 0x0102030405060708
EPOCH_BYTES = b"\xcf\x01\x02\x03\x04\x05\x06\x07\x08"
SUM = 0xFFEEDDCCBBAA9988
SUM_BYTES = b"\xcf\xff\xee\xdd\xcc\xbb\xaa\x99\x88"
PLACE = bytes.fromhex("070000000000000000000000000000000000f0ffffffffff2a000000000000000000000000000000")
"""Region 7, offset 0, 1 MiB, generation 42, and no checksum."""
TOKEN = b"0123456789abcdef"
TOKEN_BYTES = b"\xc4\x10" + TOKEN

HANDLE = wire.Handle(7, 0, 104_857_600, EPOCH)
HANDLE_BYTES = b"\x84\xa9region_id\x07\xa6offset\x00\xa6length\xce\x06\x40\x00\x00\xaaauth_token" + EPOCH_BYTES
OTHER = wire.Handle(300, 2_097_152, 2_097_152, 0)
OTHER_BYTES = (
    b"\x84\xa9region_id\xcd\x01\x2c\xa6offset\xce\x00\x20\x00\x00\xa6length\xce\x00\x20\x00\x00\xaaauth_token\x00"
)
ENTRY_BYTES = b"\x84\xa3key\xa2k1\xa9region_id\x07\xa9kv_offset" + MIB + b"\xa9kv_length" + MIB

OPERATION = wire.OperationStats(3, 2, 1, 3_145_728, 10.5, 3.5, 1.0, 6.0, 0, 0.0, 0.0, 0.0)
OPERATION_BYTES = (
    b"\x8c\xa5count\x03\xa9hit_count\x02\xaamiss_count\x01\xabtotal_bytes\xce\x00\x30\x00\x00"
    b"\xaelatency_sum_us\xcb\x40\x25\x00\x00\x00\x00\x00\x00"
    b"\xaeavg_latency_us\xcb\x40\x0c\x00\x00\x00\x00\x00\x00"
    b"\xaemin_latency_us\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"
    b"\xaemax_latency_us\xcb\x40\x18\x00\x00\x00\x00\x00\x00"
    b"\xaeinterval_count\x00"
    b"\xafinterval_avg_us\xcb\x00\x00\x00\x00\x00\x00\x00\x00"
    b"\xafinterval_min_us\xcb\x00\x00\x00\x00\x00\x00\x00\x00"
    b"\xafinterval_max_us\xcb\x00\x00\x00\x00\x00\x00\x00\x00"
)

# What a published peer sends, and what we send when none of our extras has anything to say: the same bytes.
V1_REQUESTS = [
    (
        Code.REQUEST_ALLOC,
        b"\x82\xabinstance_id\xa2i1\xa4size\xce\x06\x40\x00\x00",
        wire.AllocRequest("i1", 104_857_600),
    ),
    (Code.RETURN_ALLOC, b"\x82\xabinstance_id\xa2i1\xa9region_id\x07", wire.ReturnRequest("i1", 7)),
    (Code.LIST_ALLOCATIONS, b"\x80", wire.ListRequest()),
    (Code.LIST_ALLOCATIONS, b"\x81\xb3exclude_instance_id\xa2i1", wire.ListRequest("i1")),
    (Code.REGISTER_KV, ENTRY_BYTES, wire.RegisterRequest("k1", 7, 1 << 20, 1 << 20)),
    (
        Code.REGISTER_KV,  # a negative offset is a message: the directory refuses it, with a sentence
        b"\x84\xa3key\xa3\xe2\x82\xac\xa9region_id\x00\xa9kv_offset\xff\xa9kv_length\xd0\x9c",
        wire.RegisterRequest("€", 0, -1, -100),
    ),
    (Code.LOOKUP_KV, b"\x81\xa3key\xa2k1", wire.KeyRequest("k1")),
    (Code.EXISTS_KV, b"\x81\xa3key\xa0", wire.KeyRequest("")),
    (Code.DELETE_KV, b"\x81\xa3key\xa2k1", wire.KeyRequest("k1")),
    (Code.PIN_KV, b"\x81\xa3key\xa2k1", wire.KeyRequest("k1")),
    (Code.UNPIN_KV, b"\x81\xa3key\xa2k1", wire.KeyRequest("k1")),
    (
        Code.BATCH_REGISTER_KV,
        b"\x81\xa7entries\x92" + ENTRY_BYTES + ENTRY_BYTES,
        wire.BatchRegisterRequest([wire.RegisterRequest("k1", 7, 1 << 20, 1 << 20)] * 2),
    ),
    (Code.BATCH_LOOKUP_KV, b"\x81\xa4keys\x92\xa2k1\xa2k2", wire.KeysRequest(["k1", "k2"])),
    (Code.BATCH_EXISTS_KV, b"\x81\xa4keys\x90", wire.KeysRequest([])),
    (Code.BATCH_PIN_KV, b"\x81\xa4keys\x91\xa2k1", wire.KeysRequest(["k1"])),
    (Code.BATCH_UNPIN_KV, b"\x81\xa4keys\x91\xa2k1", wire.KeysRequest(["k1"])),
    (Code.GET_STATS, b"\x80", wire.EmptyRequest()),
    (Code.HEARTBEAT, b"\x80", wire.EmptyRequest()),
    (
        Code.REPORT_STATS,
        b"\x81\xa7entries\x91\x85\xa9client_id\xa2c1\xa7op_type\xa8retrieve\xa6result\xa3hit\xa4size"
        + MIB
        + b"\xaalatency_us\xcb\x40\x25\x00\x00\x00\x00\x00\x00",
        wire.ReportRequest([wire.ReportEntry("c1", "retrieve", "hit", 1 << 20, 10.5)]),
    ),
    (Code.GET_USAGE, b"\x80", wire.EmptyRequest()),
    (Code.HANDSHAKE, b"\x80", wire.HandshakeRequest()),
    (
        Code.HANDSHAKE,
        b"\x82\xaeclient_version\xa50.1.0\xabinstance_id\xa2i1",
        wire.HandshakeRequest(wire.raw_scalar("0.1.0"), "i1"),
    ),
    (Code.SHUTDOWN, b"\x80", wire.EmptyRequest()),
]
V1_REPLIES = [
    (Code.REQUEST_ALLOC, b"\x82\xa7success\xc3\xa6handle" + HANDLE_BYTES, wire.AllocReply(True, HANDLE)),
    (Code.REQUEST_ALLOC, b"\x82\xa7success\xc2\xa5error\xa9pool full", wire.AllocReply(False, None, "pool full")),
    (Code.RETURN_ALLOC, b"\x81\xa7success\xc3", wire.SuccessReply(True)),
    (
        Code.LIST_ALLOCATIONS,
        b"\x82\xa7success\xc3\xaballocations\x92" + HANDLE_BYTES + OTHER_BYTES,
        wire.ListReply(True, [HANDLE, OTHER]),
    ),
    (Code.LIST_ALLOCATIONS, b"\x82\xa7success\xc3\xaballocations\x90", wire.ListReply(True, [])),
    (Code.REGISTER_KV, b"\x82\xa7success\xc3\xa6is_new\xc3", wire.RegisterReply(True, True)),
    (Code.REGISTER_KV, b"\x82\xa7success\xc3\xa6is_new\xc2", wire.RegisterReply(True, False)),
    (
        Code.REGISTER_KV,
        b"\x83\xa7success\xc2\xa6is_new\xc2\xa5error\xb0no such region 9",
        wire.RegisterReply(False, False, "no such region 9"),
    ),
    (Code.EXISTS_KV, b"\x81\xa6exists\xc2", wire.ExistsReply(False)),
    (Code.DELETE_KV, b"\x81\xa7success\xc2", wire.SuccessReply(False)),
    (Code.PIN_KV, b"\x81\xa6exists\xc3", wire.ExistsReply(True)),
    (Code.UNPIN_KV, b"\x81\xa7success\xc3", wire.SuccessReply(True)),
    (
        Code.BATCH_REGISTER_KV,
        b"\x82\xa7success\xc3\xa7results\x92\xc3\xc2",
        wire.BatchRegisterReply(True, [True, False]),
    ),
    (
        Code.BATCH_REGISTER_KV,
        b"\x83\xa7success\xc2\xa7results\x90\xa5error\xa3bad",
        wire.BatchRegisterReply(False, [], "bad"),
    ),
    (Code.BATCH_EXISTS_KV, b"\x81\xa7results\x92\xc3\xc2", wire.ResultsReply([True, False])),
    (Code.BATCH_PIN_KV, b"\x81\xa7results\x92\xc3\xc2", wire.ResultsReply([True, False])),
    (Code.BATCH_UNPIN_KV, b"\x81\xa7results\x90", wire.ResultsReply([])),
    (
        Code.GET_STATS,
        b"\x83\xaakv_manager\x82\xadtotal_entries\x03\xaatotal_size\xce\x00\x30\x00\x00"
        b"\xb2allocation_manager\x83\xafnum_allocations\x01\xaftotal_allocated\xce\x06\x40\x00\x00\xaeactive_clients\x01"
        b"\xadstats_manager\x81\xa7clients\x81\xa4_all\x81\xaaoperations\x81\xa8retrieve" + OPERATION_BYTES,
        wire.StatsReply(
            wire.KvManagerStats(3, 3_145_728),
            wire.AllocationManagerStats(1, 104_857_600, 1),
            wire.StatsManagerStats({"_all": wire.ClientStats({"retrieve": OPERATION})}),
        ),
    ),
    (Code.HEARTBEAT, b"\x80", wire.HeartbeatReply()),
    (Code.REPORT_STATS, b"\x81\xa7success\xc3", wire.SuccessReply(True)),
    (
        Code.GET_USAGE,
        b"\x83\xa9instances\x91\x84\xabinstance_id\xa2i1\xa7regions\x01\xa9allocated\xce\x06\x40\x00\x00\xa4used"
        + MIB
        + b"\xaapool_total\xce\x40\x00\x00\x00\xa9pool_free\xce\x39\xc0\x00\x00",
        wire.UsageReply([wire.InstanceUsage("i1", 1, 104_857_600, 1 << 20)], 1 << 30, 0x39C00000),
    ),
    (Code.SHUTDOWN, b"\x81\xa7success\xc3", wire.SuccessReply(True)),
]
# Of these a published server sends less than we do.
V1_PUBLISHED_REPLIES = [
    (
        Code.LOOKUP_KV,
        b"\x84\xa5found\xc3\xa6handle" + HANDLE_BYTES + b"\xa9kv_offset\x00\xa9kv_length" + MIB,
        wire.LookupReply(True, HANDLE, 0, 1 << 20),
    ),
    (Code.LOOKUP_KV, b"\x81\xa5found\xc2", wire.LookupReply(False)),
    (
        Code.BATCH_LOOKUP_KV,
        b"\x81\xa7entries\x92\x84\xa5found\xc3\xa6handle"
        + OTHER_BYTES
        + b"\xa9kv_offset\x00\xa9kv_length"
        + MIB
        + b"\x81\xa5found\xc2",
        wire.BatchLookupReply([wire.LookupReply(True, OTHER, 0, 1 << 20), wire.LookupReply(False)]),
    ),
    (
        Code.HANDSHAKE,
        b"\x82\xa7success\xc3\xaarm_address\xae127.0.0.1:9850",
        wire.HandshakeReply(True, "127.0.0.1:9850"),
    ),
]
# With our extras. The clients that know nothing of them find what they look for.
EXTENDED_REQUESTS = [
    (
        Code.REQUEST_ALLOC,
        b"\x83\xabinstance_id\xa2i1\xa4size\x01\xa7session" + TOKEN_BYTES,
        wire.AllocRequest("i1", 1, TOKEN),
    ),
    (
        Code.RETURN_ALLOC,
        b"\x83\xabinstance_id\xa2i1\xa9region_id\x07\xa7session" + TOKEN_BYTES,
        wire.ReturnRequest("i1", 7, TOKEN),
    ),
    (Code.LIST_ALLOCATIONS, b"\x81\xa7session" + TOKEN_BYTES, wire.ListRequest(session=TOKEN)),
    (
        Code.HANDSHAKE,
        b"\x87\xaeclient_version\xa50.1.0\xabinstance_id\xa2i1\xaaextensions\x01\xa7session"
        + TOKEN_BYTES
        + b"\xa6tenant\xa2t1\xa5lease\xcb\x40\x24\x00\x00\x00\x00\x00\x00\xa8readonly\xc3",
        wire.HandshakeRequest(wire.raw_scalar("0.1.0"), "i1", 1, TOKEN, "t1", 10.0, True),
    ),
]
EXTENDED_REPLIES = [
    (
        Code.REQUEST_ALLOC,
        b"\x83\xa7success\xc3\xa6handle" + HANDLE_BYTES + b"\xa5epoch" + EPOCH_BYTES,
        wire.AllocReply(True, HANDLE, epoch=EPOCH),
    ),
    (Code.DELETE_KV, b"\x82\xa7success\xc3\xa5epoch" + EPOCH_BYTES, wire.SuccessReply(True, epoch=EPOCH)),
    (Code.EXISTS_KV, b"\x82\xa6exists\xc3\xa5epoch" + EPOCH_BYTES, wire.ExistsReply(True, EPOCH)),
    (Code.HEARTBEAT, b"\x81\xa5epoch" + EPOCH_BYTES, wire.HeartbeatReply(EPOCH)),
    (
        Code.HANDSHAKE,
        b"\x8c\xa7success\xc3\xaarm_address\xae127.0.0.1:9850\xa5epoch"
        + EPOCH_BYTES
        + b"\xa7session"
        + TOKEN_BYTES
        + b"\xa7resumed\xc2\xa5lease\xcb\x40\x24\x00\x00\x00\x00\x00\x00\xa5codes\x92\x40\x41"
        b"\xabdescriptors\xa6/run/d\xa6server\xa1s\xa8max_keys\xcd\x20\x00\xadmax_key_bytes\xcd\x04\x00"
        b"\xabbegins_anew\xc3",
        wire.HandshakeReply(
            True, "127.0.0.1:9850", EPOCH, TOKEN, False, 10.0, [0x40, 0x41], "/run/d", "s", 8192, 1024, True
        ),
    ),
]
OPENING = b"\xc4\x10" + TOKEN + b"\x05"  # session, ack
RETURNS = wire.Returns(9, [7, 7], [0, 1 << 20], [1, 2])
RETURNS_BYTES = b"\x94\x09\x92\x07\x07\x92\x00" + MIB + b"\x92\x01\x02"
OWN_REQUESTS = [
    (
        Code.STORE,
        b"\x99" + OPENING + b"\x03\x07\x92\xa1a\xa1b\x92\x00" + MIB + MIB + b"\xc0\xc0",
        wire.StoreRequest(TOKEN, 5, 3, 7, ["a", "b"], [0, 1 << 20], 1 << 20, None),
    ),
    (
        Code.STORE,
        b"\x99" + OPENING + b"\x03\x91\x07\x91\xa1a\x91\x00\x91" + MIB + b"\x91" + SUM_BYTES + b"\xc0",
        wire.StoreRequest(TOKEN, 5, 3, [7], ["a"], [0], [1 << 20], [SUM]),
    ),
    (
        Code.STORE,
        b"\x99" + OPENING + b"\x03\x07\x92\xa1a\xa1b\x92\x00" + MIB + MIB + b"\xc0\x92\x0c\xc0",
        wire.StoreRequest(TOKEN, 5, 3, 7, ["a", "b"], [0, 1 << 20], 1 << 20, None, [12, None]),
    ),
    (
        Code.FIND,
        b"\x96" + OPENING + b"\x92\xa1a\xa1b\xc3\xc2\x00",
        wire.FindRequest(TOKEN, 5, ["a", "b"], True, False),
    ),
    (
        Code.FIND,
        b"\x96" + OPENING + b"\x91\xa1a\xc3\xc3\xcd\x01\x00",
        wire.FindRequest(TOKEN, 5, ["a"], True, True, 256),
    ),
    (Code.UNPIN, b"\x94" + OPENING + b"\x91\xa1a\x00", wire.UnpinRequest(TOKEN, 5, ["a"])),
    (Code.UNPIN, b"\x94" + OPENING + b"\x91\xa1a\x03", wire.UnpinRequest(TOKEN, 5, ["a"], 3)),
    (
        Code.PINS,
        b"\x96" + OPENING + b"\x03\x92\xa1a\xa1b\x92\x01\x02\xc3",
        wire.PinsRequest(TOKEN, 5, 3, ["a", "b"], [1, 2], True),
    ),
    (Code.PINS, b"\x96" + OPENING + b"\x03\x90\x90\xc2", wire.PinsRequest(TOKEN, 5, 3, [], [], False)),
    (Code.LIST_KEYS, b"\x94" + OPENING + b"\xa1a\x07", wire.ListKeysRequest(TOKEN, 5, "a", 7)),
    (Code.DROP, b"\x95" + OPENING + b"\x0b\x91\xa1a\xc0", wire.DropRequest(TOKEN, 5, 11, ["a"])),
    (
        Code.DROP,
        b"\x95" + OPENING + b"\x0b\x92\xa1a\xa1b\x92\x2a\x00",
        wire.DropRequest(TOKEN, 5, 11, ["a", "b"], [42, 0]),
    ),
    (Code.RECLAIM, b"\x94" + OPENING + b"\x0b\x40", wire.ReclaimRequest(TOKEN, 5, 11, 64)),
    (
        Code.RESOLVE,
        b"\x95" + OPENING + b"\x03\x92\x07\x07\x92\x00" + MIB,
        wire.ResolveRequest(TOKEN, 5, 3, [7, 7], [0, 1 << 20]),
    ),
    (Code.BEAT, b"\x93" + OPENING + b"\x00", wire.BeatRequest(TOKEN, 5)),
    (Code.BEAT, b"\x93" + OPENING + EPOCH_BYTES, wire.BeatRequest(TOKEN, 5, EPOCH)),
    (Code.CLOSE, b"\x92" + OPENING, wire.CloseRequest(TOKEN, 5)),
    (Code.REGION, b"\x94" + OPENING + b"\x07\xc3", wire.RegionRequest(TOKEN, 5, 7, True)),
    (Code.DESCRIBE, b"\x80", wire.DescribeRequest()),
    (Code.DESCRIBE, b"\x81\xa3key\xa1k", wire.DescribeRequest("k")),
]
OWN_REPLIES = [
    (
        Code.STORE,
        b"\x94" + EPOCH_BYTES + b"\xc0\x92\x00\x01\x92\x2a\x00",
        wire.StoreReply(EPOCH, None, [wire.StoreStatus.NEW, wire.StoreStatus.DUPLICATE], [42, 0]),
    ),
    (
        Code.FIND,
        b"\x94" + EPOCH_BYTES + RETURNS_BYTES + b"\x91\x01\xc4\x28" + PLACE,
        wire.FindReply(EPOCH, RETURNS, [1], PLACE),
    ),
    (Code.UNPIN, b"\x93" + EPOCH_BYTES + b"\xc0\x92\xc3\xc2", wire.UnpinReply(EPOCH, None, [True, False])),
    (Code.PINS, b"\x93" + EPOCH_BYTES + b"\xc0\x07", wire.PinsReply(EPOCH, None, 7)),
    (
        Code.LIST_KEYS,
        b"\x94" + EPOCH_BYTES + b"\xc0\x92\xa1a\xa1b\x00",
        wire.ListKeysReply(EPOCH, None, ["a", "b"], 0),
    ),
    (
        Code.DROP,
        b"\x93" + EPOCH_BYTES + b"\xc0\x94\x00\x01\x02\x03",
        wire.DropReply(EPOCH, None, list(wire.DropAnswer)),
    ),
    (Code.RECLAIM, b"\x93" + EPOCH_BYTES + RETURNS_BYTES + b"\x02", wire.ReclaimReply(EPOCH, RETURNS, 2)),
    (Code.RESOLVE, b"\x93" + EPOCH_BYTES + b"\xc0\x92\x2a\x00", wire.ResolveReply(EPOCH, None, [42, 0])),
    (
        Code.BEAT,
        b"\x93" + EPOCH_BYTES + RETURNS_BYTES + b"\xcb\x40\x24\x00\x00\x00\x00\x00\x00",
        wire.BeatReply(EPOCH, RETURNS, 10.0),
    ),
    (Code.CLOSE, b"\x92" + EPOCH_BYTES + b"\xc0", wire.CloseReply(EPOCH, None)),
    (
        Code.REGION,
        b"\x96" + EPOCH_BYTES + b"\xc0\xc4\x03cap\x00" + MIB + b"\xc2",
        wire.RegionReply(EPOCH, None, b"cap", 0, 1 << 20, False),
    ),
    (
        Code.DESCRIBE,
        b"\x83\xa5epoch" + EPOCH_BYTES + b"\xa6server\xa50.1.0\xa8sections\x81\xa4pool\x81\xa4path\xa8/dev/shm",
        wire.DescribeReply(EPOCH, "0.1.0", {"pool": {"path": "/dev/shm"}}),
    ),
]
OWN_REQUESTS_BEFORE = [
    (
        Code.FIND,
        b"\x95" + OPENING + b"\x92\xa1a\xa1b\xc3\xc2",
        wire.FindRequest(TOKEN, 5, ["a", "b"], True, False, 0),
    ),
    (Code.UNPIN, b"\x93" + OPENING + b"\x91\xa1a", wire.UnpinRequest(TOKEN, 5, ["a"], 0)),
    (Code.DROP, b"\x94" + OPENING + b"\x0b\x91\xa1a", wire.DropRequest(TOKEN, 5, 11, ["a"], None)),
]
"""As clients of ours have sent them that know no turns, and no generations of what they delete."""
REQUESTS = V1_REQUESTS + EXTENDED_REQUESTS + OWN_REQUESTS
REPLIES = V1_REPLIES + V1_PUBLISHED_REPLIES + EXTENDED_REPLIES + OWN_REPLIES


def frame(code, sequence, body, flags=0):
    head = bytes([0xCF, 0x00, 0x01, code, flags, 0, 0, 0])
    return head + sequence.to_bytes(4, "big") + len(body).to_bytes(4, "big") + body


# --- the resource manager: what follows the magic and the version, and the message ---

RM_MAGIC = bytes.fromhex("5552414d 0200")  # "URAM": 0x4D415255, little endian; version 2
RM_HANDLE = rm.RmHandle(7, 0, 0x200000, 0x0102030405060708)
RM_HANDLE_BYTES = bytes.fromhex("0700000000000000 0000000000000000 0000200000000000 0807060504030201")
NO_RM_HANDLE = bytes(32)

RM_REQUESTS = [
    (
        bytes.fromhex("0100 33000000")
        + bytes.fromhex("0000200000000000 09000000 00000000")
        + b"/dev/shm/"
        + b"\x10\x00host.example:123"
        + bytes.fromhex("0500000000000000"),
        rm.RmAllocRequest(0x200000, "/dev/shm/", "host.example:123", 5),
    ),
    (
        bytes.fromhex("0100 1d000000 ffffffffffffffff 00000000 00000000 0300 613a31 ffffffffffffffff"),
        rm.RmAllocRequest(2**64 - 1, "", "a:1", 2**64 - 1),
    ),
    (
        bytes.fromhex("0300 2d000000") + RM_HANDLE_BYTES + b"\x03\x00a:1" + bytes.fromhex("0600000000000000"),
        rm.RmFreeRequest(RM_HANDLE, "a:1", 6),
    ),
    (bytes.fromhex("0500 00000000"), rm.RmStatsRequest()),
    (bytes.fromhex("0900 25000000") + RM_HANDLE_BYTES + b"\x03\x00a:1", rm.RmAccessRequest(RM_HANDLE, "a:1")),
]
RM_RESPONSES = [
    (
        bytes.fromhex("0200 53000000 00000000 01000000")
        + RM_HANDLE_BYTES
        + bytes.fromhex("0100000000000000 13000000")
        + b"/dev/shm/maru_7.dat"
        + b"\x0a\x00uuid-of-it",
        rm.RmAllocResponse(0, rm.DaxType.FS_DAX, RM_HANDLE, 1, "/dev/shm/maru_7.dat", "uuid-of-it"),
    ),
    (
        bytes.fromhex("0200 36000000 f4ffffff 00000000") + NO_RM_HANDLE + bytes(8) + bytes(4) + bytes(2),
        rm.RmAllocResponse(-errno.ENOMEM),
    ),
    (bytes.fromhex("0400 04000000 00000000"), rm.RmFreeResponse(0)),
    (bytes.fromhex("0400 04000000 eaffffff"), rm.RmFreeResponse(-errno.EINVAL)),
    (bytes.fromhex("0600 04000000 00000000"), rm.RmStatsResponse(())),
    (
        bytes.fromhex("0600 51000000 02000000")
        + bytes.fromhex("08000000 01000000 0000004000000000 0000003000000000 0000200000000000")
        + b"/dev/shm"
        + bytes.fromhex("05000000 00000000 0100000000000000 0000000000000000 0010000000000000")
        + b"/d\xff\x00x",
        rm.RmStatsResponse(
            (
                rm.RmPool("/dev/shm", rm.DaxType.FS_DAX, 1 << 30, 3 << 28, 1 << 21),
                rm.RmPool("/d\udcff\0x", rm.DaxType.DEV_DAX, 1, 0, 4096),
            )
        ),
    ),
    (
        bytes.fromhex("0a00 20000000 00000000 02000000")
        + b"/p"
        + bytes.fromhex("0000100000000000 0000200000000000 0400")
        + b"uuid",
        rm.RmAccessResponse(0, "/p", 0x100000, 0x200000, "uuid"),
    ),
    (bytes.fromhex("0a00 1a000000 feffffff") + bytes(22), rm.RmAccessResponse(-errno.ENOENT)),
    (bytes.fromhex("ff00 0b000000 b9ffffff 03000000") + b"bad", rm.RmErrorResponse(-errno.EPROTO, "bad")),
]
