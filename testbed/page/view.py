"""``testbed view``: serves the page of a run until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import html
import secrets
import signal
import socket
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed.errors import UserError
from testbed.page.feed import Feed
from testbed.page.others import read_others
from testbed.page.serve import PageServer, address_of, bind
from testbed.rundir import LEADERBOARD, OWNER, STUDY_PAGE, not_a_run, scratch

DEFAULT_PORT = 8765
_TEXT_BROWSERS = ("www-browser", "lynx", "w3m", "links", "elinks")
"""Browsers that are not opened: they would run in the terminal, and cannot show the page."""


def new_token() -> str:
    """Return a new secret for a page."""
    return secrets.token_urlsafe(18)


def view_command(
    run_dir: Path, others: Sequence[Path], port: int | None, browser: bool, say: Callable[[str], None]
) -> None:
    """Serve the page of ``run_dir`` until SIGINT or SIGTERM, or open a leaderboard's page. Raises ``UserError``.

    Charts show the interval of the mean over this run and ``others``. ``port`` None: ``DEFAULT_PORT``, or any
    free one if that is taken. ``browser``: open the page in this machine's browser. ``say`` prints the page's
    address.
    """
    if (run_dir / LEADERBOARD).is_file() and not others:
        say((run_dir / STUDY_PAGE).resolve().as_uri())
        if browser:
            _open((run_dir / STUDY_PAGE).resolve().as_uri())
        return
    for folder in (run_dir, *others):
        check_run_dir(folder)
    feed = Feed(run_dir.resolve())
    feed.open()
    feed.others = read_others(run_dir, others)
    listener = bind_somewhere(port)
    token = new_token()
    url = address_of(listener, token)
    with _shown(url) if browser else contextlib.nullcontext():
        serve_until_signalled(feed, listener, token, (signal.SIGINT, signal.SIGTERM), lambda: say(url))


def check_run_dir(run_dir: Path) -> None:
    """Raise ``UserError`` unless ``run_dir`` is a run directory, which may have only just begun."""
    if not any((run_dir / name).is_file() for name in (OWNER, "plan.json")):
        raise not_a_run(run_dir)


def bind_somewhere(port: int | None) -> socket.socket:
    """Listen on ``port``; None: on ``DEFAULT_PORT``, or if it is taken on any. Raises ``UserError``."""
    if port is not None:
        return bind(port)
    with contextlib.suppress(UserError):
        return bind(DEFAULT_PORT)
    return bind(0)


def serve_until_signalled(
    feed: Feed,
    listener: socket.socket,
    token: str,
    signals: tuple[signal.Signals, ...],
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve ``feed`` on ``listener`` until one of ``signals``; calls ``ready`` once these are handled."""

    async def serve() -> None:
        until = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, until.set)
        ready()
        await PageServer(feed, token).serve(listener, until)

    asyncio.run(serve())


@contextmanager
def _shown(url: str) -> Iterator[None]:
    """Open ``url`` in this machine's browser, if there is one, while the body runs.

    The browser gets the path of a file that only this user can read, and that redirects to ``url``. Other
    users could read the url, and so the page's secret, in the arguments of the browser's process.
    """
    with scratch("page") as folder:
        leading = folder / "page.html"
        place = html.escape(url)
        leading.write_text(
            f'<!doctype html><meta http-equiv=refresh content="0; url={place}">', encoding="utf-8"
        )
        _open(leading.as_uri())
        yield


def _open(url: str) -> None:
    with contextlib.suppress(webbrowser.Error):  # no browser; the address is printed, too
        if getattr(webbrowser.get(), "name", "") not in _TEXT_BROWSERS:
            webbrowser.open(url)
