"""A directory as a value, for snapshots. Pure.

The image has columns, since those decode fastest: a hundred thousand keys are loaded in some tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, groupby, repeat, starmap
from typing import Final, TypeAlias

import msgspec

from ..eviction import EvictionPolicy
from .limits import Limits
from .locations import Location
from .regions import Region, RegionState, keys_in_pieces
from .sessions import Fences, Outbox, Session
from .slices import LOOKS_AT_ONCE, Slices
from .state import State, depths_of

_ENCODED_AT_ONCE: Final = 16_384
"""Entries of a column that are encoded at once: half a millisecond."""

Runs: TypeAlias = list[tuple[int, int]]
"""A column with many repetitions: (value, how often).

Its numbers are shared by all entries, once loaded.
"""


class SessionImage(msgspec.Struct, array_like=True, gc=False):
    """One living session."""

    number: int
    token: bytes
    instance_id: str
    tenant: str
    published: bool
    lease: float
    acknowledged: int
    """The last return that its owner has applied."""
    returns: list[tuple[int, int, int]]
    """(region_id, offset, attempt) of the unacknowledged returns, in order.

    They are numbered from ``acknowledged + 1`` on.
    """
    fences: list[int]
    """Fenced attempts, ascending."""
    fence_floor: int
    """The attempt up to which all are fenced."""


class RegionImage(msgspec.Struct, array_like=True, gc=False):
    """One region."""

    region_id: int
    length: int
    instance_id: str
    published: bool
    session: int
    """Number of the owner's session; 0 if the region is abandoned."""
    returned: bool
    """Whether the region was handed back."""
    used_bytes: int
    """Bytes of its keys."""
    entries: int
    """Number of keys in it."""


class DirectoryImage(msgspec.Struct, array_like=True, gc=False):
    """All but pins, running leases, connections and the order of use.

    Two directories are equal if their images are.
    """

    generation: int
    last_session: int
    sessions: list[SessionImage]
    """Sessions by number."""
    regions: list[RegionImage]
    """Owned regions by id, then abandoned ones in the order of abandonment."""
    keys: list[str]
    """Keys, as the columns below by region, in order of registration.

    The regions are in the order of ``regions``.
    """
    offsets: list[int]
    lengths: Runs
    generations: list[int]
    checksums: list[int | None]
    attempts: Runs
    read_unpinned: bool = False
    depths: list[int | None] | None = None
    """Depths of the keys; ``None`` for an unknown one."""


def dumping(state: State) -> Slices[Callable[[], DirectoryImage]]:
    """Dump this state as it is now, in slices.

    Return a function that makes its image. The function may be called in any thread. Anything may happen between two
    slices: a location is never changed, later keys have a later generation, and the state notes keys that go meanwhile.
    One dump at a time.
    """
    sessions = [_image_of_session(session) for _, session in sorted(state.sessions.items())]
    owned = [region for _, region in sorted(state.regions.items()) if region.session is not None]
    regions = [_image_of_region(region) for region in [*owned, *state.abandoned.values()]]
    generation, last_session, read_unpinned = state.generation, state.last_session, state.read_unpinned
    located, begun = state.located, False
    assert state.gone is None
    gone = state.gone = []
    keys: list[str] = []
    locations: list[Location] = []  # one for each key; not in pairs, which would be as many pieces of memory
    try:
        for some in keys_in_pieces(list(state.regions.values()), LOOKS_AT_ONCE):
            if begun:
                yield
            begun = True
            for name, at in zip(some, map(located.get, some), strict=True):
                if at is not None and at.generation <= generation:
                    keys.append(name)
                    locations.append(at)
    finally:
        state.gone = None
    for name, at in gone:
        if at.generation <= generation:
            keys.append(name)
            locations.append(at)
    return partial(_make_image, generation, last_session, sessions, regions, keys, locations, read_unpinned)


def _make_image(
    generation: int,
    last_session: int,
    sessions: list[SessionImage],
    regions: list[RegionImage],
    keys: list[str],
    locations: list[Location],
    read_unpinned: bool,
) -> DirectoryImage:
    # Sorted by generation, so that they are in the order in which they came into their region.
    within: dict[int, list[int]] = {region.region_id: [] for region in regions}
    last = 0
    for at in sorted(range(len(keys)), key=[location.generation for location in locations].__getitem__):
        location = locations[at]
        if location.generation != last:  # equal: the key went after it was dumped, and is here twice
            within[location.region_id].append(at)
        last = location.generation
    in_order = list(chain.from_iterable(within.values()))
    locations = [locations[at] for at in in_order]
    return DirectoryImage(
        generation,
        last_session,
        sessions,
        regions,
        [keys[at] for at in in_order],
        [location.offset for location in locations],
        _runs([location.length for location in locations]),
        [location.generation for location in locations],
        [location.checksum for location in locations],
        _runs([location.attempt for location in locations]),
        read_unpinned,
        depths_of(locations),
    )


def _image_of_session(session: Session) -> SessionImage:
    return SessionImage(
        session.number,
        session.token,
        session.instance_id,
        session.tenant,
        session.published,
        session.lease,
        session.outbox.acknowledged,
        list(session.outbox.pages),
        sorted(session.fences.attempts),
        session.fences.floor,
    )


def _image_of_region(region: Region) -> RegionImage:
    return RegionImage(
        region.region_id,
        region.length,
        region.instance_id,
        region.published,
        0 if region.session is None else region.session.number,
        region.state is RegionState.RETURNED,
        region.used_bytes,
        len(region.keys_at),
    )


def encode_image(image: DirectoryImage) -> bytes:
    """Encode as :func:`msgspec.msgpack.encode` does, in pieces.

    Other threads run between two pieces.
    """
    fields = [getattr(image, name) for name in image.__struct_fields__]
    assert len(fields) < 16
    parts = [bytes([0x90 | len(fields)])]
    for field in fields:
        if isinstance(field, list) and len(field) > _ENCODED_AT_ONCE:
            parts.append(b"\xdd" + len(field).to_bytes(4, "big"))
            for start in range(0, len(field), _ENCODED_AT_ONCE):
                some = field[start : start + _ENCODED_AT_ONCE]
                parts.append(msgspec.msgpack.encode(some)[1 if len(some) < 16 else 3 :])  # without the head of an array
        else:
            parts.append(msgspec.msgpack.encode(field))
    return b"".join(parts)


def load(image: DirectoryImage, limits: Limits, eviction: Callable[[], EvictionPolicy[str]]) -> State:
    """Return the state that was dumped.

    Keys count as used in the order in which they were registered.

    Raises:
        KeyError, ValueError: this was not dumped: parts that belong together do not match.
    """
    state = State(limits, eviction)
    for one in image.sessions:
        session = state.open_session(one.number, one.token, one.instance_id, one.tenant, one.published, one.lease)
        session.outbox = Outbox(one.acknowledged, one.returns)
        session.fences = Fences(limits.max_fences, one.fences, one.fence_floor)
    state.last_session = image.last_session
    state.generation = image.generation
    state.read_unpinned = image.read_unpinned
    keys, offsets = image.keys, image.offsets
    locations = map(
        Location,
        _column([(place.region_id, place.entries) for place in image.regions]),
        offsets,
        _column(image.lengths),
        image.generations,
        image.checksums,
        _column(image.attempts),
        repeat(None) if image.depths is None else image.depths,
    )
    state.located.update(zip(keys, locations, strict=True))
    begin = 0
    for place in image.regions:
        region = state.new_region(place.region_id, place.length, place.instance_id, place.published)
        end = begin + place.entries
        region.keys_at.update(zip(offsets[begin:end], keys[begin:end], strict=True))
        begin = end
        if place.session:
            state.own(region, state.sessions[place.session])
        elif place.returned:
            region.state = RegionState.RETURNED
        region.charge(place.used_bytes)
        state.used_bytes += place.used_bytes
    for session in state.sessions.values():
        for region_id, offset, attempt in session.outbox.pages:
            if region_id in session.regions:
                session.regions[region_id].returning[offset] = attempt
        in_order = _in_order(state, session)
        session.policy.use(in_order, image.depths and depths_of([state.located[key] for key in in_order]))
    return state


def _in_order(state: State, session: Session) -> list[str]:
    """Return the keys of this owner, in order of registration."""
    columns = [region.keys_at.values() for region in session.regions.values()]
    keys = list(chain.from_iterable(columns))
    if len(columns) > 1:
        located = state.located
        keys.sort(key=lambda key: located[key].generation)  # some ascending runs: sorting only merges them
    return keys


def _runs(column: list[int]) -> Runs:
    return [(value, len(list(run))) for value, run in groupby(column)]


def _column(runs: Runs) -> list[int]:
    return list(chain.from_iterable(starmap(repeat, runs)))
