"""The Ray cluster that this machine belongs to: where it is, and whether its machines have the same testbed.

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
"""A head that does not answer within this time is none."""


def check_version(theirs: str, address: str) -> None:
    if theirs != code_version():
        raise UserError(other_version(f"{address} has {theirs}, this machine {code_version()}"))


def other_version(why: str) -> str:
    return f"the machines of the Ray cluster need the same testbed and Python as this one: {why}"


def _address() -> str:
    """Where the cluster is. Something listens there: Ray itself would try for minutes."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto"):
        try:
            address = canonicalize_bootstrap_address_or_die("auto")
        except ConnectionError:
            raise UserError(
                "there is no Ray cluster here: begin one with `ray start --head`, or set RAY_ADDRESS"
            ) from None
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        raise UserError(f"RAY_ADDRESS must be HOST:PORT of a cluster's head, not {address}")
    if not answers(address, CONNECT_S):
        raise UserError(
            f"there is no Ray cluster at {address}: begin one with `ray start --head`, or set RAY_ADDRESS to where it is"
        )
    return address


def answers(address: str, timeout_s: float) -> bool:
    """Whether something listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, OverflowError):
        return False
    return True


@contextmanager
def connected() -> Iterator[str]:
    """This process is a driver of the cluster at that address in the body.

    What Ray says of its nodes is not printed: stdout has answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = _address()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"the Ray cluster at {address} cannot be used: {why}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray has put its own in place
    said, ray_worker.print_to_stdstream = ray_worker.print_to_stdstream, lambda *_, **__: None
    try:
        yield address
    finally:
        ray.shutdown()
        ray_worker.print_to_stdstream = said
