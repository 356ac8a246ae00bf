"""Chooses the network backend: the most faithful one that works here, and why better ones do not."""

from __future__ import annotations

from netem.backend import Backend
from netem.fabric import FabricBackend
from netem.hosts import HostsBackend
from netem.kernel import NetemBackend
from netem.loopback import LoopbackBackend
from netem.spec import NetworkError, NetworkUnavailable

BACKENDS: tuple[type[Backend], ...] = (NetemBackend, FabricBackend, LoopbackBackend)
"""From most to least faithful. ``HostsBackend`` is used only if the user asks for it."""


def choose_backend(wanted: str, sharing: bool = False, joining: bool = False) -> tuple[type[Backend], str]:
    """Returns the backend called ``wanted``, or for ``auto`` the first that works here, and one sentence why.

    ``sharing``: pairs share links, so ``auto`` tries the backends that can emulate this before all others.
    ``joining``: nodes are on several machines, so ``auto`` tries only backends that can join machines.

    Raises ``NetworkUnavailable`` if the wanted backend, or for ``auto`` every backend, does not work on this
    machine, and ``NetworkError`` for an unknown name. Call it from a single-threaded process: it probes in
    forked children.
    """
    kinds: tuple[type[Backend], ...] = (*BACKENDS, HostsBackend)
    by_name = {backend.name: backend for backend in kinds}
    if wanted != "auto":
        if wanted not in by_name:
            raise NetworkError(
                f"there is no network backend {wanted!r}: use one of auto, {', '.join(by_name)}"
            )
        missing = by_name[wanted].missing()
        if missing is not None:
            raise NetworkUnavailable(f"the {wanted} network does not work here: {missing}")
        return by_name[wanted], "asked for"
    reasons: list[str] = []
    for backend in sorted(BACKENDS, key=lambda each: sharing and not each.shares_links):
        if joining and not backend.joins_machines:
            continue
        missing = backend.missing()
        if missing is None:
            if joining:
                reasons.append("nodes are on several machines, which it alone joins")
            if sharing and backend.shares_links:
                reasons.append("pairs share links, which it alone emulates")
            return backend, "; ".join(reasons) or "the most faithful one works here"
        reasons.append(f"no {backend.name} because {missing.partition(':')[0]}, see `testbed doctor`")
    raise NetworkUnavailable("; ".join(reasons))
