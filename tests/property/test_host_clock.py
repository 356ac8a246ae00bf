"""Another machine's clock from answered questions: the truth is always within the stated bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from netem.hostclock import MAX_DRIFT, HostClock

_READING_S = 1e-8
"""What instants of up to 2e6 s lose in floats."""


@dataclass(frozen=True)
class Other:
    """A clock that is ahead by ``offset_s`` at our time ``from_s`` and gains ``drift`` per second."""

    offset_s: float
    drift: float
    from_s: float

    def at(self, at_s: float) -> float:
        return at_s + self.offset_s + self.drift * (at_s - self.from_s)


@dataclass(frozen=True)
class Ways:
    """Delays: the least in each direction, jitter on top, and bursts that are twenty times as slow."""

    there_s: float
    back_s: float
    jitter_s: float
    bursts: bool

    def draw(self, random: Random, number: int) -> tuple[float, float]:
        jitter_s = self.jitter_s * (20 if self.bursts and number // 30 % 3 == 1 else 1)
        return tuple(
            least + (random.expovariate(1 / jitter_s) if jitter_s else 0.0)
            for least in (self.there_s, self.back_s)
        )  # type: ignore[return-value]


others = st.builds(
    Other, st.floats(-1e6, 1e6), st.floats(-100e-6, 100e-6), st.floats(0, 1e6)
)  # 100 ppm: what quartz differs by at most
ways = st.builds(
    Ways, st.floats(1e-5, 0.1), st.floats(1e-5, 0.1), st.sampled_from([0.0, 1e-5, 1e-3, 0.05]), st.booleans()
)


def error_s(clock: HostClock, other: Other, at_s: float) -> float:
    return abs(clock.to_local(other.at(at_s)) - at_s)


def most_s(clock: HostClock, distance_s: float) -> float:
    """Return the largest possible error so far from the newest sample: the drift may be wrong, too."""
    return 1.01 * (clock.uncertainty_s + 2 * MAX_DRIFT * abs(distance_s)) + _READING_S


def play(clock: HostClock, other: Other, ways: Ways, random: Random, n_samples: int, now_s: float) -> float:
    """Add ``n_samples`` questions and check after each; return our time at the end."""
    for number in range(n_samples):
        there_s, back_s = ways.draw(random, number)
        asked_s, answered_s, end_s = now_s, now_s + there_s, now_s + there_s + back_s
        clock.add(asked_s, other.at(answered_s), end_s)
        assert abs(clock.offset_s - (other.at(end_s) - end_s)) <= clock.uncertainty_s + _READING_S
        for at_s in (end_s, end_s + random.uniform(-5, 5)):
            assert error_s(clock, other, at_s) <= most_s(clock, at_s - end_s)
        now_s = end_s + random.choice([0.0, 0.02, 0.25])
    return now_s


@given(others, ways, st.integers(1, 300), st.builds(Random, st.integers(0, 2**32)))
def test_the_true_offset_is_within_the_stated_uncertainty(
    other: Other, ways: Ways, n_samples: int, random: Random
) -> None:
    clock = HostClock()
    play(clock, other, ways, random, n_samples, other.from_s)
    assert clock.n_samples == n_samples
    assert clock.n_forgotten == 0
    event(f"jitter {ways.jitter_s}, bursts {ways.bursts}")


@given(others, ways, st.builds(Random, st.integers(0, 2**32)))
def test_answers_may_overtake_each_other(other: Other, ways: Ways, random: Random) -> None:
    clock = HostClock()
    samples, now_s, newest_s = [], other.from_s, -math.inf
    for number in range(100):  # questions that do not wait for answers
        there_s, back_s = ways.draw(random, number)
        samples.append((now_s, other.at(now_s + there_s), now_s + there_s + back_s))
        now_s += 0.01
    for sample in sorted(samples, key=lambda each: each[2] - random.uniform(0, ways.back_s)):
        clock.add(*sample)
        newest_s = max(newest_s, sample[2])
        at_s = sample[2] + random.uniform(-1, 1)
        assert error_s(clock, other, at_s) <= most_s(clock, at_s - newest_s)
    assert clock.n_forgotten == 0


@given(others, ways, st.builds(Random, st.integers(0, 2**32)))
def test_the_uncertainty_comes_down_to_half_of_the_smallest_rtt(
    other: Other, ways: Ways, random: Random
) -> None:
    clock = HostClock()
    quiet = Ways(ways.there_s, ways.back_s, 0.0, bursts=False)
    play(clock, other, quiet, random, 200, other.from_s)
    half_s = (ways.there_s + ways.back_s) / 2
    # What the drift leaves open in the fraction of an RTT since the newest question is the rest.
    assert half_s <= clock.uncertainty_s + _READING_S
    assert clock.uncertainty_s <= 1.1 * half_s + 1e-6
    assert clock.rtt_min_s == pytest.approx(2 * half_s, abs=_READING_S)


@given(others, ways, st.builds(Random, st.integers(0, 2**32)), st.floats(0.2, 1000.0))
def test_a_clock_that_was_moved_is_found_again(other: Other, ways: Ways, random: Random, by_s: float) -> None:
    clock = HostClock()
    calm = Ways(min(ways.there_s, 0.01), min(ways.back_s, 0.01), 0.0, bursts=False)
    now_s = play(clock, other, calm, random, 100, other.from_s)
    moved = Other(other.offset_s + by_s, other.drift, other.from_s)
    asked_s = now_s
    for _ in range(100):
        answered_s, end_s = asked_s + calm.there_s, asked_s + calm.there_s + calm.back_s
        clock.add(asked_s, moved.at(answered_s), end_s)
        asked_s = end_s + 0.05
    assert clock.n_forgotten > 0
    assert abs(clock.offset_s - (moved.at(end_s) - end_s)) <= clock.uncertainty_s + _READING_S


def test_nothing_is_known_before_the_first_sample() -> None:
    clock = HostClock()
    assert clock.uncertainty_s == clock.rtt_min_s == float("inf")
    clock.add(0.0, 10.001, 0.002)
    assert clock.offset_s == pytest.approx(9.999, abs=clock.uncertainty_s)


def test_an_answer_from_before_its_question_is_refused() -> None:
    with pytest.raises(ValueError, match="before its question"):
        HostClock().add(1.0, 5.0, 0.9)
