from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.problem import RequestSpec
from testbed.experiments import dump_toml, load_experiment, shipped_scenarios
from testbed.experiments.experiment import Experiment

Load = Callable[..., Experiment]


def test_the_clustered_scenario_is_the_papers() -> None:
    e = load_experiment("clustered")
    p = e.problem
    assert [s.hardware for s in p.servers] == ["mig-1g"] * 7 + ["a100"] * 2
    assert e.sites["mig-1g-6"] == "Cluster2"
    assert e.sites["a100-1"] == "Cluster1"
    assert e.sites["client-0"] == "Cluster0"
    assert p.raw_rtt_s == ((0.1,) * 9,)
    assert p.server_rtt_s[0] == (0.0, *[0.005] * 6, 0.1, 0.1)
    assert {link.rate_bps for link in e.network.links.values()} == {1e8, 1e9}
    assert e.network.links["a100-0", "a100-1"].delay_s == 0.0025
    assert len(e.network.links) == 2 * 9 + 9 * 8
    assert (p.model.n_blocks, p.model.block_bytes, p.model.token_bytes) == (70, 1323397667.2, 28672)
    assert p.design_cache_bytes == 8486912
    mig, a100 = p.servers[0], p.servers[-1]
    assert (mig.memory_bytes, mig.decode_s, mig.block_cap) == (8.2e9, 0.0162488, 4)
    assert (a100.memory_bytes, a100.decode_s, a100.block_cap) == (79.13e9, 0.0032197, None)
    assert a100.prefill_s(20) == pytest.approx(0.034476)
    assert mig.prefill_s(20) == pytest.approx(0.2084367)
    assert (p.request_rate, p.n_input_tokens, p.n_output_tokens, len(e.workload.requests)) == (
        0.1,
        20,
        128,
        100,
    )
    assert (e.policy.placement, e.policy.routing, e.policy.design_concurrency) == ("cg-bp", "ws-rr", None)
    assert (e.calibration.name, e.calibration.session_setup_s, e.problem.initial_delay_s) == ("none", 0, 0)
    assert e.time_scale == 1


def test_a_shipped_name_and_its_file_are_the_same_scenario() -> None:
    root = Path(__file__).parents[3]
    assert load_experiment(str(root / "scenarios/clustered.toml")) == load_experiment("clustered")
    names = [name for name, _ in shipped_scenarios()]
    assert names == [
        *("abovenet", "bellcanada", "bloom-tiny", "chain-7b", "churn", "clustered", "clustered-gpu"),
        *(
            "gts-ce",
            "helix-24",
            "helix-42",
            "helix-regions",
            "load-shift",
            "petals-real",
            "trace-replay",
            "wan",
        ),
    ]
    assert all(description for _, description in shipped_scenarios())


OPTION = st.one_of(
    st.integers(0, 2**63).map(lambda n: f"seed={n}"),
    st.floats(1e-3, 1e3).map(lambda x: f"workload.rate={x!r}"),
    st.floats(0, 1e3).map(lambda x: f"network.pairs.4.rtt={x!r} ms"),
    st.floats(1e-3, 1e3).map(lambda x: f"network.pairs.4.rate={x!r} Mbit/s"),
    st.integers(0, 4).map(lambda n: f"servers.1.count={n}"),
    st.sampled_from(["none", "petals-scattered", "petals-clustered"]).map("calibration.set={}".format),
    st.sampled_from(["petals", "proposed"]).map("policy.name={}".format),
    st.just("calibration.session_setup=true"),
    st.floats(1, 9).map(lambda x: f"servers.0.memory={x!r} GiB"),
    st.floats(1e-6, 1).map(lambda x: f"hardware.mig-1g.decode={x!r} s"),
    st.integers(1, 9).map(lambda n: f"workload.n_input_tokens={{distribution='uniform',low={n},high=9}}"),
    st.floats(0, 2).map(
        lambda s: f"workload.n_output_tokens={{distribution='lognormal',mean=30,sigma={s!r},max=200}}"
    ),
    st.integers(1, 9).map(lambda n: f"workload.n_requests={n}"),
    st.integers(1, 4).map(lambda n: f"clients.count={n}"),
)


@settings(max_examples=60, deadline=None)
@given(options=st.lists(OPTION, max_size=6))
def test_a_dumped_scenario_loads_to_an_equal_experiment(
    tmp_path_factory: pytest.TempPathFactory, options: list[str]
) -> None:
    made = load_experiment("clustered", options)
    path = tmp_path_factory.mktemp("dump") / "scenario.toml"
    path.write_text(dump_toml(made), encoding="utf-8")
    assert load_experiment(str(path)) == made


def test_options_change_values_without_copying_the_file() -> None:
    e = load_experiment(
        "clustered", ["workload.rate=0.5", "clients.site=Cluster1", "servers.0.count=3", "tcp.warm=false"]
    )
    assert e.problem.request_rate == 0.5
    assert e.sites["client-0"] == "Cluster1"
    assert e.problem.n_servers == 5
    assert not e.network.tcp.warm
    assert e.problem.raw_rtt_s == ((0.1, 0.1, 0.1, 0.005, 0.005),)


def test_clients_can_be_at_several_sites(load: Load) -> None:
    e = load(replace=("[clients]", '[[clients]]\nsite = "A"\ncount = 2\n[[clients]]'))
    assert e.problem.clients == ("client-0", "client-1", "client-2")
    assert [e.sites[c] for c in e.problem.clients] == ["A", "A", "B"]
    assert ("client-0", "client-1") not in e.network.links
    assert [row[0] for row in e.problem.raw_rtt_s] == [0.005, 0.005, 0.1]


def test_servers_are_named_by_prefix_or_by_hardware(load: Load) -> None:
    more = (
        '[[servers]]\nhardware = "a100"\nsite = "A"\n'
        '[[servers]]\nhardware = "mig-1g"\nsite = "A"\nname = "edge"\n'
    )
    e = load("servers.2.count=2", replace=("[clients]", more + "[clients]"))
    assert e.nodes == ("client-0", "a100-0", "a100-1", "a100-2", "edge-0", "edge-1")
    assert load(replace=("[clients]", more + "[clients]")).nodes[-1] == "edge"


def test_a_table_with_a_profiles_name_changes_that_profile(load: Load) -> None:
    server = load("hardware.a100.decode=2 ms").problem.servers[0]
    assert (server.decode_s, server.memory_bytes) == (0.002, 79.13e9)
    capped = load('hardware.new={base="mig-1g",block_cap="none"}', "servers.0.hardware=new").problem.servers[
        0
    ]
    assert (capped.hardware, capped.decode_s, capped.block_cap) == ("new", 0.0162488, None)


def test_memory_variants_are_named_profiles(load: Load) -> None:
    large = load("servers.0.hardware=a100-large").problem.servers[0]
    assert (large.memory_bytes, large.petals_network_rps, large.decode_s) == (
        84.973e9,
        2555.208925125856,
        0.0032197,
    )
    assert load("servers.0.memory=40 GiB").problem.servers[0].memory_bytes == 40 * 2**30


def test_a_model_can_be_given_by_numbers(load: Load) -> None:
    numbers = 'name = "tiny"\nn_blocks = 4\nhidden_size = 64\nblock_size = "1 MB"'
    model = load(replace=('profile = "bloom-176b"', numbers)).problem.model
    assert (model.name, model.n_blocks, model.block_bytes, model.cache_bytes_per_token) == (
        "tiny",
        4,
        1e6,
        256,
    )
    assert load("model.n_blocks=4").problem.model.hidden_size == 14336


def test_the_clustered_calibration_has_its_own_hardware_constants() -> None:
    p = load_experiment("clustered", ["calibration.set=petals-clustered"]).problem
    mig, a100 = p.servers[0], p.servers[-1]
    assert (a100.memory_bytes, a100.decode_s, a100.prefill_s(10)) == (79.138427734375e9, 0.0022197, 0.0072197)
    assert (mig.memory_bytes, mig.decode_s, mig.prefill_s(10)) == (9.1e9, 0.0162488, 0.0512488)
    assert p.initial_delay_s == 0.1
    assert p.token_rtt_s[0][0] == pytest.approx(0.150)
    assert p.input_rtt_s(0, 0, 10) == pytest.approx(0.155)


@pytest.mark.parametrize(
    ("options", "setup_s"),
    [
        ([], 0),
        (["calibration.session_setup=true"], 60),
        (["calibration.session_setup=true", "policy.name=petals"], 250),
        (["calibration.session_setup=true", "policy.placement=petals"], 250),
        (
            [
                "calibration.session_setup=true",
                "calibration.session_setup_petals=350 s",
                "policy.name=petals",
                "calibration.set=petals-scattered",
            ],
            350,
        ),
    ],
)
def test_session_setup_is_off_unless_switched_on_and_depends_on_the_policy(
    options: list[str], setup_s: float
) -> None:
    assert load_experiment("clustered", options).calibration.session_setup_s == setup_s


@pytest.mark.parametrize(
    ("options", "pair"),
    [
        (["policy.name=petals"], ("petals", "petals")),
        (["policy.placement=petals"], ("petals", "ws-rr")),
        (["policy.routing=my:Own"], ("cg-bp", "my:Own")),
        (["policy.name=petals", "policy.placement=petals"], ("petals", "petals")),
        (["policy.placement=a", "policy.routing=b"], ("a", "b")),
    ],
)
def test_an_option_replaces_the_files_pair_or_one_half_of_it(
    options: list[str], pair: tuple[str, str]
) -> None:
    e = load_experiment("clustered", options)
    assert (e.policy.placement, e.policy.routing) == pair


def test_a_dumped_policy_can_be_replaced_by_a_pair(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(dump_toml(load_experiment("clustered")), encoding="utf-8")
    e = load_experiment(str(path), ["policy.name=petals", "calibration.session_setup=true"])
    assert (e.policy.placement, e.policy.routing, e.calibration.session_setup_s) == ("petals", "petals", 250)


@pytest.mark.parametrize("option", ["calibration.set=petals-scattered", "model.profile=bloom-176b"])
def test_a_dumped_scenario_refuses_names_that_would_change_nothing(tmp_path: Path, option: str) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(dump_toml(load_experiment("clustered")), encoding="utf-8")
    with pytest.raises(Exception, match="this is a resolved scenario"):
        load_experiment(str(path), [option])


def test_a_token_costs_the_rtt_and_its_transmission_both_ways() -> None:
    p = load_experiment("clustered").problem
    on_the_wire_bits = 8 * (28672 + 20 * 52)
    assert p.token_rtt_s[0][0] == pytest.approx(0.1 + 2 * on_the_wire_bits / 1e8)
    assert p.input_rtt_s(0, 0, 1) == pytest.approx(p.token_rtt_s[0][0])
    prompt_bits = 8 * (20 * 28672 + 397 * 52)
    assert p.input_rtt_s(0, 0, 20) == pytest.approx(0.1 + 2 * prompt_bits / 1e8, abs=1e-5)


def test_a_published_overhead_is_added_to_the_rtt_exactly() -> None:
    p = load_experiment("clustered", ["calibration.set=petals-scattered"]).problem
    assert p.token_rtt_s[0][0] == pytest.approx(0.2, abs=1e-12)
    assert p.input_rtt_s(0, 0, 20) == pytest.approx(0.181098, abs=1e-12)
    assert p.initial_delay_s == 0.07


def test_lengths_that_vary_are_planned_for_at_their_maximum() -> None:
    e = load_experiment(
        "clustered",
        [
            "workload.n_input_tokens={distribution='choice',values=[8,64],weights=[1,0]}",
            "workload.n_output_tokens={distribution='lognormal',mean=30,sigma=1,max=99}",
        ],
    )
    assert (e.problem.n_input_tokens, e.problem.n_output_tokens) == (64, 99)
    assert {r.n_input_tokens for r in e.workload.requests} == {8}
    assert all(1 <= r.n_output_tokens <= 99 for r in e.workload.requests)
    assert RequestSpec(0, 64, 99).n_tokens == e.problem.n_input_tokens + e.problem.n_output_tokens
