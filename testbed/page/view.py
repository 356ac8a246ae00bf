"""``testbed view``: serves the page of a run until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import html
import secrets
import signal
import socket
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed.errors import UserError
from testbed.page.feed import Feed
from testbed.page.others import read_others
from testbed.page.serve import PageServer, address_of, bind
from testbed.rundir import OWNER

DEFAULT_PORT = 8765
_TEXT_BROWSERS = ("www-browser", "lynx", "w3m", "links", "elinks")
"""They would take the terminal, and cannot show the page."""


def new_token() -> str:
    """A page's secret."""
    return secrets.token_urlsafe(18)


def view_command(
    run_dir: Path, others: Sequence[Path], port: int | None, browser: bool, say: Callable[[str], None]
) -> None:
    """Serve the page of ``run_dir`` until SIGINT or SIGTERM. Raises ``UserError``.

    Charts show the interval of the mean over it and ``others``. Without ``port`` it is the usual one, or any if that is taken.
    """
    for folder in (run_dir, *others):
        check_run_dir(folder)
    feed = Feed(run_dir.resolve(), read_others(run_dir, others))
    feed.open()
    listener = bind_somewhere(port)
    token = new_token()
    url = address_of(listener, token)
    with _shown(url) if browser else contextlib.nullcontext():
        serve_until_signalled(feed, listener, token, (signal.SIGINT, signal.SIGTERM), lambda: say(url))


def check_run_dir(run_dir: Path) -> None:
    """Raises ``UserError`` unless ``run_dir`` is a run directory, perhaps one that has only begun."""
    if not any((run_dir / name).is_file() for name in (OWNER, "plan.json")):
        raise UserError(
            f"{run_dir} is not a run directory (no plan.json in it); give the folder that `testbed up` or "
            "`testbed simulate --out` has written"
        )


def bind_somewhere(port: int | None) -> socket.socket:
    """A listener on ``port``, or without one on the usual port if it is free. Raises ``UserError``."""
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
    """Serve ``feed`` on ``listener`` until one of ``signals`` comes; ``ready`` is called once they may."""

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
    """Show ``url`` in this machine's browser, if there is one; the body runs meanwhile.

    The browser is given a file of this user's alone that leads there: who else is on this machine can read the
    arguments of its processes, and so the page's secret.
    """
    with tempfile.TemporaryDirectory(prefix="testbed-page-") as folder:
        leading = Path(folder) / "page.html"
        place = html.escape(url)
        leading.write_text(
            f'<!doctype html><meta http-equiv=refresh content="0; url={place}">', encoding="utf-8"
        )
        with contextlib.suppress(webbrowser.Error):  # there is none: the address is printed anyway
            if getattr(webbrowser.get(), "name", "") not in _TEXT_BROWSERS:
                webbrowser.open(leading.as_uri())
        yield
