"""Transformer blocks on a GPU: their correctness, their speed with different settings, and whole chains of
servers.

``python -m benchmarks gpu`` or ``python benchmarks/gpu.py``, with ``--device cuda|cpu --size full|small
--minutes M --out DIR``; see ``docs/gpu.md``. Exit code 1 if a part is not ``ok``, 2 if
the arguments are invalid, 130 if it was cut.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # started by its path: imports must begin at the root, not in this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.gpu_parts.commands import OutOfTime
from benchmarks.gpu_parts.record import Job, Record
from benchmarks.gpu_parts.run import SHARES, Options, pack, run_parts
from nodes.compute import ComputeError
from testbed.errors import EXIT_INTERRUPTED, TestbedError, UserError
from testbed.rundir import check_new_folder
from testbed.runtime.blocks import require_blocks
from testbed.runtime.real.awake import kept_awake

_MINUTES = {"full": 40.0, "small": 8.0}
"""Limit by size. The small size takes about three minutes on two otherwise idle cores."""

_TIMED_HERE = ("streams", "graphs", "steps")
"""Parts that time steps in their own process; the others' runs keep CPUs awake themselves.

At the small size, which is about what is right and not how fast, none does.
"""


def run(arguments: Sequence[str]) -> int:
    """Runs the parts that ``arguments`` select. Returns the exit code."""
    given = _parser().parse_args(arguments)
    if given.part:
        folder = given.out or Path()
        job = Job(
            given.device, given.size == "small", folder, time.monotonic() + given.seconds, given.checkpoint
        )
        record = Record(job, given.part)
        try:
            with kept_awake(given.part in _TIMED_HERE and not job.is_small) as words:
                record.put(kept_awake=words)
                importlib.import_module(f"benchmarks.gpu_parts.{given.part}").run(record)
        except OutOfTime as error:
            record.leave(f"{error}.")
        except (ComputeError, TestbedError) as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    try:
        return _run(given)
    except UserError as error:
        print(f"benchmarks gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu; default cuda")
    parser.add_argument("--size", choices=("full", "small"), help="default: full on a GPU, small on the CPU")
    parser.add_argument("--minutes", type=float, help="limit for all parts together; default 40, small 8")
    parser.add_argument("--out", type=Path, help="a new folder; default runs/gpu-<time>")
    parser.add_argument("--only", metavar="PARTS", help=f"of {', '.join(SHARES)}; several with commas")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="only print what each part will do and for how long, on H100 and H200",
    )
    parser.add_argument(
        "--archive", type=Path, help="also pack all results into this .tar.gz, after each part and when cut"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="serve this one in endpoint, not random weights"
    )
    parser.add_argument("--json", action="store_true", help="print results.json in place of sentences")
    parser.add_argument("--part", choices=SHARES, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=600.0, help=argparse.SUPPRESS)
    return parser


def _run(given: argparse.Namespace) -> int:
    require_blocks("this benchmark")
    size = given.size or ("small" if given.device == "cpu" else "full")
    minutes = _MINUTES[size] if given.minutes is None else given.minutes
    if minutes <= 0:
        raise UserError(f"--minutes must be more than 0, not {minutes:g}")
    wanted = tuple(SHARES) if given.only is None else given.only.split(",")
    unknown = [name for name in wanted if name not in SHARES]
    if unknown:
        raise UserError(f'--only must be of {", ".join(SHARES)}, several with commas, not "{unknown[0]}"')
    parts = tuple(name for name in SHARES if name == "machine" or name in wanted)
    if given.plan:
        if size == "small" or given.json:
            raise UserError(
                "--plan says in sentences what the full size does on two GPUs; leave out --device cpu, --size small and --json"
            )
        from benchmarks.gpu_parts.plan import plan_text  # it imports torch

        print(plan_text(Job(given.device, size == "small", Path(), 0.0), parts, minutes))
        return 0
    folder = given.out or Path("runs") / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    check_new_folder(folder)
    try:
        (folder / "logs").mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another with --out") from error
    folder = folder.resolve()
    archive = given.archive.resolve() if given.archive is not None else None
    if archive is not None:
        try:
            archive.parent.mkdir(parents=True, exist_ok=True)
            pack(folder, archive)
        except OSError as error:
            shutil.rmtree(folder)
            raise UserError(
                f"cannot write {archive}: {error.strerror}; choose another with --archive"
            ) from error
    command = [sys.executable, str(Path(__file__).resolve())]
    if given.checkpoint is not None:
        if not (given.checkpoint / "config.json").is_file():
            raise UserError(
                f"--checkpoint must name the folder of a checkpoint; {given.checkpoint} has no config.json"
            )
        command += ["--checkpoint", str(given.checkpoint.resolve())]
    signal.signal(signal.SIGTERM, _interrupt)
    answer = run_parts(Options(given.device, size == "small", folder, minutes, parts, archive), command)
    if answer["parts"]["machine"]["status"] == "failed":
        shutil.rmtree(folder)  # nothing was measured: the corrected command may use the same folder
        raise UserError(
            f"{answer['parts']['machine']['error']}; choose another with --device, such as --device cpu"
        )
    print(json.dumps(answer) if given.json else _words(answer, folder))
    if answer["is_cut"]:
        return EXIT_INTERRUPTED
    return 0 if answer["status"] == "ok" else 1


def _words(answer: dict[str, Any], folder: Path) -> str:
    lines = []
    for name, part in answer["parts"].items():
        lines.append(f"\n{name}: {part['status']}, {part['took_s']:.0f} s")
        sentences = [*part["findings"], *part["failures"], *part["unreached"], part["error"]]
        lines += [f"  {sentence}" for sentence in sentences if sentence]
    return "\n".join([*lines, f"\nwritten to {folder}: results.json, a file per part, figures/, logs/"])


def _interrupt(*_: object) -> NoReturn:
    """Ends the part that runs, as Ctrl-C does; a second signal changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
