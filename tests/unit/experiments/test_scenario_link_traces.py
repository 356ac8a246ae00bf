"""``[[network.trace]]``: links that follow a recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from policies.links import Link
from testbed.experiments import changed, dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.runtime.wiring import network_spec

Load = Callable[..., Experiment]
Complain = Callable[..., str]
Traced = Callable[..., list[tuple[float, Link]]]

UP, DOWN = ("client-0", "a100-0"), ("a100-0", "client-0")
BASE = Link(0.05, 1e8)
PACKET_BITS = 12_000
MM = 'link=["B","A"], kind="mahimahi", file="t"'
CSV = 'link=["B","A"], kind="csv", file="t"'


def course(e: Experiment, pair: tuple[str, str] = UP) -> list[tuple[float, Link]]:
    return [(change.at_s, change.links[pair]) for change in e.network.changes if pair in change.links]


def cut(link: Link = BASE) -> Link:
    return Link(link.delay_s, link.rate_bps, link.jitter_s, 1.0)


@pytest.fixture
def with_trace(load: Load, tmp_path: Path) -> Callable[..., Experiment]:
    """The small scenario with a trace, whose file has ``text``."""

    def run(text: str, keys: str, *options: str) -> Experiment:
        (tmp_path / "t").write_text(text, encoding="utf-8")
        return load(*options, replace=("", f"\n[[network.trace]]\n{keys.replace(', ', chr(10))}\n"))

    return run


def test_a_mahimahi_trace_becomes_the_mean_rate_of_each_interval_and_cuts_where_nothing_passes(
    with_trace: Callable[..., Experiment],
) -> None:
    e = with_trace("0\n50\n100\n101\n350\n", MM + ', interval="100 ms", repeat=false')
    assert course(e) == [
        (0.0, Link(0.05, 3 * PACKET_BITS / 0.1)),
        (0.1, Link(0.05, PACKET_BITS / 0.1)),
        (0.2, cut()),
        (0.3, Link(0.05, pytest.approx(PACKET_BITS / 0.05))),  # the last interval is as long as the trace
        (0.35, BASE),
    ]
    assert course(e, DOWN) == course(e)
    assert [change.why for change in e.network.changes][::4] == [
        "link B and A: trace",
        "the end of: link B and A: trace",
    ]


def test_a_mahimahi_trace_is_repeated_until_an_hour_after_the_last_arrival(
    with_trace: Callable[..., Experiment],
) -> None:
    text = "".join(f"{ms}\n" for ms in (1000, 2000, 2000))
    e = with_trace(text, MM + ', interval="1 s"')
    rates_bps = [link.rate_bps for _, link in course(e)]
    assert rates_bps[:4] == [12_000, 24_000, 12_000, 24_000]
    assert [at_s for at_s, _ in course(e)][:4] == [0.0, 1.0, 2.0, 3.0]
    last_s = max(request.arrival_at_s for request in e.workload.requests)
    assert last_s + 3600 <= course(e)[-1][0] <= last_s + 3602
    assert course(e)[-1][1] == BASE
    until = with_trace(text, MM + ', interval="1 s", at="10 s", until="13 s"')
    assert [at_s for at_s, _ in course(until)] == [10.0, 11.0, 12.0, 13.0]


def test_a_csv_trace_has_any_of_rate_rtt_and_loss_with_units_in_cells_or_keys(
    with_trace: Callable[..., Experiment],
) -> None:
    text = "rtt,time,loss,rate\n80 ms,100,1 %,20 Mbit/s\n60 ms,101.5,,0 bit/s\n\n,103,0.5,5 Mbit/s\n"
    e = with_trace(text, CSV + ', time_unit="s"')
    assert course(e) == [
        (0.0, Link(0.04, 20e6, 0.0, 0.01)),
        (1.5, Link(0.03, 1e8, 0.0, 1.0)),
        (3.0, Link(0.03, 5e6, 0.0, 0.5)),
    ]
    units = ', time_unit="ms", rate_unit="Mbit/s", rtt_unit="ms"'
    assert course(
        with_trace("Time,Rate,RTT\n0,20,80\n500,5,80\n", CSV + units + ', direction="forward"')
    ) == [
        (0.0, Link(0.04, 20e6)),
        (0.5, Link(0.04, 5e6)),
    ]


def test_a_trace_in_one_direction_leaves_the_other_alone(with_trace: Callable[..., Experiment]) -> None:
    e = with_trace("time,rate\n0 s,1 Mbit/s\n", CSV + ', direction="forward"')
    assert course(e) == [(0.0, Link(0.05, 1e6))]
    assert course(e, DOWN) == []


def test_the_last_row_of_a_repeated_csv_trace_lasts_as_long_as_the_one_before(
    with_trace: Callable[..., Experiment],
) -> None:
    e = with_trace("time,loss\n0 s,0.1\n1 s,0.2\n3 s,0.3\n", CSV + ', repeat=true, until="6 s"')
    assert [(at_s, link.loss_ratio) for at_s, link in course(e)] == [
        (0.0, 0.1), (1.0, 0.2), (3.0, 0.3), (5.0, 0.1), (6.0, 0.0)
    ]  # fmt: skip


def test_events_apply_on_top_of_a_trace_and_factors_multiply_it(
    with_trace: Callable[..., Experiment],
) -> None:
    event = 'network.event=[{at="1 s",for="2 s",site="B",rate_factor=0.5,rtt="20 ms",loss=0.1}]'
    e = with_trace("time,rate\n0 s,8 Mbit/s\n2 s,4 Mbit/s\n2.5 s,0 bit/s\n4 s,6 Mbit/s\n", CSV, event)
    assert course(e) == [
        (0.0, Link(0.05, 8e6)),
        (1.0, Link(0.01, 4e6, 0.0, 0.1)),
        (2.0, Link(0.01, 2e6, 0.0, 0.1)),
        (2.5, Link(0.01, 5e7, 0.0, 1.0)),  # no event's loss ends what the trace cuts
        (3.0, cut()),
        (4.0, Link(0.05, 6e6)),
    ]


def test_a_trace_is_not_faster_than_a_sites_own_link(with_trace: Callable[..., Experiment]) -> None:
    text = "time,rate\n0 s,1 Mbit/s\n1 s,90 Mbit/s\n"
    e = with_trace(text, CSV, 'sites=[{name="B",up="40 Mbit/s"}]')
    assert [link.rate_bps for _, link in course(e)] == [1e6, 40e6]
    assert [link.rate_bps for _, link in course(e, DOWN)] == [1e6, 90e6]


def test_a_resolved_scenario_has_the_steps_and_needs_no_file(
    with_trace: Callable[..., Experiment], tmp_path: Path
) -> None:
    e = with_trace("1\n2\n250\n", MM)
    (tmp_path / "t").unlink()
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_toml(e), encoding="utf-8")
    again = load_experiment(str(resolved))
    assert again.network == e.network
    assert dump_toml(again) == dump_toml(e)
    assert changed(e, {"network.trace": None}).network.changes == ()
    assert len(changed(e, {"network.trace.0.until": "1 s"}).network.changes) < len(e.network.changes)


@pytest.mark.parametrize(
    ("text", "keys", "said"),
    [
        ("1\n5\n4\n", MM, 'network.trace.0.file: "t": line 3: the time goes back, from 5 to 4 ms; sort the lines'),
        ("", MM, '"t": is empty; it needs a line per packet that can be sent'),
        ("0\n0\n", MM, '"t": ends at 0 ms, so that it never lets anything through; its last line is its length in ms'),
        ("1\nx\n", MM, '"t": line 2: must be a whole number of milliseconds, not "x"'),
        ("1\n-2\n", MM, '"t": line 2: must be a whole number of milliseconds, not "-2"'),
        ("1\n900000000000\n", MM, "intervals; at most 1,000,000 are allowed, so give a longer one"),
        ("1\n100\n", MM + ', interval="10 ms", until="1000000 s"', "are allowed, so give a longer interval or an earlier until"),
        ("", CSV, '"t": is empty; it needs a row with the names of its columns (time, rate, rtt, loss)'),
        ("time,rate\n", CSV, '"t": has no rows; it needs one per instant at which the link changes'),
        ("time,speed\n", CSV, '"t": has an unknown column "speed"; valid: time, rate, rtt, loss'),
        ("time,rate,rate\n", CSV, '"t": has a second column "rate"; leave one out'),
        ("rate\n", CSV, '"t": must have the column time, and at least one of rate, rtt and loss'),
        ("time,rate\n0 s\n", CSV, '"t": line 2: has 1 cells, but there are 2 columns'),
        ("time,rate\n0 s,\n", CSV, '"t": line 2, column rate: must be a rate with a unit such as "100 Mbit/s", not ""'),
        ("time,rate\n0 s,5\n", CSV, 'line 2, column rate: "5" has no unit; write it there, or give rate_unit of the trace'),
        ("time,rate\n0 s,-5\n", CSV + ', rate_unit="Mbit/s"', 'line 2, column rate: must not be negative, but is "-5.0 Mbit/s"'),
        ("time,loss\n0 s,0.1\n1 s,two\n", CSV, 'line 3, column loss: must be text such as "0.1 %" or a number from 0 to 1, not "two"'),
        ("time,loss\n5 s,0.1\n4 s,0.2\n", CSV, "line 3: the time 4 s is not later than that of the row before; sort the rows"),
        ("time,rate\n0 s,0 bit/s\n", CSV, '"t": never lets anything through; give at least one step with a rate above 0'),
        ("time,loss\n0 s,1\n", CSV, '"t": never lets anything through'),
        ("time,loss\n0 s,0.5\n", CSV + ", repeat=true", '"t": has a single row, which cannot be repeated; leave out repeat'),
        ("1\n", MM.replace('"t"', '"no"'), 'network.trace.0.file: cannot read "no": No such file or directory'),
        ("1\n", MM.replace('"B"', '"C"'), 'network.trace.0.link.0: unknown site or node "C"; valid: B, A, client-0'),
        ("1\n", MM.replace('"B","A"', '"B","B"'), "network.trace.0: changes no link: no server uses a link between B and B"),
        ("1\n", MM + ', rate_unit="Mbit/s"', 'network.trace.0.rate_unit: is only for kind = "csv"; kind is "mahimahi"'),
        ("1\n", MM + ', at="5 s", until="5 s"', "network.trace.0.until: must be later than at"),
        ("1\n", 'link=["B","A"], kind="csv"', 'network.trace.0.file: is missing; kind = "csv" needs it'),
        ("1\n", 'link=["B","A"], kind="listed"', 'network.trace.0.times: is missing; kind = "listed" needs it'),
        ("1\n", 'link=["B","A"], kind="listed", times=[0,2,1], rates=[1,1,1]', "times: must be in the order of time"),
        ("1\n", 'link=["B","A"], kind="listed", times=[0,2], rates=[1]', "rates: must have as many values as times, 2"),
        ("1\n", 'link=["B","A"], kind="listed", times=[0,2]', "changes nothing; give at least one of rates, rtts, losses"),
    ],
)  # fmt: skip
def test_bad_traces_are_refused_with_what_to_change(
    complaint: Complain, tmp_path: Path, text: str, keys: str, said: str
) -> None:
    (tmp_path / "t").write_text(text, encoding="utf-8")
    told = complaint(replace=("", f"\n[[network.trace]]\n{keys.replace(', ', chr(10))}\n"))
    assert said in told


def test_two_traces_for_one_link_are_refused(complaint: Complain, load: Load, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("1\n", encoding="utf-8")

    def both(first: str, second: str) -> tuple[str, str]:
        tables = (f"[[network.trace]]\n{keys.replace(', ', chr(10))}\n" for keys in (first, second))
        return "", "\n" + "".join(tables)

    there, back = (
        f'link=["{a}","{b}"], kind="mahimahi", file="t", direction="forward"' for a, b in ("AB", "BA")
    )
    assert load(replace=both(there, back)).network.changes
    for other in (MM, MM.replace('"A"', '"a100-1"')):
        assert "network.trace.1: is a second trace for the link" in complaint(replace=both(there, other))


def test_networks_are_given_the_planned_rates_of_links_in_their_own_time(
    with_trace: Callable[..., Experiment],
) -> None:
    text = "time,rate\n0 s,8 Mbit/s\n1 s,0 bit/s\n3 s,2 Mbit/s\n"
    spec = network_spec(
        with_trace(text, CSV + ', direction="forward"', "time_scale=2"), "run", is_virtual=False
    )
    assert {pair: (list(at), list(rates)) for pair, (at, rates) in spec.courses.items()} == {
        ("client-0", server): ([0.0, 0.0, 0.5, 1.5], [200e6, 16e6, 0.0, 4e6])
        for server in ("a100-0", "a100-1")
    }, "the link as it is at first, and the trace"
    first, second = spec.courses.values()
    assert first is second  # pairs that change alike share what is stored
