"""The times of hops that ``generate`` and ``chat`` show beside a text."""

from __future__ import annotations

from nodes.records import HopRecord, Token
from testbed.runs.generate import ended_by
from testbed.runs.hoptimes import HopTimes, hop_times, last_chain, times_text


def token(number: int, ready_at_s: float, *hops: tuple[int, int, int, float, float]) -> Token:
    """A token whose hops are (server, first block, end, network, compute); the client takes 1 ms after each."""
    records, at_s = [], ready_at_s
    for server, first, last, network_s, compute_s in hops:
        arrived_at_s = at_s + network_s / 2
        departed_at_s = arrived_at_s + compute_s
        received_at_s = departed_at_s + network_s / 2
        records.append(HopRecord(server, first, last, at_s, arrived_at_s, departed_at_s, received_at_s, 0, 0))
        at_s = received_at_s + 0.001
    return Token(0, at_s, number, ready_at_s, records, 7)


def rounded(hop: HopTimes) -> tuple[float, ...]:
    return tuple(round(value, 9) for value in vars(hop).values())


def test_the_first_token_is_apart_and_the_others_are_a_mean() -> None:
    tokens = [token(0, 0.0, (1, 0, 2, 0.02, 0.5), (0, 2, 4, 0.04, 0.3))]
    for number, network_s in ((1, 0.01), (2, 0.03)):
        tokens.append(token(number, tokens[-1].at_s, (1, 0, 2, network_s, 0.1), (0, 2, 4, 0.04, 0.2)))
    assert [rounded(hop) for hop in hop_times(tokens)] == [
        (1, 0, 2, 0.02, 0.1, 0.02, 0.5),
        (0, 2, 4, 0.04, 0.2, 0.04, 0.3),
    ]
    about, _, far, near, client, opening = times_text(tokens, ["near", "far"], -0.005).splitlines()
    assert about == "3 tokens: the first after 867 ms, each of the others 362 ms"
    assert far.split() == ["far", "0-1", "20.0", "ms", "100.0", "ms", "20.0", "ms", "500.0", "ms"]
    assert near.split() == ["near", "2-3", "40.0", "ms", "200.0", "ms", "40.0", "ms", "300.0", "ms"]
    assert client.split() == ["client", "2.0", "ms", "2.0", "ms"]
    assert opening.split() == ["opening", "5.0", "ms"]


def test_tokens_of_one_round_share_its_time() -> None:
    tokens = [token(0, 0.0, (0, 0, 4, 0.02, 0.5))]
    for number in (1, 3):
        first = token(number, tokens[-1].at_s, (0, 0, 4, 0.02, 0.1))
        tokens += [first, Token(0, first.at_s, number + 1, first.at_s, [], 7)]
    (hop,) = hop_times(tokens)
    assert rounded(hop) == (0, 0, 4, 0.01, 0.05, 0.02, 0.5)
    client = times_text(tokens, ["a"], 0.0).splitlines()[3]
    assert client.split() == ["client", "0.5", "ms", "1.0", "ms"]


def test_rounds_that_are_away_together_leave_the_client_no_negative_time() -> None:
    one = token(0, 0.0, (0, 0, 4, 0.02, 0.5))
    both = [token(number, one.at_s, (0, 0, 4, 0.02, 0.1)) for number in (1, 2)]
    client = times_text([one, *both], ["a"], 0.0).splitlines()[3]
    assert client.split() == ["client", "0.5", "ms", "1.0", "ms"]


def test_a_single_token_has_no_others_and_a_server_that_took_over_has_its_own_line() -> None:
    one = token(0, 0.0, (0, 0, 4, 0.02, 0.5))
    assert times_text([one], ["a"], 0.0).startswith("1 token: the first after 521 ms\n")
    moved = [one, token(1, one.at_s, (1, 0, 4, 0.02, 0.1))]
    assert [rounded(hop) for hop in hop_times(moved)] == [
        (0, 0, 4, 0.0, 0.0, 0.02, 0.5),
        (1, 0, 4, 0.02, 0.1, 0.0, 0.0),
    ]
    assert last_chain([one]) == [(0, 0, 4)] and last_chain(moved) == [(1, 0, 4)]


def test_a_server_that_died_counts_for_the_tokens_that_it_served() -> None:
    tokens = [token(0, 0.0, (0, 0, 2, 0.02, 0.5), (1, 2, 4, 0.02, 0.3))]
    for number, server in ((1, 1), (2, 2), (3, 2)):
        tokens.append(token(number, tokens[-1].at_s, (0, 0, 2, 0.02, 0.1), (server, 2, 4, 0.04, 0.1)))
    assert [rounded(hop)[:5] for hop in hop_times(tokens)] == [
        (0, 0, 2, 0.02, 0.1),
        (1, 2, 4, 0.04, 0.1),
        (2, 2, 4, 0.04, 0.1),
    ]
    assert times_text(tokens, ["a", "b", "c"], 0.0).splitlines()[5].split()[:2] == ["client", "2.0"]
    assert last_chain(tokens) == [(0, 0, 2), (2, 2, 4)]


def test_an_end_token_ends_an_output_also_as_the_last_one_allowed() -> None:
    assert ended_by([5, 6, 2], {2}) == "the model"
    assert ended_by([5, 6, 7], {2}) == ended_by([], {2}) == "--max-new-tokens"
