"""A place that is made of a name is whoever's who has it made: he closes it, whatever comes between."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import backends
import offload
from backends import BlockSizeError, FileTier, PlaceClosed, make_tier
from backends.abc import RoomRequest
from backends.plugins import HostConfig, NativeTier, NoAnswer, PluginFault
from backends.testing import FakeTier
from backends.wrappers import Zstd, slot_bytes, wrap
from offload import BreakerConfig, ConfigError, EngineConfig, open_engine
from offload.replay import ReplayError, ReplayOptions, TierSpec
from tests.support.engine_places import SIZE, cancelled_at_checkpoint, keys_of
from tests.support.held_by_process import open_descriptors
from tests.support.plugin_faults import PlayedConnector

HERE = __name__

made: list[Any] = []


class Connector(PlayedConnector):
    """One that is open from when it was made."""

    def __init__(self, **parameters: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        made.append(self)
        if parameters:
            os.close(self.fd)
            made.remove(self)
            raise OSError(f"no {parameters}")


class Shelf(FakeTier):
    """A tier with something to close, and as large slots as it is told; not to be entered."""

    def __init__(self, *, block_bytes: int, slot: int = 0) -> None:
        super().__init__(64, slot or block_bytes)
        self.closed = 0
        made.append(self)

    def close(self) -> None:
        self.closed += 1


class Room(Shelf):
    """One that can be entered, after a while, and then leaves nothing behind."""

    fails = False

    def __init__(self, **knobs: Any) -> None:
        super().__init__(**knobs)
        self.news: list[str] = []

    async def __aenter__(self) -> Room:
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise ConnectionError("nobody there")
        self.news.append("entered")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.news.append("left")
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        super().close()
        self.news.append("closed")


class Unready(Room):
    """Nobody is there."""

    fails = True


class Asking(Room):
    """One that says only once it was entered whether it can be read from."""

    @property
    def source(self) -> Any:
        raise RuntimeError("not yet")


class Remote(Shelf):
    """Whose end is to be awaited: an exit, and a ``close`` that nobody calls who does not await it."""

    async def __aenter__(self) -> Remote:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.closed += 1

    async def close(self) -> None:  # type: ignore[override]
        raise AssertionError("it was left")


NATIVE = {"type": "native_plugin", "module_path": HERE, "class_name": "Connector"}
BAD = {**NATIVE, "adapter_params": {"nobody": "there"}}


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    made.clear()
    before = open_descriptors(collect=True)
    yield
    assert [one.closed for one in made] == [1] * len(made)
    made.clear()
    assert open_descriptors(collect=True) <= before


def source() -> FakeTier:
    place = FakeTier(16, SIZE)
    place.fill(keys_of(4))
    return place


async def opened(tiers: dict[str, Any], **options: Any) -> None:
    async with open_engine(source(), tiers, **{"chain": False, **options}) as engine:
        await engine.release(await engine.lookup(keys_of(2)))


# --- a host -----------------------------------------------------------------------------------------------------------


async def test_a_plugin_that_nobody_has_entered_is_closed_once_and_not_opened_any_more() -> None:
    tier = NativeTier(Connector(), SIZE)
    tier.close()
    tier.close()
    with pytest.raises(PlaceClosed, match="was closed: a plugin can be opened only once"):
        await tier.__aenter__()


async def test_to_close_one_that_was_entered_is_left_to_whoever_leaves_it() -> None:
    tier = NativeTier(Connector(), SIZE)
    async with tier:
        tier.close()
        assert await tier.contains(keys_of(1)) == set()
    tier.close()


def test_a_close_that_raises_or_does_not_return_is_told() -> None:
    first, second = Connector(), Connector()
    first.close_error = OSError("as told")
    with pytest.raises(PluginFault, match=r"close raised OSError\('as told'\)"):
        NativeTier(first, SIZE).close()
    second.close_waits = threading.Event()
    with pytest.raises(NoAnswer, match=r"close did not return within 0.05 s"):
        NativeTier(second, SIZE, HostConfig(close_deadline=0.05)).close()
    second.close_waits.set()
    for thread in threading.enumerate():
        if thread.name.startswith("offload-close"):
            thread.join(5)


# --- made, and no tier in the end -------------------------------------------------------------------------------------


def test_what_turns_out_to_be_no_tier_is_closed_and_its_close_does_not_hide_why() -> None:
    with pytest.raises(ValueError, match="deadlines") as raised:
        make_tier({**NATIVE, "deadlines": 3}, block_bytes=SIZE)
    assert made[0].closed == 1 and not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("close_error", [None, OSError("as told")], ids=["quiet", "raises"])
def test_what_cannot_be_hosted_says_so_however_it_closes(
    close_error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connector, "close_error", close_error, raising=False)
    original = Connector.__init__

    def init(self: Connector, **parameters: Any) -> None:
        original(self, **parameters)
        self.close_error = close_error

    monkeypatch.setattr(Connector, "__init__", init)
    with pytest.raises(ValueError, match="deadlines") as raised:
        make_tier({**NATIVE, "deadlines": 3}, block_bytes=SIZE)
    assert ("as told" in "".join(getattr(raised.value, "__notes__", ()))) is (close_error is not None)


async def test_a_tier_whose_slots_are_too_small_for_its_wrappers_is_closed() -> None:
    with pytest.raises(BlockSizeError):
        await opened({"shelf": {"type": f"{HERE}:Shelf", "slot": SIZE, "wrappers": ["zstd"]}})
    assert len(made) == 1


async def test_a_source_that_cannot_be_read_from_is_closed() -> None:
    config = EngineConfig(source=NATIVE, tiers={"memory": "memory"}, block_bytes=SIZE)
    with pytest.raises(ConfigError, match="cannot be read as a source"):
        async with open_engine(config):
            raise AssertionError("it opened")
    assert len(made) == 1


# --- an engine that does not open -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_enter_failure", ["fail", {"first": "miss"}], ids=["fail", "miss"])
@pytest.mark.parametrize("wrappers", [{}, {"wrappers": ["zstd"]}], ids=["bare", "wrapped"])
@pytest.mark.parametrize(
    "kind", [NATIVE, {"type": f"{HERE}:Shelf"}, {"type": f"{HERE}:Room"}], ids=["native", "shelf", "room"]
)
async def test_what_was_made_is_closed_when_a_later_tier_cannot_be_made(
    kind: dict[str, Any], wrappers: dict[str, Any], on_enter_failure: Any
) -> None:
    with pytest.raises(offload.TierNotEntered, match="nobody"):
        await opened({"first": {**kind, **wrappers}, "second": BAD}, on_enter_failure=on_enter_failure)
    assert len(made) == 1


@pytest.mark.parametrize("on_enter_failure", ["fail", "miss"])
async def test_what_was_made_is_closed_wherever_opening_is_cancelled(on_enter_failure: str) -> None:
    tiers: Any = {"room": f"{HERE}:Room", "native": NATIVE}
    options: Any = {"chain": False, "on_enter_failure": on_enter_failure}
    opened = 0

    async def use() -> None:
        nonlocal opened
        async with open_engine(source(), tiers, **options):
            opened += 1

    nth = 0
    while not opened:
        await cancelled_at_checkpoint(nth, use)
        nth += 1
    assert nth > 2 and len(made) > 2


@pytest.mark.parametrize("on_enter_failure", ["fail", "miss"])
async def test_what_could_not_be_entered_is_closed(on_enter_failure: str, autojump_clock: object) -> None:
    async def use() -> None:
        said: Any = on_enter_failure
        async with open_engine(source(), {"room": f"{HERE}:Unready"}, on_enter_failure=said):
            await trio.sleep(2)

    if on_enter_failure == "fail":
        with pytest.raises(offload.TierNotEntered):
            await use()
    else:
        await use()
    assert [one.news for one in made] == [["closed"]]


async def test_what_does_not_say_what_kind_of_tier_it_is_is_closed() -> None:
    with pytest.raises(ConfigError, match="is unknown before it is entered"):
        await opened({"room": f"{HERE}:Asking"}, on_enter_failure="miss")
    assert [one.news for one in made] == [["closed"]]


class Mute(Connector):
    """One that has no descriptor to listen to."""

    def event_fd(self) -> int:
        raise OSError("out of order")


async def test_a_plugin_that_was_opened_in_vain_is_not_tried_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    often = BreakerConfig(first_wait=0.01, longest_wait=0.01)
    tiers: Any = {"mute": {**NATIVE, "class_name": "Mute"}}
    async with open_engine(source(), tiers, on_enter_failure="miss", breaker=often) as engine:
        with trio.fail_after(10):
            while engine.statistics().health["mute"].next_probe != math.inf:  # noqa: ASYNC110  # its own time
                await trio.sleep(0.01)
        assert "a plugin can be opened only once" in engine.statistics().health["mute"].cause
    assert "OSError: out of order" in caplog.text


# --- and one that does ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_enter_failure", ["fail", "miss"])
async def test_a_tier_that_is_left_and_closed_is_closed_last(on_enter_failure: str) -> None:
    await opened(
        {"room": f"{HERE}:Room", "wrapped": {"type": f"{HERE}:Room", "wrappers": ["zstd"]}},
        on_enter_failure=on_enter_failure,
    )
    assert [one.news for one in made] == [["entered", "left", "closed"]] * 2


async def test_a_close_that_is_to_be_awaited_is_left_to_the_exit() -> None:
    await opened({"remote": f"{HERE}:Remote"})


@pytest.mark.parametrize("on_enter_failure", ["fail", "miss"])
async def test_a_wrapped_directory_is_free_again_when_the_engine_is_closed(
    tmp_path: Path, on_enter_failure: str
) -> None:
    spec = {"type": "file", "directory": str(tmp_path / "kv"), "wrappers": ["zstd"]}
    for _ in range(2):
        await opened({"disk": spec}, on_enter_failure=on_enter_failure)
    FileTier(tmp_path / "kv", 4096).close()


async def test_a_wrapped_directory_that_was_made_late_is_free_again_when_the_engine_is_closed(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("not mounted")
    spec = {"type": "file", "directory": str(tmp_path / "disk" / "kv"), "wrappers": ["zstd"]}
    often = BreakerConfig(first_wait=0.01, longest_wait=0.01)
    async with open_engine(source(), {"disk": spec}, on_enter_failure="miss", breaker=often) as engine:
        assert not engine.statistics().health["disk"].entered
        (tmp_path / "disk").unlink()
        (tmp_path / "disk").mkdir()
        with trio.fail_after(10):
            while not engine.statistics().health["disk"].entered:  # noqa: ASYNC110  # a thread makes it
                await trio.sleep(0.01)
    FileTier(tmp_path / "disk" / "kv", 4096).close()


async def test_what_somebody_else_has_made_is_his_to_close(tmp_path: Path) -> None:
    inner = FileTier(tmp_path / "kv", 16 * 4096, block_bytes=slot_bytes(SIZE, Zstd()))
    mine = wrap(inner, Zstd(), block_bytes=SIZE)
    for _ in range(2):
        await opened({"disk": mine})
    mine.close()
    with pytest.raises(backends.PlaceClosed):
        inner.reserve_nowait(RoomRequest([b"k"], slot_bytes(SIZE, Zstd()), "fail")).release()


# --- a replay ---------------------------------------------------------------------------------------------------------


async def test_a_replay_closes_what_it_has_made_when_another_tier_of_it_cannot_be_made() -> None:
    from offload._replay.tiers import open_tiers

    options = ReplayOptions(
        tiers=(
            TierSpec("native", None, math.inf, NATIVE),
            TierSpec("room", None, math.inf, f"{HERE}:Room"),
            TierSpec("bad", None, math.inf, BAD),
        ),
        block_bytes=SIZE,
    )
    with pytest.raises(ReplayError, match="tier bad"):
        async with open_tiers(options, 8):
            raise AssertionError("they are open")
    assert len(made) == 2
