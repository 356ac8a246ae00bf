"""Work in a forked process, as where it enters a network namespace, and echoes inside one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_DEADLINE_S = 150


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Ends this process, a forked child, after the body: with the status that an interpreter would have."""
    status = 1
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def in_child(work: Callable[[], Any]) -> Any:
    """Runs ``work`` in a forked process; answers its result, fails with its traceback."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.alarm(_DEADLINE_S)
        try:
            answer = {"value": work()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert text, "the child process died or ran out of time"
    answer = json.loads(text)
    assert "error" not in answer, answer["error"]
    return answer["value"]


def echo_s(connection: socket.socket, payload: bytes) -> float:
    """Seconds until ``payload`` has come back, echoed when it has arrived whole."""
    started_at = time.monotonic()
    connection.sendall(len(payload).to_bytes(8, "big") + payload)
    back = bytearray()
    while len(back) < len(payload):
        part = connection.recv(1 << 20)
        assert part, "the echo server closed the connection"
        back += part
    took_s = time.monotonic() - started_at
    assert bytes(back) == payload
    return took_s


def best_s(measured_s: Callable[[], float], below_s: float) -> float:
    """The smallest of up to 100 measurements; the first below ``below_s`` ends them.

    On a machine that does other things most may be late, but what is always late has no good one.
    """
    best = measured_s()
    for _ in range(99):
        if best < below_s:
            break
        best = min(best, measured_s())
    return best
