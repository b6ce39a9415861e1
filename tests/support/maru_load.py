"""Load on a page store whose server is killed under it: clients that store, read and delete, and remember what they were told.

Each worker is a thread with one client. It writes down what was acknowledged, so that afterwards anybody can say what must
be there (:attr:`Keeper.kept`), what must not (:attr:`Keeper.gone`), and what may be (:attr:`Keeper.doubtful`: no answer came).
A key is stored once and never again under the same name, so what is gone stays gone. Whatever is wrong goes to a list.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import trio

from maru import MaruError
from tests.support.maru_actors import FACES, Client, PublishedOwner, client
from tests.support.maru_processes import DESCRIBE, PATIENCE
from tests.support.published import PublishedClient
from tests.support.published_wire import Ask

SMALL = 1024
"""Bytes of a page."""
TIMEOUT = 0.07
"""What waits for a server that was killed waits for nothing: so long, in each cycle, while the load is on."""
MOST = 0.5
"""What that grows to where nothing is answered in time: no more, or they would wait for the dead only."""
PATIENT = {"timeout_ms": 5_000, "lease": 30.0, "max_inflight": 8}
"""Of a client that is opened, or is asked at rest: then an answer comes. If not, it is asked :func:`again`."""

# What a client may meet while its server is killed. Anything else ends its thread, and is found.
EXPECTED = (MaruError, TimeoutError, ConnectionError, trio.RunFinishedError)


class Worker(ABC):
    """A thread that works while it may. At rest it touches nothing, and others may use its client."""

    def __init__(self, name: str, seed: int, findings: list[str]):
        self.name = name
        self.dice = random.Random(seed)
        self.findings = findings
        self.tcp = ""
        """Of the server."""
        self.done = self.cut_off = 0
        self.may_work, self.at_rest, self._ends = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ends = True
        self.may_work.set()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self.findings.append(f"{self.name} does not end")

    def find(self, finding: str) -> None:
        self.findings.append(f"{self.name}: {finding}")

    def _run(self) -> None:
        while not self._ends:
            if not self.may_work.is_set():
                self.at_rest.set()
                self.may_work.wait()
                self.at_rest.clear()
                continue
            try:
                self.work()
                self.done += 1
            except EXPECTED:
                self.cut_off += 1
            except BaseException as exc:
                self.find(f"ended by {exc!r}")
                self.at_rest.set()
                return

    @abstractmethod
    def work(self) -> None:
        """One round of it."""

    @abstractmethod
    def come_back(self) -> None:
        """Have the server know that it lives: until all have, nothing is handed back. At rest."""

    @abstractmethod
    def impatient(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        """It waits no longer than this for an answer while the block lasts."""

    def check(self) -> None:  # noqa: B027 - not everybody knows what must be there
        """Look whether all is as it must be. At rest."""

    @abstractmethod
    def close(self) -> None:
        """It has no client any more."""


class Keeper(Worker):
    """Owns more pages than it uses, so nothing of it is evicted: what was acknowledged must be there."""

    def __init__(self, name: str, seed: int, findings: list[str], most: int = 2_000):
        super().__init__(name, seed, findings)
        self.kept: dict[str, None] = {}
        self.gone: dict[str, None] = {}
        self.doubtful: dict[str, None] = {}
        self._most, self._number = most, 0

    def new_keys(self, n: int) -> list[str]:
        first, self._number = self._number, self._number + n
        return [f"{self.name}/{number}" for number in range(first, self._number)]

    def some(self, n: int) -> list[str]:
        return self.dice.sample(list(self.kept), min(n, len(self.kept)))

    def work(self) -> None:
        chance = self.dice.random()
        if self.kept and chance < 0.25:
            for look in self.get(self.some(16)):
                if look != "right":
                    self.find(f"it stored, and finds: {look}")
        elif self.kept and (chance < 0.4 or len(self.kept) > self._most):
            self.remove(self.some(self.dice.randrange(1, 24)))
        else:
            self.store(self.new_keys(self.dice.randrange(1, 16)))

    def store(self, keys: list[str]) -> None:
        self.doubtful.update(dict.fromkeys(keys))
        for key, answer in zip(keys, self.put(keys), strict=True):
            del self.doubtful[key]
            if answer == "NEW":
                self.kept[key] = None
            elif answer != "FULL":
                self.find(f"{key} is a {answer}")

    def remove(self, keys: list[str]) -> None:
        for key in keys:
            del self.kept[key]
        self.doubtful.update(dict.fromkeys(keys))
        for key, answer in zip(keys, self.delete(keys), strict=True):
            del self.doubtful[key]
            if answer == "DELETED":
                self.gone[key] = None
            else:
                self.kept[key] = None
                if answer == "MISSING":
                    self.find(f"{key} was acknowledged and is missing")

    def check(self) -> None:
        kept, gone, doubtful = list(self.kept), list(self.gone), list(self.doubtful)
        lost = [key for key, look in zip(kept, self.get(kept), strict=True) if look != "right"]
        if lost:
            self.find(f"{len(lost)} of {len(kept)} acknowledged keys are lost, {lost[:3]} among them")
        back = [look for look in self.get(gone) if look != "missing"]
        if back:
            self.find(f"{len(back)} of {len(gone)} deleted keys are back: {back[:3]}")
        for key, look in zip(doubtful, self.get(doubtful), strict=True):
            if look == "right":  # kept from now on, and deleted in its turn: doubtful ones would fill the region
                self.kept[key] = None
            elif look != "missing":
                self.find(look)
        self.doubtful.clear()
        self.gone = dict.fromkeys(gone[-500:])

    @abstractmethod
    def put(self, keys: list[str]) -> list[str]:
        """Store these; what became of each."""

    @abstractmethod
    def get(self, keys: list[str]) -> list[str]:
        """Read these; what each looks like."""

    @abstractmethod
    def delete(self, keys: list[str]) -> list[str]:
        """Delete these; what became of each."""


class OurKeeper(Keeper):
    """With a client of ours."""

    def __init__(self, face: str, url: str, seed: int, findings: list[str]):
        super().__init__(f"{face} keeper", seed, findings)
        self.client = client(face, url, pool_size=8 << 20, chunk_size_bytes=SMALL, **PATIENT)

    def impatient(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        return self.client.impatient(timeout)

    def come_back(self) -> None:
        self.client.beat()

    def put(self, keys: list[str]) -> list[str]:
        return self.client.put(keys, SMALL)

    def get(self, keys: list[str]) -> list[str]:
        return again(lambda: self.client.get(keys, SMALL)) if keys else []

    def delete(self, keys: list[str]) -> list[str]:
        return self.client.delete(keys)

    def check(self) -> None:
        super().check()
        check_pages(self, self.client)
        pages = self.client.pages()
        if pages.registered > pages.pages // 2:
            self.find(f"it owns too few pages for what it keeps, and may be evicted: {pages}")

    def close(self) -> None:
        self.client.close()


class PublishedKeeper(Keeper):
    """With a published client, but for one thing: a page whose fate it does not know it never uses again."""

    def __init__(self, url: str, seed: int, findings: list[str]):
        super().__init__("published keeper", seed, findings, most=500)
        self.owner = PublishedOwner(url, self.name, page=SMALL, region=8 << 20, timeout=5.0)
        self._at: dict[str, int] = {}

    def put(self, keys: list[str]) -> list[str]:
        [key] = keys
        self._at[key] = self.owner.free[-1]  # also if no answer comes: it may be there, and is deleted in its turn
        is_new = self.owner.put(key, SMALL)
        return ["NEW" if is_new else "DUPLICATE"]

    def new_keys(self, n: int) -> list[str]:
        return super().new_keys(1)

    def impatient(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        return self.owner.impatient(timeout)

    def come_back(self) -> None:
        self.store(self.new_keys(1))  # by this the server knows whose region that is

    def get(self, keys: list[str]) -> list[str]:
        return again(lambda: self.owner.get(keys)) if keys else []

    def delete(self, keys: list[str]) -> list[str]:
        return [self._delete(key) for key in keys]

    def remove(self, keys: list[str]) -> None:
        super().remove(keys[:1])

    def _delete(self, key: str) -> str:
        answer = self.owner.ask(Ask.DELETE_KV, key=key)
        if answer["success"]:
            self.owner.free.insert(0, self._at.pop(key))
            return "DELETED"
        return "PROTECTED" if answer.get("error") else "MISSING"

    def close(self) -> None:
        self.owner.close()


class Churner(Worker):
    """Owns few pages and stores all the time, so that its keys are evicted; others delete them, too."""

    def __init__(self, face: str, url: str, seed: int, findings: list[str]):
        super().__init__(f"{face} churner", seed, findings)
        self.client = client(face, url, pool_size=2 << 20, chunk_size_bytes=16 * SMALL, **PATIENT)
        self.keys: list[str] = []
        self._number = 0

    def work(self) -> None:
        first, self._number = self._number, self._number + self.dice.randrange(1, 9)
        keys = [f"{self.name}/{number}" for number in range(first, self._number)]
        self.keys += keys
        self.client.put(keys, SMALL)
        if self.dice.random() < 0.3:
            look_at(self, self.client, self.dice.sample(self.keys, min(16, len(self.keys))))
        if self.dice.random() < 0.1:
            self._hold(self.dice.choice(self.keys[-64:]))

    def _hold(self, key: str) -> None:
        if self.client.hold(key) == [True]:
            look = self.client.looks(key)
            if look not in ("right", "lost"):
                self.find(look)
            self.client.let_go(key)

    def impatient(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        return self.client.impatient(timeout)

    def come_back(self) -> None:
        self.client.beat()

    def check(self) -> None:
        looks = look_at(self, self.client, self.keys)
        self.keys = [key for key, look in zip(self.keys, looks, strict=True) if look == "right"] + self.keys[-64:]
        self.keys = list(dict.fromkeys(self.keys))
        check_pages(self, self.client)

    def close(self) -> None:
        self.client.close()


class Vandal(Worker):
    """Reads what anybody has stored, and deletes what the churners have."""

    def __init__(self, url: str, seed: int, findings: list[str], keepers: list[Keeper], churners: list[Churner]):
        super().__init__("vandal", seed, findings)
        self.client = client("blocking", url, pool_size=0, **PATIENT)
        self._keepers, self._churners = keepers, churners

    def work(self) -> None:
        churner = self.dice.choice(self._churners)
        recent = churner.keys[-64:]
        if recent:
            look_at(self, self.client, recent[::3])
            self.client.delete(self.dice.sample(recent, min(3, len(recent))))
        keeper = self.dice.choice(self._keepers)
        look_at(self, self.client, [f"{keeper.name}/{self.dice.randrange(keeper._number + 1)}" for _ in range(8)])

    def impatient(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        return self.client.impatient(timeout)

    def come_back(self) -> None:
        self.client.beat()

    def close(self) -> None:
        self.client.close()


class Reader(Worker):
    """Holds views of what the churners have stored, and looks at them without asking anybody: also while the server is killed,
    and after it was started again, when it knows of no view."""

    def __init__(self, face: str, url: str, seed: int, findings: list[str], churners: list[Churner]):
        super().__init__(f"{face} reader", seed, findings)
        self.client = client(face, url, pool_size=0, **PATIENT)
        self._churners = churners
        self.views = 0

    def work(self) -> None:
        recent = self.dice.choice(self._churners).keys[-256:]
        keys = self.dice.sample(recent, min(8, len(recent)))
        if not keys:
            return
        found = self.client.hold(*keys)
        held = [key for key, is_there in zip(keys, found, strict=True) if is_there]
        self.views += len(held)
        ends = time.monotonic() + self.dice.uniform(0.0, 0.3)
        try:
            while held and time.monotonic() < ends:
                for key in held:
                    look = self.client.looks(key)
                    if look not in ("right", "lost"):
                        self.find(look)
                time.sleep(0.002)
        finally:
            for key in held:
                with contextlib.suppress(*EXPECTED):
                    self.client.let_go(key)

    def impatient(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        return self.client.impatient(timeout)

    def come_back(self) -> None:
        self.client.beat()

    def close(self) -> None:
        self.client.close()


def look_at(worker: Worker, reader: Client, keys: list[str]) -> list[str]:
    looks = again(lambda: reader.get(keys, SMALL)) if keys else []
    for look in looks:
        if look not in ("right", "missing"):
            worker.find(look)
    return looks


def again(call: Callable[[], Any]) -> Any:
    """Once more where no answer came: for what repeats nothing."""
    for _ in range(20):
        with contextlib.suppress(*EXPECTED):
            return call()
    return call()


def check_pages(worker: Worker, owner: Client) -> None:
    """Every page is somewhere, and the owner and the server agree on how many hold a key: none is lost on either side."""
    again(owner.beat)  # what was lost on the way comes with the answer
    pages = owner.pages()
    if pages.free + pages.registered != pages.pages or pages.strays:
        worker.find(f"its pages: {pages}")
    with PublishedClient(worker.tcp, timeout=PATIENCE) as raw:
        usage = {one["instance_id"]: one["used"] for one in raw.ask(Ask.GET_USAGE)["instances"]}
    there = usage.get(owner.handler.instance_id, 0)
    if there != pages.registered * SMALL:
        worker.find(f"{there // SMALL} of its keys are at the server, and {pages.registered} by its own account")


def describe(tcp: str) -> dict[str, Any]:
    """What a server says of itself."""
    with PublishedClient(tcp, timeout=PATIENCE) as raw:
        return raw.ask(DESCRIBE)["sections"]["server"]


class Load:
    """All workers. A context manager; they begin at rest."""

    def __init__(self, tcp: str, ipc: str, seed: int):
        self.tcp = tcp
        self.findings: list[str] = []
        self.workers: list[Worker] = []
        self._timeout, self._hurry = TIMEOUT, contextlib.ExitStack()
        try:
            keepers: list[Keeper] = []
            for make in (
                lambda: OurKeeper("trio", tcp, seed, self.findings),
                lambda: OurKeeper("blocking", ipc, seed + 1, self.findings),
                lambda: PublishedKeeper(tcp, seed + 2, self.findings),
            ):
                keepers.append(make())
                self.workers.append(keepers[-1])
            churners: list[Churner] = []
            for face, url in (("blocking", tcp), ("trio", ipc)):
                churners.append(Churner(face, url, seed + 3, self.findings))
                self.workers.append(churners[-1])
            self.workers.append(Vandal(ipc, seed + 4, self.findings, keepers, churners))
            for face in FACES:
                self.workers.append(Reader(face, tcp, seed + 5, self.findings, churners))
            for worker in self.workers:
                worker.tcp = tcp
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Load:
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            if worker._thread.ident is not None:
                worker.end()
        self._hurry.close()
        for worker in self.workers:
            with contextlib.suppress(*EXPECTED):
                worker.close()

    def go(self) -> None:
        self._be_impatient()
        for worker in self.workers:
            worker.may_work.set()

    def _be_impatient(self) -> None:
        self._hurry.close()
        for worker in self.workers:
            self._hurry.enter_context(worker.impatient(self._timeout))

    def wait(self, holds: Callable[[], bool]) -> None:
        """Until their work has brought this about. Where nothing is ever answered in time, they have to wait longer."""
        deadline, slow = time.monotonic() + PATIENCE, time.monotonic() + 2.0
        while not holds():
            assert time.monotonic() < deadline, f"it did not come true in {PATIENCE:g} s: {self}"
            if time.monotonic() > slow and self._timeout < MOST:
                slow = time.monotonic() + 2.0
                self._timeout *= 2
                self._be_impatient()
            time.sleep(0.005)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        for worker in self.workers:
            worker.may_work.clear()
        for worker in self.workers:
            assert worker.at_rest.wait(PATIENCE), f"{worker.name} does not come to rest"
        self._hurry.close()
        yield
        self.go()

    def check(self) -> None:
        for worker in self.workers * 2:  # by the first answer they hear of another epoch, with the next they say so
            again(worker.come_back)
        if describe(self.tcp)["quiet after a restart"]:
            self.findings.append("all have come back, and it is quiet")
        for worker in self.workers:
            try:
                worker.check()
            except EXPECTED as exc:
                worker.find(f"could not look: {exc!r}")

    def found_here(self) -> list[int]:
        """Of each keeper of ours: how many blocks it has found or loaded over the shared index, without a message."""
        keepers = [worker for worker in self.workers if isinstance(worker, OurKeeper)]
        return [keeper.client.handler.statistics().counters.found_here for keeper in keepers]

    def held_by_board(self) -> list[int]:
        """Of each reader: how many blocks it has held by its board, without a message."""
        readers = [worker for worker in self.workers if isinstance(worker, Reader)]
        return [reader.client.handler.statistics().board.held for reader in readers]

    def __repr__(self) -> str:
        return ", ".join(f"{worker.name} {worker.done} (cut off {worker.cut_off})" for worker in self.workers)
