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
    from playwright.sync_api import Browser, Page

__all__ = ["fabric", "testbed"]

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


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page; what it says in its console, and errors of its scripts, fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert [text for text in problems if "ERR_CONNECTION" not in text and "ERR_INCOMPLETE" not in text] == []
