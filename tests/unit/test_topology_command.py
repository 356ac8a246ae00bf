"""``testbed topology``: numbers, marks and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.cli.main import app
from testbed.errors import UserError

TWO_PARTS = """
name = "parts"
nodes = [{name = "a"}, {name = "b"}, {name = "c"}, {name = "d"}]
links = [
    {nodes = ["a", "b"], delay = "2 ms", rate = "1 Gbit/s"},
    {nodes = ["c", "d"], delay = "3 ms", rate = "100 Mbit/s"},
]
"""


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    app(["topology", *arguments, "--json"], standalone_mode=False)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_answer_has_nodes_links_and_a_symmetric_rtt_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "abovenet")
    assert (found["statistics"]["n_nodes"], found["statistics"]["n_links"]) == (23, 31)
    assert found["statistics"]["without_place"] == ["abovenet-11"]
    rtt_ms = found["rtt_ms"]
    assert len(rtt_ms) == 23 and all(rtt_ms[i][i] == 0 for i in range(23))
    assert all(rtt_ms[i][j] == rtt_ms[j][i] > 0 for i in range(23) for j in range(i))
    link = found["links"][0]
    names = [node["name"] for node in found["nodes"]]
    a, b = (names.index(name) for name in link["nodes"])
    assert rtt_ms[a][b] <= 2 * link["delay_ms"]


def test_nodes_that_no_path_connects_have_no_rtt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parts.toml").write_text(TWO_PARTS)
    found = answer(capsys, str(tmp_path / "parts.toml"))
    assert found["rtt_ms"] == [
        [0.0, 4.0, None, None],
        [4.0, 0.0, None, None],
        [None, None, 0.0, 6.0],
        [None, None, 6.0, 0.0],
    ]
    assert found["statistics"]["n_components"] == 2


def test_names_that_sites_cannot_have_are_listed_with_what_they_become(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "A 7.4 46.9\nZürich 8.5 47.4\n東京 139.7 35.7\n"
    links = "e1 0 1 1 1000000 100\ne2 1 2 1 1000000 100\n"
    path = tmp_path / "cities.graph"
    path.write_text(
        f"NODES 3\nlabel x y\n{rows}\nEDGES 2\nlabel src dest weight bw delay\n{links}", encoding="utf-8"
    )
    found = answer(capsys, str(path))
    assert [node.get("label") for node in found["nodes"]] == [None, "Zürich", "東京"]
    app(["topology", str(path)], standalone_mode=False)
    assert 'names changed: "Zürich" is Zurich, "東京" is node\n' in capsys.readouterr().out


def test_a_scenario_marks_what_runs_where(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "abovenet", "--scenario", "abovenet")
    runs = [name for node in found["nodes"] for name in node.get("runs", [])]
    assert len(runs) == 10 and "client-0" in runs


def test_a_matrix_file_keeps_its_directions_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rtt.csv").write_text(",Paris,Tokyo\nParis,1,0.22\nTokyo,0.228,1\n")
    found = answer(capsys, str(tmp_path / "rtt.csv"), "--rtt-unit", "s")
    assert [node["name"] for node in found["nodes"]] == ["Paris", "Tokyo"]
    assert found["one_way_ms"] == [[0.0, 110.0], [114.0, 0.0]]
    assert found["rtt_ms"] == [[0.0, 224.0], [224.0, 0.0]]


@pytest.mark.renders
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_is_drawn_with_and_without_known_places(tmp_path: Path, ending: str) -> None:
    (tmp_path / "parts.toml").write_text(TWO_PARTS)
    for number, name in enumerate(("abovenet", str(tmp_path / "parts.toml"))):
        picture = tmp_path / f"{number}.{ending}"
        app(["topology", name, "--picture", str(picture)], standalone_mode=False)
        assert picture.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["abvnet"], 'did you mean "abovenet"'),
        (["none.csv"], 'cannot read "none.csv"'),
        (["none.csv", "--delays", "fibre"], "a matrix has no coordinates"),
        (["abovenet", "--delays", "light"], "--delays must be given or fibre"),
        (["abovenet", "--delays", "fibre", "--detour", "inf"], "--detour must lie between 1 and 100"),
        (["abovenet", "--picture", "nowhere/map.png"], "cannot write nowhere/map.png"),
        (["abovenet", "--detour", "1.2"], "--detour is only for --delays fibre"),
        (["abovenet", "--picture", "map.jpg"], "--picture must end in .png, .svg, .pdf"),
        (["abovenet", "--scenario", "clustered"], "which is no node of abovenet"),
        (["abovenet", "--rtt-unit", "s"], "--rtt-unit is for RTT matrices (.csv, .json): leave it out"),
        (["abovenet", "--set", "seed=1"], "--set changes a scenario"),
    ],
)
def test_what_does_not_go_together_gets_one_sentence(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        app(["topology", *arguments], standalone_mode=False)
    assert said in str(caught.value) and "\n" not in str(caught.value)
