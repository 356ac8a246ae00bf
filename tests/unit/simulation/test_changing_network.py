"""The mode ``real`` on links that change: messages take what is in force when they are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from testbed.errors import UserError
from testbed.experiment import Experiment, Link, NetworkChange
from testbed.scenario import load_experiment
from testbed.simulation.cases import Case
from testbed.simulation.engine import Simulation, simulate
from testbed.simulation.hops import hop_table

SCENARIO = """
seed = 3
model = { profile = "bloom-176b", n_blocks = 6 }
servers = [{ hardware = "mig-1g", site = "Here", count = 2 }, { hardware = "a100", site = "There" }]
clients = [{ site = "Here" }]
network.kind = "clusters"
network.pairs = [
    { sites = ["Here", "Here"], rtt = "5 ms", rate = "1 Gbit/s" },
    { sites = ["Here", "There"], rtt = "60 ms", rate = "100 Mbit/s" },
]
workload = { arrivals = "constant", rate = 1, n_requests = 1, n_input_tokens = 5, n_output_tokens = 20 }
"""

Make = Callable[..., Experiment]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The scenario with the given events: one request on a chain of the server There alone."""
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)

    def run(*events: str, options: tuple[str, ...] = ()) -> Experiment:
        tables = ", ".join("{" + event + "}" for event in events)
        return load_experiment(str(path), [f"network.event=[{tables}]", *options])

    return run


def gaps(simulation: Simulation) -> np.ndarray:
    """Seconds from each token to the next, of the first request."""
    table = hop_table(simulation)
    return np.diff(table.received_at_s[table.request == 0])


def run_of(experiment: Experiment, mode: str = "real") -> Simulation:
    return simulate(Case(experiment), mode)


def test_an_outage_delays_the_one_token_in_it_and_no_other(make: Make) -> None:
    steady, outage = run_of(make()), run_of(make("at='1 s', for='3 s', partition=['There']"))
    assert [r.status for r in outage.requests] == ["completed"]
    token_s = gaps(steady)[0]
    late = gaps(outage) > token_s + 1e-9
    assert late.sum() == 1
    # Sent somewhere before the end of the outage, the token in it goes out as that ends.
    received_at_s = hop_table(outage).received_at_s
    [first_late] = np.flatnonzero(late) + 1
    assert received_at_s[first_late - 1] + token_s > 1.0
    assert 4.0 < received_at_s[first_late] < 4.0 + token_s
    assert np.allclose(np.delete(gaps(outage), first_late - 1), token_s)


def test_an_rtt_counts_from_the_first_step_that_is_sent_after_it_changes(make: Make) -> None:
    simulation = run_of(make("at='1 s', site='There', rtt='260 ms'"))
    before_s = gaps(run_of(make()))[0]
    table = hop_table(simulation)
    after = table.sent_at_s[1:] >= 1.0
    assert 0 < after.sum() < len(after)
    assert np.allclose(gaps(simulation)[after], before_s + 0.2)
    unchanged = table.departed_at_s[1:] < 1.0
    assert np.allclose(gaps(simulation)[unchanged], before_s)


def test_the_table_of_hops_ends_where_the_request_does(make: Make) -> None:
    events = (
        "at='0.5 s', for='2 s', site='There', rtt_to='300 ms'",
        "at='1 s', for='1 s', partition=['Here']",
    )
    for options in (
        (),
        ("calibration.set='petals-scattered'",),
        ("policy.name='proposed'", "policy.communication='server-to-server'"),
    ):
        simulation = run_of(make(*events, options=options))
        [r] = simulation.requests
        table = hop_table(simulation)
        assert r.time_s is not None and r.ttft_s is not None
        assert table.received_at_s[-1] == pytest.approx(r.plan.arrival_at_s + r.time_s)
        first = table.received_at_s[table.token == 0].max()
        assert first == pytest.approx(r.plan.arrival_at_s + r.ttft_s)
        assert (table.compute_s > 0).all() and (table.network_s > 0).all()


def test_changes_that_come_after_the_last_request_change_nothing(make: Make) -> None:
    for options in ((), ("compute.serial=true",)):
        late = run_of(make("at='900 s', for='1 s', partition=['There']", options=options))
        steady = run_of(make(options=options))
        for a, b in zip(late.requests, steady.requests, strict=True):
            assert (a.hops, a.status) == (b.hops, b.status)
            assert a.time_s == pytest.approx(b.time_s)
            assert a.ttft_s == pytest.approx(b.ttft_s)
        assert np.allclose(hop_table(late).received_at_s, hop_table(steady).received_at_s)


def test_policies_go_on_to_see_the_times_of_the_start(make: Make) -> None:
    far = run_of(make("at='0 s', site='There', rtt='60 s'"))
    assert [r.hops for r in far.requests] == [r.hops for r in run_of(make()).requests]


def test_an_opening_waits_for_the_link_too(make: Make) -> None:
    [r] = run_of(make("at='0 s', for='5 s', site='There', down=true")).requests
    assert r.status == "completed"
    assert r.setup_s == pytest.approx(5.06)


def test_a_session_that_hears_nothing_for_300_seconds_is_lost(make: Make) -> None:
    for for_, status in (("299 s", "completed"), ("302 s", "failed")):
        [r] = run_of(make(f"at='1 s', for='{for_}', partition=['There']")).requests
        assert r.status == status
    assert r.reason.startswith("nothing came from ")
    assert r.reason.endswith(" for 300 s")
    assert r.ttft_s is not None and r.time_s is None


def test_a_cut_for_ever_fails_what_is_served_and_what_comes(make: Make) -> None:
    options = ("workload.n_requests=2", "workload.rate=0.2")
    first, second = run_of(make("at='1 s', partition=['There']", options=options)).requests
    assert (first.status, second.status) == ("failed", "failed")
    assert second.reason == "a server of the chain cannot be reached"


def test_the_reference_mode_refuses_changes_in_one_sentence(make: Make) -> None:
    with pytest.raises(
        UserError, match=r"small: network\.event has no meaning in the reference mode; add --mode"
    ):
        run_of(make("at='1 s', site='There', down=true"), "reference")


def test_the_same_changes_give_the_same_answers(make: Make) -> None:
    experiment = make("at='1 s', for='2 s', partition=['There']")
    assert run_of(experiment).requests == run_of(experiment).requests


def test_a_change_of_one_direction_changes_what_the_policies_times_are_made_of(make: Make) -> None:
    experiment = make()
    pair = experiment.problem.clients[0], "a100-0"
    link = experiment.links[pair]
    slower = NetworkChange(0.0, {pair: Link(link.delay_s + 0.1, link.rate_bps)}, "slower up")
    simulation = run_of(replace(experiment, changes=(slower,)))
    assert np.allclose(gaps(simulation), gaps(run_of(experiment)) + 0.1)
