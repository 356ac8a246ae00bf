"""TCP's settings inside the namespaces, used by both backends with real TCP (``netem`` and ``fabric``).

The emulated link alone must decide when a message arrives. So a connection here behaves like one
that has carried traffic for long: no slow start for its first messages, none after it was idle, and
buffers that never hold back the largest message of a session.

One limit stays: TCP does not scale the window in SYN packets, so at most 65,535 bytes can follow the
handshake before the first acknowledgement. A message as large as a prompt's therefore takes one more
round trip if it is the first on a connection, but not after any exchange.
"""

from __future__ import annotations

from pathlib import Path

from netem.spec import NetworkError, NetworkSpec, NetworkUnavailable, Windows
from policies.links import HEADER_BYTES

WARM_FLIGHT_BYTES = 868_800
"""What a warm connection sends before it waits for an acknowledgement: 600 segments at MTU 1500. That is
half as much again as the hidden states of a 20-token prompt (573,440 bytes)."""
COLD_FLIGHT_SEGMENTS = 10
"""The kernel's default initial congestion window: what a new connection sends before it waits."""

RECEIVE_WINDOW_BYTES = 12 * 1024**2
"""The receive window in virtual time."""
_COUNTED_RATIO = 0.925173
"""The part of a receive buffer that is its window, as measured on Linux 6.18; half of the buffer before Linux 6.6."""
_SEND_BUFFER_BYTES = 64 * 1024**2
"""The send buffer in virtual time: a third of it is free whatever the receive window and ``UNSENT_BYTES`` let a process write."""
_ENOUGH_BYTES = RECEIVE_WINDOW_BYTES * 3 // 2
"""A congestion window that is larger, also with segments that are partly filled, never holds anything back."""
FILLING_BYTES = RECEIVE_WINDOW_BYTES // 4
"""What a connection must receive until its receive window is whole in virtual time. It begins with half of the buffer, and
each byte that arrives widens it by two."""

_SYSCTL = Path("/proc/sys/net/ipv4")
_MIN_RETRANSMISSION = _SYSCTL / "tcp_rto_min_us"
"""Exists since Linux 6.11; before, a route's ``rto_min`` metric has the same effect."""
_NEVER_S = 60
"""Longer than a run in virtual time may stand still (``testbed.runtime.virtual.stall``)."""
_BUFFER_BYTES = "4096 4194304 16777216"
"""Smallest, initial and largest buffer. Half of the initial one is advertised as receive window."""


def configure_namespace(spec: NetworkSpec) -> None:
    """Applies ``spec.tcp`` to the network namespace that the calling process is in.

    Raises ``NetworkError`` if the kernel refuses a setting, such as the congestion control.
    """
    _choose_congestion_control(spec.tcp.congestion_control)
    settings = {
        "tcp_slow_start_after_idle": str(int(spec.tcp.slow_start_after_idle)),
        "tcp_no_metrics_save": "1",  # else later connections would inherit the low ssthresh after a loss
        "tcp_rmem": _BUFFER_BYTES,
        "tcp_wmem": _BUFFER_BYTES,
    }
    if spec.is_virtual:
        # Nothing is ever lost, and real round-trip times mean nothing here: TCP must never retransmit.
        settings |= {"tcp_early_retrans": "0", "tcp_recovery": "0"}
        # Near the congestion window's end, TCP holds a message back for an acknowledgement that it expects soon. It
        # judges that by real time, so such a message would sometimes wait for most of a round trip of virtual time.
        settings["tcp_tso_win_divisor"] = "0"
        # TCP sends smaller bursts where round trips are long, which it measures in real time. A burst has as many
        # acknowledgements and partly filled segments, so that the congestion window would grow by a busy machine's time.
        settings["tcp_min_tso_segs"] = "255"
        # Nor do receive buffers grow by round trips in real time.
        buffer_bytes = round(RECEIVE_WINDOW_BYTES / _COUNTED_RATIO)
        settings |= {"tcp_moderate_rcvbuf": "0", "tcp_rmem": f"4096 {buffer_bytes} {buffer_bytes}"}
        # A process is told that it may write on only while a third of the send buffer is free, which the model of a
        # connection (netem.flows) does not have.
        settings["tcp_wmem"] = f"4096 {_SEND_BUFFER_BYTES} {_SEND_BUFFER_BYTES}"
        if _MIN_RETRANSMISSION.exists():
            settings[_MIN_RETRANSMISSION.name] = str(_NEVER_S * 1_000_000)
    for name, value in settings.items():
        try:
            (_SYSCTL / name).write_text(value, encoding="ascii")
        except OSError as error:
            raise NetworkError(f"cannot set {_SYSCTL / name} in a namespace: {error.strerror}") from error
    silence_ipv6()


def route_options(spec: NetworkSpec, window_bytes: int | None = None) -> dict[str, dict[str, int]]:
    """Returns keyword arguments for pyroute2's ``IPRoute.route("add", ...)`` in a node's namespace.

    A warm connection starts with a congestion window and a receive window of ``WARM_FLIGHT_BYTES``,
    rounded up to segments; others start with the kernel's defaults. With ``window_bytes`` the congestion window starts
    with that, and the receive window with all that the kernel gives. In virtual time
    acknowledgements are sent at once, and nothing is retransmitted before ``_NEVER_S``.
    """
    metrics: dict[str, int] = {}
    mss = spec.mtu - HEADER_BYTES
    if window_bytes is not None:
        metrics |= {"initcwnd": -(-window_bytes // mss), "initrwnd": -(-RECEIVE_WINDOW_BYTES // mss)}
    elif spec.tcp.warm:
        segments = -(-WARM_FLIGHT_BYTES // mss)
        metrics |= {"initcwnd": segments, "initrwnd": segments}
    if spec.is_virtual:
        metrics["quickack"] = 1  # TCP never delays an acknowledgement by a timer
        if not _MIN_RETRANSMISSION.exists():
            metrics["rto_min"] = _NEVER_S * 1000
    return {"metrics": metrics} if metrics else {}


def windows_of_nodes(windows: Windows) -> dict[str, int] | None:
    """Returns the congestion window in bytes of all that a node sends, by node; ``None`` if that is not one for each.

    Windows that are all larger than ``_ENOUGH_BYTES`` have the same effect, and count as one.
    """
    found: dict[str, int] = {}
    for nodes, sizes in windows.items():
        for node, n_bytes in zip(nodes, (min(size, _ENOUGH_BYTES) for size in sizes), strict=True):
            if found.setdefault(node, n_bytes) != n_bytes:
                return None
    return found


def _choose_congestion_control(name: str) -> None:
    path = _SYSCTL / "tcp_congestion_control"
    try:
        path.write_text(name, encoding="ascii")
    except OSError as error:
        allowed = _SYSCTL / "tcp_allowed_congestion_control"
        raise NetworkUnavailable(
            f"congestion control {name!r} cannot be chosen in a namespace ({error.strerror}): use one of "
            f"{', '.join(allowed.read_text(encoding='ascii').split())}, or add it to {allowed} as root"
        ) from error


def silence_ipv6() -> None:
    """Disables IPv6, to keep its router solicitations and duplicate-address probes off the emulated links."""
    for interface in ("all", "default"):
        path = Path("/proc/sys/net/ipv6/conf") / interface / "disable_ipv6"
        if path.exists():
            path.write_text("1", encoding="ascii")
