import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment

Complain = Callable[..., str]
Load = Callable[..., Experiment]

Arrivals = Callable[[Experiment], Sequence[float]]


def test_the_first_request_arrives_at_zero_and_the_rest_at_the_rate(load: Load, arrivals: Arrivals) -> None:
    at_s = arrivals(load("workload.n_requests=4000"))
    assert at_s[0] == 0
    assert list(at_s) == sorted(at_s)
    assert at_s[-1] / 3999 == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(("shape", "spread"), [(0.25, 2.0), (4.0, 0.5)])
def test_gamma_arrivals_are_as_bursty_as_their_shape_says(
    load: Load, arrivals: Arrivals, shape: float, spread: float
) -> None:
    at_s = arrivals(load("workload.arrivals=gamma", f"workload.shape={shape}", "workload.n_requests=8000"))
    gaps = [b - a for a, b in itertools.pairwise(at_s)]
    assert statistics.mean(gaps) == pytest.approx(2.0, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.1)


def test_constant_arrivals_are_evenly_spaced(load: Load, arrivals: Arrivals) -> None:
    assert arrivals(load("workload.arrivals=constant", "workload.n_requests=3")) == [0, 2, 4]


def test_the_same_seed_gives_the_same_requests_and_another_seed_does_not(load: Load) -> None:
    assert load().workload.requests == load().workload.requests
    assert load().workload.requests != load("seed=1").workload.requests


@pytest.mark.parametrize(
    "option",
    [
        "clients.count=3",
        "workload.n_input_tokens={distribution='uniform',low=1,high=9}",
        "workload.n_output_tokens={distribution='uniform',low=1,high=9}",
        "servers.0.count=6",
    ],
)
def test_changing_one_random_concern_does_not_move_arrivals(
    load: Load, arrivals: Arrivals, option: str
) -> None:
    assert arrivals(load(option)) == arrivals(load())


def test_arrivals_do_not_move_lengths_clients_or_join_order(load: Load) -> None:
    options = [
        "clients.count=3",
        "servers.0.count=9",
        "workload.n_input_tokens={distribution='uniform',low=1,high=99}",
        "workload.n_output_tokens={distribution='uniform',low=1,high=99}",
    ]
    a = load(*options)
    b = load(*options, "workload.arrivals=gamma", "workload.shape=0.5", "workload.rate=3")
    assert a.problem.join_order == b.problem.join_order
    assert [(r.client, r.n_input_tokens, r.n_output_tokens) for r in a.workload.requests] == [
        (r.client, r.n_input_tokens, r.n_output_tokens) for r in b.workload.requests
    ]
    assert [r.arrival_at_s for r in a.workload.requests] != [r.arrival_at_s for r in b.workload.requests]
    assert [r.n_input_tokens for r in a.workload.requests] != [r.n_output_tokens for r in a.workload.requests]


def test_requests_are_spread_over_all_clients(load: Load) -> None:
    assert {r.client for r in load("clients.count=3", "workload.n_requests=50").workload.requests} == {
        0,
        1,
        2,
    }


def test_servers_join_in_a_permutation(load: Load) -> None:
    assert sorted(load("servers.0.count=9").problem.join_order) == list(range(9))


LISTED = ["workload.arrivals=listed", "workload.n_requests=2"]


def test_listed_requests_come_as_listed(load: Load) -> None:
    requests = load(
        *LISTED, "workload.requests=[[0,1,2],[2.0,3,4]]", replace=("n_input_tokens = 20\n", "")
    ).workload.requests
    assert [(r.arrival_at_s, r.n_input_tokens) for r in requests] == [(0, 1), (2.0, 3)]
    assert {r.n_output_tokens for r in requests} == {64}


@pytest.mark.parametrize(
    "rows", ["[[3,1,2],[1.5,3,4]]", "[[0,1]]", "[[0,1,0]]", "[['a',1,2]]", "[3]", "[[-1,1,2]]", "[[nan,1,2]]"]
)
def test_badly_listed_requests_are_refused_with_their_form(complaint: Complain, rows: str) -> None:
    said = complaint(*LISTED, f"workload.requests={rows}")
    assert ": must be [arrival in seconds, input tokens, output tokens] with arrivals in order" in said


def test_an_empty_list_of_requests_is_refused(complaint: Complain) -> None:
    assert complaint(*LISTED, "workload.requests=[]").endswith(
        "workload.requests: needs at least one request"
    )


TRACE = """
[workload]
arrivals = "trace"
file = "trace.jsonl"
"""
MOONCAKE = "".join(
    f'{{"timestamp": {1000 + 3000 * i}, "input_length": {10 + i}, "output_length": {i + 1}}}\n'
    for i in range(5)
)


@pytest.fixture
def traced(tmp_path: Path, small: str) -> Path:
    (tmp_path / "trace.jsonl").write_text(MOONCAKE)
    path = tmp_path / "traced.toml"
    path.write_text(small[: small.index("[workload]")] + TRACE)
    return path


def test_a_trace_beside_the_scenario_is_replayed(traced: Path, arrivals: Arrivals) -> None:
    e = load_experiment(str(traced))
    assert arrivals(e) == [0, 3, 6, 9, 12]
    assert [(r.n_input_tokens, r.n_output_tokens) for r in e.workload.requests][-1] == (14, 5)
    assert (e.problem.n_input_tokens, e.problem.n_output_tokens) == (14, 5)
    assert e.problem.request_rate == pytest.approx(1 / 3)


def test_a_trace_can_be_cut_and_stretched(traced: Path, arrivals: Arrivals) -> None:
    e = load_experiment(
        str(traced), ["workload.n_requests=3", "workload.rate=1", "workload.n_output_tokens=7"]
    )
    assert arrivals(e) == pytest.approx([0, 1, 2])
    assert {r.n_output_tokens for r in e.workload.requests} == {7}
    assert e.problem.request_rate == 1


def test_a_dumped_trace_needs_the_trace_file_no_more(traced: Path, tmp_path: Path) -> None:
    made = load_experiment(str(traced), ["workload.rate=0.7"])
    path = tmp_path / "resolved.toml"
    path.write_text(dump_toml(made), encoding="utf-8")
    (tmp_path / "trace.jsonl").unlink()
    assert load_experiment(str(path)) == made


def test_a_trace_given_as_an_option_is_found_from_the_current_folder(
    traced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = traced.parent / "elsewhere"
    folder.mkdir()
    (folder / "other.jsonl").write_text(MOONCAKE.splitlines()[0] + "\n")
    monkeypatch.chdir(folder)
    e = load_experiment(str(traced), ["workload.file=other.jsonl", "workload.rate=1"])
    assert len(e.workload.requests) == 1


def test_a_trace_with_too_few_requests_is_refused(traced: Path) -> None:
    with pytest.raises(Exception, match=r"workload\.n_requests: is 6, but there are only 5 requests"):
        load_experiment(str(traced), ["workload.n_requests=6"])
    with pytest.raises(
        Exception, match=r"workload\.rate: is missing; give it, since one request has no rate of its"
    ):
        load_experiment(str(traced), ["workload.n_requests=1"])


def test_the_rate_of_one_listed_request_is_asked_for_and_does_not_move_it(
    load: Load, arrivals: Arrivals
) -> None:
    one = "workload={arrivals='listed', requests=[[3, 1, 2]]RATE}"
    with pytest.raises(
        Exception, match=r"workload\.rate: .* the placement is designed for it, and no arrival is moved"
    ):
        load(one.replace("RATE", ""))
    assert list(arrivals(load(one.replace("RATE", ", rate=5")))) == [3.0]


def test_a_changing_rate_stretches_the_same_gaps(load: Load) -> None:
    plain = load("workload={arrivals='poisson', rate=1, n_requests=60, n_input_tokens=1, n_output_tokens=2}")
    shifted = load(
        "workload={arrivals='poisson', rate=1, n_requests=60, n_input_tokens=1, n_output_tokens=2, "
        "changes=[{at='10 s', rate=4}, {at='15 s', rate=0.5}]}"
    )

    def warped(at_s: float) -> float:
        """10 s at rate 1 are 10 gaps, 5 s at rate 4 are 20 more."""
        if at_s <= 10:
            return at_s
        return 10 + (at_s - 10) / 4 if at_s <= 30 else 15 + (at_s - 30) * 2

    assert [r.arrival_at_s for r in shifted.workload.requests] == pytest.approx(
        [warped(r.arrival_at_s) for r in plain.workload.requests]
    )
    assert shifted.problem.request_rate == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ("[{at='10 s', rate=4}, {at='10 s', rate=1}]", "workload.changes: must be in the order of time"),
        ("[{at='10 s', rate=0}]", "workload.changes.0.rate"),
        ("[{at='0 s', rate=1}]", "workload.changes.0.at"),
    ],
)
def test_changes_of_the_rate_that_make_no_sense_are_refused(load: Load, changes: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        load(f"workload.changes={changes}")


def test_listed_requests_have_no_rate_to_change(load: Load) -> None:
    with pytest.raises(UserError, match=r"workload\.changes: is only for generated arrivals"):
        load("workload={arrivals='listed', requests=[[0, 1, 1], [1, 1, 1]], changes=[{at='1 s', rate=1}]}")


HIDDEN = 'workload.lengths="hidden"'


def test_hidden_lengths_are_known_as_their_maximum_which_caches_are_reserved_for(load: Load) -> None:
    drawn = 'workload.n_output_tokens={distribution="uniform",low=5,high=90}'
    e = load(HIDDEN, drawn)
    assert {r.max_new_tokens for r in e.workload.requests} == {90}
    assert e.problem.n_output_tokens == 90
    assert [r.n_output_tokens for r in e.workload.requests] == [
        r.n_output_tokens for r in load(drawn).workload.requests
    ]
    own = load(HIDDEN, drawn, "workload.max_new_tokens=40")
    assert own.problem.n_output_tokens == 40
    assert {r.known.n_output_tokens for r in own.workload.requests} == {40}
    assert [r.n_output_tokens for r in own.workload.requests] == [
        min(r.n_output_tokens, 40) for r in e.workload.requests
    ]
    assert "of which at most 40 are known of before" in own.workload.source
    assert {r.max_new_tokens for r in load(drawn).workload.requests} == {None}


def test_a_listed_request_may_have_its_own_maximum(load: Load) -> None:
    rows = "workload.requests=[[0,1,2,0,7],[2.0,3,4],[2.5,3,9,0,4]]"
    listed = ["workload.arrivals=listed", "workload.n_requests=3", rows]
    without = ("n_input_tokens = 20\nn_output_tokens = 64\n", "")
    e = load(*listed, HIDDEN, replace=without)
    assert [(r.n_output_tokens, r.max_new_tokens) for r in e.workload.requests] == [(2, 7), (4, 9), (4, 4)]
    assert e.problem.n_output_tokens == 9


def test_a_maximum_means_nothing_where_lengths_are_known(complaint: Complain) -> None:
    assert 'is only for lengths = "hidden"' in complaint("workload.max_new_tokens=7")
    assert 'needs lengths = "hidden"' in complaint(*LISTED, "workload.requests=[[0,1,2,0,7],[2.0,3,4]]")
