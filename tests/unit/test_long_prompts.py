"""Large scenarios: prompts too long for a step are refused before anything runs, and limits grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.runtime.wiring import check_frames, check_rates, client_config, idle_s, server_limits

KILL = 'fault=[{kind="kill",server="a100-0",at="1 s"}]'


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["workload.n_input_tokens=74898"], None),
        (
            ["workload.n_input_tokens=74899"],
            "a prompt of 74,899 tokens does not fit into one step, which holds 74,898",
        ),
        (["workload.n_input_tokens=74800", "workload.n_output_tokens=100"], None),
        (
            ["workload.n_input_tokens=74800", "workload.n_output_tokens=100", KILL],
            'a history of 74,900 .* "step_by_step"',
        ),
        (
            [
                "workload.n_input_tokens=74800",
                "workload.n_output_tokens=100",
                KILL,
                "recovery.replay=step_by_step",
            ],
            None,
        ),
    ],
)
def test_what_does_not_fit_into_one_step_is_refused_with_what_to_change(
    options: list[str], said: str | None
) -> None:
    experiment = load_experiment("clustered", ["workload.n_requests=1", *options])
    if said is None:
        check_frames(experiment)
    else:
        with pytest.raises(UserError, match=said):
            check_frames(experiment)


def test_a_link_that_not_even_one_token_crosses_in_time_is_refused_with_the_times_it_takes() -> None:
    slow = ["workload.n_requests=1", 'sites=[{name="Cluster0",up="1 kbit/s"}]']
    said = (
        "network: no message crosses the link from client-0 to .* one token's hidden state takes 238 s at 1 kbit/s, "
        "and the longest prompt 4,753 s, but a step without an answer for 180 s has failed"
    )
    with pytest.raises(UserError, match=said):
        check_rates(load_experiment("clustered", slow))
    check_rates(load_experiment("clustered", [*slow, 'recovery.request_timeout="239 s"']))
    check_rates(load_experiment("clustered", [slow[0], slow[1].replace("1 kbit/s", "2 kbit/s")]))


def test_a_slow_link_that_pairs_share_is_named() -> None:
    with pytest.raises(UserError, match="raise the rate of Cluster0 up, or"):
        check_rates(load_experiment("clustered", ["sites=[{name='Cluster0',up='1 kbit/s'}]"]))


def test_a_slow_link_that_an_event_makes_faster_is_accepted(tmp_path: Path) -> None:
    text = """
        model = { profile = "bloom-176b", n_blocks = 4 }
        servers = [{ hardware = "a100", site = "A" }]
        clients = [{ site = "B" }]
        workload = { rate = 1, n_requests = 1, n_input_tokens = 5, n_output_tokens = 5 }
        [network]
        kind = "clusters"
        pairs = [{ sites = ["A", "B"], rtt = "1 ms", rate = "1 kbit/s" }]
    """
    path = tmp_path / "slow.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="no message crosses the link"):
        check_rates(load_experiment(str(path)))
    check_rates(load_experiment(str(path), ['network.event=[{at="0 s",link=["A","B"],rate="1 Mbit/s"}]']))


@pytest.mark.parametrize(
    ("trace", "is_refused"),
    [
        ("times=[0],rates=[1]", True),
        ("times=[0,1],rates=[1,2],length='2 s',repeat=true", True),  # an hour after the last arrival it ends
        ("times=[0,1],rates=[1,1e6],length='2 s',repeat=true", False),
        ("times=[0],rates=[1],at='100 s'", False),  # the scenario's own rate before
    ],
)
def test_a_trace_that_never_lets_a_token_through_in_time_is_refused(trace: str, is_refused: bool) -> None:
    options = ["workload.n_requests=2", "workload.rate=1"]
    site = "link=['Cluster0','Cluster1'],kind='listed'"
    experiment = load_experiment("clustered", [*options, f"network.trace=[{{{site},{trace}}}]"])
    if is_refused:
        with pytest.raises(UserError, match=r"no message crosses the link from .* at [12] bit/s"):
            check_rates(experiment)
    else:
        check_rates(experiment)


def test_servers_take_every_node_of_a_large_scenario() -> None:
    usual, large = (server_limits(load_experiment("clustered", [f"clients.count={n}"])) for n in (1, 600))
    assert (usual.max_connections, usual.max_connections_per_client) == (512, 256)
    assert large.max_connections == large.max_connections_per_client == 2 * 609


def test_a_step_may_go_without_an_answer_for_as_long_as_the_slowest_hop_needs_on_top() -> None:
    short, long = (
        load_experiment("clustered", ["workload.n_requests=1", f"workload.n_input_tokens={n}"])
        for n in (20, 60_000)
    )
    extra_s = {
        client_config(made, "client-0", Path("s"), "", Path("l")).rules.recovery.step_limit_s(n) - 180
        for made, n in ((short, 1), (short, 20), (long, 60_000))
    }
    none_s, little_s, much_s = sorted(extra_s)
    # Twice 1.72 GB over the slowest link, with headers, and the slowest prefill of 70 blocks.
    link_s = 60_000 * 28_672 * 8 / min(link.rate_bps for link in long.network.links.values())
    prefill_s = max(server.step_s(0, 60_000, 70) for server in long.problem.servers)
    assert none_s == 0
    assert 0 < little_s < 20
    assert 2 * link_s + prefill_s < much_s < 1.1 * (2 * link_s + prefill_s)
    assert idle_s(long) > 9 * much_s + 2 * link_s, "all other servers of a chain may take as long"
    many = load_experiment("clustered", ["workload.n_requests=5", "workload.n_input_tokens=60_000"])
    assert idle_s(many) == pytest.approx(idle_s(long) + 4 * 2 * link_s, rel=0.05), "and so may other prompts"
