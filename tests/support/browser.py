"""A real browser for tests of the page: Debian's chromium, driven by playwright.

A test module calls ``need_browser`` before it imports playwright.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

from tests.support.runs import require


def chromium() -> str | None:
    """Where the browser is: ``TESTBED_CHROMIUM``, or what is on the path."""
    return os.environ.get("TESTBED_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def need_browser() -> None:
    """Skips the module, by name, where there is no browser; fails where there has to be."""
    missing = None
    if chromium() is None:
        missing = "there is no chromium"
    elif importlib.util.find_spec("playwright") is None:
        missing = "playwright is not installed"
    require("browser", missing)
