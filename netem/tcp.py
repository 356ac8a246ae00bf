"""TCP inside the namespaces: what both kernel backends (``netem`` and ``fabric``) set.

The emulated link alone must decide when a message arrives, so a connection here behaves like one
that has carried traffic for long: no slow start on its first messages, none after it was idle, and
buffers that never hold back the largest message of a session.

One limit stays: TCP does not scale the window in SYN packets, so at most 65,535 bytes can follow the
handshake before the first acknowledgement. A prompt-sized message that is the very first thing on a
connection therefore costs one more round trip; after any exchange it does not.
"""

from __future__ import annotations

from pathlib import Path

from netem.spec import HEADER_BYTES, NetworkError, NetworkSpec

WARM_FLIGHT_BYTES = 868_800
"""What a warm connection sends without waiting: 600 segments at MTU 1500, half as much again as a
20-token prompt's hidden states (573,440 bytes)."""
COLD_FLIGHT_SEGMENTS = 10
"""What the kernel lets a new connection send without waiting."""

_SYSCTL = Path("/proc/sys/net/ipv4")
_MIN_RETRANSMISSION = _SYSCTL / "tcp_rto_min_us"
"""Since Linux 6.11; a route's metric says the same."""
_NEVER_S = 60
"""Longer than a run in virtual time stands still for (``testbed.runtime.virtual.stall``)."""
_BUFFER_BYTES = "4096 4194304 16777216"
"""Smallest, initial and largest buffer: half of the initial one is offered as window."""


def configure_namespace(spec: NetworkSpec) -> None:
    """Set TCP of the network namespace that the calling process is in, as ``spec.tcp`` says.

    Raises ``NetworkError`` when the kernel does not let a namespace choose that congestion control.
    """
    _choose_congestion_control(spec.tcp.congestion_control)
    settings = {
        "tcp_slow_start_after_idle": str(int(spec.tcp.slow_start_after_idle)),
        "tcp_no_metrics_save": "1",  # else one loss would leave a low ssthresh for later connections
        "tcp_rmem": _BUFFER_BYTES,
        "tcp_wmem": _BUFFER_BYTES,
    }
    if spec.is_virtual:
        # Nothing is ever lost, and the time that an acknowledgement takes says nothing: no retransmissions.
        settings |= {"tcp_early_retrans": "0", "tcp_recovery": "0"}
        # Near the congestion window's end, TCP holds a message back for an acknowledgement that it expects soon. It
        # judges that by real time, so such a message would sometimes wait for most of a round trip of virtual time.
        settings["tcp_tso_win_divisor"] = "0"
        if _MIN_RETRANSMISSION.exists():
            settings[_MIN_RETRANSMISSION.name] = str(_NEVER_S * 1_000_000)
    for name, value in settings.items():
        try:
            (_SYSCTL / name).write_text(value, encoding="ascii")
        except OSError as error:
            raise NetworkError(f"cannot set {_SYSCTL / name} in a namespace: {error.strerror}") from error
    silence_ipv6()


def route_options(spec: NetworkSpec) -> dict[str, dict[str, int]]:
    """Keyword arguments for pyroute2's ``IPRoute.route("add", ...)`` in a node's namespace.

    A warm connection starts with a congestion window and a receive window of
    ``WARM_FLIGHT_BYTES`` (in segments); otherwise the kernel's defaults hold and nothing is added.
    """
    metrics: dict[str, int] = {}
    if spec.tcp.warm:
        segments = -(-WARM_FLIGHT_BYTES // (spec.mtu - HEADER_BYTES))
        metrics |= {"initcwnd": segments, "initrwnd": segments}
    if spec.is_virtual:
        metrics["quickack"] = 1  # no acknowledgement waits for a timer
        if not _MIN_RETRANSMISSION.exists():
            metrics["rto_min"] = _NEVER_S * 1000
    return {"metrics": metrics} if metrics else {}


def _choose_congestion_control(name: str) -> None:
    path = _SYSCTL / "tcp_congestion_control"
    try:
        path.write_text(name, encoding="ascii")
    except OSError as error:
        allowed = _SYSCTL / "tcp_allowed_congestion_control"
        raise NetworkError(
            f"congestion control {name!r} cannot be chosen in a namespace ({error.strerror}): take one of "
            f"{allowed.read_text(encoding='ascii').split()}, or have root add it to {allowed}"
        ) from error


def silence_ipv6() -> None:
    """Keep router solicitations and duplicate-address probes off the emulated links."""
    for interface in ("all", "default"):
        path = Path("/proc/sys/net/ipv6/conf") / interface / "disable_ipv6"
        if path.exists():
            path.write_text("1", encoding="ascii")
