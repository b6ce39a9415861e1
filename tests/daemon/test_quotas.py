"""Quotas of tenants: the account alone, and what a daemon does by it."""

import json
import random

import attrs
import pytest
import trio

from backends.abc import Deletion
from backends.testing import FakeTier
from maru import BadMessage, ServerConfig, open_server
from offload import NO_WAIT, ConfigError
from offload.client import SharedBlocks, SharedMemory, open_client, open_connection
from offload.daemon import DaemonConfig
from offload.daemon._config import read_tenants
from offload.daemon._messages import Cancel, Cancelled, Counters, Explain, Explained, Stats, Store, Stored, packed
from offload.daemon._page_keys import PageKeys
from offload.daemon._quotas import Account, Quotas
from offload.daemon._tenants import Tenants, prefix_of, stored_keys
from tests.daemon import test_serve
from tests.daemon.test_daemon import begin_store, cache_of, registered, until
from tests.support.daemons import PATIENCE, SIZE, daemon, engine_config, serve

HIS, HERS = "credential of tenant a", "credential of tenant b"
TENANTS = Tenants({"a": HIS.encode(), "b": HERS.encode()})
GONE, HELD = Deletion.DELETED, Deletion.PINNED


def keys_of(n, start=0):
    return [b"block %d" % at for at in range(start, start + n)]


def account_of(*there, quota=4):
    account = Account("a", quota)
    account.stored(there, 2)
    return account


# --- the account --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "keys", "short"),
    [
        ("", "", 0),
        ("", "abcd", 0),
        ("", "abcde", 1),
        ("abcd", "abcd", 0),  # they are there
        ("abc", "de", 1),
        ("abc", "dd", 0),  # a key is named twice
        ("abcd", "ae", 1),
    ],
)
def test_so_many_blocks_have_to_go_for_others(there, keys, short):
    assert account_of(*there).shortage(keys, 1) == short


def test_a_quota_counts_whole_blocks():
    account = Account("a", 4 * SIZE - 1)
    assert account.shortage(["a", "b", "c"], SIZE) == 0
    assert account.shortage(["a", "b", "c", "d"], SIZE) == 1


def test_the_least_recently_used_go_first_and_what_is_held_goes_last():
    account = account_of("a", "b", "c", "d")
    account.used("a")
    assert account.victims(2, ()) == ["b", "c"]
    account.removed("c", 2)
    account.asked(["b", "c"], [HELD, GONE])
    assert account.victims(9, "d") == ["a", "b"] and account.evicted == 1


@pytest.mark.parametrize("answer", [Deletion.MISSING, Deletion.DELETED])
def test_an_answer_to_a_deletion_does_not_take_away_what_a_tier_has_told_since(answer):
    account = account_of("a", "b")
    account.asked("a", [answer])
    account.deleted("b", [answer])
    assert len(account) == 2 and account.victims(2, ()) == ["b", "a"]
    account.removed("ab", 2)
    assert len(account) == 0


def test_what_does_not_fit_is_refused_behind_what_does():
    account = account_of("a", "b")
    assert account.admit("acdef", 1) == (["a", "c", "d"], [3, 4])
    assert account.refused == 2 and len(account) == 4


def test_what_is_under_way_counts_until_its_store_has_ended():
    account = account_of()
    coming, _ = account.admit("abc", 1)
    assert account.admit("de", 1) == (["d"], [1])
    account.stored("a", 2)
    account.settled(coming)  # b and c were not stored
    account.settled(["d"])
    assert len(account) == 1 and account.shortage("bcd", 1) == 0


def test_a_block_counts_once_until_the_last_tier_has_lost_it():
    account = account_of("a")
    account.stored("a", 4)
    assert len(account) == 1
    account.removed("a", 2)
    assert len(account) == 1
    account.removed("a", 4)
    account.removed("a", 4)
    assert len(account) == 0


def test_a_block_that_two_stores_bring_counts_until_the_second_one_has_ended():
    account = account_of()
    first, _ = account.admit("ab", 1)
    second, _ = account.admit("ba", 1)
    account.settled(first)  # it was given up
    assert len(account) == 2 and account.admit("cde", 1)[0] == ["c", "d"]
    account.stored("ab", 2)
    account.settled(second)
    assert len(account) == 4


def test_a_block_that_is_there_and_stored_once_more_counts_while_it_goes():
    account = account_of("a", "b", "c", "d")
    coming, _ = account.admit("a", 1)
    account.removed("a", 2)
    assert account.shortage("e", 1) == 1
    account.stored("a", 2)
    account.settled(coming)
    assert len(account) == 4


def test_no_sequence_of_events_has_an_account_admit_more_than_its_quota():
    dice = random.Random(20)
    for _ in range(200):
        account, stores = Account("a", dice.randrange(1, 8)), []
        for _ in range(60):
            keys = dice.sample("abcdefghijkl", dice.randrange(1, 6))
            before = len(account)
            match dice.randrange(5):
                case 0:
                    coming, _ = account.admit(keys, 1)
                    stores.append(coming)
                    assert len(account) <= max(before, account.quota_bytes)
                case 1 if stores:
                    account.stored(dice.choice(stores), 2)  # whichever of those that bring a block has brought it
                    assert len(account) == before
                case 2 if stores:
                    account.settled(stores.pop(dice.randrange(len(stores))))
                case 3:
                    account.removed(keys, 2)
                case 4:
                    victims = account.victims(2, keys)
                    assert not set(victims) & set(keys)
                    account.asked(victims, [dice.choice(list(Deletion)) for _ in victims])
        for coming in stores:
            account.settled(coming)
        assert not account._coming and not account._new


class Book:
    """A tier that tells of its keys."""

    def __init__(self, keys=()):
        self.keys, self.watchers = list(keys), []

    def list_keys(self):
        return list(self.keys)

    def watch_keys(self, watcher):
        self.watchers.append(watcher)
        return lambda: self.watchers.remove(watcher)


def test_what_a_tier_has_kept_from_before_counts_for_its_tenant():
    his, hers = stored_keys("a", keys_of(3)), stored_keys("b", keys_of(2))
    quotas = Quotas()
    quotas.configure({"a": 8 * SIZE})
    quotas.open(SIZE, [Book([*his, *hers, b"of nobody"]), Book(his)], all_told=True)
    assert quotas.counters()["tenant.a.used_bytes"] == 3 * SIZE
    quotas.configure({"a": 8 * SIZE, "b": SIZE})
    assert len(list(quotas.charging())) == 2, "a step of each tier"
    assert quotas.counters()["tenant.b.used_bytes"] == 2 * SIZE
    assert not list(quotas.charging())
    quotas.configure({"b": SIZE})
    assert quotas.of("a") is None


def test_all_new_quotas_are_charged_in_one_pass():
    """A pass over a million keys takes a second, in which nobody is served."""

    class Counted(Book):
        asked = 0

        def list_keys(self):
            self.asked += 1
            return super().list_keys()

    names = [f"tenant {n}" for n in range(16)]
    book, quotas = Counted([key for name in names for key in stored_keys(name, keys_of(3))]), Quotas()
    quotas.open(SIZE, [book], all_told=True)
    quotas.configure(dict.fromkeys(names, 8 * SIZE))
    list(quotas.charging())
    assert book.asked == 1
    assert {quotas.counters()[f"tenant.{name}.used_bytes"] for name in names} == {3 * SIZE}


@pytest.mark.parametrize("pages", [False, True], ids=["tier", "page store"])
def test_news_of_a_tier_counts_more_than_its_older_list(monkeypatch, pages):
    monkeypatch.setattr("offload.daemon._quotas._CHARGED", 2)
    his = stored_keys("a", keys_of(9))
    book, quotas = Book([key.hex() for key in his[:6]] if pages else his[:6]), Quotas()

    def tell(news, keys):
        getattr(watcher, news)([key.hex() for key in keys] if pages else keys)

    quotas.open(SIZE, [PageKeys(book) if pages else book], all_told=True)
    quotas.configure({"a": 99 * SIZE})
    [watcher] = book.watchers
    charging = quotas.charging()
    next(charging)  # counts 4 and 5
    tell("removed", [his[0], his[1], his[5]])
    tell("stored", [his[1], his[7], his[8]])
    tell("removed", [his[8]])
    assert len(list(charging)) == 2
    there = quotas.of("a").victims(99, ())
    assert there == [his[at] for at in (2, 3, 4, 1, 7)], "what was stored since is used last"


def test_tiers_are_followed_from_the_first_quota_on_and_once():
    book, quotas = Book(), Quotas()
    quotas.open(SIZE, [book], all_told=True)
    assert not book.watchers
    quotas.configure({"a": SIZE})
    quotas.configure({"a": 2 * SIZE})
    assert len(book.watchers) == 1


def test_in_a_tier_that_does_not_tell_a_block_counts_until_it_is_deleted_or_missing():
    quotas = Quotas()
    quotas.configure({"a": 4 * SIZE})
    quotas.open(SIZE, [Book()], all_told=False)
    account, (first, second, third, fourth) = quotas.of("a"), stored_keys("a", keys_of(4))
    coming, _ = account.admit([first, second], SIZE)
    quotas.settled(account, coming, [first, second, third])  # the third one was there
    quotas.found("a", [fourth])
    account.stored([first], 2)
    account.removed([first], 2)
    assert len(account) == 4  # the other tier may have it
    quotas.deleted("a", [first, second], [Deletion.PINNED, Deletion.DELETED])
    account.asked([third], [Deletion.MISSING])
    assert len(account) == 2 and account.evicted == 0


@pytest.mark.parametrize("lists_new", [False, True])
def test_what_a_page_store_lists_late_is_less_recently_used_than_what_was_found(lists_new):
    quotas = Quotas()
    quotas.configure({"a": 8 * SIZE})
    quotas.open(SIZE, [], all_told=False)
    account, keys = quotas.of("a"), stored_keys("a", keys_of(6))
    old, new = keys[:4], keys[4:]
    quotas.found("a", new)
    list(quotas.listing(account, [*new, *old] if lists_new else old[:]))
    assert account.victims(6, ()) == keys


def test_what_comes_and_goes_between_steps_of_a_listing_is_newer_than_it(monkeypatch):
    monkeypatch.setattr("offload.daemon._quotas._CHARGED", 2)
    quotas = Quotas()
    quotas.configure({"a": 99 * SIZE})
    quotas.open(SIZE, [Book()], all_told=False)
    account, keys = quotas.of("a"), stored_keys("a", keys_of(9))
    listing = quotas.listing(account, keys[:6])
    for steps, counted in enumerate((2, 4), 1):
        next(listing)
        assert len(account) == counted, f"two keys for each of {steps} steps"
    quotas.deleted("a", [keys[0], keys[5]], [GONE, HELD])
    account.asked([keys[1], keys[4]], [GONE, Deletion.MISSING])
    quotas.found("a", [keys[1], keys[7]])  # it was stored again
    account.removed([keys[2]], 2)  # by a tier that tells
    assert not list(listing)[1:]
    assert account.victims(9, ()) == [keys[at] for at in (2, 3, 5, 1, 7)]
    list(quotas.listing(account, keys[:6]))  # asked again: what was deleted before counts
    assert len(account) == 7


def test_a_listing_that_was_left_is_begun_again():
    quotas = Quotas()
    quotas.configure({"a": 99 * SIZE})
    quotas.open(SIZE, [], all_told=False)
    account, keys = quotas.of("a"), stored_keys("a", keys_of(3))
    listing = quotas.listing(account, keys[:])
    next(listing)
    quotas.deleted("a", keys[:1], [GONE])
    listing.close()
    list(quotas.listing(account, keys[:]))
    assert account.victims(9, ()) == keys


# --- the file of tenants ------------------------------------------------------------------------------------------------


def tenants_file(tmp_path, text):
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


def test_a_tenant_is_a_line_or_a_table_with_a_quota(tmp_path):
    text = f'[tenants]\na = "{HIS}"\n[tenants.b]\ncredential = "{HERS}"\nquota = "8 GiB"\n'
    tenants = read_tenants(tenants_file(tmp_path, text))
    assert tenants.credentials == TENANTS.credentials and tenants.quotas == {"b": 8 << 30}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('a = "short"', "tenants.a: must be NAME"),
        (f'a = {{ credential = "{HIS}", quota = "8 parsecs" }}', "tenants.a.quota = '8 parsecs': must be bytes"),
        (f'a = {{ credential = "{HIS}", quota = -1 }}', "tenants.a.quota = -1: must be bytes"),
        (f'a = {{ credential = "{HIS}", qouta = 1 }}', "tenants.a.qouta: unknown"),
        ("a = { quota = 1 }", "tenants.a: must be NAME"),
        (f'a = "{"x" * 300}"', "tenants.a: must be NAME"),
        (f'"" = "{HIS}"', "name of 0 characters"),
        (f'a = "{HIS}"\nb = "{HIS}"', "a different credential for each tenant"),
        ("", "must have a table"),
    ],
)
def test_what_is_wrong_with_a_tenant_is_named_and_no_credential_is_shown(tmp_path, line, why):
    with pytest.raises(ConfigError) as caught:
        read_tenants(tenants_file(tmp_path, f"[tenants]\n{line}\n"))
    assert why in str(caught.value) and HIS not in str(caught.value)


# --- a daemon with quotas -----------------------------------------------------------------------------------------------


def tenants(tmp_path, quota_a=None, quota_b=None):
    lines = [f"[tenants.{name}]\ncredential = {credential!r}\n" + (f"quota = {quota}\n" if quota is not None else "")
             for name, credential, quota in (("a", HIS, quota_a), ("b", HERS, quota_b))]  # fmt: skip
    return tenants_file(tmp_path, "\n".join(lines))


async def store(engine, cache, keys):
    handle = await engine.store(cache.external([at % 8 for at in range(len(keys))], keys), NO_WAIT)
    return await handle.wait()


def refused(result):
    assert not result.filtered
    return {key for key, why in result.failed.items() if "quota" in str(why)}


async def there(engine, keys):
    """How many of these are there, asked one by one."""
    return sum([len((await found(engine, key)).keys) for key in keys])


async def found(engine, key):
    async with await engine.lookup([key]) as hit:
        assert not hit.unavailable
        return hit


async def test_what_a_tenant_stores_over_its_quota_makes_its_own_oldest_go_and_no_others(path, tmp_path):
    async with daemon(path, tenants_file=tenants(tmp_path, 8 * SIZE)) as server:
        cache = cache_of()
        async with (
            open_client(cache, server.url, credential=HIS) as his,
            open_client(cache, server.url, credential=HERS) as hers,
        ):
            await store(hers, cache, keys_of(8))
            for start in range(0, 24, 6):
                assert len((await store(his, cache, keys_of(6, start))).completed) == 6
                assert server.statistics()["tenant.a.used_bytes"] <= 8 * SIZE
            assert await there(his, keys_of(16)) == 0 and await there(his, keys_of(8, 16)) == 8
            assert await there(hers, keys_of(8)) == 8
            why = await his.tiers["daemon"].connection.ask(lambda seq: Explain(seq, keys_of(1)), Explained)
            assert "over the quota of its tenant" in why.text
        statistics = server.statistics()
        assert statistics["tenant.a.evicted_blocks"] == 16 and statistics["tenant.a.refused_blocks"] == 0
        assert statistics["tenant.a.used_bytes"] == statistics["tenant.a.quota_bytes"] == 8 * SIZE


@pytest.mark.long
async def test_a_quota_holds_over_the_embedded_page_store_as_well_and_behind_a_crash(path, tmp_path):
    small = ("--host-bytes", "8 MiB", "--maru-pool-size-gb", "0.03", "--tenants-file", tenants(tmp_path, 8 * SIZE))
    with serve(path, *small) as process:
        cache = cache_of()
        async with open_client(cache, f"ipc://{path}/daemon.sock", credential=HIS) as his:
            for start in range(0, 24, 6):
                assert len((await store(his, cache, keys_of(6, start))).completed) == 6
            assert await there(his, keys_of(16)) == 0 and await there(his, keys_of(8, 16)) == 8
            connection = his.tiers["daemon"].connection
            told = (await connection.ask(lambda seq: Stats(seq), Counters)).values
            assert told["tenant.a.used_bytes"] == 8 * SIZE and told["tenant.a.evicted_blocks"] == 16
        process.kill()
    with serve(path, *small):  # the page store has kept them, and tells this daemon of them
        async with open_client(cache, f"ipc://{path}/daemon.sock", credential=HIS) as his:
            assert await there(his, keys_of(8, 16)) == 8
            # For a while the page store deletes nothing that is of its life before: until then what is new is refused.
            with trio.fail_after(PATIENCE):
                while (result := await store(his, cache, keys_of(2, 101))).failed:
                    assert refused(result)
                    await trio.sleep(0.1)
            told = (await his.tiers["daemon"].connection.ask(lambda seq: Stats(seq), Counters)).values
            assert told["tenant.a.used_bytes"] <= 8 * SIZE


def beside(tmp_path):
    """A page store of a process of its own, as far as a daemon can tell, and the tiers of a daemon that uses it."""
    server = ServerConfig(pool_path=str(tmp_path / "pool"), capacity_bytes=64 << 20, rm_address="")
    url = f"ipc://{tmp_path}/pool/maru.sock"
    place = {"type": "maru", "server_url": url, "pool_size": 64 * SIZE, "instance_id": "daemon"}
    return server, engine_config(tiers={"maru": place})


async def test_quota_counts_a_separate_page_store_after_restarts(path, tmp_path):
    server, tiers = beside(tmp_path)
    file = tenants(tmp_path, 8 * SIZE)
    async with open_server(server):
        for life in range(3):
            async with daemon(path, engine=tiers, tenants_file=file, block_bytes=SIZE) as running:
                assert running.statistics()["tenant.a.used_bytes"] == min(life, 1) * 8 * SIZE
                cache = cache_of()
                async with open_client(cache, running.url, credential=HIS) as his:
                    assert len((await store(his, cache, keys_of(8, 8 * life))).completed) == 8
                    assert await there(his, keys_of(8 * (life + 1))) == 8
                assert running.statistics()["tenant.a.used_bytes"] == 8 * SIZE


async def test_a_separate_page_store_is_charged_with_others_served_between_two_steps(path, tmp_path, monkeypatch):
    class Tasks(trio.abc.Instrument):
        steps = 0

        def before_task_step(self, task):
            self.steps += 1

    server, tiers = beside(tmp_path)
    file = tenants(tmp_path, 8 * SIZE)
    tasks, charged, listed = Tasks(), [], Account.listed
    async with open_server(server):
        async with daemon(path, engine=tiers, tenants_file=file, block_bytes=SIZE) as running:
            cache = cache_of()
            async with open_client(cache, running.url, credential=HIS) as his:
                await store(his, cache, keys_of(8))
        monkeypatch.setattr("offload.daemon._quotas._CHARGED", 2)
        monkeypatch.setattr(Account, "listed", lambda *args: charged.append(tasks.steps) or listed(*args))
        trio.lowlevel.add_instrument(tasks)
        async with daemon(path, engine=tiers, tenants_file=file, block_bytes=SIZE) as running:
            assert running.statistics()["tenant.a.used_bytes"] == 8 * SIZE
        trio.lowlevel.remove_instrument(tasks)
    assert len(set(charged)) == len(charged) == 4


async def test_quota_given_again_counts_a_separate_page_store(path, tmp_path):
    server, tiers = beside(tmp_path)
    file = tenants(tmp_path, 8 * SIZE)
    async with open_server(server), daemon(path, engine=tiers, tenants_file=file, block_bytes=SIZE) as running:
        cache = cache_of()
        async with open_client(cache, running.url, credential=HIS) as his:
            await store(his, cache, keys_of(8))
            tenants(tmp_path, None)
            running.reload(DaemonConfig(runtime_dir=path, tenants_file=file))
            assert "tenant.a.used_bytes" not in running.statistics()
            tenants(tmp_path, 8 * SIZE)
            running.reload(DaemonConfig(runtime_dir=path, tenants_file=file))
            await until(lambda: running.statistics()["tenant.a.used_bytes"] == 8 * SIZE)


def refuse():
    raise BadMessage("ask again later")


async def test_page_store_that_does_not_list_is_asked_again(path, tmp_path, monkeypatch, caplog):
    server, tiers = beside(tmp_path)
    monkeypatch.setattr("offload.daemon._service._LIST_AGAIN", 0.01)
    file = tenants(tmp_path, 8 * SIZE)
    async with open_server(server) as page_store:
        async with daemon(path, engine=tiers, tenants_file=file, block_bytes=SIZE) as running:
            cache = cache_of()
            async with open_client(cache, running.url, credential=HIS) as his:
                await store(his, cache, keys_of(8))
        refusing = pytest.MonkeyPatch()
        refusing.setattr(page_store._service.directory, "list_keys", refuse)
        async with daemon(path, engine=tiers, tenants_file=file, block_bytes=SIZE) as running:
            assert running.statistics()["tenant.a.used_bytes"] == 0
            assert "are not counted yet" in caplog.text
            for _ in range(3):
                running.reload(DaemonConfig(runtime_dir=path, tenants_file=file))
            await trio.testing.wait_all_tasks_blocked()
            nursery = running._service._nursery
            assert sum("charge_later" in task.name for task in nursery.child_tasks) == 1
            refusing.undo()
            await until(lambda: running.statistics()["tenant.a.used_bytes"] == 8 * SIZE)


async def test_a_new_quota_is_charged_while_a_page_store_does_not_list(path, tmp_path, monkeypatch):
    server, tiers = beside(tmp_path)
    file = tenants(tmp_path, 8 * SIZE)
    async with open_server(server) as page_store:
        monkeypatch.setattr(page_store._service.directory, "list_keys", refuse)
        async with daemon(path, engine=tiers, tenants_file=file, block_bytes=SIZE) as running:
            await trio.testing.wait_all_tasks_blocked()
            charged = []
            monkeypatch.setattr(running._service.quotas, "charging", lambda: charged.append(True) or ())
            running.reload(DaemonConfig(runtime_dir=path, tenants_file=file))
            with trio.fail_after(5):  # not after half a minute
                await until(lambda: charged)


async def test_a_block_that_was_used_stays_and_one_that_was_not_goes(path, tmp_path):
    async with daemon(path, tenants_file=tenants(tmp_path, 8 * SIZE)) as server:
        cache = cache_of()
        async with open_client(cache, server.url, credential=HIS) as his:
            await store(his, cache, keys_of(8))
            await found(his, keys_of(1)[0])
            await store(his, cache, keys_of(2, 8))
            assert [await there(his, [key]) for key in keys_of(4)] == [1, 0, 0, 1]


async def test_what_is_held_stays_and_what_does_not_fit_beside_it_is_refused(path, tmp_path):
    async with daemon(path, tenants_file=tenants(tmp_path, 8 * SIZE)) as server:
        cache = cache_of()
        async with open_client(cache, server.url, credential=HIS) as his:
            await store(his, cache, keys_of(8))
            async with await his.lookup(keys_of(6)) as hit:
                assert len(hit.keys) == 6
                result = await store(his, cache, keys_of(5, 8))
                assert result.completed == tuple(keys_of(2, 8))
                assert refused(result) == set(keys_of(3, 10))
            assert server.statistics()["tenant.a.refused_blocks"] == 3
            assert len((await store(his, cache, keys_of(5, 20))).completed) == 5  # nothing is held any more


async def test_with_a_quota_of_nothing_all_is_refused(path, tmp_path):
    async with daemon(path, tenants_file=tenants(tmp_path, 0)) as server:
        cache = cache_of()
        async with open_client(cache, server.url, credential=HIS) as his:
            assert refused(await store(his, cache, keys_of(3))) == set(keys_of(3))
            assert server.statistics()["tenant.a.used_bytes"] == 0


async def test_what_a_tenant_deletes_or_a_full_tier_evicts_is_free_again(path, tmp_path):
    small = engine_config(tiers={"host": {"type": "memory", "capacity_bytes": 4 * SIZE}})
    async with daemon(path, engine=small, tenants_file=tenants(tmp_path, 8 * SIZE)) as server:
        cache = cache_of()
        async with open_client(cache, server.url, credential=HIS) as his:
            for start in (0, 4):
                await store(his, cache, keys_of(4, start))
            assert server.statistics()["tenant.a.used_bytes"] == 4 * SIZE  # the tier has no room for more
            await his.delete(keys_of(2, 4))
            assert server.statistics()["tenant.a.used_bytes"] == 2 * SIZE


async def test_a_smaller_quota_that_is_read_again_holds_at_once(path, tmp_path):
    file = tenants(tmp_path, 8 * SIZE)
    async with daemon(path, tenants_file=file) as server:
        cache = cache_of()
        async with open_client(cache, server.url, credential=HIS) as his:
            await store(his, cache, keys_of(8))
            tenants(tmp_path, 3 * SIZE)
            server.reload(DaemonConfig(runtime_dir=path, tenants_file=file))
            await until(lambda: server.statistics()["tenant.a.used_bytes"] == 3 * SIZE)
            assert await there(his, keys_of(5)) == 0 and await there(his, keys_of(3, 5)) == 3


async def test_what_is_beyond_a_quota_goes_in_steps(path, tmp_path, monkeypatch):
    monkeypatch.setattr("offload.daemon._stores._DELETED", 2)
    file, asked = tenants(tmp_path, 8 * SIZE), []
    async with daemon(path, tenants_file=file) as server:
        cache = cache_of()

        async def noted(keys, **knobs):
            asked.append(len(keys))
            return await delete(keys, **knobs)

        async with open_client(cache, server.url, credential=HIS) as his:
            await store(his, cache, keys_of(8))
            async with await his.lookup(keys_of(2)):
                delete = server.engine.delete
                monkeypatch.setattr(server.engine, "delete", noted)
                tenants(tmp_path, 0)
                server.reload(DaemonConfig(runtime_dir=path, tenants_file=file))
                await until(lambda: server.statistics()["tenant.a.used_bytes"] == 2 * SIZE)
    assert asked == [2, 2, 2, 2]


class Slow(FakeTier):
    """A tier that deletes nothing while it is away."""

    capabilities = attrs.evolve(FakeTier.capabilities, answers_at_once=False)
    away = False

    async def contains(self, keys):
        return super().contains_nowait(keys)

    async def delete(self, keys):
        if self.away:
            raise ConnectionError("its server restarts")
        return await super().delete(keys)


async def test_no_tier_loses_blocks_that_another_cannot_delete(path, tmp_path):
    slow, host = Slow(64, SIZE), {"type": "memory", "capacity_bytes": 64 * SIZE}
    both = engine_config(tiers={"host": host, "slow": slow})
    async with daemon(path, engine=both, tenants_file=tenants(tmp_path, 8 * SIZE), block_bytes=SIZE) as server:
        cache = cache_of()
        async with open_client(cache, server.url, credential=HIS) as his:
            await store(his, cache, keys_of(8))
            await server.engine.drain()
            slow.away = True
            for _ in range(2):
                assert refused(await store(his, cache, keys_of(2, 8))) == set(keys_of(2, 8))
                assert len(server.engine.tiers["host"]) == len(slow) == 8
            slow.away = False
            assert len((await store(his, cache, keys_of(2, 8))).completed) == 2
            assert server.statistics()["tenant.a.evicted_blocks"] == 2


@pytest.mark.parametrize(("waits_in", "left"), [("delete", 8), ("store", 0)])
async def test_a_store_that_is_cancelled_while_room_is_made_stores_nothing_and_counts_for_nothing(
    path, tmp_path, waits_in, left
):
    async with daemon(path, tenants_file=tenants(tmp_path, 8 * SIZE)) as server:
        cache = cache_of()
        async with open_connection(server.url, credential=HIS) as connection:
            number = await registered(connection, cache)
            ids = packed(range(8))
            first = await connection.ask(lambda seq: Store(seq, number, keys_of(8), ids), Stored)
            assert first.status == "complete" and not first.filtered
            engine, began, go_on = server._engine.engine, trio.Event(), trio.Event()
            quickly = getattr(engine, waits_in)

            async def slowly(*args, **more):
                began.set()
                await go_on.wait()
                return await quickly(*args, **more)

            setattr(engine, waits_in, slowly)
            answers = []

            async def again():
                answers.append(
                    await connection.ask(lambda seq: Store(seq, number, keys_of(8, 8), ids, False, 7), Stored)
                )

            async with trio.open_nursery() as nursery:
                nursery.start_soon(again)
                await began.wait()
                confirmed = await connection.ask(lambda seq: Cancel(seq, [], 7), Cancelled)
                assert confirmed.count == 1 and confirmed.unproven == 0
            assert answers[0].status == "cancelled"
            setattr(engine, waits_in, quickly)
            assert server.statistics()["tenant.a.used_bytes"] == left * SIZE
            assert server.statistics()["requests"] == 0
            last = await connection.ask(lambda seq: Store(seq, number, keys_of(8, 8), ids), Stored)
            assert last.status == "complete" and not last.filtered


async def test_a_daemon_may_end_while_what_is_beyond_a_quota_goes(path, tmp_path):
    file = tenants(tmp_path, 8 * SIZE)
    async with daemon(path, tenants_file=file) as server:
        cache, began = cache_of(), trio.Event()

        async def never(keys, **more):
            began.set()
            await trio.sleep_forever()

        async with open_client(cache, server.url, credential=HIS) as his:
            await store(his, cache, keys_of(8))
        server._engine.engine.delete = never
        tenants(tmp_path, 3 * SIZE)
        server.reload(DaemonConfig(runtime_dir=path, tenants_file=file))
        await began.wait()


async def test_quotas_are_charted_by_tenant(path, tmp_path):
    prometheus = pytest.importorskip("prometheus_client")
    from offload.metrics import DaemonCollector

    async with daemon(path, tenants_file=tenants(tmp_path, 8 * SIZE, 0)) as server:
        registry, cache = prometheus.CollectorRegistry(), cache_of()
        registry.register(DaemonCollector(server.statistics))

        def chart(field, tenant):
            return registry.get_sample_value(f"kv_offload_daemon_tenant_{field}", {"tenant": tenant})

        fields = ("quota_bytes", "used_bytes", "evicted_blocks_total", "refused_blocks_total")
        assert [chart(field, "a") for field in fields] == [8 * SIZE, 0, 0, 0]  # from the start
        async with open_client(cache, server.url, credential=HIS) as his:
            await store(his, cache, keys_of(6))
            await store(his, cache, keys_of(6, 6))
        async with open_client(cache, server.url, credential=HERS) as hers:
            await store(hers, cache, keys_of(2))
        assert [chart(field, "a") for field in fields] == [8 * SIZE, 8 * SIZE, 4, 0]
        assert [chart(field, "b") for field in fields] == [0, 0, 0, 2]


# --- what a tenant sees of another one ----------------------------------------------------------------------------------


async def test_what_another_tenant_has_is_like_what_nobody_has_whatever_is_asked(path, tmp_path):
    async with daemon(path, tenants_file=tenants(tmp_path, 8 * SIZE, 8 * SIZE)) as server:
        cache, hers_only, nobodys = cache_of(), keys_of(2), keys_of(2, 50)
        async with (
            open_client(cache, server.url, credential=HIS) as his,
            open_client(cache, server.url, credential=HERS) as hers,
        ):
            await store(his, cache, keys_of(1, 90))
            before = await seen(his, [*hers_only, *nobodys])
            await store(hers, cache, hers_only)
            after = await seen(his, [*hers_only, *nobodys])
            assert before == after
            for key, other in zip(hers_only, nobodys, strict=True):
                assert await seen(his, [key]) == await seen(his, [other])
            assert await his.delete(hers_only) == [Deletion.MISSING] * 2
            assert await there(hers, hers_only) == 2


async def seen(engine, keys):
    """Everything that an engine can ask about keys."""
    tier = engine.tiers["daemon"]
    async with await engine.lookup(keys) as hit:
        prefix = len(hit.keys)
    explained = await tier.connection.ask(lambda seq: Explain(seq, keys), Explained)
    stats = await tier.connection.ask(lambda seq: Stats(seq), Counters)
    return prefix, await tier.contains(keys), explained.text, stats.values, await engine.delete(keys)


async def test_a_tenant_is_told_its_own_counters_only(path, tmp_path):
    async with daemon(path, tenants_file=tenants(tmp_path, 8 * SIZE, 8 * SIZE)) as server:
        async with open_connection(server.url, credential=HIS) as connection:
            values = (await connection.ask(lambda seq: Stats(seq), Counters)).values
        assert {name.rpartition(".")[0] for name in values} == {"session", "tenant.a"}


@pytest.mark.parametrize("has_tenants", [True, False])
async def test_the_status_page_of_a_daemon_with_tenants_shows_no_keys_and_explains_none(path, tmp_path, has_tenants):
    pytest.importorskip("starlette")
    knobs = {"tenants_file": tenants(tmp_path)} if has_tenants else {}
    credential, tenant = (HIS, "a") if has_tenants else ("", "")
    async with (
        daemon(path, status="ipc", **knobs) as server,
        open_connection(server.url, credential=credential) as connection,
        trio.open_nursery() as nursery,
    ):
        number = await registered(connection, cache_of())
        await begin_store(nursery, connection, number, keys_of(2))  # its signal never comes
        while not (oldest := json.loads((await get(path, "/status"))[1])["oldest"]):  # noqa: ASYNC110
            await trio.sleep(0.1)
        key = stored_keys(tenant, keys_of(1))[0].hex()
        code, text = await get(path, f"/explain?key={key}")
        if has_tenants:
            assert oldest[0]["keys"] == [] and code == 400 and "offload explain --tenant" in text
        else:
            assert oldest[0]["keys"][0] == key and code == 200 and "on its way" in text
        nursery.cancel_scope.cancel()


async def get(path, where):
    return await trio.to_thread.run_sync(test_serve.get, path, where)


def test_keys_of_tenants_begin_differently():
    assert prefix_of("a") != prefix_of("b") and len(prefix_of("a")) == 8


async def test_memory_is_not_shared_by_tenants_unless_they_name_their_own(path, tmp_path):
    async with daemon(path, tenants_file=tenants(tmp_path)) as server:
        mine, other = cache_of(), SharedBlocks(SharedMemory(8 * SIZE), SIZE)
        async with open_connection(server.url, credential=HIS) as his:
            number = await registered(his, mine)
            async with open_connection(server.url, credential=HERS) as hers:
                from offload.client import DaemonRefused

                await registered(hers, other)
                with pytest.raises(DaemonRefused, match="no cache"):
                    await hers.ask(lambda seq: Store(seq, number, [b"x"], packed([0])), Stored)
