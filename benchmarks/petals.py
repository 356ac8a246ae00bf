"""Compares PETALS itself with our servers and the simulation on the same links, and fits the overhead of
PETALS.

``python -m benchmarks petals [--only NAME] [--out DIR]`` takes 15 to 20 minutes, and needs namespaces, ``make
petals`` and the extra ``[blocks]``. Both systems serve the same checkpoint, one after the other, at the same
places of the scenario ``petals-real``; every token of both is compared with that of transformers.
docs/petals.md has the results.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from testbed.results import load_run, read_tables

_BLOCKS = 8
_SITES = ("East", "West", "South")
_PYTHON = Path(".venv-petals/bin/python")
_OUTPUT = 24
_LARGE = 4096
"""From this hidden size on, there are fewer requests and shorter prompts."""
_FURTHER_MS = 4.0
"""The additional RTT of a spare server, so that both systems choose the other one first."""
_KILL_AFTER = 12
_STUCK_S = 300.0
"""How long to wait for the end after a server was killed. PETALS' client waits 180 s for an answer."""


@dataclass(frozen=True)
class Case:
    """One setting: a chain of servers. ``rtt_ms``: RTT between any two places. ``hidden``: the model's hidden
    size.
    """

    n_servers: int
    rtt_ms: float
    hidden: int = 64
    fits: bool = True
    """Whether the calibration is fitted to this case; the other cases judge the fit."""

    @property
    def name(self) -> str:
        return f"{self.n_servers}-servers-{self.rtt_ms:g}ms-{self.hidden}"

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of tokens of the prompts, one request each. The first request is a warm-up and does not
        count.
        """
        return (8, 8, 64, 256, 8, 64, 256) if self.hidden < _LARGE else (8, 8, 64)

    @property
    def lengths(self) -> list[int]:
        return sorted(set(self.inputs))

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """(first, last + 1) block of each server; their sizes differ by at most one."""
        ends = [-(-_BLOCKS * k // self.n_servers) for k in range(self.n_servers + 1)]
        return list(itertools.pairwise(ends))


@dataclass
class Times:
    """Times of one system in ms. ``first_ms``: length of the prompt -> times to the first token; ``gaps_ms``:
    times of all later tokens.
    """

    first_ms: dict[int, list[float]] = field(default_factory=dict)
    gaps_ms: list[float] = field(default_factory=list)
    opening_ms: list[float] = field(default_factory=list)
    """Only of our servers: the time to open the session, before the prompt is sent. PETALS opens it with the
    prompt.
    """

    def add(self, n_input: int, at_s: Sequence[float]) -> None:
        """Adds a request that began at ``at_s[0]`` and whose tokens arrived at the other times."""
        gaps = [1e3 * float(gap) for gap in np.diff(at_s)]
        self.first_ms.setdefault(n_input, []).append(gaps[0])
        self.gaps_ms.extend(gaps[1:])

    @property
    def gap_ms(self) -> float:
        return statistics.median(self.gaps_ms)

    def first(self, n_input: int) -> float:
        return statistics.median(self.first_ms[n_input])

    def prefill(self, n_input: int) -> float:
        """Returns ``first`` without the time to open the session, in ms."""
        return self.first(n_input) - statistics.median(self.opening_ms)


CASES = (
    *(Case(n, rtt, fits=rtt != 40) for n in (2, 3) for rtt in (5, 40, 100)),
    Case(2, 40, 1024, fits=False),
    Case(2, 40, 4096, fits=False),
)


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks petals", description=(__doc__ or "").splitlines()[0])
    names = [*(case.name for case in CASES), "kill"]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--out", type=Path, help="a new folder for figures.json and all runs; default a temporary one"
    )
    given = parser.parse_args(arguments)
    if not _PYTHON.exists():
        print(f"benchmarks petals: there is no {_PYTHON} here; run `make petals` first", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        out: Path = given.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="petals-")))
        out.mkdir(parents=True, exist_ok=bool(not given.out))
        wanted = given.only or names
        bench = _Bench(out)
        for case in CASES:
            if case.name in wanted:
                bench.measure(case)
        if "kill" in wanted:
            bench.kill()
        bench.calibrate()
        (out / "figures.json").write_text(json.dumps(bench.figures, indent=1) + "\n")
    return 0


class _Bench:
    def __init__(self, out: Path) -> None:
        self.figures: dict[str, Any] = {}
        self._out = out
        self._measured: list[tuple[Case, Times, Times]] = []
        """Case, times of PETALS, times of the twin of our run."""

    def measure(self, case: Case) -> None:
        model = self._model(case.hidden)
        profile = self._profile(case.hidden)
        petals, n_other = self._petals(case, model)
        ours, twin = self._ours(case, model, profile)
        self._measured.append((case, petals, twin))
        self.figures[case.name] = {
            **asdict(case),
            "petals": asdict(petals),
            "petals_requests_with_other_tokens": n_other,
            "ours": asdict(ours),
            "twin": asdict(twin),
        }
        print(
            f"{case.n_servers} servers, RTT {case.rtt_ms:g} ms, hidden size {case.hidden}: a token takes PETALS "
            f"{petals.gap_ms:.1f} ms, ours {ours.gap_ms:.1f}, simulated {twin.gap_ms:.1f}; "
            f"the first after {', '.join(map(str, case.lengths))} tokens takes "
            f"PETALS {_firsts(petals)} ms, ours {_firsts(ours)}, simulated {_firsts(twin)}; "
            f"{n_other} of PETALS' {len(case.inputs)} requests with other tokens than transformers'",
            flush=True,
        )

    def kill(self) -> None:
        """Measures both systems while the server of the second half is killed; there is a spare server for
        it.
        """
        case = Case(2, 40)
        model, profile = self._model(case.hidden), self._profile(case.hidden)
        for replay in ("as-is", "mended"):
            gap_s, why = self._petals_killed(case, model, replay)
            self.figures[f"kill-petals-{replay}"] = {"longest_gap_s": gap_s, "why": why}
            outcome = (
                f"goes on after {gap_s:.2f} s"
                if gap_s is not None
                else f"does not go on within {_STUCK_S:g} s: {why}"
            )
            print(f"a server killed, PETALS {replay}: {outcome}", flush=True)
        gap_s = self._ours_killed(case, model, profile)
        self.figures["kill-ours"] = {"longest_gap_s": gap_s}
        print(f"a server killed, ours: goes on after {gap_s:.2f} s", flush=True)

    def calibrate(self) -> None:
        """Fits the time that PETALS adds to the simulated times to the cases with ``fits``, and prints all
        errors.
        """
        fitted = [(case, petals, twin) for case, petals, twin in self._measured if case.fits]
        if len({case.n_servers for case, *_ in fitted}) < 2:
            return
        rows = np.array([[case.n_servers, 1.0] for case, *_ in fitted])
        own = np.array([petals.gap_ms - twin.gap_ms for _, petals, twin in fitted])
        (per_hop, per_token), *_ = np.linalg.lstsq(rows, own, rcond=None)
        firsts_of = [
            (case.n_servers, n, petals.first(n) - twin.prefill(n))
            for case, petals, twin in fitted
            for n in case.lengths
        ]
        rows = np.array([[n_hops, n_hops * n, 1.0] for n_hops, n, _ in firsts_of])
        own = np.array([own_ms for *_, own_ms in firsts_of])
        (first, slope, once), *_ = np.linalg.lstsq(rows, own, rcond=None)
        self.figures["fit_ms"] = {
            "token_per_hop": per_hop,
            "token_at_the_client": per_token,
            "input_per_hop": first,
            "input_per_hop_and_token": slope,
            "input_at_the_client": once,
        }
        print(f"fit, ms: {json.dumps({k: round(float(v), 4) for k, v in self.figures['fit_ms'].items()})}")
        for case, petals, twin in self._measured:
            predicted_ms = twin.gap_ms + case.n_servers * per_hop + per_token
            error = predicted_ms / petals.gap_ms - 1
            firsts = [
                (twin.prefill(n) + case.n_servers * (first + slope * n) + once) / petals.first(n) - 1
                for n in case.lengths
            ]
            self.figures[case.name]["error"] = {
                "token": error,
                "first": dict(zip(case.lengths, firsts, strict=True)),
            }
            role = "fitted" if case.fits else "judge"
            errors = ", ".join(f"{100 * e:+.1f}" for e in firsts)
            print(f"{role} {case.name}: token {100 * error:+.2f} %, first token {errors} %")

    def _model(self, hidden: int) -> Path:
        folder = self._out / f"model-{hidden}"
        if not folder.exists():
            sizes = ("--layers", str(_BLOCKS), "--hidden", str(hidden), "--heads", str(max(4, hidden // 64)))
            _testbed("model", "make-tiny", str(folder), *sizes)
        return folder

    def _profile(self, hidden: int) -> Path:
        folder = self._out / f"profile-{hidden}"
        if not folder.exists():
            blocks, lengths = ("4", "8,64,256") if hidden < _LARGE else ("2", "8,64")
            _testbed(
                *("calibrate", "--model", str(self._model(hidden)), "--name", "measured", "--blocks", blocks),
                *("--lengths", lengths, "--sessions", "1", "--rounds", "3", "--output-tokens", "32"),
                *("--out", str(folder)),
            )
        return folder / "profile.toml"

    def _petals(self, case: Case, model: Path) -> tuple[Times, int]:
        given = f"--input {' '.join(map(str, case.inputs))} --output {_OUTPUT}"
        folder = self._out / f"{case.name}-petals"
        with _swarm(folder, case, model, case.blocks, given) as lines:
            events = _until_ended(lines, 600)
        times = Times()
        for index in range(1, len(case.inputs)):
            own = [event for event in events if event.get("request") == index]
            assert len(own) == 1 + _OUTPUT
            times.add(own[0]["n_input"], [event["at_s"] for event in own])
        return times, int(events[-1]["n_with_other_tokens"])

    def _ours(self, case: Case, model: Path, profile: Path) -> tuple[Times, Times]:
        # The requests must not overlap: the gap is longer than a request's round trips and computations.
        every_s = 2 + 1.3e-3 * _OUTPUT * case.n_servers * (case.rtt_ms + 10) + 40 * (case.hidden / 4096) ** 2
        requests = [[k * every_s, n, _OUTPUT] for k, n in enumerate(case.inputs)]
        folder = self._out / f"{case.name}-ours"
        _up(folder, case, model, profile, case.blocks, requests)
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["n_completed"] == len(requests)
        return _times_of(folder), _times_of(folder / "twin")

    def _petals_killed(self, case: Case, model: Path, replay: str) -> tuple[float | None, str]:
        """Returns the longest time between two tokens in seconds and "", or None and the error in the
        client's log.
        """
        folder = self._out / f"kill-petals-{replay}"
        blocks = [*case.blocks, case.blocks[-1]]
        with _swarm(
            folder, case, model, blocks, f"--input 8 8 --output {_OUTPUT} --replay {replay}"
        ) as lines:
            tokens = (event for event in lines if event["event"] == "token" and event["request"] == 1)
            before = [next(tokens) for _ in range(_KILL_AFTER)]
            pid = int((folder / "petals" / f"{_server_in_use(folder)}.pid").read_text())
            os.killpg(os.getpgid(pid), signal.SIGKILL)
            try:
                after = _until_ended(lines, _STUCK_S)
            except TimeoutError:
                log = (folder / "logs" / "petals-client.log").read_text()
                return None, next(reversed(re.findall(r"\w+Error\(['\"][\w ]+", log)), "its log has no error")
        assert after[-1]["n_with_other_tokens"] == 0
        at_s = [event["at_s"] for event in (*before, *after) if event["event"] == "token"]
        return float(max(np.diff(at_s))), ""

    def _ours_killed(self, case: Case, model: Path, profile: Path) -> float:
        folder = self._out / "kill-ours"
        fault = f'[{{kind="kill",server="half-1",after={{request=1,tokens={_KILL_AFTER}}}}}]'
        requests = [[0.0, 8, _OUTPUT], [8.0, 8, _OUTPUT]]
        blocks = [*case.blocks, case.blocks[-1]]
        _up(folder, case, model, profile, blocks, requests, f"fault={fault}")
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["n_completed"] == 2
        assert summary["n_replays"] == 1, "the killed server was not the one in use"
        record = read_tables(folder, load_run(folder)).records.requests[1]
        return float(max(np.diff([token.at_s for token in record.tokens])))


def _server_in_use(folder: Path) -> str:
    """Returns which of PETALS' two servers of the second half opened a session last."""
    begun = {
        name: [
            line
            for line in (folder / "logs" / f"{name}.log").read_text().splitlines()
            if "inference.open" in line
        ]
        for name in ("petals-1", "petals-2")
    }
    return max(begun, key=lambda name: begun[name][-1][:19] if begun[name] else "")


def _firsts(times: Times) -> str:
    return "/".join(f"{times.first(n):.0f}" for n in sorted(times.first_ms))


def _times_of(folder: Path) -> Times:
    times = Times()
    for record in read_tables(folder, load_run(folder)).records.requests[1:]:
        times.add(record.n_input_tokens, [record.arrived_at_s, *(token.at_s for token in record.tokens)])
        times.opening_ms.append(1e3 * (record.tokens[0].ready_at_s - record.arrived_at_s))
    return times


def _links(case: Case, n_servers: int) -> str:
    """Returns the setting ``network.pairs``: the RTT of ``case`` between all places, and a longer one to a
    spare.
    """
    places = ("Home", *_SITES)
    pairs = []
    for index, a in enumerate(places):
        pairs.append(f'{{sites=["{a}","{a}"],rtt="1 ms",rate="1 Gbit/s"}}')
        for b in places[index + 1 :]:
            is_spare = b == _SITES[n_servers - 1] and n_servers > case.n_servers
            rtt_ms = case.rtt_ms + (_FURTHER_MS if is_spare else 0)
            pairs.append(f'{{sites=["{a}","{b}"],rtt="{rtt_ms} ms",rate="100 Mbit/s"}}')
    return f"network.pairs=[{','.join(pairs)}]"


@contextlib.contextmanager
def _swarm(
    folder: Path, case: Case, model: Path, blocks: list[tuple[int, int]], client: str
) -> Iterator[Iterator[dict[str, Any]]]:
    """Runs PETALS on the network of ``case`` while the body runs. Yields an iterator over the lines of its
    client.
    """
    program = f"{_PYTHON} ./scenarios/petals/swarm.py"
    nodes = [("petals-dht", "Home", "dht"), ("petals-client", "Home", f"client {client}")]
    for index, (first, last) in enumerate(blocks):
        nodes.append((f"petals-{index}", _SITES[index], f"server {first}:{last}"))
    tables = ",".join(f'{{name="{n}",site="{s}",command="{program} {what}"}}' for n, s, what in nodes)
    options = _sets(f"node=[{tables}]", _links(case, len(blocks)))
    command = [sys.executable, "-m", "testbed", "net", "petals-real", "--out", str(folder), *options]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stderr=log, stdout=log, env={**os.environ, "PETALS_MODEL": str(model.absolute())}
        )
    try:
        yield _lines(folder / "petals" / "client.jsonl", process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _lines(path: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the lines of ``path`` as they are written, and events "waiting" while there is no new one.

    Raises ``SystemExit`` if the process ends before ``path`` exists.
    """
    while not path.exists():
        if process.poll() is not None:
            raise SystemExit(f"the network ended with {process.returncode}: see {path.parents[1]}.log")
        yield {"event": "waiting"}
        time.sleep(0.2)
    with path.open(encoding="utf-8") as file:
        rest = ""
        while True:
            rest += file.readline()
            if rest.endswith("\n"):
                yield json.loads(rest)
                rest = ""
            else:
                yield {"event": "waiting"}
                time.sleep(0.05)


def _until_ended(lines: Iterator[dict[str, Any]], limit_s: float) -> list[dict[str, Any]]:
    """Returns all events up to "ended". Raises ``TimeoutError`` after ``limit_s`` seconds."""
    until = time.monotonic() + limit_s
    events = []
    for event in lines:
        if event["event"] != "waiting":
            events.append(event)
        if event["event"] == "ended":
            return events
        if time.monotonic() > until:
            raise TimeoutError(f"PETALS' client has not ended after {limit_s:g} s")
    raise AssertionError("the iterator of lines has no end")


def _up(
    folder: Path,
    case: Case,
    model: Path,
    profile: Path,
    blocks: list[tuple[int, int]],
    requests: list[list[float]],
    *more: str,
) -> None:
    """Runs our servers with transformer blocks on the network of ``case``, and their twin with the times of
    ``profile``.
    """
    plan = folder.parent / f"{folder.name}.plan.json"
    plan.write_text(json.dumps([[first + 1, last - first] for first, last in blocks]))
    servers = ",".join(f'{{hardware="half",site="{_SITES[k]}"}}' for k in range(len(blocks)))
    _testbed(
        *(
            "up",
            "petals-real",
            "--compute",
            "blocks",
            "--model",
            str(model),
            "--out",
            str(folder),
            "--no-page",
        ),
        *("--no-report", "--placement", f"fixed:{plan.absolute()}"),
        *_sets(
            "node=[]",
            "model={}",
            f'hardware_files=["{profile.absolute()}"]',
            'hardware.half={base="measured",memory="8 GB"}',
            f"servers=[{servers}]",
            _links(case, len(blocks)),
            f'workload={{arrivals="listed",requests={json.dumps(requests)}}}',
            *more,
        ),
    )


def _sets(*options: str) -> list[str]:
    return [text for option in options for text in ("--set", option)]


def _testbed(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "testbed", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"testbed {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
