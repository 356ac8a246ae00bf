"""``[[sites]]``: the links of a site, which its pairs with other sites share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.inspect.topology import topology_command
from testbed.inspect.validity import validate_command
from testbed.page.header import header
from testbed.records.plan import PlacementRow, Plan
from testbed.runtime.wiring import network_spec

Load = Callable[..., Experiment]
Complain = Callable[..., str]

PLAN = Plan(placement=PlacementRow(ranges=[(0, 1)] * 2, cache_bytes=[1.0] * 2))
UP, DOWN, INSIDE = ("client-0", "a100-0"), ("a100-0", "client-0"), ("a100-0", "a100-1")
HOME = 'sites=[{name="A",up="40 Mbit/s",down="60 Mbit/s"}]'
MATRIX = 'network={kind="matrix",sites=["A","B"],rtt=[[5,60],[60,2]],rtt_unit="ms",rate="1 Gbit/s"'


def rates(e: Experiment, *pairs: tuple[str, str]) -> list[float]:
    return [e.network.links[pair].rate_bps for pair in pairs]


def test_pairs_with_other_sites_share_a_sites_links_and_pairs_inside_do_not(load: Load) -> None:
    e = load(HOME)
    assert e.network.shared_bps == {"A up": 40e6, "A down": 60e6}
    assert e.network.shared_paths == {
        (x, y): ("A up",) if y == "client-0" else ("A down",)
        for s in ("a100-0", "a100-1")
        for x, y in ((s, "client-0"), ("client-0", s))
    }
    assert rates(e, UP, DOWN, INSIDE) == [60e6, 40e6, 1e9]


def test_a_pair_passes_the_uplink_of_one_site_and_the_downlink_of_the_other(load: Load) -> None:
    e = load('sites=[{name="A",down="1 Gbit/s"},{name="B",up="10 Mbit/s"}]')
    assert e.network.shared_paths[UP] == ("B up", "A down")
    assert DOWN not in e.network.shared_paths
    assert rates(e, UP, DOWN) == [10e6, 100e6]


@pytest.mark.parametrize(
    "own", [MATRIX + "}", MATRIX + ',shared={wan="9 Mbit/s"},paths=[{from="B",to="A",links=["wan"]}]}']
)
def test_a_matrix_has_them_too_around_its_own_shared_links(load: Load, own: str) -> None:
    e = load(own, 'sites=[{name="A",down="20 Mbit/s"},{name="B",up="10 Mbit/s"}]')
    wan = ("wan",) if "wan" in own else ()
    assert e.network.shared_paths[UP] == ("B up", *wan, "A down")
    assert rates(e, UP, DOWN) == [9e6 if wan else 10e6, 1e9]


def test_a_topology_has_them_too_and_its_resolved_form(tmp_path: Path) -> None:
    site = load_experiment("abovenet").sites["client-0"]
    e = load_experiment("abovenet", [f'sites=[{{name="{site}",up="5 Mbit/s"}}]', "network.share_links=true"])
    from_there = [pair for pair in e.network.links if e.sites[pair[0]] == site != e.sites[pair[1]]]
    assert from_there and {e.network.links[pair].rate_bps for pair in from_there} == {5e6}
    assert all(e.network.shared_paths[pair][0] == f"{site} up" for pair in from_there)
    assert all(len(e.network.shared_paths[pair]) > 1 for pair in from_there)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_toml(e))
    again = load_experiment(str(resolved))
    assert again.network == e.network
    assert network_spec(again, "run").shared[f"{site} up"] == 5e6


def test_a_site_that_another_seed_would_draw_is_left_out_of_a_topology(load: Load) -> None:
    drawn = [
        "network={kind='topology',topology='abovenet',delays='fibre'}",
        "servers.0.site=any",
        "clients.site=any",
    ]
    e = load(*drawn)
    elsewhere = next(
        s for s in ("abovenet-00", "abovenet-01", "abovenet-02", "abovenet-03") if s not in e.sites.values()
    )
    assert load(*drawn, f'sites=[{{name="{elsewhere}",up="1 Mbit/s"}}]').network.shared_bps == {}


@pytest.mark.parametrize(
    "change",
    [
        "network.event=[{at='0 s',link=['A','B'],rate_factor=FACTOR}]",
        "network.event=[{at='0 s',link=['A','B'],rate='RATE Mbit/s'}]",
    ],
)
@pytest.mark.parametrize("factor", [0.9, 0.5, 0.1])
def test_a_factor_multiplies_the_rate_that_a_pair_states_before_the_sites_own_links_limit_it(
    load: Load, change: str, factor: float
) -> None:
    e = load(HOME, change.replace("FACTOR", f"{factor}").replace("RATE", f"{100 * factor:g}"))
    now = {**e.network.links, **(e.network.changes[0].links if e.network.changes else {})}
    assert [now[UP].rate_bps, now[DOWN].rate_bps] == pytest.approx(
        [min(60e6, factor * 1e8), min(40e6, factor * 1e8)]
    )


def test_an_event_does_not_widen_a_link_beyond_the_sites_own(load: Load) -> None:
    event = 'network.event=[{at="1 s",link=["A","B"],rate="50 Mbit/s"}]'
    (change,) = load(HOME, event).network.changes
    assert {pair: link.rate_bps for pair, link in change.links.items() if pair in (UP, DOWN)} == {UP: 50e6}


def test_validate_the_topology_and_the_page_show_a_sites_own_links(small: str, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(small, encoding="utf-8")
    answer, text = validate_command(str(path), [HOME])
    assert answer["sites"] == [{"name": "A", "up_bps": 40e6, "down_bps": 60e6}]
    assert "sites' own links: A 40 Mbit/s up, 60 Mbit/s down" in text
    assert "own links" not in validate_command(str(path), [])[1]

    e = load_experiment(str(path), [HOME.replace(',down="60 Mbit/s"', "")])
    limits = {site["name"]: (site["up_bps"], site["down_bps"]) for site in header(e, PLAN)["sites"]}
    assert limits == {"A": (40e6, None), "B": (None, None)}

    placed = ["servers.0.site=abovenet-00", 'sites=[{name="abovenet-00",up="5 Mbit/s"}]']
    found, text = topology_command("abovenet", "given", None, load_experiment("abovenet", placed), None)
    assert (found["nodes"][0]["up_bps"], found["nodes"][0]["down_bps"]) == (5e6, None)
    assert "  abovenet-00 (5 Mbit/s up): " in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (['sites=[{name="A",up="0 bit/s"}]'], 'sites.0.up: must be more than 0, not "0 bit/s"'),
        (
            ['sites=[{name="A"}]'],
            "sites.0: says nothing of its site; give up, down, region or carbon_g_per_kwh",
        ),
        (
            ['sites=[{name="AA",up="1 Mbit/s"}]'],
            'sites.0.name: unknown site "AA" (did you mean "A"?); valid: A, B',
        ),
        (
            ['sites=[{name="A",up="1 Mbit/s"},{name="A",down="1 Mbit/s"}]'],
            'sites.1.name: "A" is also in sites.0; keep one of the two',
        ),
        (
            [HOME, "servers.0.site=B", 'network.pairs.0.sites=["B","B"]'],
            'sites.0.name: no server, client or node is at "A"; put one there, or leave this site out',
        ),
        (
            [HOME, "clients.site=A"],
            'sites.0.name: all nodes are at "A", so nothing uses its links; leave this site out',
        ),
        (
            [HOME, MATRIX + ',shared={"A up"="1 Mbit/s"},paths=[{from="A",to="B",links=["A up"]}]}'],
            'network.shared: "A up" is the name of a site\'s own link; use another',
        ),
    ],
)
def test_bad_sites_are_refused_with_what_to_change(
    complaint: Complain, options: list[str], said: str
) -> None:
    assert complaint(*options).endswith(said)
