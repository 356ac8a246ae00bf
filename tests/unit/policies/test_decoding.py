"""Speculative decoding: what a round makes, by its law and as drawn, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from policies import Hop, RequestSpec, service_s
from policies.decoding import MOST_TOKENS, Decoding, RoundTimes, Seen, measured_rates
from policies.problem import decode_step_s
from policies.steps import StepTimes
from tests.support.problems import forwarded, make_problem

DRAFTERS = ["ngram", "petals"]


@dataclass(frozen=True)
class Agreeing(Decoding):
    """The first ``n_agree`` drafted tokens of every round agree, and no others."""

    n_agree: int = 0

    def agrees(self, request: int, token: int, number: int) -> bool:
        return number < self.n_agree


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
def test_the_mean_of_all_rounds_that_may_come_is_the_law(
    drafter: str, acceptance: float, tokens: int
) -> None:
    mean = 0.0
    for n_agree in range(tokens + 1):
        made = Agreeing(drafter, tokens, acceptance, n_agree=n_agree).drawn(0, 1, tokens).made
        odds = acceptance**n_agree * (1.0 if n_agree == tokens else 1 - acceptance)
        mean += odds * made
    assert Decoding(drafter, tokens, acceptance).expected_tokens() == pytest.approx(mean, rel=1e-12)
    if drafter == "ngram" and acceptance < 1:
        law = (1 - acceptance ** (tokens + 1)) / (1 - acceptance)
        assert mean == pytest.approx(law, rel=1e-12)


def test_drawn_agreement_has_its_rate_and_does_not_depend_on_the_tokens_per_round() -> None:
    few, many = Decoding("ngram", 1, 0.7, seed=3), Decoding("ngram", 9, 0.7, seed=3)
    drawn = [few.agrees(request, token, 0) for request in range(200) for token in range(1, 501)]
    assert drawn == [many.agrees(request, token, 7) for request in range(200) for token in range(1, 501)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.7, abs=4 * (0.21 / len(drawn)) ** 0.5)
    together = [one and other for one, other in pairwise(drawn)]
    assert sum(together) / len(together) == pytest.approx(0.49, abs=0.01)
    assert drawn[:500] != [replace(few, seed=4).agrees(0, token, 0) for token in range(1, 501)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rounds_end_with_the_request(drafter: str) -> None:
    decoding = Decoding(drafter, 5, 1.0)
    n_done, n_rounds = 1, 0
    while n_done < 24:
        drawn = decoding.drawn(0, n_done, decoding.n_drafted(24 - n_done, (), Seen()))
        assert drawn.accepted == drawn.drafted
        n_done, n_rounds = n_done + drawn.made, n_rounds + 1
    assert n_done == 24
    assert n_rounds == (4 if drafter == "ngram" else 5)  # 6, 6, 6, 5 and 5, 5, 5, 5, 3


def test_the_models_token_follows_those_that_agree_and_under_petals_rule_only_if_none_does() -> None:
    usual, petals = (Decoding(drafter, 3, 0.5) for drafter in DRAFTERS)
    assert usual.kept([4, 5, 6, 7], [4, 5, 6]) == (3, [4, 5, 6, 7])
    assert usual.kept([4, 5, 6, 7], [4, 9, 6]) == (1, [4, 5])
    assert usual.kept([4, 5, 6, 7], [9, 5, 6]) == (0, [4])
    assert petals.kept([4, 5, 6], [4, 5, 6]) == (3, [4, 5, 6])
    assert petals.kept([4, 5, 6], [4, 9, 6]) == (1, [4])
    assert petals.kept([4, 5, 6], [9, 5, 6]) == (0, [4])


def test_verified_tokens_take_what_a_decode_or_so_many_tokens_of_a_prompt_take() -> None:
    """As with prompts, more tokens cost nothing while reading weights and caches takes longer."""
    computed = StepTimes(0.25, 2.0, 0.125, 0.5, 2**-6, 2**-4)
    pairs = (5 + 3) ** 2 - 5**2
    assert computed.step_s(5, 3, 2) == 0.5 + 2 * (2.0 + 3 * 0.125 + pairs * 2**-4)
    assert computed.extend_s(5, 1) == computed.decode_at_s(5)
    read = replace(computed, decode_s=8.0)
    assert read.extend_s(5, 3) == read.extend_s(5, 2) == read.decode_at_s(5) == 8.0 + 5 * 2**-6
    experts = replace(read, experts_s=8.0, experts_ratio=0.5)
    assert experts.extend_s(5, 3) == 8.0 + 5 * 2**-6 + 8.0 * (0.5 - 0.5**3)


def test_a_draft_alone_in_a_batch_takes_what_it_takes_without_and_drafts_read_their_experts_once() -> None:
    times = StepTimes(
        8.0, 2.0, 0.125, 0.5, 2**-6, 2**-4, session_slope_s=0.5, experts_s=8.0, experts_ratio=0.5
    )
    assert times.batch_s(2, [5], range(0), [3]) == times.step_s(5, 3, 2)
    both_s = times.batch_s(2, [5, 9], range(0), [3, 1])
    assert both_s == 0.5 + 2 * (8.0 + 14 * 2**-6 + 0.5 + 8.0 * (0.5 - 0.5**4))
    computed = replace(times, decode_s=0.25, experts_s=0.0)
    pairs = 8**2 - 5**2 + 10**2 - 9**2
    assert computed.batch_s(2, [5], range(0), [3]) == computed.step_s(5, 3, 2)
    assert computed.batch_s(2, [5, 9], range(0), [3, 1]) == 0.5 + 2 * (2.0 + 4 * 0.125 + pairs * 2**-4)


@pytest.mark.parametrize("window_tokens", [0, 40])
@pytest.mark.parametrize("prefill_least_s", [0.0, 4.0])
def test_the_rest_of_a_prompt_takes_as_long_alone_as_in_a_batch(
    prefill_least_s: float, window_tokens: int
) -> None:
    times = StepTimes(
        1.0, 2.0, 0.125, 0.5, 2**-6, 2**-12, prefill_least_s=prefill_least_s, window_tokens=window_tokens
    )
    for n_cached in (1, 30, 100):
        for n_tokens in (MOST_TOKENS + 2, 60):
            rest_s = times.step_s(n_cached, n_tokens, 2)
            assert rest_s == times.batch_s(2, [], range(n_cached, n_cached + n_tokens))
            assert times.step_s(0, n_tokens, 2) <= rest_s <= times.step_s(0, n_cached + n_tokens, 2)
    drafted = times.by_token(40, 8.0)
    if not window_tokens:
        for n_cached in (1, 50):
            assert drafted.decode_at_s(n_cached) == times.extend_s(n_cached, 40) / 8


@pytest.mark.parametrize("kind", ["hub-spoke", "forwarding", "forwarding over links"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_requests_time_is_that_of_its_rounds_shared_by_their_tokens(kind: str, drafter: str) -> None:
    problem = make_problem(
        [99.0, 99.0],
        rtt_s=[[0.1, 0.4]],
        prefill_slope_s=0.01,
        server_rtt_s=[[0.0, 0.3]] * 2,
        decode_s=[0.1] * 2,
    )
    servers = tuple(replace(s, context_slope_s=0.125, decode_context_tokens=3.0) for s in problem.servers)
    decoding = Decoding(drafter, 4, 0.8, draft_token_s=0.02)
    problem = replace(
        problem, servers=servers, hub_token_s=0.25, decoding=decoding, further_token_s=((0.01, 0.03),)
    )
    if kind != "hub-spoke":
        problem = forwarded(problem, over_links=kind == "forwarding over links")
    request, hops = RequestSpec(0, 3, 7), [Hop(0, 0, 2), Hop(1, 2, 4)]
    first_s, all_s = service_s(problem, request, hops)
    assert first_s == service_s(replace(problem, decoding=None), request, hops)[0]
    rounds_s = [decode_step_s(problem, request, hops, 3 + n, 4) for n in range(6)]
    assert all_s - first_s == pytest.approx(sum(rounds_s) / decoding.expected_tokens())
    assert problem.by_token.decoding is None


def test_the_saving_per_token_is_that_of_dsd() -> None:
    """(N - 1) t (k - 1) / k for N nodes and k tokens per round, where forwarding takes t from each to the next."""
    n, t, k = 4, 0.05, 6
    problem = make_problem([99.0] * n, rtt_s=[[0.0] * n], prefill_slope_s=0.0, server_rtt_s=[[2 * t] * n] * n)
    problem = replace(forwarded(problem), token_rtt_s=problem.raw_rtt_s)
    request, hops = RequestSpec(0, 3, 61), [Hop(j, j, j + 1) for j in range(n)]
    drafting = replace(problem, decoding=Decoding("ngram", k - 1, 1.0))
    saved_s = service_s(problem, request, hops)[1] - service_s(drafting, request, hops)[1]
    computed_s = sum(problem.servers[j].decode_s for j in range(n)) * (k - 1) / k
    assert saved_s / 60 - computed_s == pytest.approx((n - 1) * t * (k - 1) / k)


def test_how_much_to_draft_follows_costs_and_what_was_seen() -> None:
    auto = Decoding("ngram", MOST_TOKENS, 0.5, is_auto=True)
    far, near = line(1.0, 0.01), line(0.01, 0.01)
    dearer = (1.0, *line(3.0, 0.01)[1:])
    for round_s, acceptance in ((far, 0.0), (far, 0.5), (far, 0.9), (near, 0.5), (near, 0.95), (dearer, 0.9)):
        law = [
            Decoding("ngram", MOST_TOKENS, acceptance).expected_tokens(n) / round_s[n]
            for n in range(MOST_TOKENS + 1)
        ]
        assert auto.best_tokens(round_s, acceptance) == law.index(max(law))
    assert auto.best_tokens(dearer, 0.6) == 0 < auto.best_tokens(dearer, 0.9)
    assert auto.best_tokens(near, 0.5) == 0 < auto.best_tokens(far, 0.5) < auto.best_tokens(far, 0.9)
    assert auto.n_drafted(100, far, Seen()) == auto.best_tokens(far, 0.5)
    seen = Seen()
    seen.add(4, 4)
    seen.add(4, 1)
    assert (seen.n_accepted, seen.n_tested) == (5, 6)
    assert auto.n_drafted(100, far, seen) == auto.best_tokens(far, (0.5 + 5) / (1 + 6))
    assert auto.n_drafted(3, far, seen) == 2


def test_measured_rounds_give_each_drafted_token_its_rate() -> None:
    counts = [0, 0, 1, 2, 2, 3, 3, 3]
    rates = measured_rates(counts)
    assert rates == (6 / 8, 5 / 6, 3 / 5)
    decoding = Decoding("ngram", 3, 0.7, rates=rates)
    assert decoding.expected_tokens() == pytest.approx(1 + sum(counts) / len(counts))
    rounds = [decoding.drawn(request, 1, 3).accepted for request in range(20_000)]
    assert sum(rounds) / len(rounds) == pytest.approx(sum(counts) / len(counts), abs=0.03)
    assert rounds.count(3) / len(rounds) == pytest.approx(3 / 8, abs=0.015)
    assert measured_rates([0, 0]) == (0.0,)


def line(base_s: float, token_s: float) -> RoundTimes:
    return tuple(base_s + n * token_s for n in range(MOST_TOKENS + 1))


def total_s(decoding: Decoding, acceptance: float, round_s: RoundTimes) -> float:
    """The seconds of 16 requests of 128 tokens, of whose drafted tokens ``acceptance`` agree."""
    found_s, truth = 0.0, Decoding("ngram", MOST_TOKENS, acceptance, seed=5)
    for request in range(16):
        n_done, seen = 1, Seen()
        while n_done < 128:
            drawn = truth.drawn(request, n_done, decoding.n_drafted(128 - n_done, round_s, seen))
            seen.add(drawn.drafted, drawn.accepted)
            n_done += drawn.made
            found_s += round_s[drawn.drafted]
    return found_s


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.9])
def test_a_session_that_expects_half_of_its_drafts_to_agree_is_near_the_best(acceptance: float) -> None:
    round_s = line(0.436, 0.0143)
    fixed_s = [total_s(Decoding("ngram", n, acceptance), acceptance, round_s) for n in (1, 2, 3, 5, 8, 16)]
    none_s = 16 * 127 * round_s[0]
    auto_s = total_s(Decoding("ngram", MOST_TOKENS, 0.5, is_auto=True), acceptance, round_s)
    assert auto_s <= 1.02 * none_s
    assert auto_s <= 1.05 * min(none_s, *fixed_s)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("jump_s", [0.0, 2.1])
def test_a_session_that_trusts_a_true_acceptance_is_near_the_best_also_where_any_draft_is_dear(
    acceptance: float, jump_s: float
) -> None:
    round_s = 0.436, *(0.436 + jump_s + 0.0143 * n for n in range(1, MOST_TOKENS + 1))
    fixed_s = [total_s(Decoding("ngram", n, acceptance), acceptance, round_s) for n in (1, 2, 3, 5, 8, 16)]
    auto = Decoding("ngram", MOST_TOKENS, acceptance, is_auto=True, acceptance_weight=64)
    assert total_s(auto, acceptance, round_s) <= 1.03 * min(16 * 127 * round_s[0], *fixed_s)
