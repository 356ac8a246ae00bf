"""The few system calls that Python 3.11 lacks: namespaces, mounts, and settings of a process (``prctl``)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")
    return result


def unshare(flags: int) -> None:
    """Moves the calling process into new namespaces (``unshare(2)``). Raises ``OSError``, as all here do."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int = CLONE_NEWNET) -> None:
    """Moves the calling thread into the namespace that ``fd`` refers to (``setns(2)``)."""
    _check(_libc.setns(fd, kind), "setns")


def make_mounts_private() -> None:
    """Makes all mounts of this mount namespace private: later mounts in it do not show in any other."""
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")


def bind_mount(source: str, target: str) -> None:
    """Makes ``source`` visible at ``target``, too (``mount --bind``)."""
    result = _libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND, None)
    _check(result, f"mount --bind {source} {target}")


def set_death_signal(signal: int) -> None:
    """Makes the kernel send ``signal`` to this process when its parent dies.

    Call it after the last change of credentials: entering a user namespace clears the setting.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl")


def enter_user_namespace() -> None:
    """Moves the calling process into a new user and network namespace, where it is root (rootless operation).

    The process must be single-threaded. Raises ``OSError`` if the kernel forbids it.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWNET)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {uid} 1"),
        ("gid_map", f"0 {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def new_network_namespace() -> int:
    """Makes an unnamed network namespace and returns a descriptor that keeps it alive.

    The caller stays in its own namespace. The new one vanishes with its last descriptor and process.
    """
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        unshare(CLONE_NEWNET)
        try:
            return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            setns(home)
    finally:
        os.close(home)


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Runs a block of code inside the network namespace that ``namespace`` refers to."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        setns(namespace)
        try:
            yield
        finally:
            setns(home)
    finally:
        os.close(home)


def set_timer_slack(nanoseconds: int) -> None:
    """Sets how much later than asked the kernel may end this thread's sleeps (the default is 50 µs)."""
    _check(_libc.prctl(_PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0), "prctl")


def set_process_name(name: str) -> None:
    """Sets the process's name that ``ps`` and ``top`` show (only its first 15 bytes)."""
    _check(_libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl")
