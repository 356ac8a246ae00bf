"""What routers believe about servers, and which servers a client avoids."""

from __future__ import annotations

from policies.bans import Bans
from policies.membership import Membership, MembershipRules

ANNOUNCED = MembershipRules("announced", announce_period_s=60.0, expiry_s=120.0, refresh_s=10.0)


def test_instant_routers_know_at_once_and_are_never_wrong() -> None:
    m = Membership(MembershipRules(), 3, absent=[2])
    assert m.believed(0.0) == {0, 1}
    m.ends(0, 5.0)
    m.begins(2, 5.0)
    assert m.believed(5.0) == {1, 2} == m.alive()
    assert m.wrong(5.0) == frozenset()


def test_a_dead_server_stays_visible_until_its_last_announcement_expires() -> None:
    m = Membership(ANNOUNCED, 2)
    m.ends(0, 61.0)  # announced at 60, until 180
    assert m.believed(179.0) == {0, 1}
    assert m.wrong(179.0) == {0}
    assert m.believed(180.0) == {1}
    assert m.wrong(180.0) == frozenset()


def test_a_server_that_dies_at_its_announcement_does_not_make_it() -> None:
    m = Membership(ANNOUNCED, 1)
    m.ends(0, 60.0)
    assert m.believed(119.0) == {0}
    assert m.believed(120.0) == frozenset()


def test_routers_see_a_change_at_their_next_look_and_not_before() -> None:
    m = Membership(ANNOUNCED, 2, absent=[1])
    m.begins(1, 12.0)
    assert m.believed(19.9) == {0}
    assert m.wrong(19.9) == {1}
    assert m.believed(20.0) == {0, 1}


def test_a_server_that_leaves_announces_it() -> None:
    m = Membership(ANNOUNCED, 2)
    m.ends(0, 12.0, is_said=True)
    assert m.believed(19.9) == {0, 1}
    assert m.believed(20.0) == {1}


def test_a_halted_server_that_goes_on_announces_itself_when_it_would_have_anyway() -> None:
    m = Membership(ANNOUNCED, 1)
    m.ends(0, 50.0)  # announced at 0, until 120
    m.goes_on(0, 125.0)
    assert m.believed(170.0) == frozenset()
    assert m.wrong(170.0) == {0}
    assert m.believed(180.0) == {0}


def test_a_short_halt_between_announcements_goes_unnoticed() -> None:
    m = Membership(ANNOUNCED, 1)
    m.ends(0, 61.0)
    m.goes_on(0, 70.0)
    assert m.believed(115.0) == {0}
    assert m.believed(230.0) == {0}


def test_a_server_that_begins_anew_announces_itself_at_once_and_in_its_own_rhythm() -> None:
    m = Membership(ANNOUNCED, 1)
    m.ends(0, 1.0)
    m.begins(0, 205.0)  # then at 265, 325, ...
    assert m.believed(209.0) == frozenset()
    assert m.believed(210.0) == {0}
    m.ends(0, 264.0)
    assert m.believed(320.0) == {0}
    assert m.believed(330.0) == frozenset()


def test_telling_what_is_known_changes_nothing() -> None:
    m = Membership(MembershipRules(), 1)
    m.begins(0, 1.0)
    m.ends(0, 2.0)
    m.ends(0, 3.0)
    assert m.alive() == frozenset()


def test_each_failure_in_a_row_bans_for_twice_as_long() -> None:
    bans = Bans(15.0)
    assert bans.failed(0, 3, 100.0) == 115.0
    assert bans.banned(0, 114.9) == {3}
    assert bans.banned(0, 115.0) == frozenset()
    assert bans.failed(0, 3, 120.0) == 150.0
    assert bans.failed(0, 3, 150.0) == 210.0


def test_sessions_that_notice_the_same_failure_do_not_make_its_ban_longer() -> None:
    bans = Bans(15.0)
    assert [bans.failed(0, 3, at_s) for at_s in (0.0, 1.0, 2.0)] == [15.0] * 3
    assert bans.failed(0, 3, 15.0) == 45.0


def test_a_server_that_serves_again_is_forgiven_and_other_clients_never_minded() -> None:
    bans = Bans(15.0)
    bans.failed(0, 3, 0.0)
    bans.failed(0, 3, 15.0)
    assert bans.banned(1, 1.0) == frozenset()
    bans.served(0, 3)
    assert bans.banned(0, 1.0) == frozenset()
    assert bans.failed(0, 3, 1.0) == 16.0


def test_a_ban_of_no_time_bans_nobody_and_many_failures_do_not_overflow() -> None:
    bans = Bans(0.0)
    bans.failed(0, 0, 1.0)
    assert bans.banned(0, 1.0) == frozenset()
    bans, now_s = Bans(15.0), 0.0
    for _ in range(5000):
        now_s = bans.failed(0, 1, now_s)
    assert bans.banned(0, 0.999 * now_s) == {1}


def test_what_no_router_sees_any_more_is_forgotten_and_changes_no_belief() -> None:
    m = Membership(ANNOUNCED, 1)
    never_forgets = Membership(ANNOUNCED, 1)
    never_forgets._forget_old = lambda server, at_s: None  # type: ignore[method-assign]
    for number in range(1, 400):
        at_s = 37.0 * number
        for members in (m, never_forgets):
            if number % 3:
                members.ends(0, at_s, is_said=number % 7 == 0)
            else:
                members.begins(0, at_s)
        for later_s in (0.0, 11.0, 36.0):
            assert m.believed(at_s + later_s) == never_forgets.believed(at_s + later_s)
    assert len(m._spells[0]) <= 4
    assert len(never_forgets._spells[0]) > 100
