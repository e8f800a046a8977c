"""A real headless Chromium, and pages in it that are watched: what they load, what they throw, what a policy refuses."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser a module. Longer would leave Playwright's event loop running under tests that start their own."""
    if CHROMIUM is None:
        pytest.skip("the command chromium is not installed: Debian's package of that name has it")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Watched:
    """A browser context: profiles of their own for tests, and an account of what their pages did."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.context = context
        self.origin = origin
        self.strangers: list[str] = []
        self.faults: list[str] = []
        context.set_default_timeout(PATIENCE_MS)
        context.on("request", self._requested)
        context.on("weberror", lambda error: self.faults.append(str(error.error)))
        context.on("console", self._said)

    def open(self, path: str = "") -> Page:
        """A tab, once it knows how the server is."""
        tab = self.context.new_page()
        tab.goto(self.origin + path)
        tab.wait_for_selector("body[data-server]")
        return tab

    def _requested(self, request: Request) -> None:
        address = urlsplit(request.url)
        if f"{address.scheme}://{address.netloc}" != self.origin and address.scheme != "data":
            self.strangers.append(request.url)

    def _said(self, message: ConsoleMessage) -> None:
        # A status of 400 and more is an error in Chromium's eyes; the page's own words for it are what tests look at.
        is_status = message.text.startswith("Failed to load resource")
        if message.type in ("error", "warning") and not is_status:
            self.faults.append(message.text)


@pytest.fixture
def watch(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Makes watched contexts for an origin; after the test, nothing else was loaded and nothing went wrong in them."""
    made: list[Watched] = []

    def start(origin: str, **options: Any) -> Watched:
        made.append(Watched(browser.new_context(**options), origin))
        return made[-1]

    yield start
    for each in made:
        each.context.close()
    assert [each.strangers for each in made if each.strangers] == []
    assert [each.faults for each in made if each.faults] == []


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: the folder that TORCHTPU_SCREENSHOTS names, to look at them."""
    named = os.environ.get("TORCHTPU_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
