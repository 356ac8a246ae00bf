"""The page in a real browser, of runs that are made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import chromium
from tests.support.runs import MEMORY, Testbed, wait_until
from tests.system.conftest import fabric, testbed

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Error, Page, ViewportSize

__all__ = ["fabric", "testbed"]

SCREEN: ViewportSize = {"width": 1280, "height": 900}
CHURN = ("churn", *MEMORY, "--set", "workload.n_requests=12", "--set", "workload.n_output_tokens=32")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Playwright keeps an event loop running: no test of another module may meet it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """The command, for runs and servers that all tests here share."""
    testbed = Testbed(tmp_path_factory.mktemp("browser"))
    yield testbed
    testbed.close()


@pytest.fixture(scope="session")
def churned(command: Testbed) -> Path:
    """A finished run in which servers died and sessions recovered."""
    return command.up(*CHURN).run_dir


@pytest.fixture(scope="session")
def served(command: Testbed, churned: Path) -> str:
    """The address of its page."""
    viewing = command.start("view", str(churned), "--port", "0", "--no-browser")
    return str(wait_until(lambda: viewing.stdout.strip(), "the page's address"))


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Page:
    """The one tab in which all tests look at their pages: a new one costs as much as what it shows."""
    return browser.new_context(viewport=SCREEN, reduced_motion="reduce").new_page()


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    """The tab. What a page says in its console, and errors of its scripts, fail the test."""
    problems: list[str] = []

    def note_error(error: Error) -> None:
        problems.append(str(error))

    def note_message(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(message.text)

    tab.on("pageerror", note_error)
    tab.on("console", note_message)
    yield tab
    tab.remove_listener("pageerror", note_error)
    tab.remove_listener("console", note_message)
    tab.set_viewport_size(SCREEN)
    tab.emulate_media(color_scheme=None)
    assert [text for text in problems if "ERR_CONNECTION" not in text and "ERR_INCOMPLETE" not in text] == []


@pytest.fixture
def shown(page: Page, served: str, request: pytest.FixtureRequest) -> Page:
    """The page of the finished run. It is loaded once for tests in a row that look at it, unless one fails; no dialog is open."""
    if not page.url.startswith(served.partition("#")[0]) or request.session.testsfailed:
        page.goto("about:blank")
        page.goto(served)
    page.evaluate("document.querySelectorAll('dialog[open]').forEach((dialog) => dialog.close())")
    return page
