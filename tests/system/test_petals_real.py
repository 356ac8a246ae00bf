"""The real PETALS as programs on the emulated network (``make petals``, docs/petals.md)."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from testbed.records.events import ProgramEnded, read_events
from tests.support.runs import Testbed, assert_one_sentence, require, wait_until

ROOT = Path(__file__).parents[2]
IN_CHECKOUT = ("env", "-C", str(ROOT))
"""Where the scenario's commands find PETALS' environment."""

pytestmark = pytest.mark.usefixtures("fabric")


@pytest.mark.timeout(400)  # four processes of PETALS begin beside whatever else this machine does
def test_petals_gives_the_tokens_of_transformers_over_the_emulated_links(
    testbed: Testbed, tmp_path: Path
) -> None:
    is_complete = (ROOT / ".venv-petals" / ".done").exists()
    require("petals", None if is_complete else "`make petals` has not been run to its end")
    run_dir = tmp_path / "run"
    client = ".venv-petals/bin/python ./scenarios/petals/swarm.py client --input 8 20 --output 12"
    running = testbed.start(
        *("net", "petals-real", "--network", "fabric", "--out", str(run_dir)),
        *("--set", f'node.3.command="{client}"'),
        wrapper=IN_CHECKOUT,
    )
    ended = wait_until(
        lambda: (
            [e for e in read_events(run_dir, ProgramEnded) if e.node == "petals-client"]
            if (run_dir / "events.jsonl").exists()
            else None
        ),
        f"the end of PETALS' client: {running.stderr}",
        timeout_s=300,
    )
    said = (run_dir / "logs" / "petals-client.log").read_text(encoding="utf-8")
    running.interrupt()
    running.wait()
    assert ended[0].status == 0, said
    lines = [json.loads(line) for line in (run_dir / "petals" / "client.jsonl").read_text().splitlines()]
    assert (lines[-1]["n_requests"], lines[-1]["n_with_other_tokens"]) == (2, 0)
    at_s = [line["at_s"] for line in lines if line.get("request") == 1]
    assert len(at_s) == 1 + 12
    # Two servers, each 40 ms away and back: no token can be faster, and PETALS' own time is of that order.
    gaps = [b - a for a, b in pairwise(at_s[1:])]
    assert min(gaps) > 0.080 and statistics.median(gaps) < 0.400


def test_without_petals_environment_the_network_is_not_begun(testbed: Testbed) -> None:
    outcome = testbed("net", "petals-real", "--network", "fabric")
    assert_one_sentence(outcome, ".venv-petals/bin/python", "the scenario's file may say how")
