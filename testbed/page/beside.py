"""``testbed up --page``: serves the page of a run in a process beside it, which ends with the run.

The address is bound here, before the run begins, so that a port that is taken does not end a run. The process
inherits the socket, and gets the page's token in its environment, which other users cannot read.
``python -m testbed.page.beside`` is that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.page.feed import Feed
from testbed.page.serve import address_of, bind
from testbed.page.view import new_token, serve_until_signalled
from testbed.rundir import PAGE, marks, process_start, replacing

_TOKEN_VARIABLE = "TESTBED_PAGE_TOKEN"
_END_TIMEOUT_S = 5.0


def bind_page(port: int | None) -> socket.socket | None:
    """Bind the port of ``--page``, or return None if it is None. Raises ``UserError``."""
    return None if port is None else bind(port)


@contextmanager
def page_beside(
    run_dir: Path, listener: socket.socket | None, announce: Callable[[str], None]
) -> Iterator[None]:
    """Serve the page of ``run_dir`` on ``listener`` while the body runs; without a listener, do nothing.

    Announces the address, and writes it to ``page.json``, which only this user can read, while the body runs.
    """
    if listener is None:
        yield
        return
    token = new_token()
    with listener, open(run_dir / "logs" / "page.log", "ab") as log:
        url = address_of(listener, token)
        number = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "testbed.page.beside", str(run_dir), str(number), str(os.getpid())],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **marks(run_dir), _TOKEN_VARIABLE: token, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        _write_private(
            run_dir / PAGE, {"url": url, "pid": process.pid, "started": process_start(process.pid)}
        )
        announce(f"page {url}")
        yield
    finally:
        _end(process)
        with contextlib.suppress(OSError):  # the directory of a run that did not begin is removed
            (run_dir / PAGE).unlink(missing_ok=True)


def _write_private(path: Path, value: dict[str, object]) -> None:
    """Write ``value`` as JSON to a file that only this user can read."""
    with replacing(path) as temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.write("\n")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(run_dir: Path, descriptor: int, owner: int) -> None:
    """Serve the page of ``run_dir`` on the inherited socket ``descriptor``.

    Ends on SIGTERM or SIGHUP, or when the process ``owner``, its parent, ends.
    """
    if sys.platform == "linux":
        from netem.syscalls import set_death_signal

        set_death_signal(signal.SIGTERM)
    if os.getppid() != owner:  # it has ended already
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    feed = Feed(run_dir)
    serve_until_signalled(
        feed,
        socket.socket(fileno=descriptor),
        os.environ.pop(_TOKEN_VARIABLE),
        (signal.SIGTERM, signal.SIGHUP),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
