"""The status page in a real browser: what a person sees and does. Needs Debian's `chromium` and `chromium-driver`."""

from __future__ import annotations

import functools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

import maru
from backends.maru import MaruTier
from backends.memory import MemoryTier
from offload import NO_WAIT, Engine, open_engine
from offload.instruments import StageTimes
from offload.status import EngineStatus, StatusView, serve_status

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="no chromium: apt-get install chromium chromium-driver",
)
SIZE = 1 << 12
MARKUP = "<img src=x onerror=document.title='broken'>"
PATIENCE = 30.0


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):  # in a container, as root
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@asynccontextmanager
async def engine_with_a_page(tmp_path: object) -> AsyncIterator[tuple[str, Engine, trio.Event]]:
    """An engine that has stored four blocks, and has a container of two that waits for an event; and its page."""
    source, times, ready = MemoryTier(1 << 20, SIZE), StageTimes(), trio.Event()
    for number in range(6):
        source.put(b"%d" % number, bytes(SIZE))
    config = maru.ServerConfig(pool_path=str(tmp_path), capacity_bytes="64 MiB")
    async with maru.open_server(config) as server:
        handler = maru.MaruHandler(
            server_url=server.endpoints[0], pool_size="8 MiB", chunk_size_bytes=SIZE, instance_id="engine-0"
        )
        tiers = {MARKUP: MemoryTier(1 << 20, SIZE), "maru": MaruTier(handler)}
        async with open_engine(source, tiers, instruments=[times]) as engine, trio.open_nursery() as nursery:
            await (await engine.store(source.weak([b"%d" % at for at in range(4)]), precondition=NO_WAIT)).wait()
            await engine.drain()
            await engine.store(source.weak([b"4", b"5"]), precondition=ready)
            status = EngineStatus(engine, times, server=server, name="an engine of the tests")
            (address,) = await nursery.start(functools.partial(serve_status, status))
            yield address, engine, ready
            ready.set()
            nursery.cancel_scope.cancel()


async def in_browser(look: Callable[[], object]) -> None:
    """Look at the page in a thread, while the engine and its page go on here."""
    await trio.to_thread.run_sync(look)


def wait_for(browser: webdriver.Chrome, found: Callable[[webdriver.Chrome], object]) -> None:
    WebDriverWait(browser, PATIENCE).until(found)


def text_of(browser: webdriver.Chrome, where: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, where).text


def open_page(browser: webdriver.Chrome, address: str, width: int = 1200) -> None:
    browser.set_window_size(width, 1400)
    browser.get(address)
    wait_for(browser, lambda page: text_of(page, "#connection") == "live")
    wait_for(browser, lambda page: page.find_elements(By.CSS_SELECTOR, "#oldest tr"))


async def test_the_page_shows_what_the_engine_is_and_follows_it(browser: webdriver.Chrome, tmp_path: object) -> None:
    async with engine_with_a_page(tmp_path) as (address, _, ready):

        def look() -> None:
            open_page(browser, address)
            assert browser.title == text_of(browser, "#name") == "an engine of the tests"
            rows = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#tiers tr")]
            assert len(rows) == 2 and rows[1].startswith("maru") and "4" in rows[1] and rows[1].endswith("works")
            assert browser.find_element(By.CSS_SELECTOR, '[data-stage="awaiting"] .count').text == "1"
            assert "its precondition" in text_of(browser, "#oldest")
            wait_for(browser, lambda page: "region" in text_of(page, "#pool"))
            assert "of engine-0" in text_of(browser, "#pool")
            assert not browser.get_log("browser")  # no error, nothing refused

        await in_browser(look)
        ready.set()
        await in_browser(lambda: wait_for(browser, lambda page: text_of(page, "#nothing") == "Nothing is under way."))


async def test_degradations_stand_at_the_top_while_they_last(browser: webdriver.Chrome, tmp_path: object) -> None:
    async with engine_with_a_page(tmp_path) as (_, engine, _), trio.open_nursery() as nursery:
        texts = [f"/kv has 4 KiB left: free some {MARKUP}"]

        class Degraded(EngineStatus):
            def view(self) -> StatusView:
                return attrs.evolve(super().view(), degraded=list(texts))

        (address,) = await nursery.start(functools.partial(serve_status, Degraded(engine, StageTimes())))

        def look() -> None:
            browser.get(address)
            wait_for(browser, lambda page: text_of(page, "#degraded li") == texts[0])
            assert browser.find_element(By.CSS_SELECTOR, "#degraded-section").is_displayed()
            texts.clear()
            wait_for(browser, lambda page: not page.find_element(By.CSS_SELECTOR, "#degraded-section").is_displayed())

        await in_browser(look)
        nursery.cancel_scope.cancel()


async def test_a_name_that_looks_like_markup_is_text(browser: webdriver.Chrome, tmp_path: object) -> None:
    async with engine_with_a_page(tmp_path) as (address, _, _):

        def look() -> None:
            open_page(browser, address)
            assert MARKUP in text_of(browser, "#tiers")
            assert not browser.find_elements(By.CSS_SELECTOR, "#tiers img")

        await in_browser(look)


async def test_a_container_is_explained_with_the_keyboard_alone(browser: webdriver.Chrome, tmp_path: object) -> None:
    async with engine_with_a_page(tmp_path) as (address, _, _):

        def look() -> None:
            open_page(browser, address)
            focused = browser.switch_to.active_element
            for _ in range(5):
                focused.send_keys(Keys.TAB)
                focused = browser.switch_to.active_element
                if focused.text == "Explain":
                    break
            focused.send_keys(Keys.ENTER)
            wait_for(browser, lambda page: "on its way to" in text_of(page, "#answer"))
            browser.switch_to.active_element.send_keys(Keys.ESCAPE)
            wait_for(browser, lambda page: not page.find_element(By.ID, "dialog").is_displayed())

        await in_browser(look)


async def test_any_key_can_be_asked_about(browser: webdriver.Chrome, tmp_path: object) -> None:
    async with engine_with_a_page(tmp_path) as (address, _, _):

        def look() -> None:
            open_page(browser, address)
            browser.find_element(By.ID, "key").send_keys(b"1".hex() + Keys.ENTER)
            wait_for(browser, lambda page: "and maru" in text_of(page, "#answer"))

        await in_browser(look)


@pytest.mark.parametrize("width", [360, 1200])
async def test_nothing_is_wider_than_the_window(browser: webdriver.Chrome, tmp_path: object, width: int) -> None:
    async with engine_with_a_page(tmp_path) as (address, _, _):

        def look() -> None:
            open_page(browser, address, width)
            browser.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True},
            )
            try:
                wide = browser.execute_script("return document.documentElement.scrollWidth")
            finally:
                browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            assert wide <= width

        await in_browser(look)


async def test_a_server_that_is_gone_is_said_so(browser: webdriver.Chrome, tmp_path: object) -> None:
    async with engine_with_a_page(tmp_path) as (address, _, _):
        await in_browser(lambda: open_page(browser, address))
    await in_browser(lambda: wait_for(browser, lambda page: "no connection" in text_of(page, "#connection")))
