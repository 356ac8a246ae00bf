"""Runs the parts one after another, each in a process of its own and within its share of the time.

Damage that a part does (device memory that is not freed, a broken context, a limit that stays set) thus ends
with its process, and a part can be stopped from outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.rundir import write_json

SHARES = {
    "machine": 10,
    "tests": 70,
    "correctness": 120,
    "streams": 75,
    "graphs": 110,
    "steps": 80,
    "models": 380,
    "batches": 260,
    "calibration": 200,
    "serving": 220,
    "cluster": 180,
    "endpoint": 100,
}
"""The parts in their order, and their shares of the time: about the seconds that each needs at full size on an H100
(those of ``correctness``, ``graphs``, ``steps``, ``models``, ``batches`` and ``serving`` are partly guessed).

Time that a part does not use goes to later ones.
"""
_LEAST_S = 15.0
"""The least time of a part, since imports alone take seconds."""
_FIRST_LEAST_S = 90.0
"""The least time of the first part, which reads the libraries from disk for the first time."""
_STOP_S = 10.0
"""How long a part that is out of time may take to stop."""
_ERROR_LINES = 3


@dataclass(frozen=True)
class Options:
    device: str
    is_small: bool
    folder: Path
    minutes: float
    parts: tuple[str, ...] = tuple(SHARES)
    archive: Path | None = None
    """Where all results are packed into one file, after each part."""


def pack(folder: Path, archive: Path) -> None:
    """Writes all files of ``folder`` but weights to the gzipped tar file ``archive``, which is whole at any moment."""
    partial = archive.with_name(f".{archive.name}.partial")
    with tarfile.open(partial, "w:gz") as tar:
        tar.add(
            folder, folder.name, filter=lambda entry: None if entry.name.endswith(".safetensors") else entry
        )
    partial.replace(archive)


def run_parts(options: Options, command: Sequence[str]) -> dict[str, Any]:
    """Runs all parts. Returns the content of ``results.json``, which is written after each part.

    ``command`` starts the script; ``--part NAME`` and other options are appended. A part's ``status`` is
    ``ok``, ``wrong`` (it ran, but a result is wrong), ``failed`` (it broke), or ``not reached`` (it had no time, or
    too little: it has what was found until then). After an interruption the other parts are ``not reached``, and
    ``is_cut`` is true.
    """
    ends_at_s = time.monotonic() + 60 * options.minutes
    answer: dict[str, Any] = {
        "device": options.device,
        "size": "small" if options.is_small else "full",
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {},
        "parts": {},
        "is_cut": False,
    }
    todo = list(options.parts)
    while todo:
        left_s = max(0.0, ends_at_s - time.monotonic())
        share = SHARES[todo[0]] / sum(SHARES[name] for name in todo)
        name = todo.pop(0)
        allowed_s = max(_LEAST_S if answer["parts"] else _FIRST_LEAST_S, share * left_s)
        if answer["is_cut"] or (answer["parts"] and left_s < _LEAST_S):
            part = _not_begun(name, "the command was cut" if answer["is_cut"] else "no time was left for it")
        else:
            print(f"{name}: at most {allowed_s:.0f} s", file=sys.stderr, flush=True)
            part = _run_part(name, options, command, allowed_s)
            answer["is_cut"] = part.pop("is_cut")
        found = part.pop("record")
        answer["parts"][name] = part
        if name == "machine":
            answer["machine"] = {
                k: v for k, v in found.items() if k not in ("part", "findings", "failures", "unreached")
            }
            if part["status"] == "failed":  # the device cannot be used, so all other parts would fail, too
                todo = []
        statuses = {one["status"] for one in answer["parts"].values()}
        answer["status"] = (
            "failed" if statuses & {"failed", "wrong"} else "ok" if statuses == {"ok"} else "not reached"
        )
        write_json(options.folder / "results.json", answer)
        if options.archive is not None:
            pack(options.folder, options.archive)
    return answer


def _run_part(name: str, options: Options, command: Sequence[str], allowed_s: float) -> dict[str, Any]:
    began_at_s = time.monotonic()
    arguments = [*command, "--part", name, "--device", options.device, "--out", str(options.folder)]
    arguments += ["--size", "small" if options.is_small else "full", "--seconds", f"{allowed_s:.1f}"]
    log_path = options.folder / "logs" / f"{name}.log"
    is_cut = False
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=allowed_s + _STOP_S)
        except subprocess.TimeoutExpired:
            code = None
        except KeyboardInterrupt:
            code, is_cut = None, True
        finally:
            _end(process)
    record = _read(options.folder / f"{name}.json")
    error = None
    if code is None:
        why = "the command was cut" if is_cut else "it was out of time"
        status, error = "not reached", f"was stopped after {time.monotonic() - began_at_s:.0f} s: {why}"
    elif code:
        status, error = "failed", _last_lines(log_path) or f"ended with exit code {code}"
    else:
        status = "wrong" if record.get("failures") else "not reached" if record.get("unreached") else "ok"
    return {
        "status": status,
        "error": error,
        "took_s": round(time.monotonic() - began_at_s, 1),
        "file": f"{name}.json",
        "log": f"logs/{name}.log",
        "findings": record.get("findings", []),
        "failures": record.get("failures", []),
        "unreached": record.get("unreached", []),
        "record": record,
        "is_cut": is_cut,
    }


def _not_begun(name: str, why: str) -> dict[str, Any]:
    return {
        "status": "not reached",
        "error": why,
        "took_s": 0.0,
        "file": f"{name}.json",
        "log": f"logs/{name}.log",
        "findings": [],
        "failures": [],
        "unreached": [],
        "record": {},
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the part and all that it has started, first with SIGTERM, so that a run removes its network, then
    SIGKILL.
    """
    until_s = time.monotonic() + _STOP_S
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_S)
        while _is_there(process.pid) and time.monotonic() < until_s:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # usually nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # the part ended before its first result
        return {}
    assert isinstance(record, dict)
    return record


def _last_lines(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-_ERROR_LINES:])
