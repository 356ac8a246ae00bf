"""Finds and connects to the Ray cluster of this machine, and checks that its machines have the same testbed.

Needs the extra ``[ray]``.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._private import worker as ray_worker
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.exceptions import RayError

from testbed.codeversion import code_version
from testbed.errors import UserError

CONNECT_S = 5.0
"""Timeout for a TCP connection to the cluster's head."""


def check_version(theirs: str, address: str) -> None:
    """Raise ``UserError`` unless ``theirs``, the ``code_version`` at ``address``, is this machine's."""
    if theirs != code_version():
        raise UserError(other_version(f"{address} has {theirs}, this machine {code_version()}"))


def other_version(why: str) -> str:
    """Return the message for a machine of the cluster that has another version; ``why`` says which one."""
    return f"the machines of the Ray cluster need the same testbed and Python as this one: {why}"


def _address() -> str:
    """Return HOST:PORT of the cluster's head, from RAY_ADDRESS or from the cluster that this machine is in.

    Checks that something listens there, because Ray itself would try for minutes. Raises ``UserError``.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto"):
        try:
            address = canonicalize_bootstrap_address_or_die("auto")
        except ConnectionError:
            raise UserError(
                "this machine is in no Ray cluster: start one with `ray start --head`, or set RAY_ADDRESS"
            ) from None
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        raise UserError(f"RAY_ADDRESS must be HOST:PORT of a cluster's head, not {address}")
    if not answers(address, CONNECT_S):
        raise UserError(
            f"there is no Ray cluster at {address}: start one with `ray start --head`, or set RAY_ADDRESS to "
            "HOST:PORT of a cluster's head"
        )
    return address


def answers(address: str, timeout_s: float) -> bool:
    """Whether ``address`` (HOST:PORT) accepts a TCP connection within ``timeout_s`` real seconds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, OverflowError):
        return False
    return True


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what native code writes to stderr while the body runs."""
    own = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


@contextmanager
def connected() -> Iterator[str]:
    """Connect this process to the cluster as a driver while the body runs; yields the head's address.

    Ray's messages about its nodes are not printed, because stdout is for the command's result. Raises
    ``UserError`` if there is no cluster or Ray refuses the connection.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors, such as lost nodes, would go to stderr
    address = _address()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _silent_stderr():  # its C++ part says that it found the variable
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"the Ray cluster at {address} cannot be used: {why}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # ray.init has installed another
    before, ray_worker.print_to_stdstream = ray_worker.print_to_stdstream, lambda *_, **__: None
    try:
        yield address
    finally:
        ray.shutdown()
        ray_worker.print_to_stdstream = before
