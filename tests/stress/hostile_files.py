"""Files of other tools, as they are written and with slips: networks, RTT tables, recorded workloads.

A network is drawn once and written in each format; unchanged, all readers must find the same. Then the text is changed
in places. Each reader must find a network or a workload in it, or say in one sentence what is wrong.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from netem.topology import Topology
from testbed.errors import TestbedError
from testbed.experiments.matrices import matrix_of_file
from testbed.experiments.network_tables import MatrixTable
from testbed.experiments.problems import KeyedError
from testbed.experiments.sources import read_toml
from testbed.experiments.topologies import load_topology
from testbed.experiments.traces import read_trace

_LONGEST_SENTENCE = 1500
_REFUSALS = (TestbedError, KeyedError)


class Net(NamedTuple):
    """Places in degrees, and links as (from, to, rate in Mbit/s or ``None``, delay in us)."""

    places: Sequence[tuple[float, float]]
    links: Sequence[tuple[int, int, int | None, int]]


def _number(low: float, high: float) -> st.SearchStrategy[float]:
    return st.integers(int(100 * low), int(100 * high)).map(lambda n: n / 100 or 0.01)


@st.composite
def nets(draw: st.DrawFn) -> Net:
    places = draw(st.lists(st.tuples(_number(-170, 170), _number(-80, 80)), min_size=2, max_size=5))
    ends = st.integers(0, len(places) - 1)
    rates = st.none() | st.integers(1, 100_000)
    return Net(
        places, draw(st.lists(st.tuples(ends, ends, rates, st.integers(1, 90_000)), min_size=1, max_size=6))
    )


def as_gml(net: Net) -> str:
    lines = ["graph [", "  directed 0"]
    for i, (x, y) in enumerate(net.places):
        lines += [
            "  node [",
            f"    id {i}",
            f'    label "n{i}"',
            f"    Longitude {x}",
            f"    Latitude {y}",
            "  ]",
        ]
    for a, b, rate, _ in net.links:
        label = [] if rate is None else [f'    LinkLabel "{rate} Mbps"']
        lines += ["  edge [", f"    source {a}", f"    target {b}", *label, "  ]"]
    return "\n".join([*lines, "]", ""])


def as_graphml(net: Net) -> str:
    nodes = [
        f'<node id="{i}"><data key="n">n{i}</data><data key="x">{x}</data><data key="y">{y}</data></node>'
        for i, (x, y) in enumerate(net.places)
    ]
    edges = [
        f'<edge source="{a}" target="{b}">'
        + ("" if rate is None else f'<data key="s">{rate}</data><data key="u">M</data>')
        + "</edge>"
        for a, b, rate, _ in net.links
    ]
    keys = [("Longitude", "node", "x"), ("Latitude", "node", "y"), ("label", "node", "n")]
    keys += [("LinkSpeed", "edge", "s"), ("LinkSpeedUnits", "edge", "u")]
    head = [f'<key attr.name="{name}" attr.type="string" for="{of}" id="{key}" />' for name, of, key in keys]
    return "\n".join(
        [
            '<?xml version="1.0" encoding="utf-8"?>',
            '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">',
            *head,
            '<graph edgedefault="undirected">',
            *nodes,
            *edges,
            "</graph>",
            "</graphml>",
            "",
        ]
    )


def as_sndlib(net: Net) -> str:
    nodes = [f"  n{i} ( {x} {y} )" for i, (x, y) in enumerate(net.places)]
    links = [
        f"  L{k} ( n{a} n{b} ) {rate or 0}.0 0.0 0.0 0.0 ( )" for k, (a, b, rate, _) in enumerate(net.links)
    ]
    meta = ["META (", "  unit = MBITPERSEC", ")"]
    return "\n".join(
        [
            "?SNDlib native format; type: network; version: 1.0",
            *meta,
            "NODES (",
            *nodes,
            ")",
            "LINKS (",
            *links,
            ")",
            "",
        ]
    )


def as_repetita(net: Net) -> str:
    nodes = [f"n{i} {x} {y}" for i, (x, y) in enumerate(net.places)]
    links = [
        f"e{k}{way} {a} {b} 1 {1000 * (rate or 1000)} {delay}"
        for k, (one, other, rate, delay) in enumerate(net.links)
        for way, (a, b) in enumerate(((one, other), (other, one)))
    ]
    return "\n".join(
        [
            f"NODES {len(nodes)}",
            "label x y",
            *nodes,
            "",
            f"EDGES {len(links)}",
            "label src dest weight bw delay",
            *links,
            "",
        ]
    )


def as_toml(net: Net) -> str:
    nodes = [
        f'[[nodes]]\nname = "n{i}"\nlongitude = {x}\nlatitude = {y}' for i, (x, y) in enumerate(net.places)
    ]
    links = [
        f'[[links]]\nnodes = ["n{a}", "n{b}"]\ndelay = "{delay} us"'
        + ("" if rate is None else f'\nrate = "{rate} Mbit/s"')
        for a, b, rate, delay in net.links
    ]
    return "\n".join(['name = "net"', *nodes, *links, ""])


def as_square(net: Net) -> str:
    names = [f"n{i}" for i in range(len(net.places))]
    rows = [[names[a], *(str(abs(a - b) * 7) for b in range(len(names)))] for a in range(len(names))]
    return "\n".join(",".join(row) for row in [["", *names], *rows]) + "\n"


def as_pairs(net: Net) -> str:
    rows = [f"n{a},n{b},{abs(a - b) * 7},100" for a in range(len(net.places)) for b in range(len(net.places))]
    return "\n".join(["source,destination,rtt_ms,gbps", *rows, ""])


def as_matrix_json(net: Net) -> str:
    n = len(net.places)
    return json.dumps(
        {"sites": [f"n{i}" for i in range(n)], "rtt": [[7 * abs(a - b) for b in range(n)] for a in range(n)]}
    )


def as_azure(net: Net) -> str:
    rows = [f"2024-03-31 0{a}:{b:02}:00.5,{delay},{(rate or 5)}" for a, b, rate, delay in net.links]
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""])


def as_burstgpt(net: Net) -> str:
    rows = [f"{a}.5,ChatGPT,{delay},{rate or 5},9,API log" for a, b, rate, delay in net.links]
    return "\n".join(["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *rows, ""])


def as_mooncake(net: Net) -> str:
    rows = (
        {"timestamp": a * 1000, "input_length": delay, "output_length": rate or 5}
        for a, _, rate, delay in net.links
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_sharegpt(net: Net) -> str:
    talks = [
        {
            "id": f"t{a}",
            "conversations": [
                {"from": who, "value": "x" * (delay % 50)} for who in ("human", "gpt") * (1 + b)
            ],
        }
        for a, b, _, delay in net.links
    ]
    return json.dumps(talks)


def as_aiperf(net: Net) -> str:
    rows = (
        {"session_id": f"s{a}", "timestamp": 1000 * i, "input_length": delay, "output_length": rate or 5}
        if b % 2
        else {
            "session_id": f"n{i}",
            "turns": [{"text": "x" * 9, "output_length": 3, "delay": 10 * n} for n in range(1 + b)],
        }
        for i, (a, b, rate, delay) in enumerate(net.links)
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def _topology(path: Path) -> Topology:
    return load_topology(str(path))


def _matrix(path: Path) -> MatrixTable:
    has_units = path.name == "pairs.csv"
    table = {"kind": "matrix", "file": str(path)}
    table |= {} if has_units else {"rtt_unit": "ms", "rate": "1 Gbit/s"}
    return matrix_of_file(MatrixTable.model_validate(table), Path())


FORMATS: dict[str, tuple[str, Callable[[Net], str], Callable[[Path], Any]]] = {
    "gml": ("net.gml", as_gml, _topology),
    "graphml": ("net.graphml", as_graphml, _topology),
    "sndlib": ("net.txt", as_sndlib, _topology),
    "repetita": ("net.graph", as_repetita, _topology),
    "toml": ("net.toml", as_toml, _topology),
    "scenario": ("scenario.toml", as_toml, read_toml),
    "square": ("square.csv", as_square, _matrix),
    "pairs": ("pairs.csv", as_pairs, _matrix),
    "json": ("matrix.json", as_matrix_json, _matrix),
    "azure": ("azure.csv", as_azure, read_trace),
    "burstgpt": ("burstgpt.csv", as_burstgpt, read_trace),
    "mooncake": ("mooncake.jsonl", as_mooncake, read_trace),
    "sharegpt": ("sharegpt.json", as_sharegpt, read_trace),
    "aiperf": ("aiperf.jsonl", as_aiperf, read_trace),
}
_ODD = (
    *(
        "",
        " ",
        "\t",
        ";",
        ",",
        "-1",
        "1e999",
        "1e-320",
        "NaN",
        "inf",
        "true",
        "null",
        "0x10",
        "1_000",
        "9" * 400,
        "é",
        "São Paulo",
    ),
    *(
        "[",
        "]",
        "{",
        "}",
        "<",
        ">",
        "<!-- -->",
        "&amp;",
        "&x;",
        '"',
        "'",
        "#",
        "\r\n",
        "\n\n",
        "\x00",
        "\ufeff",
        "None",
        "any",
        "10.5",
    ),
    *("2024-03-31T01:00:00+02:00", "OC-192", "10-100 Mbps", "-0", "१२", "multigraph 1", "<!DOCTYPE a>"),
)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ("replace", "insert", "delete line", "double line", "cut", "swap lines", "separator", "case")
        ),
        st.integers(0, 10_000),
        st.sampled_from(_ODD),
    ),
    max_size=3,
)


def changed(text: str, changes: Sequence[tuple[str, int, str]]) -> str:
    """Returns the text after slips of the pen, each at a word or line by its number."""
    for how, at, odd in changes:
        lines = text.split("\n")
        line = at % len(lines)
        if how in ("replace", "insert"):
            words = lines[line].split(" ")
            word = at // 7 % len(words)
            words[word : word + (how == "replace")] = [odd]
            lines[line] = " ".join(words)
        elif how == "delete line":
            del lines[line]
        elif how == "double line":
            lines.insert(line, lines[line])
        elif how == "cut":
            lines = text[: at % (len(text) + 1)].split("\n")
        elif how == "swap lines":
            other = at // 11 % len(lines)
            lines[line], lines[other] = lines[other], lines[line]
        elif how == "separator":
            lines = text.replace(",", odd or ";").split("\n")
        else:
            lines[line] = lines[line].swapcase()
        text = "\n".join(lines)
    return text


class FilesTarget:
    """The readers of files. Each case is (network, format, changes)."""

    name = "files"
    cases = st.tuples(nets(), st.sampled_from(sorted(FORMATS)), CHANGES)

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._folder = Path(tempfile.mkdtemp(prefix="files-"))

    def check(self, case: tuple[Net, str, Sequence[tuple[str, int, str]]]) -> None:
        """Raises ``AssertionError`` if a reader breaks a promise, or what it lets through."""
        net, kind, changes = case
        name, write, read = FORMATS[kind]
        path, text = self._folder / name, write(net)
        wrong = changed(text, changes)
        path.write_bytes(wrong.encode("utf-8", "surrogatepass"))
        try:
            found = read(path)
        except _REFUSALS as error:
            sentence = str(error)
            assert wrong != text or not self._is_good(net, kind), f"refused as written: {sentence}"
            assert sentence and "\n" not in sentence.strip() and len(sentence) < _LONGEST_SENTENCE, sentence
            self.counts["refused"] += 1
            return
        self.counts["read"] += 1
        if wrong == text and isinstance(found, Topology):
            self._check_alike(net, kind, found)

    @staticmethod
    def _is_good(net: Net, kind: str) -> bool:
        """Whether the file must be read: a topology needs a link between two nodes."""
        return kind in ("square", "json", "scenario", "azure", "burstgpt", "mooncake", "aiperf") or (
            any(a != b for a, b, _, _ in net.links)
            and (kind != "toml" or all(a != b for a, b, _, _ in net.links))
        )

    @staticmethod
    def _check_alike(net: Net, kind: str, found: Topology) -> None:
        """Every format gives the same places and links, but for what it cannot state."""
        assert [(node.longitude_deg, node.latitude_deg) for node in found.nodes] == list(net.places)
        expected = sorted(
            (*sorted((a, b)), 1e9 if rate is None else rate * 1e6) for a, b, rate, _ in net.links if a != b
        )
        names = found.node_names
        links = sorted(
            (*sorted((names.index(link.a), names.index(link.b))), link.rate_bps) for link in found.links
        )
        assert len(links) == len(expected)
        for one, other in zip(links, expected, strict=True):
            assert one[:2] == other[:2] and math.isclose(one[2], other[2]), (kind, one, other)

    def n_left(self) -> int:
        return 0

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
