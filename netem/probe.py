"""Tests what this machine and user can do, by trying it in a forked child.

Every probe returns ``None`` if the thing works, else one sentence: what is missing and how to get it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem.syscalls import CLONE_NEWNET, enter_user_namespace, unshare
from netem.tun import open_tun


def try_in_child(attempt: Callable[[], str | None]) -> str | None:
    """Runs ``attempt`` in a forked child and returns its result; an exception's text becomes the result.

    The child may change its own namespaces: they end with it.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            answer = attempt() or ""
        except OSError as error:
            answer = str(error) or type(error).__name__
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text or None


def become_network_admin() -> None:
    """Enters a new network namespace as root; without root, in a new user namespace where this user is root.

    Raises ``OSError`` if neither works. The process must be single-threaded.
    """
    try:
        unshare(CLONE_NEWNET)
    except PermissionError:
        enter_user_namespace()


def probe_namespaces() -> str | None:
    """Probes whether network namespaces can be made, as root or in an unprivileged user namespace."""

    def attempt() -> str | None:
        become_network_admin()
        return None

    error = try_in_child(attempt)
    if error is None:
        return None
    return (
        f"network namespaces cannot be made ({error}): run as root, or allow unprivileged user "
        "namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
    )


def probe_rootless() -> str | None:
    """Probes whether an unprivileged user can be root in a user namespace."""

    def attempt() -> str | None:
        enter_user_namespace()
        return None

    error = try_in_child(attempt)
    if error is None:
        return None
    return (
        f"unprivileged user namespaces are not allowed ({error}): sysctl kernel.unprivileged_userns_clone=1, "
        "user.max_user_namespaces=10000, kernel.apparmor_restrict_unprivileged_userns=0"
    )


def probe_tun() -> str | None:
    """Probes whether a TUN device with offloads can be made in a new namespace."""
    missing = probe_namespaces()
    if missing is not None:
        return missing
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun does not exist: modprobe tun (or give the container --device /dev/net/tun)"

    def attempt() -> str | None:
        become_network_admin()
        os.close(open_tun("probe0"))
        return None

    error = try_in_child(attempt)
    if error is None:
        return None
    return f"a TUN device cannot be made ({error}): let this user read and write /dev/net/tun (chmod 666 /dev/net/tun)"


def probe_qdisc(kind: str) -> str | None:
    """Probes whether a queueing discipline of that kind (``htb``, ``netem``) works in a new namespace."""
    missing = probe_namespaces()
    if missing is not None:
        return missing

    def attempt() -> str | None:
        become_network_admin()
        options = {"netem": {"delay": 1000}, "htb": {"default": 1}}.get(kind, {})
        with IPRoute() as ip:
            try:
                ip.tc("add", kind, ip.link_lookup(ifname="lo")[0], "1:", **options)
            except NetlinkError as error:
                if error.code == errno.ENOENT:
                    return (
                        f"sch_{kind} is not in this kernel: modprobe sch_{kind}, or install its extra modules"
                    )
                return f"sch_{kind}: {error}"
        return None

    return try_in_child(attempt)
