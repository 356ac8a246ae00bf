"""``testbed fault`` and ``testbed link``: change a running testbed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.control.faults.byhand import Fault, check_fault
from testbed.control.links import in_words, link_change
from testbed.control.live import ask_running
from testbed.errors import UserError


def fault_command(
    kind: str, server: str, factor: float | None, run: Path | None
) -> tuple[dict[str, Any], str]:
    """Carry out a fault in the running testbed of the directory ``run``. Returns (JSON, text).

    Without ``run`` it is the latest below ``runs``. Raises ``UserError``, or ``RunError`` if it does not
    answer.
    """
    run_dir, why_not = ask_running(run, Fault(kind, server, check_fault(kind, factor)))
    if why_not is not None:
        raise UserError(why_not)
    done = {"run": str(run_dir), "kind": kind, "server": server, "factor": factor}
    return done, f"{kind} {server}: done in {run_dir}"


def link_command(
    action: str,
    a: str,
    b: str,
    rtt: str | None,
    rate: str | None,
    loss: str | None,
    run: Path | None,
) -> tuple[dict[str, Any], str]:
    """Change the link between two nodes or sites of the running testbed of ``run``; returns (JSON, text).

    Without ``run`` it is the latest below ``runs``. Raises ``UserError``, or ``RunError`` if it does not
    answer.
    """
    asked = link_change(action, a, b, rtt, rate, loss)
    run_dir, answer = ask_running(run, asked)
    if answer.why_not is not None:
        raise UserError(answer.why_not)
    done = {
        "run": str(run_dir),
        "action": action,
        "link": [a, b],
        "at_s": answer.at_s,
        "n_links": answer.n_links,
    }
    return done, f"{in_words(asked)}, done at {answer.at_s:.3f} s in {run_dir}"
