"""Faults of wrappers: codecs, encryption, tenants, and the tier that they make."""

import xxhash

from backends.base import copying as _copying
from backends.wrappers import _aes_gcm, _chain, _coding, _fp8, _source, _tier

# --- the faults ---------------------------------------------------------------------------------------------------


def a_nonce_is_used_again(patch):
    patch.setattr(_aes_gcm.os, "urandom", lambda n: b"\x07" * n)


def a_nonce_counts_from_the_start_of_the_process(patch):
    numbers = iter(range(1 << 30))
    patch.setattr(_aes_gcm.os, "urandom", lambda n: next(numbers).to_bytes(n, "little"))


def the_key_is_not_authenticated(patch):
    patch.setattr(_aes_gcm, "_associated", lambda context, before, nbytes: context.chain + before[:16])


def the_key_is_not_in_the_checksum(patch):
    sum_of = _chain._sum_of
    patch.setattr(_chain, "_sum_of", lambda head, key, body: sum_of(head, b"", body))


def the_checksum_is_of_the_plain_bytes(patch):
    """Taken before encoding, and verified behind decoding."""
    encode, decode, sums = _coding.Coder.encode, _coding.Coder.decode, {}

    def summed(self, context, plain, page, scratch):
        sums[context.key] = xxhash.xxh3_64_intdigest(plain)
        return encode(self, context, plain, page, scratch)

    def verified(self, context, page, plain, scratch):
        decode(self, context, page, plain, scratch)
        if sums[context.key] != xxhash.xxh3_64_intdigest(plain):
            raise _chain.Damaged

    patch.setattr(_coding.Coder, "encode", summed)
    patch.setattr(_coding.Coder, "decode", verified)
    patch.setattr(_chain, "_sum_of", lambda head, key, body: 0)


def the_body_is_not_in_the_checksum(patch):
    sum_of = _chain._sum_of
    patch.setattr(_chain, "_sum_of", lambda head, key, body: sum_of(head, key, body[:0]))


def lengths_are_believed(patch):
    patch.setattr(_chain.Chain, "_possible", lambda self, lengths, page_bytes: True)


def one_staging_is_for_all(patch):
    things = {}
    patch.setattr(_coding.Pool, "take", lambda self: _Always(things.setdefault(self, self._make())))


class _Always:
    """A context manager that gives out the same thing to everybody."""

    def __init__(self, scratch):
        self.scratch = scratch

    def __enter__(self):
        return self.scratch

    def __exit__(self, *exc):
        pass


def of_two_tenants_the_first_wins(patch):
    patch.setattr(_chain.TenantTags, "of", lambda self, key: next(iter(self._claims.get(key, {""})), ""))


def whose_a_block_is_is_asked_when_it_is_decoded(patch):
    decode = _coding.Coder.decode
    now = {}
    carry = _chain.TenantTags.carry

    def carried(self, keys, tenant):
        now.update(dict.fromkeys(keys, tenant))
        return carry(self, keys, tenant)

    def latest(self, context, *rest):
        return decode(self, _tier.Context(context.key, now.get(context.key, ""), context.chain), *rest)

    patch.setattr(_chain.TenantTags, "carry", carried)
    patch.setattr(_coding.Coder, "decode", latest)


def what_is_foreign_is_forgotten(patch):
    damaged = _tier.Damaged.__init__
    patch.setattr(_tier.Damaged, "__init__", lambda self, reason="damaged", *, keep=False: damaged(self, reason))


def what_cannot_be_decoded_stays(patch):
    patch.setattr(_tier.WrappedTier, "forget", lambda self, lease, positions: None)


def what_was_refused_is_left_lying_there(patch):
    patch.setattr(_coding.ctypes, "memset", lambda *args: None)


def sources_are_believed(patch):
    patch.setattr(_copying, "_known_checksums", lambda source, keys, refs: None)


def anybody_is_encrypted_for(patch):
    patch.setattr(_coding.Coder, "refusals", lambda self, contexts: {})


def the_name_below_is_the_key(patch):
    patch.setattr(_chain.Chain, "name", lambda self, key: key)


def a_scale_is_of_the_whole_block(patch):
    quantize = _fp8.Fp8._quantize

    def together(self, values, scales, small, room):
        quantize(self, values, scales, small, room)
        wide = small.float().view(-1) * scales.repeat_interleave(self.row)[: small.numel()]
        scales.fill_(scales.max())
        small.copy_(wide / scales[0])

    patch.setattr(_fp8.Fp8, "_quantize", together)


def values_are_cut_off_instead_of_rounded(patch):
    quantize = _fp8.Fp8._quantize

    def lower(self, values, scales, small, room):
        quantize(self, values, scales, small, room)
        small.copy_(small.float() * 0.9)

    patch.setattr(_fp8.Fp8, "_quantize", lower)


def what_is_not_finite_is_not_looked_for(patch):
    patch.setattr(_fp8.math, "isfinite", lambda value: True)


def guards_are_not_counted(patch):
    release = _source.DecodedSource.release

    def once(self, refs):
        self.guarded = {ref: held for ref, held in self.guarded.items() if ref not in refs}
        release(self, refs)

    patch.setattr(_source.DecodedSource, "release", once)
