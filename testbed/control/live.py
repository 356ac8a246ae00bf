"""The socket of a running testbed for faults and links by hand, and how commands find it and use it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from pathlib import Path

from nodes import control
from nodes.messages import A, Question
from testbed.errors import RunError, UserError
from testbed.rundir import OWNER, owner_alive

log = logging.getLogger(__name__)

SOCKET = "live.sock"


class LiveSocket:
    """A socket in the run directory, for its owner only. ``handlers`` carry out the questions sent to it."""

    def __init__(self, run_dir: Path, handlers: control.Handlers) -> None:
        self._path = run_dir / SOCKET
        self._handlers = handlers
        self._listener: control.Listener | None = None
        self._peers: set[control.Peer] = set()

    async def open(self) -> None:
        self._listener = await control.listen(self._path, self._accept)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
        for peer in self._peers:
            peer.close()

    async def _accept(self, peer: control.Peer) -> None:
        peer.take(self._handlers)
        self._peers.add(peer)
        try:
            await peer.serve()
        except control.ControlError as error:
            log.warning("the testbed's socket received an invalid request: %s", error)
        finally:
            self._peers.discard(peer)


def ask_running(run: Path | None, question: Question[A]) -> tuple[Path, A]:
    """Send ``question`` to the running testbed of ``run`` (see ``running_testbed``).

    Returns its directory and its answer. Raises ``UserError`` if there is none that accepts questions,
    ``RunError`` if it does not answer.
    """
    run_dir = running_testbed(run)
    if not (run_dir / SOCKET).exists():
        if keeps_virtual_time(run_dir):
            raise UserError(
                f"the testbed of {run_dir} keeps virtual time; changes by hand need --clock real or --hold"
            )
        raise UserError(f"the testbed of {run_dir} does not serve yet, or no longer: try again")
    try:
        return run_dir, asyncio.run(ask(run_dir, question))
    except (OSError, control.ControlError) as error:
        raise RunError(f"the testbed of {run_dir} did not answer: {error}") from error


async def ask(run_dir: Path, question: Question[A]) -> A:
    """Send ``question`` to the testbed of ``run_dir`` and return its answer.

    Raises ``OSError``, ``ControlError``.
    """
    peer = await control.connect(run_dir / SOCKET, {})
    serving = asyncio.ensure_future(peer.serve())
    try:
        return await peer.ask(question)
    finally:
        peer.close()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def running_testbed(run: Path | None) -> Path:
    """Returns ``run`` if its testbed is running; without ``run``, the latest running one below ``runs``.

    Raises ``UserError`` if there is none.
    """
    if run is not None:
        if not (run / OWNER).is_file():
            raise UserError(f"{run} is not a run directory; give that of a running testbed with --run")
        found = [run]
    else:
        owners = sorted(Path("runs").glob(f"*/{OWNER}"), key=lambda path: path.stat().st_mtime)
        found = [owner.parent for owner in owners]
    for run_dir in reversed(found):
        if owner_alive(run_dir):
            return run_dir
    where = f"in {run}" if run is not None else "below runs/"
    raise UserError(
        f"no testbed is running {where}; start one with `testbed up SCENARIO --hold`, or give --run DIR"
    )


def keeps_virtual_time(run_dir: Path) -> bool:
    """Returns whether the testbed of ``run_dir`` keeps virtual time; False before it has written its plan."""
    try:
        plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(plan["clock"]["name"] == "virtual")
