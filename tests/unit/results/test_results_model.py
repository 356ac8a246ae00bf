import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from policies.links import Link
from testbed.experiments.experiment import Calibration, NetworkChange
from testbed.experiments.timeline import Timeline
from testbed.records.events import EventWriter, LinksChanged, Serving
from testbed.results.hop_table import HopTable
from testbed.results.logs import read_logs
from testbed.results.model import hop_table, model_setup_s
from testbed.results.trace import write_trace
from tests.unit.results.conftest import LINK, MakeRun, SyntheticRun, perfect_hop

CHAIN = [(0, 0, 2), (1, 2, 4)]


def table_of(run: SyntheticRun) -> HopTable:
    return hop_table(run.experiment, read_logs(run.path))


def step(run: SyntheticRun, index: int, sent_at_s: float, **times: float) -> None:
    """One decode step on all blocks of s0, sent at ``sent_at_s``, with some instants moved."""
    server, first, last, sent, arrived, departed, received, up, down = perfect_hop(0, 0, 4, sent_at_s)
    arrived, departed = times.get("arrived", arrived), times.get("departed", departed)
    received = times.get("received", received)
    run.token(index, 1, sent_at_s, [(server, first, last, sent, arrived, departed, received, up, down)])


def test_a_hop_alone_takes_propagation_transmission_and_compute(make_run: MakeRun) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    table = table_of(run)
    assert table.token.tolist() == [0, 0, 1, 1, 2, 2]
    assert_allclose(table.model_network_s, [0.5, 0.5, 0.3, 0.3, 0.3, 0.3])
    assert_allclose(table.model_compute_s, [0.06, 0.06, 0.02, 0.02, 0.02, 0.02])
    assert_allclose(table.measured_s, table.model_s)
    assert_allclose(table.model_link_queue_s, 0, atol=1e-12)


def test_a_message_waits_in_the_model_for_the_one_that_another_session_sent_before(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)] * 2)
    run.arrive(0, 0.0)
    run.arrive(1, 0.0)
    # The log has the later one first: what counts is when they were sent.
    step(run, 1, 1.02, arrived=1.25, departed=1.29, received=1.44)
    step(run, 0, 1.0)  # on the link until 1.1, so that the other's transmission starts 0.08 s late
    table = table_of(run)
    by_request = dict(zip(table.request.tolist(), range(2), strict=True))
    first, second = by_request[0], by_request[1]
    assert_allclose(table.model_link_queue_s[[first, second]], [0.0, 0.08], atol=1e-12)
    assert_allclose(table.model_network_s[[first, second]], [0.3, 0.38])
    assert_allclose(table.network_s[second], 0.38)


def test_answers_queue_in_the_order_in_which_the_server_sent_them(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)] * 2)
    run.arrive(0, 0.0)
    run.arrive(1, 0.0)
    step(run, 0, 1.0, departed=2.03)
    step(run, 1, 1.5, departed=2.0)  # sent later, answered first: 0 waits 0.07 s for it
    table = table_of(run)
    assert_allclose(table.model_link_queue_s, [0.07, 0.0], atol=1e-12)


def test_sessions_of_different_clients_do_not_share_a_link(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)] * 2, clients=[0, 1])
    run.arrive(0, 0.0)
    run.arrive(1, 0.0)
    step(run, 0, 1.0)
    step(run, 1, 1.02)
    assert_allclose(table_of(run).model_link_queue_s, 0, atol=1e-12)


def test_a_server_that_computes_serially_makes_the_second_session_wait_in_the_model(
    make_run: MakeRun,
) -> None:
    run = make_run(lengths=[(2, 3)] * 2, clients=[0, 1], batching="serial")
    run.arrive(0, 0.0)
    run.arrive(1, 0.0)
    step(run, 0, 1.0)  # computes from 1.15 to 1.19
    step(run, 1, 1.01)  # arrives at 1.16
    assert_allclose(table_of(run).model_compute_s, [0.04, 0.03 + 0.04])


def test_sessions_at_once_do_not_slow_each_other_unless_the_server_is_serial(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)] * 2, clients=[0, 1])
    run.arrive(0, 0.0)
    run.arrive(1, 0.0)
    step(run, 0, 1.0)
    step(run, 1, 1.01)
    assert_allclose(table_of(run).model_compute_s, [0.04, 0.04])


def test_prefill_is_modelled_with_each_requests_own_length(make_run: MakeRun) -> None:
    run = make_run(lengths=[(1, 2), (3, 1)])
    run.serve(0, 0.0, [(0, 0, 4)])
    run.serve(1, 50.0, [(0, 0, 4)])
    table = table_of(run)
    assert table.request.tolist() == [0, 0, 1]
    assert_allclose(table.model_compute_s, [4 * 0.025, 4 * 0.01, 4 * 0.035])
    assert_allclose(table.model_network_s, [0.3, 0.3, 0.7])


def test_published_overheads_count_less_the_transmission_that_the_link_takes(make_run: MakeRun) -> None:
    calibration = Calibration("measured", token_overhead_s=0.25, input_overhead_base_s=0.1)
    run = make_run(calibration=calibration)
    run.serve(0, 0.0, [(0, 0, 4)])
    # Decode: 0.25 - 2 x 0.1 on top of 0.04. Prefill: 0.1 is less than 2 x 0.2, and never negative.
    assert_allclose(table_of(run).model_compute_s, [4 * 0.03, 0.09, 0.09])


def test_the_parts_of_a_tokens_hops_add_up_to_its_time(make_run: MakeRun) -> None:
    run = make_run()
    run.arrive(0, 0.0)
    hops = [perfect_hop(0, 0, 2, 1.003), perfect_hop(1, 2, 4, 1.3307)]
    run.token(0, 1, 1.0, hops, finished_at_s=1.6591)
    table = table_of(run)
    assert_allclose(table.client_s, [0.003, 1.3307 - hops[0][6]], atol=1e-12)
    assert_allclose(table.tail_s, [0.0, 1.6591 - hops[1][6]], atol=1e-12)
    parts = table.client_s + table.tail_s + table.network_s + table.compute_s
    assert_allclose(parts.sum(), 0.6591, atol=1e-12)
    assert_allclose(table.measured_s, parts)


@pytest.mark.parametrize(
    ("calibration", "expected_s"),
    [
        (Calibration(), 0.1),
        (Calibration("a", initial_delay_s=0.07), 0.1),
        (Calibration("a", initial_delay_s=0.3), 0.3),
        (Calibration("a", initial_delay_s=0.3, session_setup_s=60.0), 60.3),
    ],
)
def test_setup_takes_a_round_trip_or_the_initial_delay_and_then_the_session_setup(
    make_run: MakeRun, calibration: Calibration, expected_s: float
) -> None:
    run = make_run(calibration=calibration)
    assert_allclose(model_setup_s(run.experiment, "c0", [[0, 0, 4]]), expected_s)


def test_a_run_without_tokens_has_an_empty_table(make_run: MakeRun) -> None:
    run = make_run()
    run.arrive(0, 0.0)
    table = table_of(run)
    assert len(table.request) == 0
    assert np.sum(table.model_s) == 0


def test_a_link_that_changes_counts_as_it_is_when_a_message_goes_out(make_run: MakeRun) -> None:
    slow = {pair: Link(0.25, 84_160.0) for pair in (("c0", "s0"), ("s0", "c0"))}
    run = make_run(lengths=[(2, 3)] * 2)
    changes = (NetworkChange(1.1, slow, "slower"), NetworkChange(9.0, {}, "never came to that"))
    run.experiment = replace(run.experiment, network=replace(run.experiment.network, changes=changes))
    note_changes(run, 1.1)
    run.arrive(0, 0.0)
    step(run, 0, 1.0)  # sent before the change, answered after it
    step(run, 0, 2.0, arrived=2.35, departed=2.39, received=2.74)
    table = table_of(run)
    assert_allclose(table.model_network_s, [0.15 + 0.35, 0.7])
    assert_allclose(table.model_link_queue_s, 0, atol=1e-12)


def test_a_message_is_transmitted_at_the_rates_that_its_link_has_meanwhile(make_run: MakeRun) -> None:
    """A tenth of a second at the full rate: half of it, a quarter at half the rate, a pause, and the last quarter."""
    to_server = ("c0", "s0")
    slow, cut = Link(0.25, LINK.rate_bps / 2), Link(0.05, LINK.rate_bps, 0.0, 1.0)
    links = ((1.05, slow), (1.1, cut), (1.5, LINK))
    run = make_run()
    changes = tuple(NetworkChange(at_s, {to_server: link}, "changes") for at_s, link in links)
    run.experiment = replace(run.experiment, network=replace(run.experiment.network, changes=changes))
    note_changes(run, *(at_s for at_s, _ in links))
    run.arrive(0, 0.0)
    step(run, 0, 1.0, arrived=1.575, departed=1.615, received=1.765)
    assert_allclose(table_of(run).model_network_s, [0.525 + 0.05 + 0.15])


def test_a_message_that_meets_a_cut_link_goes_out_in_the_model_when_it_is_up_again(make_run: MakeRun) -> None:
    cut = {("c0", "s0"): Link(0.05, 84_160.0, 0.0, 1.0)}
    run = make_run()
    changes = (NetworkChange(1.0, cut, "down"), NetworkChange(3.0, {("c0", "s0"): LINK}, "up"))
    run.experiment = replace(run.experiment, network=replace(run.experiment.network, changes=changes))
    note_changes(run, 1.2, 3.1)  # what counts is when it was done
    run.arrive(0, 0.0)
    step(run, 0, 1.1)
    step(run, 0, 1.5, arrived=3.25, departed=3.29, received=3.44)
    table = table_of(run)
    assert_allclose(table.model_network_s, [0.3, 1.6 + 0.3])
    assert_allclose(table.network_s, table.model_network_s)


def test_a_message_sent_while_its_link_was_being_cut_was_caught_if_it_came_after_the_cut(
    make_run: MakeRun,
) -> None:
    cut = {("c0", "s0"): Link(0.05, 84_160.0, 0.0, 1.0)}
    run = make_run()
    changes = (NetworkChange(1.0, cut, "down"), NetworkChange(3.0, {("c0", "s0"): LINK}, "up"))
    run.experiment = replace(run.experiment, network=replace(run.experiment.network, changes=changes))
    note_changes(run, 1.2, 3.1)
    run.arrive(0, 0.0)
    step(run, 0, 1.1, arrived=3.25, departed=3.29, received=3.44)
    table = table_of(run)
    assert_allclose(table.model_network_s, [2.0 + 0.3])
    assert_allclose(table.network_s, table.model_network_s)


def test_opening_a_chain_over_a_cut_link_takes_until_it_is_up(make_run: MakeRun) -> None:
    cut = {("s0", "c0"): Link(0.05, 84_160.0, 0.0, 1.0)}
    experiment = make_run().experiment
    changes = (NetworkChange(1.0, cut, "down"), NetworkChange(3.0, {("s0", "c0"): LINK}, "up"))
    experiment = replace(experiment, network=replace(experiment.network, changes=changes))
    timeline = Timeline(experiment)
    chain = [[0, 0, 4]]
    assert_allclose(model_setup_s(experiment, "c0", chain), 0.1)
    assert_allclose(model_setup_s(experiment, "c0", chain, timeline, 2.0), 1.05)
    assert_allclose(model_setup_s(experiment, "c0", chain, timeline, 3.0), 0.1)


def test_changes_of_links_are_instants_of_the_trace(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    note_changes(run, 1.25)
    records = read_logs(run.path)
    write_trace(tmp_path / "trace.json", run.experiment, records, table_of(run))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    [instant] = [event for event in events if event["ph"] == "i"]
    assert (instant["name"], instant["ts"], instant["s"]) == ("change 0", 1.25e6, "g")
    assert_allclose(instant["args"]["late_ms"], 250.0)


def note_by_hand(run: SyntheticRun, at_s: float, **links: Any) -> None:
    """Write what the emulation writes when links are changed by hand, or are not as planned."""
    writer = EventWriter(run.path)
    details = {
        "planned_at_s": None,
        "late_s": None,
        "why": "by hand",
        "n_links": 2,
        "by": "hand",
        "asked_at_s": at_s,
    }
    writer.write(LinksChanged(at_s=at_s, **(details | links)))
    writer.close()


BOTH = (("c0", "s0"), ("s0", "c0"))
SLOW_BY_HAND = [[*pair, 0.25, 84_160.0, 0.0, 0.0] for pair in BOTH]


def test_the_model_knows_of_links_changed_by_hand_among_planned_changes(make_run: MakeRun) -> None:
    """Slow from 1.1 s by hand; what was planned for 1.5 s finds it so; restored at 3 s to what was planned."""
    run = make_run(lengths=[(2, 3)] * 2)
    planned = dict.fromkeys(BOTH, Link(0.15, 84_160.0))
    run.experiment = replace(
        run.experiment,
        network=replace(run.experiment.network, changes=(NetworkChange(1.5, planned, "planned"),)),
    )
    note_by_hand(run, 1.1, links=SLOW_BY_HAND)
    note_by_hand(run, 1.6, planned_at_s=1.5, late_s=0.1, by="scenario", links=SLOW_BY_HAND)
    note_by_hand(run, 3.0, links=[[*pair, 0.15, 84_160.0, 0.0, 0.0] for pair in BOTH])
    run.arrive(0, 0.0)
    step(run, 0, 1.0)  # sent before anything, answered after the change by hand
    step(run, 0, 2.0, arrived=2.35, departed=2.39, received=2.74)
    step(run, 0, 4.0, arrived=4.25, departed=4.29, received=4.54)
    assert_allclose(table_of(run).model_network_s, [0.15 + 0.35, 0.7, 0.5])


def test_a_change_by_hand_of_a_pair_that_serves_nothing_does_not_disturb_the_model(make_run: MakeRun) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    before = table_of(run).model_network_s
    note_by_hand(run, 0.1, links=[["c0", "c1", 9.0, 1.0, 0.0, 1.0]])
    assert_allclose(table_of(run).model_network_s, before)


def test_a_change_by_hand_is_an_instant_of_the_trace(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    run.serve(0, 0.0, CHAIN)
    note_by_hand(run, 1.25, links=SLOW_BY_HAND)
    write_trace(tmp_path / "trace.json", run.experiment, read_logs(run.path), table_of(run))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "i"] == [
        ("by hand", 1.25e6, {"by": "hand"})
    ]


def note_changes(run: SyntheticRun, *at_s: float) -> None:
    """Write what the emulation writes when it carries out a change; a kill cuts the last line short."""
    writer = EventWriter(run.path)
    writer.write(Serving(at_s=0.0))
    planned_at_s = [change.at_s for change in run.experiment.network.changes] or [1.0]
    for number, now_s in enumerate(at_s):
        late_s = now_s - planned_at_s[number]
        details = {
            "planned_at_s": planned_at_s[number],
            "late_s": late_s,
            "why": f"change {number}",
            "n_links": 1,
        }
        writer.write(LinksChanged(at_s=now_s, **details))
    writer.close()
    with open(run.path / "events.jsonl", "a") as file:
        file.write('{"event": "network-ch')
