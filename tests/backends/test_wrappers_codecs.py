"""Each wrapper by itself: bytes in, bytes out, whatever the bytes; and what it makes of those that it did not make."""

import contextlib
import math
import os
from hashlib import blake2b

import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends.wrappers import AesGcm, Context, Damaged, Fp8, UnknownTenant, Zstd
from tests.support.wrapping import SECRETS, encoded, through, wrappers_of

PLAIN = Context(b"key", "", b"chain")
ANN = Context(b"key", "ann", b"chain")
SIZES = (0, 1, 2, 31, 32, 33, 4095, 4096, 100_001)


def damaged(wrapper, data, size, context=PLAIN):
    with pytest.raises(Damaged) as caught:
        wrapper.decode(context, memoryview(bytearray(data)), memoryview(bytearray(size)))
    return caught.value.reason


# --- what loses nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zeros", "text", "noise"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["zstd", "aes"])
def test_what_comes_out_is_what_went_in(name, size, kind):
    data = {"zeros": bytes(size), "text": (b"KV cache " * (size // 9 + 1))[:size], "noise": os.urandom(size)}[kind]
    [wrapper] = wrappers_of(name)
    assert through(wrapper, data) == data
    assert len(encoded(wrapper, data)) <= wrapper.bound(size)


@settings(deadline=None)
@given(data=st.binary(max_size=300), name=st.sampled_from(["zstd", "aes"]), times=st.integers(1, 40))
def test_any_bytes_come_back(data, name, times):
    [wrapper] = wrappers_of(name)
    assert through(wrapper, data * times) == data * times


@pytest.mark.parametrize("level", [-7, 1, 22])
def test_every_level_decodes_what_any_other_has_made(level):
    data = b"KV cache " * 1000
    back = bytearray(len(data))
    Zstd(level=5).decode(PLAIN, memoryview(bytearray(encoded(Zstd(level=level), data))), memoryview(back))
    assert bytes(back) == data


def test_what_can_be_compressed_is_and_what_cannot_costs_one_byte():
    assert len(encoded(Zstd(), bytes(100_000))) < 100
    noise = os.urandom(100_000)
    assert encoded(Zstd(), noise) == b"\x00" + noise


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00" + bytes(63),
        b"\x00" + bytes(65),
        b"\x02" + bytes(64),
        b"\x01",
        b"\x01" + b"no frame at all",
        encoded(Zstd(), bytes(63)),
        encoded(Zstd(), bytes(65)),
        encoded(Zstd(), bytes(64))[:-1],
        encoded(Zstd(), bytes(1 << 20)),
    ],
    ids=lambda body: f"{len(body)} bytes {body[:4].hex()}",
)
def test_what_is_no_frame_of_so_many_bytes_is_damaged(body):
    assert damaged(Zstd(), body, 64) == "damaged"


def test_a_frame_that_asks_for_gigabytes_does_not_get_them():
    # Magic, a descriptor without content size, and a window of 2**(10 + 21) bytes; then a raw block.
    frame = bytes.fromhex("28b52ffd") + b"\x00" + bytes([21 << 3]) + (64 << 3 | 1).to_bytes(3, "little") + bytes(64)
    assert damaged(Zstd(), b"\x01" + frame, 64) == "damaged"


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), size=st.integers(0, 300))
def test_whatever_is_decoded_it_comes_to_an_end_and_says_so(data, size):
    for wrapper in (Zstd(), AesGcm(SECRETS)):
        try:
            wrapper.decode(PLAIN, memoryview(bytearray(data)), memoryview(bytearray(size)))
        except Damaged:
            continue
        assert isinstance(wrapper, Zstd) and data[:1] in (b"\x00", b"\x01")


def test_what_was_damaged_does_no_harm_to_the_next_one():
    wrapper, data = Zstd(), b"KV cache " * 1000
    body = encoded(wrapper, data)
    for at in range(0, len(body), 3):
        broken = bytearray(body)
        broken[at] ^= 0x55
        with contextlib.suppress(Damaged):
            wrapper.decode(PLAIN, memoryview(broken), memoryview(bytearray(len(data))))
        assert through(wrapper, data) == data


# --- encryption ---------------------------------------------------------------------------------------------------


def test_nothing_of_the_block_can_be_read_and_no_two_look_alike():
    data = b"secret" * 100
    first, second = encoded(AesGcm(SECRETS), data, ANN), encoded(AesGcm(SECRETS), data, ANN)
    assert b"secret" not in first
    assert first[28:] != second[28:]


def test_a_tenants_name_cannot_be_confirmed_without_a_secret():
    body = encoded(AesGcm(SECRETS), b"bytes", ANN)
    assert body[:8] == encoded(AesGcm(SECRETS), b"other", ANN)[:8]
    assert body[:8] != encoded(AesGcm({"ann": b"x" * 32}), b"bytes", ANN)[:8]
    assert body[:8] != blake2b(b"ann", digest_size=8, person=b"offload.tenant").digest()


def test_blocks_that_name_their_tenant_are_read():
    # As version 1 wrote them: sealed with a hash of the tenant's name alone.
    secret, nonce = SECRETS["ann"], bytes(12)
    before = b"".join(
        blake2b(text, digest_size=8, person=b"offload." + field).digest()
        for text, field in ((b"ann", b"tenant"), (secret, b"secret"))
    )
    sealed = AESGCM(secret).encrypt(nonce, b"bytes", b"chain" + (5).to_bytes(8, "little") + before + b"key")
    body, back = bytearray(before + nonce + sealed), bytearray(5)
    AesGcm(SECRETS).decode(ANN, memoryview(body), memoryview(back))
    assert back == b"bytes"
    bob = Context(b"key", "bob", b"chain")
    assert damaged(AesGcm(SECRETS), body, 5, bob) == damaged(AesGcm(SECRETS.get), body, 5, bob) == "foreign"
    assert damaged(AesGcm({"ann": b"n" * 32}), body, 5, ANN) == damaged(AesGcm({}), body, 5, ANN) == "secret"


def test_a_block_of_an_unknown_tenant_stays_where_a_function_knows_the_secrets():
    body = encoded(AesGcm(SECRETS), b"bytes", ANN)
    bob = Context(b"key", "bob", b"chain")
    with pytest.raises(Damaged) as caught:
        AesGcm({"bob": b"b" * 32}.get).decode(bob, memoryview(bytearray(body)), memoryview(bytearray(5)))
    assert (caught.value.reason, caught.value.keep) == ("foreign", True)


def test_nonces_are_all_different():
    wrapper = AesGcm(SECRETS)
    nonces = {encoded(wrapper, b"", ANN)[16:28] for _ in range(2000)}
    assert len(nonces) == 2000
    assert all(len({nonce[at] for nonce in nonces}) > 200 for at in range(12)), "all 96 bits are random"


@pytest.mark.parametrize("at", range(44 + 5))
def test_every_byte_that_is_changed_is_found(at):
    body = bytearray(encoded(AesGcm(SECRETS), b"bytes", ANN))
    body[at] ^= 1
    assert damaged(AesGcm(SECRETS), body, 5, ANN) == ("foreign" if at < 8 else "secret" if at < 16 else "tag")


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (Context(b"kez", "ann", b"chain"), "tag"),
        (Context(b"key", "ann", b"Chain"), "tag"),
        (Context(b"key", "bob", b"chain"), "foreign"),
        (Context(b"key", "", b"chain"), "foreign"),
        (Context(b"key", "nobody that is known", b"chain"), "foreign"),
        (Context(b"key", None, b"chain"), "foreign"),
    ],
)
def test_it_is_that_block_of_that_tenant_through_that_chain(context, reason):
    assert damaged(AesGcm(SECRETS), encoded(AesGcm(SECRETS), b"bytes", ANN), 5, context) == reason


def test_the_same_secret_does_not_make_one_tenant_of_two():
    wrapper = AesGcm({"ann": b"k" * 32, "bob": b"k" * 32})
    body = bytearray(encoded(wrapper, b"bytes", ANN))
    assert damaged(wrapper, body, 5, Context(b"key", "bob", b"chain")) == "foreign"
    body[:8] = encoded(wrapper, b"", Context(b"key", "bob", b"chain"))[:8]
    assert damaged(wrapper, body, 5, Context(b"key", "bob", b"chain")) == "tag"


def test_a_length_cannot_be_cut():
    body = encoded(AesGcm(SECRETS), b"bytes", ANN)
    assert damaged(AesGcm(SECRETS), body[:-1], 4, ANN) == "tag"
    assert damaged(AesGcm(SECRETS), body, 4, ANN) == "damaged"
    assert damaged(AesGcm(SECRETS), body[:43], 0, ANN) == "damaged"


def test_an_old_secret_decodes_as_long_as_it_is_known():
    secrets = {"ann": [b"old!" * 4]}
    wrapper = AesGcm(secrets)
    old = encoded(wrapper, b"bytes", ANN)
    secrets["ann"] = [b"new!" * 8, b"old!" * 4]
    new, back = encoded(wrapper, b"bytes", ANN), bytearray(5)
    assert old[8:16] != new[8:16]
    for body in (old, new):
        wrapper.decode(ANN, memoryview(bytearray(body)), memoryview(back))
        assert back == b"bytes"
    secrets["ann"] = [b"new!" * 8]
    assert damaged(wrapper, old, 5, ANN) == "secret"
    del secrets["ann"]
    assert damaged(wrapper, new, 5, ANN) == "secret"


def test_a_function_may_know_the_secrets():
    asked = []

    def secret_of(tenant):
        asked.append(tenant)
        return b"f" * 16 if tenant == "ann" else None

    wrapper = AesGcm(secret_of)
    assert through(wrapper, b"bytes", ANN) == b"bytes"
    assert asked == ["ann", "ann"]
    with pytest.raises(UnknownTenant, match="no secret for the tenant ''"):
        encoded(wrapper, b"bytes", PLAIN)
    assert isinstance(wrapper.refusal(PLAIN), UnknownTenant) and wrapper.refusal(ANN) is None


def test_what_a_function_raises_is_an_answer_about_one_block():
    def secret_of(tenant):
        raise OSError("the vault is closed")

    assert isinstance(AesGcm(secret_of).refusal(ANN), OSError)


def test_no_secret_is_in_any_text(caplog):
    wrapper = AesGcm({"ann": b"0123456789abcdef"})
    texts = [repr(wrapper), str(wrapper)]
    for attempt in (
        lambda: encoded(wrapper, b"x", PLAIN),
        lambda: wrapper.decode(ANN, memoryview(bytearray(45)), memoryview(bytearray(1))),
        lambda: AesGcm({"ann": b"0123456789abcde"}),
    ):
        with pytest.raises(Exception) as caught:
            attempt()
        texts += [str(caught.value), repr(caught.value), repr(caught.value.args)]
    texts += [record.getMessage() for record in caplog.records]
    for text in texts:
        assert "0123456789" not in text and b"0123456789".hex() not in text


# --- quantization -------------------------------------------------------------------------------------------------

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
DIGITS = {"float16": 11, "bfloat16": 8, "float32": 24}


def bytes_of(tensor):
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def quantized(values, dtype, row):
    """What comes back, as 32-bit floats."""
    data = bytes_of(values.to(DTYPES[dtype]))
    back = through(Fp8(dtype, row=row, lossy=True), data)
    return torch.frombuffer(bytearray(back), dtype=DTYPES[dtype]).to(torch.float32)


def reference(values, dtype, row):
    """The same, value by value, in plain arithmetic: what the module says it does."""
    grid = sorted(
        {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
        | {m / 8 * 2.0**-6 for m in range(8)}
    )
    wide = values.to(DTYPES[dtype]).to(torch.float64).tolist()
    back = []
    for start in range(0, len(wide), row):
        part = wide[start : start + row]
        largest = torch.tensor(max(map(abs, part)), dtype=torch.float32)
        scale = max((largest / 448.0).item(), 2.0**-126)
        for value in part:
            wanted = (torch.tensor(abs(value), dtype=torch.float32) / scale).item()
            small = min(grid, key=lambda one: (abs(one - wanted), round(one * 2**9) % 2))
            back.append(math.copysign(min(small, 448.0) * scale, value))
    return back


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    row=st.integers(1, 9),
    values=st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=40),
)
@example(dtype="float16", row=4, values=[65504.0, -65504.0, 1.0, 0.0])
@example(dtype="float32", row=3, values=[1e-45, -1e-40, 0.0, 3e38])
@example(dtype="bfloat16", row=2, values=[0.0, -0.0, 1e-38])
def test_every_value_comes_back_within_the_bound_that_is_promised(dtype, row, values):
    given = torch.tensor(values).to(DTYPES[dtype]).to(torch.float32)
    back = quantized(torch.tensor(values), dtype, row)
    for start in range(0, len(values), row):
        part, got = given[start : start + row].double(), back[start : start + row].double()
        scale = max(part.abs().max().item() / 448, 2.0**-126)
        rounding = part.abs() * 2.0 ** -DIGITS[dtype] + 2.0**-126
        assert ((got - part).abs() <= torch.clamp(part.abs() / 16, min=scale * 2.0**-10) * 1.0001 + rounding).all()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("row", [1, 8, 33])
def test_it_is_what_plain_arithmetic_says(dtype, row):
    torch.manual_seed(8)
    values = torch.randn(100) * 3
    expected = torch.tensor(reference(values, dtype, row)).to(DTYPES[dtype]).to(torch.float32)
    assert torch.equal(quantized(values, dtype, row), expected)


@settings(max_examples=100, deadline=None)
@given(dtype=st.sampled_from(sorted(DTYPES)), row=st.integers(1, 70), data=st.binary(max_size=600))
def test_what_was_decoded_loses_nothing_more(dtype, row, data):
    wrapper = Fp8(dtype, row=row, lossy=True)
    data = data[: len(data) // 4 * 4]
    once = through(wrapper, data)
    assert through(wrapper, once) == once
    if not torch.frombuffer(bytearray(once or b"\0\0\0\0"), dtype=DTYPES[dtype]).isnan().any():
        assert encoded(wrapper, once) == encoded(wrapper, data), "the oracle: the same bytes"


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("size", [1e-3, 1e-4, 3e-6, 1e-7])
def test_what_is_hardly_more_than_zero_loses_nothing_more_either(dtype, size):
    torch.manual_seed(1)
    data = bytes_of((torch.randn(64 * 500) * size).to(DTYPES[dtype]))
    wrapper = Fp8(dtype, row=64, lossy=True)
    once = through(wrapper, data)
    assert through(wrapper, once) == once
    assert encoded(wrapper, once) == encoded(wrapper, data)
    before, after = (torch.frombuffer(bytearray(one), dtype=DTYPES[dtype]).float() for one in (data, once))
    scale = (before.view(-1, 64).abs().amax(1) / 448).repeat_interleave(64)
    step = 2.0**-24 if dtype == "float16" else 0.0  # of float16, near zero
    assert ((after - before).abs() <= torch.maximum(before.abs() / 16, scale * 2.0**-10) * 1.01 + step).all()


@pytest.mark.parametrize("length", [0, 1, 4, 5, 11, 13, 16, 30])
def test_what_is_not_as_long_as_it_must_be_is_damaged(length):
    assert damaged(Fp8("float32", row=8, lossy=True), bytes(length), 32) == "damaged"


def test_a_place_for_no_whole_number_of_values_is_filled_with_none():
    assert damaged(Fp8("float32", row=8, lossy=True), bytes(12), 31) == "damaged"


def test_rows_are_scaled_each_for_itself():
    values = torch.cat([torch.full((8,), 1e-6), torch.full((8,), 1e6), torch.full((3,), 7.0)])
    back = quantized(values, "float32", 8)
    assert torch.allclose(back, values, rtol=1e-6)


def test_what_is_not_finite_is_told_and_spoils_nothing_else():
    values = torch.tensor([1.0, math.inf, 0.5, -2.0, -math.inf, math.nan, 448.0, 1.0])
    back = quantized(values, "float16", 4)
    assert back.isnan().tolist() == [False, True, False, False, True, True, False, False]
    assert torch.equal(back[[0, 2, 3, 6, 7]], torch.tensor([1.0, 0.5, -2.0, 448.0, 1.0]))
    assert quantized(torch.full((4,), math.nan), "bfloat16", 4).isnan().all()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_zeros_stay_zeros(dtype):
    assert not quantized(torch.zeros(130), dtype, 64).any()


@pytest.mark.parametrize("values", [0, 1, 7, 128, 129, 66_000, 131_073])
def test_any_number_of_values_will_do(values):
    torch.manual_seed(values)
    data = bytes_of(torch.randn(values).to(torch.bfloat16))
    wrapper = Fp8("bfloat16", lossy=True)
    assert len(encoded(wrapper, data)) == wrapper.bound(len(data)) == values + 4 * -(-values // 128)
    assert through(wrapper, through(wrapper, data)) == through(wrapper, data)


def test_what_is_read_only_can_be_encoded_too():
    data = bytes_of(torch.arange(64, dtype=torch.float32))
    room = bytearray(Fp8("float32", lossy=True).bound(256))
    assert Fp8("float32", lossy=True).encode(PLAIN, memoryview(data), memoryview(room)) == len(room)
    assert bytes(room) == encoded(Fp8("float32", lossy=True), data)


def test_the_source_is_left_as_it_was():
    data = bytearray(bytes_of(torch.arange(64, dtype=torch.float32)))
    before = bytes(data)
    room = bytearray(Fp8("float32", lossy=True).bound(256))
    Fp8("float32", lossy=True).encode(PLAIN, memoryview(data), memoryview(room))
    assert data == before
