"""RTT matrices in files, and jitter, loss and shared links of a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from policies.links import Link
from testbed.errors import ScenarioError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.runtime.wiring import network_spec
from tests.unit.experiments.conftest import SMALL

Load = Callable[..., Experiment]
Complain = Callable[..., str]

CLUSTERS = SMALL[SMALL.index("[network]") : SMALL.index("[workload]")]
DOWN, UP, INSIDE = ("a100-0", "client-0"), ("client-0", "a100-0"), ("a100-0", "a100-1")


@pytest.fixture
def of_file(tmp_path: Path) -> Callable[..., Experiment]:
    """Load the small scenario with its network in a file beside it."""

    def run(name: str, text: str, rest: str = 'rtt_unit = "ms"\nrate = "1 Gbit/s"') -> Experiment:
        (tmp_path / name).write_text(text, encoding="utf-8")
        network = f'[network]\nkind = "matrix"\nfile = "{name}"\n{rest}\n'
        path = tmp_path / "small.toml"
        path.write_text(SMALL.replace(CLUSTERS, network), encoding="utf-8")
        return load_experiment(str(path))

    return run


Of = Callable[..., Experiment]


def delays(e: Experiment) -> list[float]:
    return [e.network.links[pair].delay_s for pair in (DOWN, UP, INSIDE)]


def test_a_square_csv_gives_half_of_each_cell_to_its_direction(of_file: Of) -> None:
    assert delays(of_file("rtt.csv", ",A,B\nB,140,2\nA,5,60\n")) == [0.03, 0.07, 0.0025]


def test_an_empty_cell_takes_the_other_direction_and_nothing_inside_a_site(of_file: Of) -> None:
    assert delays(of_file("rtt.csv", "site,A,B\nA,,60\nB,,\n")) == [0.03, 0.03, 0.0]


def test_a_list_of_pairs_may_have_rates_and_either_direction(of_file: Of) -> None:
    text = "from,to,rtt,rate\nA,B,60,100\nB,A,140,50\nA,A,5,1000\n"
    e = of_file("rtt.csv", text, 'rtt_unit = "ms"\nrate_unit = "Mbit/s"')
    assert delays(e) == [0.03, 0.07, 0.0025]
    assert [e.network.links[pair].rate_bps for pair in (DOWN, UP, INSIDE)] == [1e8, 5e7, 1e9]
    one = of_file("rtt.csv", "From, To, RTT\nA, B, 60\n")
    assert delays(one) == [0.03, 0.03, 0.0]


TABLES = {
    "sending_region,receiving_region,milliseconds,gigabits_per_second\nA,B,60,0.1\nB,A,140,0.05\nA,A,5,1\n": "",
    "src\tdst\trtt_us\nA\tB\t60000\nB\tA\t140000\nA\tA\t5000\n": 'rate = "1 Gbit/s"',
    "to,from,latency (ms)\nB,A,60\nA,B,140\nA,A,5\n": 'rate = "1 Gbit/s"',
    "from,to,rate,rtt\nA,B,9,60\nB,A,9,140\nA,A,9,5\n": 'rtt_unit = "ms"\nrate_unit = "Gbit/s"',
    ";A;B\nA;5,0;60\nB;140,00;-\n": 'rtt_unit = "ms"\nrate = "1 Gbit/s"',
    "city,A,B\nA,5 ms,0.06 s\nB,140 ms,NaN\n": 'rate = "1 Gbit/s"',
    "A,B\nA,5,60\nB,140,-1\n": 'rtt_unit = "ms"\nrate = "1 Gbit/s"',
}


@pytest.mark.parametrize("text", TABLES)
def test_tables_as_others_write_them_give_the_same_delays(of_file: Of, text: str) -> None:
    assert delays(of_file("rtt.csv", text, TABLES[text])) == pytest.approx([0.03, 0.07, 0.0025], rel=1e-12)


def test_an_empty_cell_of_a_list_takes_the_other_direction(of_file: Of) -> None:
    e = of_file("rtt.csv", "from,to,rtt,rate\nA,B,60,100\nB,A,,\n", 'rtt_unit = "ms"\nrate_unit = "Mbit/s"')
    assert delays(e) == [0.03, 0.03, 0.0]
    assert {link.rate_bps for link in e.network.links.values()} == {1e8}


def test_a_unit_that_contradicts_the_file_is_refused(of_file: Of) -> None:
    with pytest.raises(ScenarioError, match=r'rtt_unit: is s, but ".*rtt.csv" states ms; leave it out'):
        of_file("rtt.csv", "from,to,rtt_ms\nA,B,60\n", 'rtt_unit = "s"\nrate = "1 Gbit/s"')


def test_names_become_plain_and_only_sites_with_nodes_are_kept(of_file: Of, tmp_path: Path) -> None:
    text = (
        "from,to,rtt\nA,B,60\nSão Paulo,A,100\nSão Paulo,New York,120\n"  # B to New York is in no direction
    )
    e = of_file("rtt.csv", text)
    assert e.sites.keys() == {"a100-0", "a100-1", "client-0"}
    assert "Paulo" not in dump_toml(e)
    other = (tmp_path / "small.toml").read_text(encoding="utf-8").replace('site = "B"', 'site = "Sao-Paulo"')
    (tmp_path / "other.toml").write_text(other, encoding="utf-8")
    assert load_experiment(str(tmp_path / "other.toml")).network.links[DOWN].delay_s == 0.05
    (tmp_path / "other.toml").write_text(other.replace("Sao-Paulo", "Paulo"), encoding="utf-8")
    with pytest.raises(ScenarioError, match=r'unknown site "Paulo" .*valid: A, B, Sao-Paulo, New-York'):
        load_experiment(str(tmp_path / "other.toml"))


def test_json_holds_sites_and_matrices(of_file: Of) -> None:
    e = of_file("rtt.json", '{"sites": ["A", "B"], "rtt": [[5, 60], [140, null]]}')
    assert delays(e) == [0.03, 0.07, 0.0025]


def test_a_resolved_scenario_holds_the_matrix_and_needs_its_file_no_more(of_file: Of, tmp_path: Path) -> None:
    e = of_file("rtt.csv", ",A,B\nA,5,60\nB,140,2\n")
    (tmp_path / "rtt.csv").unlink()
    path = tmp_path / "resolved.toml"
    path.write_text(dump_toml(e))
    again = load_experiment(str(path))
    assert again.network.links == e.network.links
    assert dump_toml(again) == dump_toml(e)


WIDE = {
    ",A,B\nA,5,x\nB,140,2\n": 'row A, column B: must be a number, not "x"',
    ",A,B\nA,5,60\nB,-2,2\n": "row B, column A: must not be negative, but is -2",
    ",A,B\nA,5,inf\nB,1,2\n": 'row A, column B: must be a number, not "inf"',
    ",A,B\nA,5,\nB,,2\n": "row A, column B: is empty in both directions",
    ",A,B\nA,5\nB,140,2\n": "row A has 1 cells, but there are 2 columns",
    ",A,B\nA,5,60\n": "has a column for B, but no row",
    ",A,B\nA,5,60\nC,140,2\n": 'row "C" has no column of that name',
    ",A,B\nA,5,60\nA,5,60\n": "has two rows for A",
    ",A,A\nA,5,60\n": "its first row names A twice",
    "5,60\n60,5\n": "begins with a row of numbers, so that the sites have no names: a matrix has a first row of",
    "x,y,z\nA,B,5\n": "is neither a matrix nor a list of pairs: a matrix has a first row of names, and for each",
    "source,target,min,avg\nA,B,5,6\n": "has the columns source, target, min, avg, but they must be from, to, rtt",
    ",A,B\nA,5,60 m\nB,1,2\n": 'row A, column B: "60 m" has no unit of a duration: h, min, s, ms',
    "": "is empty",
    "from,to,rtt\nA,B,x\n": 'row 2 (A to B), column rtt: must be a number, not "x"',
    "from,to,rtt\nA,B,1\nA,B,2\n": "row 3: has A to B a second time",
    "from,to,rtt,rate\nA,B,60,0\n": "row 2 (A to B), column rate: must be more than 0, but is 0",
    "from,to,rtt,rate\nA,B,60,0 Mbit/s\n": "row 2 (A to B), column rate: must be more than 0, but is 0",
    "from,to,rtt,rate\nA,B,60,-3\n": "row 2 (A to B), column rate: must be more than 0, but is -3",
    "from,to,rtt\n\n\nA,B,x\n": 'row 4 (A to B), column rtt: must be a number, not "x"',
    "from,to,rtt\nA,B\n": "row 2 has 2 cells, but there are 3 columns",
    "from,to,rtt\n,B,1\n": "row 2, column from: is empty",
    "from,to,rtt,hops\nA,B,1,2\n": "has the columns from, to, rtt, hops, but they must be from, to, rtt and",
}
JSON = {
    "{": "is not JSON: line 1, column 2:",
    "[]": "must hold an object with sites, rtt, rate",
    '{"site": []}': 'unknown key "site" (did you mean "sites"?)',
    '{"sites": ["A", "B"], "rtt": [[1, 2]]}': "rtt must be a 2 x 2 matrix",
    '{"sites": ["A", "B"], "rtt": [[1, 2], ["x", 1]]}': 'rtt row B, column A: must be a number, not "x"',
    '{"sites": ["A", "B"], "rtt": [[0, 2], [2, 0]], "rate": [[1, 0], [1, 1]]}': "rate row A, column B: must be more than 0",
    '{"sites": ["A", "B"]}': "has no rtt",
    '{"sites": "A", "rtt": []}': "sites must be a list of names",
    '{"sites": ["A", "A"], "rtt": [[1, 2], [3, 1]]}': "lists a site twice",
}


@pytest.mark.parametrize("text", [*WIDE, *JSON])
def test_a_bad_matrix_file_is_refused_with_file_row_and_column(
    of_file: Of, tmp_path: Path, text: str
) -> None:
    name = "rtt.csv" if text in WIDE else "rtt.json"
    with pytest.raises(ScenarioError) as caught:
        of_file(name, text)
    said = str(caught.value).replace(f"{tmp_path}/", "")
    assert said.startswith(f'small.toml: network.file: "{name}": {({**WIDE, **JSON})[text]}')
    assert "\n" not in said


def test_a_matrix_nested_too_deeply_or_with_huge_numbers_is_refused(of_file: Of) -> None:
    with pytest.raises(ScenarioError, match=r'rtt\.json": is nested too deeply'):
        of_file("rtt.json", "[" * 100_000)
    with pytest.raises(ScenarioError, match=r'rtt\.json": cannot be read: Exceeds the limit'):
        of_file("rtt.json", "1" * 5000)
    huge = f'{{"sites": ["A", "B"], "rtt": [[5, 1{"0" * 400}], [140, 1]]}}'
    with pytest.raises(ScenarioError, match=r"rtt row A, column B: must be a number, not 1000"):
        of_file("rtt.json", huge)


def test_units_and_rates_must_be_said_once(of_file: Of, complaint: Complain) -> None:
    with_rates = "from,to,rtt,rate\nA,B,60,100\n"
    for text, rest, said in (
        (
            "from,to,rtt\nA,B,60\n",
            'rate = "1 Gbit/s"',
            "network.rtt_unit: is missing; give the unit of the file's RTTs",
        ),
        ("from,to,rtt\nA,B,60\n", 'rtt_unit = "ms"', "network.rate: is missing; give it, since "),
        (with_rates, 'rtt_unit = "ms"', "network.rate_unit: is missing; give one of bit/s"),
        (with_rates, 'rtt_unit = "ms"\nrate = "1 Gbit/s"', "network.rate: "),
        (
            "from,to,rtt\nA,B,60\n",
            'rtt_unit = "msec"\nrate = "1 Gbit/s"',
            'network.rtt_unit: unknown unit "msec"',
        ),
        (
            "from,to,rtt\nA,B,60\n",
            'sites = ["A"]',
            "network.sites: is also in network.file",
        ),
    ):
        with pytest.raises(ScenarioError) as caught:
            of_file("rtt.csv", text, rest)
        assert f"small.toml: {said}" in str(caught.value)
    said = complaint('network={kind="matrix",sites=["A"],rtt_unit="ms",rate="1 Gbit/s"}')
    assert said.endswith("network.rtt: is missing, or give the file of a matrix")
    said = complaint('network={kind="matrix",file="no.csv",rtt_unit="ms",rate="1 Gbit/s"}')
    assert 'network.file: cannot read "no.csv": No such file' in said
    said = complaint('network={kind="matrix",file="small.toml",rtt_unit="ms",rate="1 Gbit/s"}')
    assert "must end in .csv or .json to be read as a matrix" in said


def test_jitter_and_loss_are_those_of_all_links_or_of_a_pair(load: Load, complaint: Complain) -> None:
    e = load('network.jitter="4 ms"', 'network.loss="0.1 %"', 'network.pairs.1.jitter="20 ms"')
    # Inside A the delay is 2.5 ms, and a jitter is never larger.
    assert e.network.links[INSIDE] == Link(0.0025, 1e9, 0.0025, 0.001)
    assert e.network.links[UP] == Link(0.05, 1e8, 0.02, 0.001)
    assert load("network.pairs.1.loss=0.25").network.links[UP].loss_ratio == 0.25
    said = complaint('network.pairs.1.jitter="51 ms"')
    assert said.endswith("network.pairs.1.jitter: must be at most the one-way delay, 50 ms")
    assert complaint('network.loss="100 %"').endswith('network.loss: must be less than 1, not "100 %"')


def test_a_topology_can_share_its_links_and_its_resolved_form_too(tmp_path: Path) -> None:
    e = load_experiment("abovenet", ["network.share_links=true", "time_scale=2"])
    client, server = e.problem.clients[0], e.problem.servers[0].name
    path = e.network.shared_paths[client, server]
    assert path[0].startswith(f"{e.sites[client]}>")
    assert path[-1].endswith(f">{e.sites[server]}")
    back = [">".join(reversed(link.split(">"))) for link in reversed(path)]
    assert list(e.network.shared_paths[server, client]) == back
    spec = network_spec(e, "run")
    assert set(spec.paths) == set(spec.links)
    assert set(spec.shared) == {link for links in spec.paths.values() for link in links}
    assert spec.shared[path[0]] == 2 * e.network.shared_bps[path[0]]
    assert min(spec.shared[link] for link in path) == spec.links[client, server].rate_bps
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_toml(e))
    again = load_experiment(str(resolved))
    assert (again.network.shared_bps, again.network.shared_paths) == (
        e.network.shared_bps,
        e.network.shared_paths,
    )
    assert dump_toml(again) == dump_toml(e)
    assert network_spec(load_experiment("abovenet"), "run").shared == {}


def test_a_matrix_can_name_shared_links_and_bad_ones_are_refused(load: Load, complaint: Complain) -> None:
    matrix = 'network={kind="matrix",sites=["A","B"],rtt=[[5,60],[60,2]],rtt_unit="ms",rate="1 Gbit/s"'
    e = load(matrix + ',shared={wan="10 Mbit/s"},paths=[{from="B",to="A",links=["wan"]}]}')
    assert e.network.shared_bps == {"wan": 1e7}
    assert e.network.shared_paths == {UP: ("wan",), ("client-0", "a100-1"): ("wan",)}
    for rest, said in (
        ('shared={wan="10 Mbit/s"}', "network.paths: is missing; shared links need both"),
        ('paths=[{from="B",to="A",links=["wan"]}]', "network.shared: is missing; shared links need both"),
        (
            'shared={wan="1 Mbit/s"},paths=[{from="B",to="C",links=["wan"]}]',
            'network.paths: unknown site "C"',
        ),
        (
            'shared={wan="1 Mbit/s"},paths=[{from="B",to="A",links=["wam"]}]',
            'network.paths: unknown shared link "wam" (did you mean "wan"?)',
        ),
        (
            'shared={wan="1 Mbit/s"},paths=[{from="B",to="A",links=["wan"]},{from="B",to="A",links=["wan"]}]',
            "network.paths: has two rows from B to A",
        ),
        ('shared={wan="0 bit/s"},paths=[]', "network.shared.wan: must be more than 0"),
    ):
        assert said in complaint(f"{matrix},{rest}}}")


def test_round_trips_in_the_wrong_unit_are_warned_of(of_file: Of, caplog: pytest.LogCaptureFixture) -> None:
    of_file("rtt.csv", ",A,B\nA,1,88\nB,88,1\n", 'rtt_unit = "s"\nrate = "1 Gbit/s"')
    assert (
        "messages from A to B take 44 s one way, more than any path on Earth; check the unit" in caplog.text
    )
    caplog.clear()
    of_file("rtt.csv", ",A,B\nA,1,88\nB,88,1\n")
    assert "any path on Earth" not in caplog.text
