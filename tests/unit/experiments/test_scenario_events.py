"""``[[network.event]]``: which links change when, and to what."""

from __future__ import annotations

import tomllib
from collections.abc import Callable

import pytest

from policies.links import Link
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment

Load = Callable[..., Experiment]
Complain = Callable[..., str]

UP = ("client-0", "a100-0")
BASE = Link(0.05, 1e8)


def events(*tables: str) -> str:
    return f"network.event=[{', '.join('{' + table + '}' for table in tables)}]"


def course(e: Experiment, pair: tuple[str, str] = UP) -> list[tuple[float, Link]]:
    """The changes of one pair."""
    return [(change.at_s, change.links[pair]) for change in e.network.changes if pair in change.links]


def test_an_event_changes_both_directions_and_its_end_restores_the_link(load: Load) -> None:
    e = load(events("at='30 s', for='10 s', link=['A','B'], loss='20 %'"))
    lossy = Link(0.05, 1e8, 0.0, 0.2)
    assert course(e) == [(30.0, lossy), (40.0, BASE)]
    assert course(e, UP[::-1]) == course(e)
    assert set(e.network.changes[0].links) == {
        (x, y) for s in ("a100-0", "a100-1") for x, y in ((s, "client-0"), ("client-0", s))
    }
    assert [c.why for c in e.network.changes] == [
        "link A and B: loss 20 %",
        "the end of: link A and B: loss 20 %",
    ]


def test_an_event_ends_at_the_nanosecond_at_which_another_one_begins(load: Load) -> None:
    e = load(events("at='0.1 s', for='0.2 s', site='B', down=true", "at='0.3 s', site='B', rate='10 Mbit/s'"))
    assert [at_s for at_s, _ in course(e)] == [0.1, 0.3]


def test_a_change_of_a_link_without_an_end_stays(load: Load) -> None:
    assert course(load(events("at='1 s', site='B', rate='10 Mbit/s'"))) == [(1.0, Link(0.05, 1e7))]


def test_forward_changes_one_direction_alone(load: Load) -> None:
    e = load(events("at='1 s', link=['client-0','a100-0'], direction='forward', rtt='80 ms'"))
    assert [set(change.links) for change in e.network.changes] == [{UP}]
    assert course(e) == [(1.0, Link(0.04, 1e8))]


def test_a_node_can_be_named_where_a_site_can(load: Load) -> None:
    e = load(events("at='1 s', site='a100-1', down=true"))
    assert {node for pair in e.network.changes[0].links for node in pair} == {"client-0", "a100-0", "a100-1"}
    assert ("client-0", "a100-0") not in e.network.changes[0].links


def test_a_partition_cuts_sites_from_the_rest_and_not_from_each_other(load: Load) -> None:
    e = load(events("at='1 s', for='1 s', partition=['A']"))
    assert {link.loss_ratio for link in e.network.changes[0].links.values()} == {1.0}
    assert all("client-0" in pair for pair in e.network.changes[0].links)
    whole = load(events("at='1 s', for='1 s', site='A', down=true"))
    assert ("a100-0", "a100-1") in whole.network.changes[0].links


def test_of_events_that_overlap_the_later_in_the_file_wins_property_by_property(load: Load) -> None:
    e = load(
        events(
            "at='0 s', for='10 s', site='B', rtt='80 ms', rate='1 Mbit/s'",
            "at='2 s', for='4 s', site='B', rtt='60 ms'",
            "at='3 s', for='1 s', site='B', down=true",
            "at='5 s', for='20 s', site='B', loss=0.5",
        )
    )
    assert course(e) == [
        (0.0, Link(0.04, 1e6)),
        (2.0, Link(0.03, 1e6)),
        (3.0, Link(0.03, 1e6, 0.0, 1.0)),
        (4.0, Link(0.03, 1e6)),
        (5.0, Link(0.03, 1e6, 0.0, 0.5)),
        (6.0, Link(0.04, 1e6, 0.0, 0.5)),
        (10.0, Link(0.05, 1e8, 0.0, 0.5)),
        (25.0, BASE),
    ]


def test_a_factor_multiplies_what_the_network_says_and_not_what_other_events_say(load: Load) -> None:
    e = load(events("at='0 s', site='B', rtt='80 ms'", "at='1 s', site='B', rtt_factor=1.5, rate_factor=0.1"))
    assert course(e)[-1] == (1.0, Link(pytest.approx(0.075), pytest.approx(1e7)))


def test_an_rtt_drifts_in_steps_of_a_second_and_stays_where_it_arrives(load: Load) -> None:
    e = load(events("at='10 s', for='2.5 s', site='B', rtt_to='150 ms'"))
    assert [(at_s, round(link.delay_s, 6)) for at_s, link in course(e)] == [
        (11.0, 0.06),
        (12.0, 0.07),
        (12.5, 0.075),
    ]


def test_a_drift_begins_where_the_events_above_it_are(load: Load) -> None:
    e = load(
        events(
            "at='0 s', for='3 s', site='B', rtt='200 ms'", "at='2 s', for='2 s', site='B', rtt_to='100 ms'"
        )
    )
    assert [(at_s, round(link.delay_s, 6)) for at_s, link in course(e)] == [
        (0.0, 0.1),
        (3.0, 0.075),
        (4.0, 0.05),
    ]


def test_a_long_drift_takes_600_steps(load: Load) -> None:
    assert len(course(load(events("at='0 s', for='2 h', site='B', rtt_to='1 s'")))) == 600


def test_a_change_that_changes_nothing_is_none(load: Load) -> None:
    assert (
        load(events("at='1 s', for='1 s', site='B', rate='100 Mbit/s', rtt='100 ms'")).network.changes == ()
    )


def test_jitter_in_an_event_is_at_most_the_delay(load: Load) -> None:
    e = load(events("at='1 s', link=['A','B'], jitter='80 ms'"))
    assert course(e) == [(1.0, Link(0.05, 1e8, 0.05))]


@pytest.mark.parametrize(
    ("option", "warning"),
    [
        (
            "network.jitter='51 ms'",
            "network.jitter 51 ms is larger than the one-way delay of every link (at most 50 ms)",
        ),
        ("network.jitter='50 ms'", ""),
        (
            events("at='1 s', site='B', jitter='80 ms'"),
            "network.event.0.jitter 80 ms is larger than the one-way delay of every link (at most 50 ms)",
        ),
        (events("at='1 s', site='B', jitter='80 ms', rtt='160 ms'"), ""),
    ],
)
def test_a_jitter_that_no_link_can_have_is_warned_of(
    load: Load, caplog: pytest.LogCaptureFixture, option: str, warning: str
) -> None:
    load(option)
    assert bool(caplog.text) == bool(warning) and warning in caplog.text


def test_a_resolved_scenario_with_events_loads_to_the_same_changes(load: Load, tmp_path: object) -> None:
    e = load(
        events(
            "at='1 s', for='2 s', partition=['A']", "at='2 s', link=['A','B'], direction='forward', loss=1"
        )
    )
    text = dump_toml(e)
    assert tomllib.loads(text)["network"]["event"][0]["for"] == "2 s"
    path = f"{tmp_path}/resolved.toml"
    with open(path, "w") as file:
        file.write(text)
    again = load_experiment(path)
    assert again.network.changes == e.network.changes
    assert dump_toml(again) == text


BAD = {
    "at='1 s', link=['A','C'], down=true": '.link.1: unknown site or node "C"; valid: B, A, client-0, a100-0',
    "at='1 s', site='clent-0', down=true": '.site: unknown site or node "clent-0" (did you mean "client-0"?)',
    "at='1 s', partition=['B','X'], for='1 s'": '.partition.1: unknown site or node "X"',
    "at='1 s', partition=['A','B']": ": changes no link: no server uses a link between A or B and the rest",
    "at='1 s', link=['client-0','client-0'], down=true": ": changes no link: no server uses a link between client-0",
    "at='1 s', down=true": ": needs exactly one of link, site and partition",
    "at='1 s', site='B', link=['A','B'], down=true": ": needs exactly one of link, site and partition, not link and site",
    "at='1 s', site='B'": ": changes nothing; give at least one of down, loss,",
    "at='1 s', partition=['A'], loss=0.1": ".loss: cannot be combined with partition, which cuts links",
    "at='1 s', site='B', rtt='1 s', rtt_factor=2": ": has both rtt and rtt_factor; keep one",
    "at='1 s', site='B', rate='1 Mbit/s', rate_factor=2": ": has both rate and rate_factor; keep one",
    "at='1 s', site='B', rtt_to='1 s'": ".for: is missing; rtt_to needs the duration",
    "at='1 s', site='B', direction='forward', down=true": ".direction: is only for events with link",
    "at='1 s', link=['A','B'], direction='back', down=true": '.direction: unknown value "back"',
    "at='1 s', for='0 s', site='B', down=true": ".for: must be more than 0, not",
    "at=1, site='B', down=true": ".at: must be text with a unit such as",
    "site='B', down=true": ".at: is missing",
    "at='1 s', site='B', loss='120 %'": '.loss: must be from 0 to 1, or from 0 % to 100 %, not "120 %"',
    "at='1 s', site='B', loss='much'": '.loss: must be text such as "0.1 %" or a number from 0 to 1',
    "at='1 s', site='B', los=1": '.los: unknown key (did you mean "loss"?)',
    "at='1 s', link=['A'], down=true": ".link: needs at least 2 ent",
    "at='1 s', site='B', rate='0 bit/s'": ".rate: must be more than 0",
}


@pytest.mark.parametrize("table", BAD)
def test_a_bad_event_is_refused_by_its_number_with_what_to_change(complaint: Complain, table: str) -> None:
    said = complaint(events("at='5 s', site='B', rate='1 Mbit/s'", table))
    assert said.rsplit(": network.event.1", 1)[1].startswith(BAD[table])
