"""`testbed reproduce helix` of a made-up log, calculated by hand, and of invalid logs."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import UserError
from testbed.studies.reproduce.helix import helix_command
from testbed.studies.reproduce.helix_files import read_cluster, read_log, read_times

CLUSTER = """
[ComputeNode-0]
type=L4
[ComputeNode-1]
type=T4
[Link-source-0]
bandwidth=16384 * kbps
latency=2 * MilliSec
[Link-0-1]
bandwidth=16384 * kbps
latency=1 * MilliSec
[Link-1-sink]
bandwidth=16384 * kbps
latency=2 * MilliSec
"""
"""A token takes a millisecond on each link."""

ROUTE = "({}, 4, 2, [1, 2, 0], [0, 2, -1], [2, 5, -1])\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "cluster.ini").write_text(CLUSTER)
    for kind, prompt, decode in (("l4", (10, 30), (5, 7)), ("t4", (20, 40), (8, 12))):
        (tmp_path / f"{kind}_prompt.csv").write_text(f"2,{prompt[0]}\n6,{prompt[1]}\n")
        (tmp_path / f"{kind}_decode.csv").write_text(f"1,{decode[0]}\n2,{decode[1]}\n")
    (tmp_path / "query_route.txt").write_text(ROUTE.format(0))
    (tmp_path / "events.txt").write_text(
        "(1.0, 0, 'out', 'prompt', 0, 4)\n(1.5, 0, 'in', 'prompt', 4, 1)\n"
        "(1.5, 0, 'out', 'decode', 4, 1)\n(1.6, 0, 'in', 'decode', 5, 1)\n"
    )
    return tmp_path


def run(folder: Path, warm_up_s: float = 0.0, base_s: float = 0.0) -> dict[str, Any]:
    return helix_command(folder, folder / "cluster.ini", folder, warm_up_s, base_s)[0]


def test_a_query_alone_takes_its_links_and_layers(files: Path) -> None:
    answer = run(files)
    assert answer["measured"]["prompt_s"]["mean"] == pytest.approx(0.5)
    assert answer["measured"]["decode_s"]["mean"] == pytest.approx(0.1)
    assert answer["measured"]["tokens_per_s"] == pytest.approx(1 / 1.6)
    # Four tokens: 2 + 4 ms, two layers of 20 ms, 1 + 4 ms, three layers of 30 ms, back 2 + 1 ms.
    assert answer["simulated"]["prompt_s"]["mean"] == pytest.approx(0.006 + 0.040 + 0.005 + 0.090 + 0.003)
    # One: 2 + 1 ms, two of 5 ms, 1 + 1 ms, three of 8 ms, back 2 + 1 ms.
    assert answer["simulated"]["decode_s"]["mean"] == pytest.approx(0.003 + 0.010 + 0.002 + 0.024 + 0.003)


def test_a_step_takes_its_base_however_many_layers_it_has(files: Path) -> None:
    plain, based = run(files), run(files, base_s=0.1)
    for key in ("prompt_s", "decode_s"):
        assert based["simulated"][key]["mean"] - plain["simulated"][key]["mean"] == pytest.approx(2 * 0.1)


def test_a_query_that_outlasts_the_log_goes_on_until_its_end(files: Path) -> None:
    (files / "query_route.txt").write_text(ROUTE.format(0).replace("4, 2,", "4, 50,"))
    answer = run(files)
    assert answer["measured"]["decode_s"]["n"] == 1
    assert answer["simulated"]["decode_s"]["n"] == int((0.6 - 0.144) / 0.042)


def test_queries_that_meet_share_steps(files: Path) -> None:
    (files / "query_route.txt").write_text(ROUTE.format(0) + ROUTE.format(1))
    (files / "events.txt").write_text(
        "(1.0, 0, 'out', 'prompt', 0, 4)\n(1.001, 1, 'out', 'prompt', 0, 4)\n"
        "(2.5, 0, 'in', 'prompt', 4, 1)\n(2.6, 1, 'in', 'prompt', 4, 1)\n"
    )
    answer = run(files)
    # The second prompt waits for 39 ms at the first server and for 50 at the second, which is slower.
    assert answer["simulated"]["prompt_s"]["max"] == pytest.approx(0.144 + 0.039 + 0.050)


def test_what_was_before_the_warm_ups_end_does_not_count(files: Path) -> None:
    answer = run(files, 1.2)
    assert (answer["measured"]["prompt_s"]["n"], answer["measured"]["decode_s"]["n"]) == (0, 1)


def test_packed_files_are_read_too(files: Path) -> None:
    unpacked = read_log(files)
    for name in ("events.txt", "query_route.txt"):
        text = (files / name).read_text()
        (files / name).unlink()
        with gzip.open(files / f"{name}.gz", "wt") as file:
            file.write(text)
    assert read_log(files) == unpacked


def test_between_measured_sizes_and_above_them_times_lie_on_lines(files: Path) -> None:
    times = read_times(files, "L4")
    assert times.batch_s(1, [0], range(0)) == pytest.approx(0.005)
    assert times.batch_s(2, [0] * 3, range(4)) == pytest.approx(2 * (0.009 + 0.020))
    assert times.batch_s(1, [], range(8)) == pytest.approx(0.040)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("query_route.txt", "(0, 4, 2, [1, 2, 0], [0, 2], [2, 5, -1])\n", "line 1: a route is"),
        ("query_route.txt", "__import__('os')\n", "line 1: not a tuple"),
        ("query_route.txt", "(0, 4, 2, [3, 0], [0, -1], [2, -1])\n", "node 3, which the cluster"),
        ("query_route.txt", "", "query 0 has no route"),
        ("events.txt", "(1.0, 0, 'up', 'prompt', 0, 4)\n", "line 1: an event is"),
        ("events.txt", "(1.0, 0, 'in', 'prompt', 0, 4)\n", "without having been sent"),
        ("cluster.ini", CLUSTER.replace("Link-0-1", "Link-1-1"), "no link between nodes 1 and 2"),
        ("cluster.ini", "nothing\n", "is not a cluster"),
        ("cluster.ini", CLUSTER.replace("ComputeNode-1", "ComputeNode-7"), "must be numbered"),
        ("cluster.ini", CLUSTER.replace("kbps", "parsecs"), "not a number with a unit"),
        ("l4_prompt.csv", "2,10\n", "two or more"),
        ("l4_prompt.csv", "2,10\nx,y\n", "lines of two numbers"),
        ("t4_decode.csv", "2,10\n3,-1\n", "0 or more"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(files: Path, name: str, text: str, words: str) -> None:
    (files / name).write_text(text)
    with pytest.raises(UserError, match=words) as raised:
        run(files)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("n_kept", (5, 10, 30))
def test_a_packed_file_that_is_broken_is_one_sentence(files: Path, n_kept: int) -> None:
    (files / "events.txt").unlink()
    packed = gzip.compress(1000 * b"(1.0, 0, 'out', 'prompt', 0, 4)\n")
    (files / "events.txt.gz").write_bytes(packed[:n_kept] + 40 * b"\xff")
    with pytest.raises(UserError, match=r"events\.txt\.gz cannot be read: "):
        run(files)


def test_a_missing_file_and_a_warm_up_that_leaves_nothing_are_refused(files: Path) -> None:
    with pytest.raises(UserError, match="leaves nothing"):
        run(files, 100.0)
    with pytest.raises(UserError, match="--warm-up must be"):
        run(files, -1.0)
    (files / "events.txt").unlink()
    with pytest.raises(UserError, match=r"has no events.txt \(nor events.txt.gz\)"):
        run(files)


def test_all_links_of_a_cluster_are_read(files: Path) -> None:
    cluster = read_cluster(files / "cluster.ini")
    assert cluster.kinds == ["L4", "T4"]
    assert cluster.links[-1, 0] == (16384e3, 0.002)
