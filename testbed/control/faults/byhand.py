"""Faults by hand: what ``testbed fault`` asks of a running testbed, and what that does then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from nodes.messages import Question
from testbed.errors import UserError
from testbed.experiments.limits import MAX_NUMBER
from testbed.experiments.problems import unknown
from testbed.faultkinds import KINDS, any_of

ApplyFault = Callable[[str, int, float], Awaitable[str | None]]
"""Carries out (kind, server, factor). Returns the reason if that was not possible, else ``None``."""


class Fault(Question[str | None], frozen=True):
    """Carry out a fault of ``kind`` on ``server``.

    The answer is the reason, in one sentence, if it was not done.
    """

    kind: str
    server: str
    factor: float = 1.0


async def fault_by_hand(fault: Fault, names: Sequence[str], apply: ApplyFault) -> str | None:
    """Carry out a fault by ``apply``. Returns the reason if it was not done, else ``None``.

    ``names`` are the servers' names.
    """
    if fault.kind not in KINDS:
        return f"unknown fault {fault.kind[:40]!r}; known faults: {', '.join(KINDS)}"
    if fault.server not in names:
        return unknown("server", fault.server[:200], names)
    if not 1 <= fault.factor <= MAX_NUMBER:
        return f"--factor must be a number from 1 (as fast as at first) to {MAX_NUMBER:g}"
    return await apply(fault.kind, names.index(fault.server), fault.factor)


def check_fault(kind: str, factor: float | None) -> float:
    """Returns the factor of a fault of ``kind``.

    Raises ``UserError`` for an unknown kind or a wrong factor.
    """
    if kind not in KINDS:
        raise UserError(unknown("fault", kind, KINDS))
    has_factor = KINDS[kind].has_factor
    if has_factor and factor is None:
        raise UserError(f"{kind} needs --factor, for example --factor 4 (1: as fast as at first)")
    if not has_factor and factor is not None:
        with_factor = any_of(name for name, each in KINDS.items() if each.has_factor)
        raise UserError(f"--factor is only for {with_factor}, not for {kind}; leave it out")
    return 1.0 if factor is None else factor
