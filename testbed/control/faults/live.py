"""Faults by hand: the socket of a running testbed, and what ``testbed fault`` does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from nodes import control
from nodes.messages import Question
from testbed.errors import RunError, UserError
from testbed.rundir import OWNER, owner_alive
from testbed.scenario.experiment import KINDS_BY_HAND
from testbed.scenario.limits import MAX_NUMBER
from testbed.scenario.problems import unknown

log = logging.getLogger(__name__)

SOCKET = "fault.sock"

ApplyFault = Callable[[str, int, float], Awaitable[str | None]]
"""Does (kind, server, factor); returns why that does not apply, or ``None``."""


class Fault(Question[str | None], frozen=True):
    """Do ``kind`` to ``server``. Answered with the reason, in one sentence, if it was not done."""

    kind: str
    server: str
    factor: float = 1.0


class FaultSocket:
    """Listens in the run directory, for its owner only, while the testbed is up."""

    def __init__(self, run_dir: Path, names: list[str], apply: ApplyFault) -> None:
        self._path = run_dir / SOCKET
        self._names = names
        self._apply = apply
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
        peer.take({Fault: self._fault})
        self._peers.add(peer)
        try:
            await peer.serve()
        except control.ControlError as error:
            log.warning("the fault socket was told what is no request: %s", error)
        finally:
            self._peers.discard(peer)

    async def _fault(self, fault: Fault) -> str | None:
        if fault.kind not in KINDS_BY_HAND:
            return f"there is no fault {fault.kind[:40]!r}; they are {', '.join(KINDS_BY_HAND)}"
        if fault.server not in self._names:
            return unknown("server", fault.server[:200], self._names)
        if not 1 <= fault.factor <= MAX_NUMBER:
            return f"--factor must be a number from 1 (as fast as at first) to {MAX_NUMBER:g}"
        return await self._apply(fault.kind, self._names.index(fault.server), fault.factor)


def fault_command(
    kind: str, server: str, factor: float | None, run: Path | None
) -> tuple[dict[str, Any], str]:
    """Have the running testbed of the directory ``run`` do ``kind`` to ``server``; returns (JSON, text).

    Without ``run`` it is the only one, or the latest, below ``runs``. Raises ``UserError``.
    """
    checked_factor = check_fault(kind, factor)
    run_dir = _running(run)
    try:
        why_not = asyncio.run(ask_fault(run_dir, kind, server, checked_factor))
    except (OSError, control.ControlError) as error:
        raise RunError(f"the testbed of {run_dir} did not answer: {error}") from error
    if why_not is not None:
        raise UserError(why_not)
    done = {"run": str(run_dir), "kind": kind, "server": server, "factor": factor}
    return done, f"{kind} {server}: done in {run_dir}"


def check_fault(kind: str, factor: float | None) -> float:
    """The factor of a fault of ``kind``. Raises ``UserError`` for a kind or a factor that makes no sense."""
    if kind not in KINDS_BY_HAND:
        raise UserError(unknown("fault", kind, KINDS_BY_HAND))
    if kind == "slow" and factor is None:
        raise UserError("slow needs --factor, for example --factor 4 (1: as fast as at first)")
    if kind != "slow" and factor is not None:
        raise UserError(f"--factor is only for slow, not for {kind}; leave it out")
    return 1.0 if factor is None else factor


async def ask_fault(run_dir: Path, kind: str, server: str, factor: float) -> str | None:
    """Have the running testbed of ``run_dir`` do ``kind`` to ``server``; returns why it did not, or ``None``.

    Raises ``OSError`` or ``ControlError`` if it does not answer.
    """
    peer = await control.connect(run_dir / SOCKET, {})
    serving = asyncio.ensure_future(peer.serve())
    try:
        return await peer.ask(Fault(kind, server, factor))
    finally:
        peer.close()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def _running(run: Path | None) -> Path:
    if run is not None:
        if not (run / OWNER).is_file():
            raise UserError(f"{run} is not a run directory; give that of a running testbed with --run")
        found = [run]
    else:
        owners = sorted(Path("runs").glob(f"*/{OWNER}"), key=lambda path: path.stat().st_mtime)
        found = [owner.parent for owner in owners]
    for run_dir in reversed(found):
        if owner_alive(run_dir):
            if not (run_dir / SOCKET).exists():
                if _keeps_virtual_time(run_dir):
                    raise UserError(
                        f"the testbed of {run_dir} keeps virtual time; faults by hand need --clock real or --hold"
                    )
                raise UserError(f"the testbed of {run_dir} does not serve yet, or no longer: try again")
            return run_dir
    where = f"in {run}" if run is not None else "below runs/"
    raise UserError(
        f"no testbed is running {where}; start one with `testbed up SCENARIO --hold`, or give --run DIR"
    )


def _keeps_virtual_time(run_dir: Path) -> bool:
    try:
        plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it has not got so far
        return False
    return bool(plan["clock"]["name"] == "virtual")
