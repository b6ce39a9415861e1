"""Indexes of all tenants, updated from a directory's locations. Pure.

Rule 1. A registration is found when the journal has it: it waits here until :meth:`TenantIndexes.publish`, which comes
        after the journal and before the answer. So a client finds all that it was told to be stored, and nobody finds a
        registration that a crash undoes.
Rule 2. A removed name is not found from that moment on, whether it was published or still waits.
Rule 3. A name is in the index of the tenant that it names, whoever registered it: it is found by the same clients as by
        message.
Rule 4. A tenant without readers has no index, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .layout import tenant_of
from .writer import Entries, IndexStatistics, IndexWriter

if TYPE_CHECKING:
    from .._directory.locations import Columns, Location


class TenantIndexes:
    """Index writers by tenant, and entries that wait for the journal."""

    def __init__(self) -> None:
        self._writers: dict[str, IndexWriter] = {}
        self._waiting: list[tuple[str, Entries]] = []
        self._gone: set[int] = set()  # generations of waiting entries that were removed

    def __len__(self) -> int:
        return len(self._writers)

    def __contains__(self, tenant: object) -> bool:
        return tenant in self._writers

    def open(self, tenant: str, memory: Any, epoch: int, seed: int) -> None:
        """Begin a new index for this tenant; an existing one is retired.

        It is empty. A missing name means nothing until :meth:`fill` was called with all names, and then
        :meth:`end_filling`.
        """
        writer = IndexWriter(memory, epoch, seed)
        writer.begin_filling()
        before = self._writers.get(tenant)
        if before is not None:
            before.retire()
        self._writers[tenant] = writer

    def drop(self, tenant: str) -> None:
        """Retire the index of this tenant and release its memory.

        Its readers ask by message from now on.
        """
        self._writers.pop(tenant).retire()
        self._waiting = [(other, entries) for other, entries in self._waiting if other != tenant]

    def close(self) -> None:
        """Drop all indexes and release their memory, without retiring them."""
        self._writers.clear()

    def fill(self, tenant: str, located: Iterable[tuple[str, Location, bool]]) -> None:
        """Add names that a directory has, passing over other tenants' names.

        Args:
            tenant: the owner of the index.
            located: names, their locations, and whether they may be found. All of them are in the journal.
        """
        writer = self._writers[tenant]
        mine = [one for one in located if tenant_of(one[0]) == tenant]
        readable = [(name, location) for name, location, is_readable in mine if is_readable]
        writer.add(
            Entries(
                [name for name, _ in readable],
                [location.region_id for _, location in readable],
                [location.offset for _, location in readable],
                [location.length for _, location in readable],
                [location.checksum for _, location in readable],
                [location.generation for _, location in readable],
            )
        )
        writer.leave_out([name for name, _, is_readable in mine if not is_readable])

    def end_filling(self, tenant: str) -> None:
        """Mark the index as filled: all names were handed to :meth:`fill`."""
        self._writers[tenant].end_filling()

    def is_filling(self, tenant: str) -> bool:
        """Return whether this index has not been filled yet."""
        return self._writers[tenant].is_filling

    def is_empty(self, tenant: str) -> bool:
        """Return whether this index is filled and its tenant has no key."""
        writer = self._writers[tenant]
        statistics = writer.statistics()
        return not (writer.is_filling or statistics.keys or statistics.left_out)

    def is_crowded(self, tenant: str) -> bool:
        """Return whether this tenant should have a larger file."""
        return self._writers[tenant].is_crowded

    def statistics(self) -> dict[str, IndexStatistics]:
        """Return a snapshot for each tenant."""
        return {tenant: writer.statistics() for tenant, writer in self._writers.items()}

    # --- notifications of a directory -----------------------------------------------------------------------------

    def registered(self, columns: Columns, generations: Sequence[int], readable: bool) -> None:
        """Queue registered entries until they are published.

        Those in regions of published owners, who may write there at any time, are never found.
        """
        if not self._writers:
            return
        regions, keys, offsets, lengths, checksums, _, _ = columns
        entries = Entries(keys, regions, offsets, lengths, checksums, generations)
        for tenant, part in _by_tenant(entries):
            writer = self._writers.get(tenant)
            if writer is None:
                continue
            if readable:
                self._waiting.append((tenant, part))
            else:
                writer.leave_out(part.names)

    def removed(self, names: Sequence[str], generations: Sequence[int]) -> None:
        """Remove names that are not registered any more."""
        if not self._writers:
            return
        if self._waiting:
            self._gone.update(generations)
        for writer, some, of_them in self._parts(names, generations):
            writer.remove(some, of_them)

    def mark(self, names: Sequence[str], generations: Sequence[int]) -> None:
        """Let nobody begin to hold these registrations from now on."""
        for writer, some, of_them in self._parts(names, generations):
            writer.mark(some, of_them)

    def unmark(self, names: Sequence[str], generations: Sequence[int]) -> None:
        """Remove the marks of these registrations, which stay after all."""
        for writer, some, of_them in self._parts(names, generations):
            writer.unmark(some, of_them)

    def names_at(self, tenant: str, uses: Iterable[tuple[int, int]]) -> list[str]:
        """Return the names at these words of a tenant's index.

        Their generations end in the given halves; a use that does not match is passed over.
        """
        writer = self._writers.get(tenant)
        if writer is None:
            return []
        return [name for word, low in uses if (name := writer.name_at(word, low)) is not None]

    def publish(self) -> bool:
        """Let all waiting registrations be found, now that the journal has them.

        Return whether there were any.
        """
        waiting, self._waiting = self._waiting, []
        gone, self._gone = self._gone, set()
        for tenant, entries in waiting:
            if gone:
                entries = _at(entries, [at for at, one in enumerate(entries.generations) if one not in gone])
            self._writers[tenant].add(entries)
        return bool(waiting)

    def _parts(
        self, names: Sequence[str], generations: Sequence[int]
    ) -> Iterable[tuple[IndexWriter, Sequence[str], Sequence[int]]]:
        """Yield each tenant's writer, if any, with its part of these names."""
        for tenant, positions in _positions(names).items():
            writer = self._writers.get(tenant)
            if writer is None:
                continue
            if positions is None:
                yield writer, names, generations
            else:
                yield writer, [names[at] for at in positions], [generations[at] for at in positions]


def _positions(names: Sequence[str]) -> dict[str, Sequence[int] | None]:
    """Return the positions of each tenant's names; ``None``: all.

    Usually all names belong to one tenant, and begin alike.
    """
    if not names:
        return {}
    tenant = tenant_of(names[0])
    head = f"\x1f{len(tenant)}:{tenant}"
    if names[0].startswith(head):
        if all([name.startswith(head) for name in names]):
            return {tenant: None}
    elif not any([name.startswith("\x1f") for name in names]):
        return {tenant: None}
    found: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        found.setdefault(tenant_of(name), []).append(at)
    return {**found}


def _by_tenant(entries: Entries) -> Iterable[tuple[str, Entries]]:
    for tenant, positions in _positions(entries.names).items():
        yield tenant, entries if positions is None else _at(entries, positions)


def _at(entries: Entries, positions: Sequence[int]) -> Entries:
    """Return the entries at these positions."""

    def pick(column: Any) -> Any:
        return column if column is None or isinstance(column, int) else [column[at] for at in positions]

    return Entries(*map(pick, entries))
