"""Step base, context slope, prefill curve and contention mean the same in the stub, the model columns and the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

from policies.problem import Placement, Problem, ServerSpec
from testbed.errors import UserError
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import stub_profile
from testbed.results.hop_table import HopTable
from testbed.results.logs import read_logs
from testbed.results.model import hop_table
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from testbed.simulator.hops import hop_table as simulated_hops
from tests.support.failing import fail
from tests.support.problems import make_problem, placed
from tests.support.simulation import arrivals, run_fast
from tests.unit.results.conftest import SyntheticRun, make_experiment, perfect_hop


def better(server: ServerSpec, contention_ratio: float = 0.0, context_tokens: float = 3.0) -> ServerSpec:
    return replace(
        server,
        step_base_s=0.5,
        context_slope_s=0.125,
        decode_context_tokens=context_tokens,
        prefill_curve_s=0.25,
        contention_ratio=contention_ratio,
    )


def with_servers(experiment: Experiment, contention_ratio: float = 0.0) -> Experiment:
    servers = tuple(better(server, contention_ratio) for server in experiment.problem.servers)
    return replace(experiment, problem=replace(experiment.problem, servers=servers))


def small(contention_ratio: float = 0.0) -> tuple[Problem, Placement]:
    """Two servers with two blocks each; a step base is in the round trip, as a scenario puts it there."""
    problem = make_problem([99.0, 99.0], rtt_s=[[0.1, 0.4]], prefill_slope_s=0.01, n_output_tokens=7)
    servers = tuple(better(server, contention_ratio) for server in problem.servers)
    problem = replace(
        problem,
        servers=servers,
        token_rtt_s=tuple(tuple(t + 0.5 for t in row) for row in problem.raw_rtt_s),
        input_rtt_base_s=tuple(tuple(t + 0.5 for t in row) for row in problem.raw_rtt_s),
    )
    return problem, placed(problem, [(0, 2), (2, 4)], [99.0, 99.0])


def model_of(run: SyntheticRun) -> HopTable:
    return hop_table(run.experiment, read_logs(run.path))


def test_the_model_columns_count_every_step_as_the_stub_does(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", with_servers(make_experiment([(3, 4)])))
    stub = stub_profile(run.experiment, 0)
    run.arrive(0, 0.0)
    for token in range(4):
        run.token(0, token, 10.0 * token, [perfect_hop(0, 0, 4, 10.0 * token)])
    steps_s = [stub.times.step_s(0, 3, 4), *(stub.times.step_s(3 + i, 1, 4) for i in range(3))]
    assert_allclose(model_of(run).model_compute_s, steps_s)
    assert_allclose(steps_s[0], 0.5 + 4 * (0.02 + 0.005 * 3 + 0.25 * 9))
    assert_allclose(steps_s[3] - steps_s[2], 4 * 0.125)


def test_the_model_columns_count_those_that_computed_when_a_step_arrived(tmp_path: Path) -> None:
    experiment = with_servers(make_experiment([(2, 3)] * 2, clients=[0, 1]), contention_ratio=0.5)
    run = SyntheticRun(tmp_path / "run", experiment)
    alone_s = stub_profile(experiment, 0).times.step_s(2, 1, 4)
    for index, sent_at_s in ((0, 1.0), (1, 1.01)):
        run.arrive(index, 0.0)
        run.token(index, 1, sent_at_s, [perfect_hop(0, 0, 4, sent_at_s)])
    assert_allclose(sorted(model_of(run).model_compute_s), [alone_s, 1.5 * alone_s])


@pytest.mark.parametrize("forwarding", [False, True])
def test_a_request_alone_takes_the_same_in_closed_form_and_step_by_step(forwarding: bool) -> None:
    problem, placement = small()
    problem = replace(problem, forwarding=forwarding)
    plans = arrivals(0.0, n_input=3, n_output=7)
    [closed] = run_fast(problem, placement, plans).requests
    for batching in ("none", "serial", "continuous"):
        [system] = fail((problem, placement), plans, batching=batching).requests
        assert system.times.ttft_s == pytest.approx(closed.ttft_s)
        assert system.times.e2e_s == pytest.approx(closed.time_s)
    if not forwarding:
        contexts = range(3, 9)
        decode_s = sum(0.1 + 0.4 + 2 * 0.5 + 4 * (0.01 + 0.125 * (c - 3)) for c in contexts)
        prefill_s = 0.1 + 0.4 + 2 * 0.5 + 4 * (0.03 + 0.25 * 9)
        assert closed.ttft_s is not None
        assert closed.time_s - closed.ttft_s == pytest.approx(decode_s)
        assert closed.ttft_s - (closed.setup_s or 0.0) == pytest.approx(prefill_s)


def test_a_step_base_keeps_a_serial_server_busy() -> None:
    problem = make_problem([99.0], n_blocks=1, rtt_s=[[0.0]], decode_s=[1.0])
    servers = (replace(problem.servers[0], step_base_s=1.0),)
    problem = replace(problem, servers=servers, token_rtt_s=((1.0,),), input_rtt_base_s=((1.0,),))
    made = problem, placed(problem, [(0, 1)], [99.0])
    run = fail(made, arrivals(0.0, 0.0), batching="serial")
    assert [r.times.ttft_s for r in run.requests] == pytest.approx([1.0, 2.0], abs=1e-6)


def test_sessions_slow_each_other_by_the_servers_contention_in_virtual_time() -> None:
    problem = make_problem([99.0], n_blocks=1, rtt_s=[[0.0]], decode_s=[1.0], prefill_slope_s=2.0)
    servers = (replace(problem.servers[0], contention_ratio=0.5),)
    problem = replace(problem, servers=servers)
    run = fail((problem, placed(problem, [(0, 1)], [99.0])), arrivals(0.0, 1.0))
    assert [r.times.ttft_s for r in run.requests] == pytest.approx([2.0, 3.0], abs=1e-6)


def test_simulated_hops_add_up_to_the_requests_that_they_belong_to() -> None:
    experiment = with_servers(make_experiment([(3, 5), (2, 4)]))
    # What a scenario does with a step base: it is in t_cj and t^I_cj.
    problem = experiment.problem
    problem = replace(
        problem,
        servers=tuple(replace(s, memory_bytes=1e5) for s in problem.servers),
        token_rtt_s=tuple(tuple(t + 0.5 for t in row) for row in problem.token_rtt_s),
        input_rtt_base_s=tuple(tuple(t + 0.5 for t in row) for row in problem.input_rtt_base_s),
    )
    done = simulate(Case(replace(experiment, problem=problem)), "testbed")
    table = simulated_hops(done)
    assert len(done.rows) == 2
    for row in done.rows:
        hops, times = table.request == row.request, row.times
        assert times.e2e_s is not None
        assert table.measured_s[hops].sum() == pytest.approx(times.e2e_s - times.queue_s - times.setup_s)
    stub = stub_profile(experiment, 0)
    chain = [(int(a), int(b)) for a, b in zip(table.first, table.last, strict=True)]
    for row, (first, last) in enumerate(chain):
        token, n_input = int(table.token[row]), {0: 3, 1: 2}[int(table.request[row])]
        position, n_tokens = (n_input + token - 1, 1) if token else (0, n_input)
        assert table.compute_s[row] == pytest.approx(stub.times.step_s(position, n_tokens, last - first))


def test_the_reference_mode_refuses_contention_that_it_does_not_have() -> None:
    experiment = with_servers(make_experiment([(3, 5)]), contention_ratio=0.5)
    with pytest.raises(UserError, match="contention of hardware has no meaning in the reference mode"):
        simulate(Case(experiment), "reference")
