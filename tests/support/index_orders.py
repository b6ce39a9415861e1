"""A walk over the shared index: the reader's loads in every order between the stores of the server and of the owners.

The server's and the owners' stores are a list: the real writer's, taken from it one word at a time, and those into pages. The
real reader runs over a memory whose every load may come at any later time than the one before it. Only times that make a
difference are tried: right now, and right behind each later store to the word that is loaded. (Whatever else a later time would
show, a later load shows as well.) So the walk is complete for a given list of stores, for one reader; x86 lets no load overtake
a load and no store a store, which is what a list of stores and a time that only goes forward say.

A list of stores comes from a *program*: what the owners and the server do, in every order up to a depth, and with a crash of
the server at every store of the last step. `programs` makes them, `walk` tries all orders of one, `check` says what was wrong.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import attrs

from maru._index import MIN_BYTES, Entries, IndexReader, IndexWriter

EPOCH: Final = 9
NAMES: Final = ("a", "b")
PAGES: Final = 2
PAGE_WORDS: Final = 2
INDEX_WORDS: Final = MIN_BYTES // 8
PAGE_AT: Final = INDEX_WORDS
LEASE_AT: Final = PAGE_AT + PAGES * PAGE_WORDS
"""Not 0: the lease of the reader is over."""
ALL_WORDS: Final = LEASE_AT + 1
NEVER: Final = float("inf")
FIRST: Final = 256
"""The first generation. It and the next one differ in their last byte only, which is 0 here: what a torn store mixes up."""


@attrs.frozen
class Faults:
    """What is wrong, on purpose."""

    publish_first: bool = False
    """A name can be found before it is in the journal."""
    tell_first: bool = False
    """The owner hears of a removal before the index shows it."""
    torn: bool = False
    """A sequence is written byte by byte."""
    never_retired: bool = False
    """A new server leaves the index of the one before as it is."""
    sequence_first: bool = False
    """The sequence is written before what it stands for."""
    no_check: bool = False
    """The reader believes what it has copied."""
    no_lease: bool = False
    """The reader does not look whether its lease is over."""


class StoringWriter(IndexWriter):
    """The real writer, over a memory of its own: gives the words that it has stored, in their order."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.stores: list[tuple[int, int]] = []
        self._before: list[int] = [0] * INDEX_WORDS
        super().__init__(mmap.mmap(-1, MIN_BYTES), EPOCH, seed=1)
        self.note()

    def note(self) -> None:
        """Note what has been stored since this was called last; upwards where nobody says otherwise."""
        now = self._words[:INDEX_WORDS].tolist()
        self.stores += [(at, new) for at, (old, new) in enumerate(zip(self._before, now, strict=True)) if old != new]
        self._before = now

    def take(self) -> list[tuple[int, int]]:
        self.note()
        stores, self.stores = self.stores, []
        return stores

    def _set_sequence(self, slot: int, sequence: int) -> None:
        at = self._word_of(slot)
        if self.faults.sequence_first and sequence:
            fields = self._words[at + 1 : at + 8].tolist()
            self._words[at + 1 : at + 8] = memoryview(bytes(56)).cast("Q")
            super()._set_sequence(slot, sequence)
            self.note()
            for word, value in enumerate(fields, start=at + 1):
                self._words[word] = value
            self.note()
            return
        self.note()
        if self.faults.torn:
            whole = self._words.cast("B")
            for byte in reversed(range(8)):
                whole[8 * at + byte] = sequence.to_bytes(8, "little")[byte]
                self.note()
            return
        super()._set_sequence(slot, sequence)
        self.note()

    def _set_hash(self, slot: int, digest: bytes) -> None:
        self.note()
        super()._set_hash(slot, digest)
        self.note()

    def _tell_left_out(self) -> None:
        self.note()
        super()._tell_left_out()
        self.note()

    def retire(self) -> None:
        self.note()
        super().retire()
        self.note()


# --- programs -----------------------------------------------------------------------------------------------------


@attrs.define
class Registered:
    """One registration. Times are numbers of stores that were made before."""

    name: str
    page: int
    generation: int
    journaled_at: float = NEVER
    answered_at: float = NEVER
    removed_at: float = NEVER
    """Begins to be."""
    gone_at: float = NEVER
    """The journal says that it is not there any more."""


class Host:
    """A server, its owners and their pages, as a list of stores. Facts are noted with the time at which they hold."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.writer = StoringWriter(faults)
        self.start = self.writer.take()
        self.stores: list[tuple[int, int]] = []
        self.pages: list[Registered | None] = [None] * PAGES
        self.all: list[Registered] = []
        self.is_new = False
        """The server has crashed, and another one is there. It writes an index of its own, at which nobody here looks."""
        self.lease_is_over = False

    @property
    def now(self) -> int:
        return len(self.stores)

    @cached_property
    def stored_at(self) -> dict[int, list[int]]:
        """When each word is stored to. To be asked for when the program is whole."""
        times: dict[int, list[int]] = {}
        for when, (at, _) in enumerate(self.stores):
            times.setdefault(at, []).append(when)
        return times

    def store(self, name: str, page: int) -> None:
        """The owner fills a page and registers it."""
        generation = FIRST + len(self.all)
        one = Registered(name, page, generation)
        self.all.append(one)
        self.pages[page] = one
        self._write(page, generation)
        if self.is_new:
            one.journaled_at = self.now
            return
        if not self.faults.publish_first:
            one.journaled_at = self.now
        self.writer.add(Entries([name], 0, [page], 1, None, [generation]))
        self.stores += self.writer.take()
        if self.faults.publish_first:
            one.journaled_at = self.now
        one.answered_at = self.now

    def drop(self, name: str) -> None:
        """The server removes a name, and tells the owner, who writes into the page at once."""
        one = self.find(name)
        assert one is not None
        if self.faults.tell_first:
            self._write(one.page, 1)
        one.removed_at = self.now
        if not self.is_new:
            self.writer.remove([name], [one.generation])
            self.stores += self.writer.take()
        one.gone_at = self.now
        self.pages[one.page] = None
        if not self.faults.tell_first:
            self._write(one.page, 1)

    def crash(self, at: int) -> None:
        """The server dies when so many of all stores were made; a new one takes over, and answers about what was in doubt."""
        del self.stores[at:]
        self.is_new = True
        if not self.faults.never_retired:
            self.writer.retire()
            self.stores += self.writer.take()
        for one in self.all:
            if one.journaled_at >= at:  # not held: its owner may use the page at once
                one.journaled_at = NEVER
                self.pages[one.page] = None
                self._write(one.page, 2)
            elif one.gone_at >= at and one.removed_at != NEVER:  # it is there again
                one.removed_at = one.gone_at = NEVER
                self.pages[one.page] = one

    def end_lease(self) -> None:
        """The longest lease is over: the new server may remove what it has found."""
        self.lease_is_over = True
        self.stores.append((LEASE_AT, 1))

    def find(self, name: str) -> Registered | None:
        return next((one for one in self.pages if one is not None and one.name == name), None)

    def _write(self, page: int, stamp: int) -> None:
        self.stores += [(PAGE_AT + page * PAGE_WORDS + word, stamp) for word in range(PAGE_WORDS)]


Step = Callable[[Host], None]


def steps_of(host: Host) -> Iterator[Step]:
    """What may happen next."""
    for name in NAMES:
        if host.find(name) is not None:
            if not host.is_new or host.lease_is_over:
                yield lambda h, name=name: h.drop(name)  # type: ignore[misc]
        elif None in host.pages:
            yield lambda h, name=name: h.store(name, h.pages.index(None))  # type: ignore[misc]
    if host.is_new and not host.lease_is_over:
        yield Host.end_lease


def play(faults: Faults, steps: Sequence[Step]) -> Host:
    host = Host(faults)
    for step in steps:
        step(host)
    return host


def programs(depth: int, faults: Faults) -> Iterator[Host]:
    """All there are of so many steps, also with a crash at every store of one of them, followed by so many as are left."""

    def go_on(steps: list[Step]) -> Iterator[Host]:
        host = play(faults, steps)
        if len(steps) == depth:
            yield host
            return
        following = list(steps_of(host))
        for step in following:
            yield from go_on([*steps, step])
        if host.is_new or not steps:
            return
        before = play(faults, steps[:-1]).now
        for at in range(before, host.now + 1):
            yield from go_on([*steps, lambda h, at=at: h.crash(at)])  # type: ignore[misc]

    yield from go_on([])


# --- orders -------------------------------------------------------------------------------------------------------


class Clock:
    """A time that only goes forward, and as far as a script of choices says."""

    def __init__(self, host: Host, script: list[int]) -> None:
        self.host = host
        self.words = [0] * ALL_WORDS
        for at, value in host.start:
            self.words[at] = value
        self.script = script
        self.choices: list[int] = []
        """How many there were, at each load of what is stored to later."""
        self.now = 0

    def load(self, at: int) -> int:
        """The word at a time that the script chooses: now, or behind one of the later stores to it."""
        later = [when for when in self.host.stored_at.get(at, ()) if when >= self.now]
        if later:
            turn = len(self.choices)
            if turn == len(self.script):
                self.script.append(0)
            self.choices.append(1 + len(later))
            if self.script[turn]:
                until = later[self.script[turn] - 1] + 1
                for where, value in self.host.stores[self.now : until]:
                    self.words[where] = value
                self.now = until
        return self.words[at]


class TimedMemory:
    """The memory of an index as a reader sees it. Pieces are loaded word by word, upwards or downwards."""

    def __init__(self, clock: Clock, *, upwards: bool) -> None:
        self.clock = clock
        self.upwards = upwards

    def __len__(self) -> int:
        return MIN_BYTES

    def __getitem__(self, at: Any) -> bytes:
        words = range(at.start // 8, at.stop // 8)
        loaded = {word: self.clock.load(word) for word in (words if self.upwards else reversed(words))}
        return b"".join([loaded[word].to_bytes(8, "little") for word in words])

    def find(self, sub: bytes, start: int, end: int) -> int:
        spot = self[start:end].find(sub)
        return spot if spot < 0 else spot + start


class TimedWords:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __getitem__(self, at: int) -> int:
        return self.clock.load(at)


@attrs.frozen
class Seen:
    """What a reader came to."""

    began: int
    ended: int
    found: dict[str, tuple[int, list[int]]]
    """Generation and words of each page that counts."""
    is_definite: bool


def read(host: Host, clock: Clock, *, upwards: bool) -> Seen:
    """Find all names, copy the pages, and look again. The real reader; only what it loads from is not."""
    memory = mmap.mmap(-1, MIN_BYTES)
    with memoryview(memory).cast("B") as whole:
        for at, value in host.start:
            whole[8 * at : 8 * at + 8] = value.to_bytes(8, "little")
    reader = IndexReader(memory)
    reader._memory, reader._words = TimedMemory(clock, upwards=upwards), TimedWords(clock)  # type: ignore[assignment]
    faults, began = host.faults, clock.now
    if not faults.no_lease and clock.load(LEASE_AT):
        return Seen(began, clock.now, {}, False)
    found = reader.find(NAMES)
    ended = clock.now
    copies = []
    for page in found.offsets:
        words = range(PAGE_AT + page * PAGE_WORDS, PAGE_AT + (page + 1) * PAGE_WORDS)
        copies.append([clock.load(word) for word in (words if upwards else reversed(words))])
    changed = set() if faults.no_check else set(reader.changed(found))
    if not faults.no_lease and clock.load(LEASE_AT):
        changed.update(range(len(found)))
    kept = {
        NAMES[position]: (found.generations[at], copies[at])
        for at, position in enumerate(found.positions)
        if at not in changed
    }
    return Seen(began, ended, kept, found.is_definite and len(found) == len(kept))


def check(host: Host, seen: Seen) -> str:
    """What is wrong with what a reader came to; empty if nothing is."""
    of = {one.generation: one for one in host.all}
    for name, (generation, words) in seen.found.items():
        one = of.get(generation)
        if one is None or one.name != name:
            return f"{name} was found as {generation}, which is another name's"
        if words != [generation] * PAGE_WORDS:
            return f"{name}: {words} was copied instead of {generation}"
        if one.journaled_at == NEVER:
            return f"{name} was read, and the next server does not know it"
    if seen.is_definite:
        for one in host.all:
            there = one.answered_at <= seen.began and seen.ended < one.removed_at
            if there and one.name not in seen.found:
                return f"{one.name} was answered before the search began, and was not found"
    return ""


def walk(host: Host) -> Iterator[tuple[Seen, str]]:
    """Every order of a reader's loads among the stores of a program."""
    for upwards in (True, False):
        script: list[int] = []
        while True:
            clock = Clock(host, script)
            seen = read(host, clock, upwards=upwards)
            yield seen, check(host, seen)
            while script and script[-1] + 1 == clock.choices[len(script) - 1]:
                script.pop()
            if not script:
                break
            script[-1] += 1


def first_wrong(depth: int, faults: Faults, about: str = "") -> tuple[str, int, int]:
    """Walk all programs of a depth until something is wrong of which this is said: what, in how many programs and orders."""
    orders = number = 0
    for number, host in enumerate(programs(depth, faults), start=1):
        for _, wrong in walk(host):
            orders += 1
            if wrong and about in wrong:
                return wrong, number, orders
    return "", number, orders
