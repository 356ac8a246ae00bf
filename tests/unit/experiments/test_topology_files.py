"""Topologies in the forms of other tools."""

from __future__ import annotations

import math
from pathlib import Path

import networkx as nx
import pytest

from netem.topology import TopologyError
from testbed.errors import ScenarioError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.network_tables import TopologyNetworkTable
from testbed.experiments.problems import KeyedError
from testbed.experiments.speeds import speed_bps
from testbed.experiments.topologies import load_topology, topology_of
from testbed.experiments.topology_files import unique_names


def zoo_graph() -> nx.MultiGraph:
    """Three cities as the Topology Zoo states them: the second has no place, the last a link to itself."""
    graph = nx.MultiGraph()
    graph.add_node("0", label="Zürich HB", Longitude=8.54, Latitude=47.37)
    graph.add_node("1", label="None")
    graph.add_node("2", label="Zürich HB", Longitude=6.14, Latitude=46.2)
    graph.add_edge("0", "1", LinkSpeedRaw=1e10)
    graph.add_edge("1", "2")
    graph.add_edge("2", "2")
    return graph


ZOO_GML = """graph [
  multigraph 1
  node [ id 0 label "Zürich HB" Longitude 8.54 Latitude 47.37 ]
  node [ id 1 label "None" ]
  node [ id 2 label "Zürich HB" Longitude 6.14 Latitude 46.2 ]
  edge [ source 0 target 1 LinkSpeedRaw 10000000000.0 ]
  edge [ source 1 target 2 ]
  edge [ source 2 target 2 ]
]
"""


@pytest.mark.parametrize("ending", ["graphml", "gml"])
def test_a_topology_zoo_file_gives_nodes_places_and_rates(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"Tiny.{ending}"
    if ending == "graphml":
        nx.write_graphml(zoo_graph(), path)
    else:
        path.write_text(ZOO_GML.replace("ü", "&#252;"), encoding="ascii")
    topology = load_topology(str(path))
    assert topology.name == "tiny"
    assert topology.node_names == ("Zurich-HB", "None", "Zurich-HB-2")
    assert [(link.a, link.b, link.delay_s, link.rate_bps) for link in topology.links] == [
        ("Zurich-HB", "None", None, 1e10),
        ("None", "Zurich-HB-2", None, 1e9),
    ]
    with pytest.raises(TopologyError, match='delays = "fibre"'):
        topology.paths(topology.node_names)
    derived = topology.with_fibre_delays()
    assert derived.without_coordinates == ("None",)
    # The node of unknown place counts as lying in the middle of the other two.
    first, second = (link.delay_s or math.nan for link in derived.links)
    assert first == pytest.approx(second, rel=1e-6)
    assert first + second == pytest.approx(224.3 / 200_000, rel=0.01)


def test_a_repetita_file_gives_each_pair_of_directions_as_one_link(tmp_path: Path) -> None:
    (tmp_path / "Net.graph").write_text(
        "NODES 3\nlabel x y\n0_A 10.0 50.0\n1_B 0 0\n2_C 11.0 50.0\n\n"
        "EDGES 6\nlabel src dest weight bw delay\n"
        "e0 0 1 1 1000000 250\ne1 1 0 1 1000000 250\n"
        "e2 1 2 1 500000 100\ne3 2 1 1 500000 100\n"
        "e4 0 1 1 1000000 250\ne5 1 0 1 1000000 250\n"
    )
    topology = load_topology(str(tmp_path / "Net.graph"))
    assert [(node.name, node.latitude_deg) for node in topology.nodes] == [
        ("0_A", 50.0),
        ("1_B", None),
        ("2_C", 50.0),
    ]
    links = [(link.a, link.b, link.delay_s, link.rate_bps) for link in topology.links]
    assert links == [("0_A", "1_B", 250e-6, 1e9), ("1_B", "2_C", 100e-6, 5e8), ("0_A", "1_B", 250e-6, 1e9)]


SNDLIB_XML = """<?xml version="1.0" encoding="ISO-8859-1"?>
<network xmlns="http://sndlib.zib.de/network" version="1.0">
 <meta><granularity>5min</granularity><unit>MBITPERSEC</unit></meta>
 <networkStructure>
  <nodes coordinatesType="geographical">
   <node id="Bern"><coordinates><x>7.45</x><y>46.95</y></coordinates></node>
   <node id="Genf"><coordinates><x>6.14</x><y>46.2</y></coordinates></node>
   <node id="Chur"/>
  </nodes>
  <links>
   <link id="L1"><source>Bern</source><target>Genf</target>
    <preInstalledModule><capacity>9920.0</capacity><cost>0</cost></preInstalledModule>
    <additionalModules><addModule><capacity>40000</capacity><cost>1</cost></addModule></additionalModules></link>
   <link id="L2"><source>Bern</source><target>Chur</target></link>
  </links>
 </networkStructure>
 <demands><demand id="D1"><source>Bern</source><target>Genf</target><demandValue>1</demandValue></demand></demands>
</network>
"""
SNDLIB_NATIVE = """?SNDlib native format; type: network; version: 1.0
# network three

META (
  granularity = 5min
  unit = MBITPERSEC
)

NODES (
  # <node_id> [(<longitude>, <latitude>)]
  Bern ( 7.45 46.95 )
  Genf ( 6.14 46.2 )
  Chur
)

LINKS (
  L1 ( Bern Genf ) 9920.0 0.00 0.00 0.00 ( 40000.00 1.00 )
  L2 ( Bern Chur ) 0.0 0.00 0.00 0.00 ( )
)

DEMANDS (
  D1 ( Bern Genf ) 1 1.00 UNLIMITED
)
"""


@pytest.mark.parametrize(("ending", "text"), [("xml", SNDLIB_XML), ("txt", SNDLIB_NATIVE)])
def test_an_sndlib_file_gives_nodes_places_and_installed_rates(
    tmp_path: Path, ending: str, text: str
) -> None:
    path = tmp_path / f"three.{ending}"
    path.write_text(text)
    topology = load_topology(str(path))
    assert [(node.name, node.longitude_deg, node.latitude_deg) for node in topology.nodes] == [
        ("Bern", 7.45, 46.95),
        ("Genf", 6.14, 46.2),
        ("Chur", None, None),
    ]
    links = [(link.a, link.b, link.delay_s, link.rate_bps) for link in topology.links]
    assert links == [("Bern", "Genf", None, 9.92e9), ("Bern", "Chur", None, 1e9)]


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("xml", SNDLIB_XML.replace("geographical", "pixel")),
        ("txt", SNDLIB_NATIVE.replace("46.95", "460.95")),
    ],
)
def test_an_sndlib_drawing_in_pixels_has_no_places(tmp_path: Path, ending: str, text: str) -> None:
    (tmp_path / f"drawn.{ending}").write_text(text)
    topology = load_topology(str(tmp_path / f"drawn.{ending}"))
    assert [node.latitude_deg for node in topology.nodes] == [None, None, None]


def test_an_sndlib_capacity_without_a_unit_is_no_rate(tmp_path: Path) -> None:
    (tmp_path / "three.txt").write_text(SNDLIB_NATIVE.replace("unit = MBITPERSEC", ""))
    assert [link.rate_bps for link in load_topology(str(tmp_path / "three.txt")).links] == [1e9, 1e9]


@pytest.mark.parametrize(
    ("ending", "text", "sentence"),
    [
        ("txt", "NODES (\n)\n", "its first line must begin with '\\?SNDlib native format"),
        ("txt", SNDLIB_NATIVE.replace("LINKS (", "EDGES ("), "it has no sections NODES and LINKS"),
        (
            "txt",
            SNDLIB_NATIVE.replace("L1 ( Bern Genf )", "L1 ( Bern )"),
            "line 17 is not a row of the section LINKS",
        ),
        (
            "txt",
            SNDLIB_NATIVE.replace("Bern Chur", "Bern Olten"),
            "a link ends at 'Olten', which is not one of the file's nodes",
        ),
        ("xml", SNDLIB_XML.replace("networkStructure", "structure"), "it has no networkStructure with nodes"),
        ("xml", SNDLIB_XML.replace("<network ", "<!DOCTYPE network><network "), "has a document type"),
    ],
)
def test_an_sndlib_file_with_a_mistake_is_refused_with_it(
    tmp_path: Path, ending: str, text: str, sentence: str
) -> None:
    (tmp_path / f"wrong.{ending}").write_text(text)
    with pytest.raises(ScenarioError, match=sentence):
        load_topology(str(tmp_path / f"wrong.{ending}"))


@pytest.mark.parametrize("ending", ["graphml", "gml", "graph", "xml", "txt"])
def test_a_file_that_is_not_what_its_ending_says_is_refused_by_name(tmp_path: Path, ending: str) -> None:
    name = f"broken.{ending}"
    (tmp_path / name).write_text("nothing of the kind")
    with pytest.raises(ScenarioError, match=name):
        load_topology(str(tmp_path / name))


def test_links_far_from_any_known_place_are_named_when_delays_are_to_be_derived(tmp_path: Path) -> None:
    graph = nx.Graph()
    graph.add_edge("0", "1")
    nx.write_graphml(graph, tmp_path / "nowhere.graphml")
    topology = load_topology(str(tmp_path / "nowhere.graphml"))
    with pytest.raises(TopologyError, match="neither a delay for the link 0 to 1 nor coordinates"):
        topology.with_fibre_delays()


def test_labels_become_different_plain_names() -> None:
    assert unique_names(["São Paulo", "Sao Paulo", "??", "any", "a/b c"]) == [
        "Sao-Paulo",
        "Sao-Paulo-2",
        "node",
        "any-2",
        "a-b-c",
    ]


ZOO_AS_PUBLISHED = """graph [
  Network "Pair"
  directed 0
  node [
    id 0
    label "Bern"
    Longitude 7.45
    Latitude 46.95
  ]
  node [
    id 1
    label "Genf"
    Longitude 6.14
    Latitude 46.2
  ]
  edge [
    source 0
    target 1
    LinkLabel "Green Link"
  ]
  edge [
    source 0
    target 1
    LinkLabel "Red Link, OC-48"
  ]
  edge [
    source 1
    target 1
  ]
]
"""


def test_parallel_links_need_no_line_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "pair.gml").write_text(ZOO_AS_PUBLISHED)
    links = load_topology(str(tmp_path / "pair.gml")).links
    assert [(link.a, link.b, link.rate_bps) for link in links] == [
        ("Bern", "Genf", 1e9),
        ("Bern", "Genf", 48 * 51.84e6),
    ]


@pytest.mark.parametrize("line", ["e2 1 1 1 1000000 1", "e2 1 0 1 1000000 500"])
def test_a_link_to_itself_is_left_out_of_a_graph_file_too(tmp_path: Path, line: str) -> None:
    rows = "NODES 2\nlabel x y\na 7 46\nb 6 46\n\nEDGES 3\nlabel src dest weight bw delay\n"
    path = tmp_path / "self.graph"
    path.write_text(f"{rows}e0 0 1 1 1000000 650\ne1 1 0 1 1000000 650\n{line}\n")
    assert len(load_topology(str(path)).links) == 1 + (line.split()[1] != line.split()[2])


def test_delays_in_milliseconds_are_warned_of_and_read_with_their_unit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ms.graph"
    path.write_text(
        "NODES 2\nlabel x y\nLondon 0.0 0.0\nNY 0.0 0.0\n\nEDGES 2\nlabel src dest weight bw delay\n"
        "Link_0 0 1 1 10000000 29\nLink_1 1 0 1 10000000 29\n"
    )

    def delay_s(**unit: str) -> float | None:
        caplog.clear()
        table = {"kind": "topology", "topology": str(path), **unit}
        return topology_of(TopologyNetworkTable.model_validate(table), Path()).links[0].delay_s

    assert delay_s() == 29e-6
    assert "all delays of ms are below 0.1 ms (the longest is 0.029 ms)" in caplog.text
    assert delay_s(delay_unit="ms") == 0.029
    assert not caplog.records


@pytest.mark.parametrize("spelling", ["lon {} lat {}", "longitude {} latitude {}", "lng {} Lat {}"])
def test_coordinates_have_several_names(tmp_path: Path, spelling: str) -> None:
    text = ZOO_AS_PUBLISHED.replace("Longitude 7.45\n    Latitude 46.95", spelling.format(7.45, 46.95))
    (tmp_path / "names.gml").write_text(text)
    bern, genf = load_topology(str(tmp_path / "names.gml")).nodes
    assert (bern.longitude_deg, bern.latitude_deg, genf.longitude_deg) == (7.45, 46.95, 6.14)
    (tmp_path / "pixels.gml").write_text(text.replace("46.2", "462.5"))
    assert {node.latitude_deg for node in load_topology(str(tmp_path / "pixels.gml")).nodes} == {None}


@pytest.mark.parametrize(("number", "rate_bps"), [("2e9", 2e9), ("+25E+8", 2.5e9), ("2.0e9", 2e9)])
def test_a_number_of_gml_needs_no_point_before_its_exponent(
    tmp_path: Path, number: str, rate_bps: float
) -> None:
    text = ZOO_AS_PUBLISHED.replace("    target 1\n", f"    target 1\n    LinkSpeedRaw {number}\n")
    (tmp_path / "pair.gml").write_text(text.replace('"Genf"', '"Genf 1e9"'))
    link = load_topology(str(tmp_path / "pair.gml")).links[0]
    assert (link.b, link.rate_bps) == ("Genf-1e9", rate_bps)


def test_a_latency_counts_once_its_unit_is_stated(tmp_path: Path) -> None:
    text = ZOO_AS_PUBLISHED.replace('LinkLabel "Green Link"', "latency 1.5")
    (tmp_path / "delays.gml").write_text(text)
    assert load_topology(str(tmp_path / "delays.gml")).links[0].delay_s is None
    assert load_topology(str(tmp_path / "delays.gml"), delay_unit="ms").links[0].delay_s == 0.0015


def test_places_are_drawn_from_the_largest_part_of_real_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "parts.toml"
    names = "abcdefgh"
    rows = [f'{{ name = "{n}", internal = {"false" if n in "bc" else "true"} }}' for n in names]
    links = [f'{{ nodes = ["{a}", "{b}"], delay = "1 ms" }}' for a, b in ("ab", "bc", "cd", "de", "fg")]
    path.write_text(f'name = "parts"\nnodes = [{", ".join(rows)}]\nlinks = [{", ".join(links)}]\n')
    network = f"network={{kind='topology',topology='{path}'}}"
    places = ["servers.0.site=any", "servers.0.count=2", "servers.1.site=any", "servers.1.count=1"]
    drawn = set()
    for seed in range(8):
        e = load_experiment("clustered", [network, *places, "clients.site=any", f"seed={seed}", *_SMALL])
        drawn |= set(e.sites.values())
    assert drawn == set("ade")
    assert (
        '"any" is drawn from 3 of the 8 nodes of parts (without 3 not connected with these, 2 no places of'
        in caplog.text
    )
    with pytest.raises(ScenarioError, match="parts has only 3 nodes that no entry names in its largest part"):
        load_experiment("clustered", [network, *places, "servers.0.count=3", "clients.site=any", *_SMALL])


_SMALL = ['model={profile="bloom-176b",n_blocks=4}']

SPEEDS = {
    "OC-192": 192 * 51.84e6,
    "OC3": 3 * 51.84e6,
    "STM-64/OC-192": 64 * 155.52e6,
    "10 Gbps (STM-64)": 10e9,
    "155M": 155e6,
    "2.5 Gbit/s": 2.5e9,
    "10GE": 10e9,
    "GigE": 1e9,
    "2 x 10Gbps": 20e9,
    "4xSTM-16": 4 * 16 * 155.52e6,
    "T3": 44.736e6,
    "DWDM": None,
    "Green Link": None,
    "<2.5 Gbps": None,
    "10-100 Mbps": None,
    "155 Mbps & 2.5 Gbps": None,
    "n x 10G": None,
    "1,000 Mbps": None,
    "5 m": None,
    "100 km": None,
}


@pytest.mark.parametrize("text", SPEEDS)
def test_the_rate_in_a_label_is_read_or_left_alone(text: str) -> None:
    assert speed_bps(text) == (None if SPEEDS[text] is None else pytest.approx(SPEEDS[text]))


BROKEN = {
    "": "a.graph: expected NODES and their number",
    "NODES\n": "a.graph:1: expected NODES and their number",
    "NODES 2\nlabel x y\na 1 1\n": "a.graph: has 1 rows of NODES, but states 2",
    "NODES 1\nlabel x y\na 1\n": "a.graph:3: has 2 columns, but NODES need 3",
    "NODES 1\nlabel x y\na 1 1\n": "a.graph: expected EDGES and their number",
    "NODES 1\nlabel x y\na b c\nEDGES 0\nlabel\n": "a.graph:3: the node a must have two numbers",
    "NODES 1\nlabel x y\na 1 1\n\nEDGES 1\nlabel\ne 0 1 1 1 1\n": "a.graph:7: there is no node 1; nodes are 0 to 0",
    "NODES 1\nlabel x y\na 1 1\nEDGES 2\nlabel\ne 0 0 1 1 1\n": "a.graph: has 1 rows of EDGES, but states 2",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_repetita_file_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.graph"
    path.write_text(text)
    with pytest.raises(ScenarioError) as caught:
        load_topology(str(path))
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(BROKEN[text])


def test_a_matrix_is_no_topology_and_the_sentence_says_where_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "rtt.csv"
    path.write_text(",A\nA,0\n")
    with pytest.raises(KeyedError) as caught:
        load_topology(str(path))
    assert caught.value.what.endswith('use kind = "matrix" and file = "rtt.csv"')


def test_links_without_a_rate_have_the_default_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "Tiny.gml"
    path.write_text(ZOO_GML.replace("ü", "&#252;"), encoding="ascii")
    topology = load_topology(str(path), default_bps=5e6)
    assert ([link.rate_bps for link in topology.links], topology.n_without_rate) == ([1e10, 5e6], 1)

    def rate_bps(*options: str) -> float:
        caplog.clear()
        network = f"network={{kind='topology',topology='{path}',delays='fibre'}}"
        sites = ["servers.0.site=Zurich-HB-2", "servers.1.site=Zurich-HB-2", "clients.site=None"]
        e = load_experiment("clustered", [network, *sites, *options])
        return e.network.links["client-0", e.problem.servers[0].name].rate_bps

    assert rate_bps() == 1e9
    said = "network.topology: 1 of 2 links of tiny have no rate in their file and count as 1 Gbit/s; set network.default_rate"
    assert [record.getMessage()[: len(said)] for record in caplog.records] == [said]
    assert rate_bps('network.default_rate="20 Mbit/s"') == 20e6
    assert not caplog.records


@pytest.mark.parametrize(
    ("delay_us", "is_wrong"), [(29, True), (2_700, True), (2_800, False), (29_000, False)]
)
def test_delays_far_below_those_of_light_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, delay_us: int, is_wrong: bool
) -> None:
    path = tmp_path / "ms.graph"
    rows = "".join(f"l{a} {a} {1 - a} 1 1000 {delay_us}\n" for a in (0, 1))
    path.write_text(
        f"NODES 2\nlabel x y\nLondon -0.1 51.5\nNewYork -74 40.7\n\nEDGES 2\nlabel s d w b y\n{rows}",
        encoding="ascii",
    )
    load = TopologyNetworkTable(kind="topology", topology=str(path))
    topology_of(load, Path())
    assert [
        ("the delays of 1 of 1 links are less than a tenth" in r.getMessage()) for r in caplog.records
    ] == [True] * is_wrong
    caplog.clear()
    topology_of(load.model_copy(update={"delays": "fibre"}), Path())
    assert not caplog.records


def test_round_trips_far_below_those_of_light_between_places_are_warned_of(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    places = "network.places={Cluster0=[2.35, 48.86], Cluster1=[139.7, 35.7], Cluster2=[2.4, 48.9]}"
    load_experiment("clustered", [places, 'network.pairs.4.rtt="100 us"'])  # 5 km
    assert not caplog.records
    e = load_experiment("clustered", [places, 'network.pairs.3.rtt="100 us"'])
    (record,) = caplog.records
    assert "network: the delays of 1 of 2 links" in record.getMessage()
    assert "such as Cluster0 to Cluster1: 0.05 ms one way, where light needs 48.6 ms" in record.getMessage()
    (tmp_path / "resolved.toml").write_text(dump_toml(e), encoding="utf-8")
    load_experiment(str(tmp_path / "resolved.toml"))
    assert len(caplog.records) == 1
