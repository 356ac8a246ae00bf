"""Use of links: from the messages of a run, in the engine ``fast``, and what the links themselves carried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from netem.forwarder_links import Pipe
from netem.spec import draws_name
from testbed.experiments import load_experiment
from testbed.experiments.slo import Objectives
from testbed.experiments.sources import Document
from testbed.fast.lazy import LazyPipe
from testbed.records.links import LinksUsed, LinkUse
from testbed.results.report import report_body
from testbed.results.text import summary_text
from testbed.simulator.answer import answer
from testbed.simulator.cases import Case
from testbed.simulator.engine import Simulation, simulate
from testbed.simulator.summary import summarize_simulation
from testbed.simulator.tables import write_simulation
from testbed.simulator.text import comparison_text
from tests.support.small_model import SMALL_HARDWARE, SMALL_MODEL

BASE: dict[str, Any] = {
    "name": "busy",
    "model": SMALL_MODEL,
    "hardware": {"small": SMALL_HARDWARE},
    "servers": [{"hardware": "small", "site": site} for site in ("B", "C")],
    "clients": [{"site": "A"}],
    "network": {
        "kind": "clusters",
        "pairs": [
            {"sites": ["A", "B"], "rtt": "20 ms", "rate": "40 Mbit/s"},
            {"sites": ["A", "C"], "rtt": "60 ms", "rate": "100 Mbit/s"},
            {"sites": ["B", "C"], "rtt": "30 ms", "rate": "20 Mbit/s"},
        ],
    },
    "workload": {
        "arrivals": "poisson",
        "rate": 2,
        "n_requests": 6,
        "n_input_tokens": 300,
        "n_output_tokens": 8,
    },
    "policy": {"name": "proposed", "design_concurrency": 1},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "client to server": {},
    "server to server": {"policy": BASE["policy"] | {"communication": "server-to-server"}},
    "a site's own link": {"sites": [{"name": "A", "up": "50 Mbit/s", "down": "30 Mbit/s"}]},
    "links that change": {
        "network": BASE["network"]
        | {
            "event": [
                {"at": "1 s", "for": "2 s", "link": ["A", "B"], "down": True},
                {"at": "4 s", "for": "20 s", "link": ["A", "C"], "rate": "30 Mbit/s"},
            ]
        }
    },
}
LONG_PROMPTS = tuple(
    f"workload.{key}"
    for key in ("n_requests=3", "n_input_tokens=250", "n_output_tokens=2", "rate=4", "arrivals=constant")
)
"""Of the scenario ``clustered``; fewer and shorter requests than where such prompts were first noticed to wait."""
LEAST_WAIT_S = 0.002
"""Waits below this are of messages between each other's packets, whose order is nearly chance."""


def case(**changes: Any) -> Case:
    return Case(load_experiment(Document(BASE | changes)))


def used(simulation: Simulation) -> dict[tuple[str, str], tuple[float, float, float]]:
    """By link: its use, and the mean and the 99th percentile of waits."""
    summary = summarize_simulation(simulation, Objectives())
    assert summary.links
    ratios = [round(row.use_ratio, 9) for row in summary.links]  # equal ones by name, whatever was rounded
    assert ratios == sorted(ratios, reverse=True)
    return {(row.from_, row.to): (row.use_ratio, row.wait_s.mean, row.wait_s.p99) for row in summary.links}


def over_time(run_dir: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of ``links.parquet`` by link."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in pq.read_table(run_dir / "links.parquet").to_pylist():
        found.setdefault((row["from"], row["to"]), []).append(row)
    return found


@pytest.fixture
def carried_s(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """For how long every pipe was busy, by its name, as the network itself plays it."""
    found: dict[str, float] = {}

    def count(method: str) -> None:
        plain = getattr(Pipe, method)

        def counted(self: Pipe, now_s: float, *args: Any) -> Any:
            if isinstance(self, LazyPipe):  # of the closed model
                return plain(self, now_s, *args)
            start_s, before_s = max(self.free_at_s, now_s), found.get(self.name, 0.0)
            taken = plain(self, now_s, *args)
            found[self.name] = before_s + self.free_at_s - start_s  # ``enter`` may call ``take``
            return taken

        monkeypatch.setattr(Pipe, method, counted)

    count("enter")
    count("take")
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_use_of_links_is_the_same_in_both_engines(variant: str, tmp_path: Path) -> None:
    """Use within 1 %, waits within a few percent."""
    one = case(**VARIANTS[variant])
    fast = simulate(one, "testbed", folder=tmp_path / "fast")
    virtual = simulate(one, "testbed", is_virtual=True, live=False, folder=tmp_path / "virtual")
    by_fast, by_system = used(fast), used(virtual)
    assert by_fast.keys() == by_system.keys() and len(by_fast) >= 3
    assert ("A up", "") in by_fast or variant != "a site's own link"
    # Which of two prompts on one link is done first is nearly chance.
    rel = {"server to server": 0.15, "a site's own link": 0.25}.get(variant, 0.03)
    for link, (use_ratio, mean_s, p99_s) in by_system.items():
        assert by_fast[link][0] == pytest.approx(use_ratio, rel=0.01), link
        assert by_fast[link][1] == pytest.approx(mean_s, rel=rel, abs=LEAST_WAIT_S), link
        assert by_fast[link][2] == pytest.approx(p99_s, rel=rel, abs=LEAST_WAIT_S), link
    assert max(mean_s for _, mean_s, _ in by_system.values()) > 0.05, "messages waited"
    said = comparison_text([answer(fast) | {"target": "busy"}])
    summary = virtual.served.summary
    assert summary is not None
    for text in (said, summary_text(summary), report_body(summary, [], [])):
        has_warning = "the link A down was busy 86% of the time: messages" in " ".join(text.split())
        assert has_warning == (variant == "a site's own link")
    assert "<td>small-1 to client-0<td>" in report_body(summary, [], [])
    write_simulation(tmp_path / "fast", fast, summarize_simulation(fast, Objectives()))
    bins, others = over_time(tmp_path / "fast"), over_time(tmp_path / "virtual")
    if not one.experiment.network.changes:  # in runs a message has waited where its link became slower
        waits = (pq.read_table(tmp_path / name / "hops.parquet") for name in ("fast", "virtual"))
        mine, theirs = (table.column("model_link_queue_s").to_numpy() for table in waits)
        assert np.abs(mine - theirs).max() < LEAST_WAIT_S and mine.max() > 0.05
    for link, rows in others.items():
        assert sum(row["use_ratio"] for row in bins[link]) == pytest.approx(
            sum(row["use_ratio"] for row in rows), rel=0.01
        )
        mine, theirs = ({row["start_s"]: row["use_ratio"] for row in of} for of in (bins[link], rows))
        apart = [abs(mine.get(at_s, 0.0) - theirs.get(at_s, 0.0)) for at_s in mine.keys() | theirs.keys()]
        assert np.mean(apart) < 0.02, link


def test_long_prompts_between_regions_wait_as_long_in_both_engines() -> None:
    one = Case(load_experiment("clustered", LONG_PROMPTS))
    by_fast, by_system = (
        used(simulate(one, "testbed", is_virtual=is_virtual, live=False)) for is_virtual in (False, True)
    )
    assert by_fast.keys() == by_system.keys()
    for link, (use_ratio, mean_s, p99_s) in by_system.items():
        assert by_fast[link][0] == pytest.approx(use_ratio, rel=0.01), link
        assert by_fast[link][1] == pytest.approx(mean_s, rel=0.03, abs=LEAST_WAIT_S), link
        assert by_fast[link][2] == pytest.approx(p99_s, rel=0.03, abs=LEAST_WAIT_S), link
    assert max(mean_s for _, mean_s, _ in by_system.values()) > 0.05, "messages waited"


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
def test_a_prompt_of_megabytes_takes_as_long_in_both_engines(communication: str) -> None:
    """Servers confirm its parts, and what acknowledges the confirmations takes the link from the parts that follow."""
    one = case(
        servers=[{"hardware": "small", "site": "B"}, {"hardware": "small", "site": "C"}],
        workload=BASE["workload"] | {"n_requests": 2, "rate": 0.01, "n_input_tokens": 2000},
        policy=BASE["policy"] | {"communication": communication},
    )
    fast, system = (
        simulate(one, "testbed", is_virtual=is_virtual, live=False) for is_virtual in (False, True)
    )
    assert fast.engine == "fast"
    for row, other in zip(fast.rows, system.rows, strict=True):
        assert row.chain == other.chain == "0:0-2 1:2-4"
        assert other.times["ttft_s"] > 2 * 3.0, "the prompt takes seconds on a link"
        assert row.times["ttft_s"] == pytest.approx(other.times["ttft_s"], abs=5e-6)
        assert row.times["e2e_s"] == pytest.approx(other.times["e2e_s"], abs=1e-5)


FIRST_USED_LATE = {"times": [0, 1], "rates": [20e6, 2e6], "length": "2 s", "repeat": True, "until": "60 s"}
SLOW_FROM_SOON_ON = {"at": "200 ms", "for": "20 s", "rate": "2 Mbit/s"}


@pytest.mark.parametrize(
    ("network", "arrival_at_s", "ttft_s"),
    [
        ({"trace": [{"kind": "listed", "link": ["A", "B"], **FIRST_USED_LATE}]}, 5.3, 3.6),
        ({"event": [{"link": ["A", "B"], **SLOW_FROM_SOON_ON}]}, 0.0, 17.0),
    ],
    ids=["a link that is first used after changes", "a first change during a message"],
)
def test_what_is_queued_is_sent_by_the_planned_rates_of_its_link(
    network: dict[str, Any], arrival_at_s: float, ttft_s: float
) -> None:
    """2.5 MB there and back: at 20 Mbit/s in one second and 2 Mbit/s in the next, or 40 Mbit/s for 0.2 s and 2 Mbit/s then."""
    one = case(
        servers=[{"hardware": "small", "site": "B", "memory": "500 MB"}],
        network={**BASE["network"], **network},
        workload={"arrivals": "listed", "rate": 1, "requests": [[arrival_at_s, 300, 1]]},
    )
    fast, system = (
        simulate(one, "testbed", is_virtual=is_virtual, live=False).rows[0] for is_virtual in (False, True)
    )
    assert system.times["ttft_s"] == pytest.approx(ttft_s, rel=0.05)
    assert fast.times["ttft_s"] == pytest.approx(system.times["ttft_s"], abs=0.003)


def test_use_is_what_the_links_of_the_network_carried(carried_s: dict[str, float], tmp_path: Path) -> None:
    """Beside hidden states there is little else, if connections are not warmed."""
    simulation = simulate(
        case(tcp={"warm": False}), "testbed", is_virtual=True, live=False, folder=tmp_path / "run"
    )
    ended_s = max(row.ended_at_s or 0.0 for row in simulation.rows)
    links = used(simulation)
    assert len(links) == 4
    for (source, target), (use_ratio, _, _) in links.items():
        assert use_ratio * ended_s == pytest.approx(carried_s[draws_name(0, (source, target))], rel=0.02)
    for rows in over_time(tmp_path / "run").values():
        assert all(0 <= row["use_ratio"] <= 1 for row in rows)
        assert {row["end_s"] - row["start_s"] for row in rows} == {2.0**-5}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(row["from"], row["to"]) for row in summary["links"]] == list(links)


def test_a_session_that_nobody_meets_waits_for_nothing(tmp_path: Path) -> None:
    alone = BASE["workload"] | {"n_requests": 1, "n_input_tokens": 2}
    fast = simulate(case(workload=alone), "testbed")
    assert "in closed form" in fast.why
    folder = tmp_path / "virtual"
    virtual = simulate(case(workload=alone), "testbed", is_virtual=True, live=False, folder=folder)
    for link, (use_ratio, mean_s, p99_s) in used(virtual).items():
        assert used(fast)[link] == (pytest.approx(use_ratio, rel=0.01), 0.0, 0.0)
        assert (mean_s, p99_s) == (pytest.approx(0, abs=1e-4), pytest.approx(0, abs=1e-4))
    write_simulation(tmp_path / "fast", fast, summarize_simulation(fast, Objectives()))
    bins, others = over_time(tmp_path / "fast"), over_time(folder)
    assert bins.keys() == others.keys()
    for link, rows in others.items():  # in each part of the run
        assert [row["start_s"] for row in bins[link]] == [row["start_s"] for row in rows]
        for name in ("use_ratio", "wait_s"):
            assert [row[name] for row in bins[link]] == pytest.approx([row[name] for row in rows], abs=1e-4)


def use_of(*messages: tuple[float, float, float]) -> LinkUse:
    """Of messages (left at, busy for, waited)."""
    use = LinkUse()
    use.add(*np.array(messages).T)
    return use


def test_messages_between_each_other_s_parts_take_the_link_for_the_sum_of_both() -> None:
    use = use_of((4.0, 3.0, 0.5), (2.0, 0.5, 0.0))  # a half of the longer one before the other
    links = LinksUsed([("a", "b", use)], until_s=8.0)
    ((row, series),) = links.series()
    assert row.use_ratio == pytest.approx(3.5 / 8) and row.wait_s.mean == 0.25
    starts_s = np.arange(len(series.use_ratio)) * links.width_s
    busy = series.use_ratio == 1.0
    assert starts_s[busy].min() == 0.5 and starts_s[busy].max() == 4.0 - links.width_s
    assert series.use_ratio[~busy].sum() == 0
    assert series.wait_s[starts_s == 4.0].tolist() == [0.5] and np.isnan(series.wait_s[starts_s == 3.0])


def test_bins_are_as_many_as_a_page_can_show_however_long_the_run() -> None:
    late = use_of(*((second + 0.5, 0.5, 0.1) for second in range(1, 5000)))
    early, even = use_of((0.5, 0.25, 1.0)), LinkUse()
    even.spread(1000.0, 2000.0, busy_s=100.0, n_messages=7)
    uses = [("a", "c", early), ("a", "b", late), ("a", "d", even), ("b", "a", LinkUse())]
    links = LinksUsed(uses, until_s=5000.0)
    (row, busy), (last, evenly), (_, idle) = links.series()
    assert row.to == "b" and row.use_ratio == pytest.approx(0.5, rel=1e-3) and links.width_s == 32
    assert len(busy.use_ratio) == 157 and busy.use_ratio[1:150] == pytest.approx(0.5)
    assert busy.use_ratio.sum() * 32 == pytest.approx(4999 * 0.5)
    assert idle.use_ratio[0] == 0.25 / 32 and idle.wait_s[0] == 1.0 and not idle.use_ratio[1:].any()
    assert (last.to, last.wait_s.p99) == ("d", 0.0) and evenly.use_ratio[40] == pytest.approx(0.1)
    assert evenly.use_ratio.sum() * 32 == pytest.approx(100.0)
