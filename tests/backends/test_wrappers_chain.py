"""A chain without its bytes: the order, the bounds, the names, the header; and whose a key is. Pure."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.wrappers import (
    AesGcm,
    Chain,
    ChainError,
    Damaged,
    Fp8,
    LossyNotChosen,
    MissingExtra,
    Sealing,
    Wrapper,
    Zstd,
    layout_of,
    slot_bytes,
)
from backends.wrappers._chain import TenantTags
from tests.support.wrapping import NAMES, SECRETS, Spy, sealed_again, wrappers_of

FP8 = Fp8("float16", lossy=True)


class OtherCipher(Spy):
    id = b"other cipher"
    seals = True


# --- the order ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrappers", "says"),
    [
        ([], "a chain needs at least one wrapper"),
        ([Zstd(), Zstd(level=3)], "each wrapper can be used only once"),
        ([Zstd(), FP8], r"not Zstd\(level=1\), Fp8\(.*\), but Fp8\(.*\), Zstd"),
        ([AesGcm(SECRETS), Zstd()], r"and encryption last: not AesGcm\(...\), Zstd\(level=1\), but Zstd"),
        ([AesGcm(SECRETS), FP8], "lossy wrappers must come first"),
        ([FP8, AesGcm(SECRETS), Zstd()], "encryption last"),
        ([AesGcm(SECRETS), OtherCipher()], "a block is encrypted once"),
        ([Zstd(), "gzip"], "'gzip' is not a wrapper: it needs id, lossy, bound, encode and decode"),
    ],
)
def test_an_order_that_cannot_be_meant_is_refused_and_the_right_one_named(wrappers, says):
    with pytest.raises(ChainError, match=says):
        Chain(wrappers, 64)
    with pytest.raises(ValueError, match=says):
        slot_bytes(64, *wrappers)


def test_a_wrapper_of_ones_own_has_its_place():
    assert Chain([FP8, Zstd(), Spy(), AesGcm(SECRETS)], 64).slot_bytes
    assert Chain([Spy(), Zstd(), OtherCipher()], 64).slot_bytes
    with pytest.raises(ChainError, match=r"but Spy\(\), AesGcm"):
        Chain([AesGcm(SECRETS), Spy()], 64)
    assert isinstance(Zstd(), Wrapper) and not isinstance(Zstd(), Sealing) and isinstance(AesGcm(SECRETS), Sealing)


def test_what_changes_values_must_be_chosen():
    for options in ({}, {"lossy": False}, {"lossy": 1}):
        with pytest.raises(LossyNotChosen, match="lossy=True"):
            Fp8("float16", **options)
    assert FP8.lossy and not Zstd().lossy and not AesGcm(SECRETS).lossy


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (Zstd, "zstandard", "zstd"),
        (lambda: AesGcm(SECRETS), "cryptography", "aes"),
        (lambda: Fp8("float16", lossy=True), "torch", "torch"),
    ],
)
def test_an_extra_that_is_missing_is_named(monkeypatch, make, package, extra):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"needs {package}.*trio-offload\[{extra}\]") as caught:
        make()
    assert caught.value.extra == extra
    assert isinstance(caught.value, ImportError)


# --- names and sizes ----------------------------------------------------------------------------------------------


def test_chains_are_told_apart_by_what_decoding_depends_on():
    chains = [
        *(wrappers_of(name) for name in NAMES),
        [Fp8("float16", row=8, lossy=True)],
        [Fp8("float32", row=16, lossy=True)],
        [Spy()],
    ]
    assert len({Chain(wrappers, 64).id for wrappers in chains}) == len(chains)
    assert Chain([Zstd(level=1)], 64).id == Chain([Zstd(level=9)], 64).id
    assert Chain([AesGcm(SECRETS)], 64).id == Chain([AesGcm({"x": b"y" * 16})], 64).id


def test_ids_cannot_be_moved_from_one_wrapper_to_the_next():
    class Named(Spy):
        def __init__(self, name):
            super().__init__()
            self.id = name

    assert Chain([Named(b"ab"), Named(b"c")], 1).id != Chain([Named(b"a"), Named(b"bc")], 1).id


def test_the_format_is_pinned_since_files_outlive_the_process():
    chain = Chain([Zstd(), AesGcm(SECRETS)], 64)
    assert chain.id.hex() == "6c3e7884d1816654"
    assert chain.header_bytes == 4 + 2 + 2 + 8 + 8 + 2 * 8 + 8
    assert chain.slot_bytes == chain.header_bytes + 64 + 1 + 44


def test_the_name_of_a_block_below_is_its_key_and_the_chain():
    chain = Chain([Zstd()], 64)
    assert chain.name(b"key") == b"key" + chain.id
    assert chain.key(chain.name(b"key")) == b"key"
    assert chain.key(chain.name(b"")) == b""


def test_only_what_is_lossy_needs_keys_of_its_own():
    assert layout_of("llama", [Zstd(), AesGcm(SECRETS)]) == "llama"
    lossy = layout_of("llama", [FP8])
    assert lossy.startswith("llama+lossy-") and lossy == layout_of("llama", [FP8, Zstd()])
    assert lossy != layout_of("llama", [Fp8("float16", row=64, lossy=True)])
    with pytest.raises(ChainError):
        layout_of("llama", [Zstd(), FP8])


@pytest.mark.parametrize("size", [0, 1, 31, 64, 4096, 1 << 20])
def test_bounds_are_what_the_documentation_says(size):
    assert Zstd().bound(size) == size + 1
    assert AesGcm(SECRETS).bound(size) == size + 44
    assert Fp8("float16", row=128, lossy=True).bound(2 * size) == size + 4 * -(-size // 128)
    assert Fp8("float32", row=128, lossy=True).bound(4 * size) == size + 4 * -(-size // 128)


def test_blocks_that_are_no_whole_number_of_values_are_refused_when_the_tier_is_wrapped():
    with pytest.raises(ValueError, match="63 bytes are not a whole number of float16 values"):
        slot_bytes(63, FP8)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Zstd(level=23), "level is 23, but must be from -7 to 22"),
        (lambda: Fp8("int8", lossy=True), "dtype is int8, but must be one of float16, bfloat16, float32"),
        (lambda: Fp8("float16", row=0, lossy=True), "row is 0, but must be at least 1"),
        (lambda: AesGcm({"ann": b"short"}), "those of the tenant 'ann' have: 5"),
        (lambda: AesGcm({"ann": []}), "those of the tenant 'ann' have: none"),
        (lambda: AesGcm({"ann": [b"k" * 16, b"k" * 17]}), "16, 24 or 32 bytes, but .* have: 16, 17"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_by_name_value_and_bound(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_torchs_own_names_of_dtypes_will_do():
    import torch

    assert Fp8(torch.bfloat16, lossy=True).id == Fp8("bfloat16", lossy=True).id


# --- the header ---------------------------------------------------------------------------------------------------


def page_of(chain, key=b"key", lengths=(10, 20)):
    page = memoryview(bytearray(chain.slot_bytes))
    page[chain.header_bytes : chain.header_bytes + lengths[-1]] = bytes(range(lengths[-1]))
    assert chain.write_header(key, lengths, page) == chain.header_bytes + lengths[-1] == chain.used_bytes(page)
    return page


def test_a_header_says_what_it_was_told():
    chain = Chain([Zstd(), Spy()], 64)
    assert chain.read_header(b"key", page_of(chain)) == (10, 20)


def test_no_byte_of_what_is_stored_can_be_changed_unnoticed():
    chain = Chain([Zstd(), Spy()], 64)
    page = page_of(chain)
    used = chain.used_bytes(page)
    for at in range(used):
        for bit in (1, 128):
            page[at] ^= bit
            with pytest.raises(Damaged):
                chain.read_header(b"key", page)
            page[at] ^= bit
    page[used] ^= 1
    assert chain.read_header(b"key", page) == (10, 20)


def test_a_page_is_that_of_its_key_its_chain_and_its_size():
    chain = Chain([Zstd(), Spy()], 64)
    page = page_of(chain)
    for other, key in ((chain, b"kez"), (Chain([Spy(), Zstd()], 64), b"key"), (Chain([Zstd(), Spy()], 65), b"key")):
        with pytest.raises(Damaged):
            other.read_header(key, page)


def test_a_key_and_what_follows_cannot_be_shifted_against_each_other():
    chain = Chain([Spy()], 64)
    page = page_of(chain, b"ab", (20,))
    page[chain.header_bytes :] = bytes(b"x" + page[chain.header_bytes : -1])
    with pytest.raises(Damaged):
        chain.read_header(b"a", page)


@settings(deadline=None)
@given(first=st.integers(0, 2**64 - 1), last=st.integers(0, 2**64 - 1))
def test_a_length_is_believed_only_within_its_bounds(first, last):
    chain = Chain([Zstd(), Spy()], 64)
    page = page_of(chain)
    page[24:40] = first.to_bytes(8, "little") + last.to_bytes(8, "little")
    sealed_again(chain, b"key", page)
    if first <= 65 and last <= 65:
        assert chain.read_header(b"key", page) == (first, last)
    else:
        with pytest.raises(Damaged):
            chain.read_header(b"key", page)


def test_a_body_may_not_end_behind_its_page():
    chain = Chain([Spy()], 64)
    page = page_of(chain, lengths=(64,))
    with pytest.raises(Damaged):
        chain.read_header(b"key", page[:-1])


# --- whose a key is -----------------------------------------------------------------------------------------------


def test_a_key_is_whose_who_carries_it():
    tenants = TenantTags()
    assert tenants.of(b"k") == ""
    first = tenants.carry([b"k", b"l"], "ann")
    second = tenants.carry([b"k"], "ann")
    assert (tenants.of(b"k"), tenants.of(b"l"), len(tenants)) == ("ann", "ann", 2)
    first()
    first()
    assert (tenants.of(b"k"), tenants.of(b"l")) == ("ann", "")
    second()
    assert tenants.of(b"k") == "" and not len(tenants)


def test_what_two_tenants_claim_is_nobodys():
    tenants = TenantTags()
    ends = [tenants.carry([b"k"], tenant) for tenant in ("ann", "bob", "")]
    assert tenants.of(b"k") is None
    ends[1]()
    assert tenants.of(b"k") is None, "the empty tenant is one, too, once it is said"
    ends[2]()
    assert tenants.of(b"k") == "ann"
