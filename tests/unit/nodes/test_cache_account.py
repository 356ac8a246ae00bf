from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nodes.cache import CacheAccount, NoCapacityError

CAPACITY_BYTES = 1e9
SIZES = st.one_of(
    st.integers(1, 10**9).map(float),
    st.floats(1.0, 2e9, allow_nan=False),
    st.integers(1, 40).map(lambda n: CAPACITY_BYTES / n),
)


class AccountMachine(RuleBasedStateMachine):
    """Any sequence of reservations and releases, beside a plain list of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.account = CacheAccount(CAPACITY_BYTES)
        self.held: dict[int, float] = {}
        self.next_key = 0

    @rule(n_bytes=SIZES)
    def reserve(self, n_bytes: float) -> None:
        self.next_key += 1
        total = math.fsum([*self.held.values(), n_bytes])
        try:
            self.account.reserve(self.next_key, n_bytes)
        except NoCapacityError:
            assert total > CAPACITY_BYTES, "refused although there was room"
        else:
            self.held[self.next_key] = n_bytes

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[key]
        self.account.release(key)
        self.account.release(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def reserve_twice(self, data: st.DataObject) -> None:
        with pytest.raises(KeyError):
            self.account.reserve(data.draw(st.sampled_from(sorted(self.held))), 1.0)

    @rule()
    def release_all(self) -> None:
        for key in list(self.held):
            self.account.release(key)
        self.held.clear()

    @invariant()
    def is_never_oversubscribed_and_counts_what_is_held(self) -> None:
        total = math.fsum(self.held.values())
        assert total <= CAPACITY_BYTES * (1 + 2e-9)
        assert self.account.used_bytes == pytest.approx(total, rel=1e-9, abs=1e-3)
        assert len(self.account) == len(self.held)
        assert 0.0 <= self.account.used_ratio <= 1 + 2e-9
        if not self.held:
            assert self.account.used_bytes == 0.0


AccountMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnySequenceOfReservations = AccountMachine.TestCase


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_releasing_in_any_order_returns_to_exactly_zero(sizes: list[float], random: object) -> None:
    account = CacheAccount(1e9)
    for key, n_bytes in enumerate(sizes):
        account.reserve(key, n_bytes)
    keys = list(range(len(sizes)))
    random.shuffle(keys)  # type: ignore[attr-defined]
    for key in keys:
        account.release(key)
    assert account.used_bytes == 0.0
    assert len(account) == 0


@pytest.mark.parametrize("n", [3, 7, 49, 1000])
def test_rounding_never_refuses_a_session_that_fits_by_division(n: int) -> None:
    account = CacheAccount(8.2e9)
    for key in range(n):
        account.reserve(key, 8.2e9 / n)
    with pytest.raises(NoCapacityError):
        account.reserve("one more", 8.2e9 / n)


def test_a_refusal_says_how_much_was_asked_for_and_how_much_is_free() -> None:
    account = CacheAccount(10e6)
    account.reserve("a", 7.5e6)
    with pytest.raises(NoCapacityError, match=r"^3\.0 MB asked for, 2\.5 MB free$"):
        account.reserve("b", 3e6)
    assert account.used_bytes == 7.5e6
    account.grow("a", 2.49e6)
    with pytest.raises(NoCapacityError, match=r"^20\.5 kB asked for, 10\.0 kB free$"):
        account.reserve("b", 20.5e3)
    with pytest.raises(NoCapacityError, match=r"^10\.02 kB asked for, 10\.00 kB free$"):
        account.reserve("b", 10_020)


def test_a_refusal_of_a_session_that_will_grow_says_what_it_may_need_or_what_would_be_in_use() -> None:
    account = CacheAccount(10e6)
    account.reserve("a", 8e6)
    with pytest.raises(NoCapacityError, match=r"^10\.02 MB may be needed; the server has 10\.00 MB$"):
        account.leave_room(1e6, 10.02e6, 0.9)
    with pytest.raises(NoCapacityError, match=r"^9\.02 MB would be in use, more than 90% of the room$"):
        account.leave_room(1.02e6, 5e6, 0.9)


def test_a_refusal_never_speaks_of_less_than_nothing_free() -> None:
    account = CacheAccount(1.0)
    for key in range(10):
        account.reserve(key, 0.1 * (1 + 5e-10))
    with pytest.raises(NoCapacityError, match=r"^1\.0 MB asked for, 0\.0 MB free$"):
        account.reserve("b", 1e6)


def test_an_account_without_any_room_admits_nobody() -> None:
    account = CacheAccount(0.0)
    assert account.used_ratio == 0.0
    with pytest.raises(NoCapacityError):
        account.reserve("a", 1.0)
    assert len(account) == 0
