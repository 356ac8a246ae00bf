"""``testbed view`` and ``testbed up --page``: what is served, to whom, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.runs import FAST, LONG, MEMORY, Outcome, Running, Testbed, assert_one_sentence, wait_until


def address(running: Running) -> str:
    """The address that ``testbed view`` printed."""
    return str(wait_until(lambda: running.stdout.strip(), "the page's address"))


def ask(url: str, path: str, method: str = "GET", body: str = "", **headers: str) -> tuple[int, Any]:
    """Status and JSON of one request."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body or None, named)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, json.loads(data) if "json" in answer.headers["Content-Type"] else data


def token_of(url: str) -> str:
    return urlsplit(url).fragment.removeprefix("token=")


def test_view_serves_a_finished_run_and_ends_with_ctrl_c(finished: Outcome, testbed: Testbed) -> None:
    viewing = testbed.start("view", str(finished.run_dir), "--port", "0", "--no-browser")
    url = address(viewing)
    status, run = ask(url, "/api/run")
    assert status == 200
    assert run["header"]["name"] == "clustered"
    assert len(run["update"]["tokens"]["at_s"]) == 12
    assert run["update"]["status"]["phase"] == "ended"
    status, hops = ask(url, "/api/requests/0/hops")
    assert [row[0] for row in hops] == [0, 1, 2, 3]
    assert ask(url, "/")[0] == 200
    assert ask(url, "/../__init__.py")[0] == 404
    assert ask(url, "/vendor/uPlot.iife.min.js")[0] == 200
    viewing.interrupt()
    outcome = viewing.wait()
    assert (outcome.code, outcome.stdout.strip(), outcome.stderr) == (0, url, "")


def test_view_shows_the_page_in_a_browser_without_its_secret_in_the_arguments(
    finished: Outcome, testbed: Testbed, tmp_path: Path
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/asked; cat "${{1#file://}}" > {tmp_path}/file\n')
    browser.chmod(0o755)
    viewing = testbed.start("view", str(finished.run_dir), "--port", "0", env={"BROWSER": str(browser)})
    url = address(viewing)
    shown = wait_until(
        lambda: (tmp_path / "file").exists() and (tmp_path / "file").read_text(), "the browser"
    )
    assert url in shown
    assert token_of(url) not in (tmp_path / "asked").read_text()
    viewing.interrupt()
    assert viewing.wait().code == 0


def test_view_lets_nobody_change_a_run_that_is_over(finished: Outcome, testbed: Testbed) -> None:
    url = address(testbed.start("view", str(finished.run_dir), "--port", "0", "--no-browser"))
    fault = json.dumps({"kind": "kill", "server": "a100-0"})
    assert ask(url, "/api/faults", "POST", fault)[0] == 403
    status, answer = ask(url, "/api/faults", "POST", fault, X_Testbed_Token=token_of(url))
    assert status == 409
    assert "does not serve" in answer["error"]
    assert ask(url, "/api/run", Host="evil.example")[0] == 403


def test_view_of_a_simulation_reads_its_tables(testbed: Testbed, tmp_path: Path) -> None:
    out = tmp_path / "simulated"
    assert testbed("simulate", "clustered", "--out", str(out), *FAST[:6]).code == 0
    url = address(testbed.start("view", str(out), "--port", "0", "--no-browser"))
    _, run = ask(url, "/api/run")
    assert run["update"]["status"]["phase"] == "simulated"
    assert [record[0] for record in run["update"]["records"]].count("e") == 3
    assert run["update"]["tokens"]["number"].count(3) == 3
    _, hops = ask(url, "/api/requests/1/hops")
    assert [len(row[3]) for row in hops] == [len(row[3]) for row in hops[:1]] * 4


def test_view_reads_others_of_the_same_scenario_with_other_seeds_alone(
    finished: Outcome, testbed: Testbed, tmp_path: Path
) -> None:
    simulated, same_seed = tmp_path / "simulated", tmp_path / "same-seed"
    for out, seed in ((simulated, "1"), (same_seed, "0")):
        assert testbed("simulate", "clustered", "--seed", seed, "--out", str(out), *FAST[:6]).code == 0
    shown = str(finished.run_dir)
    url = address(testbed.start("view", shown, str(simulated), "--port", "0", "--no-browser"))
    assert len(ask(url, "/api/others")[1]) == 1
    refused = testbed("view", shown, str(simulated), str(same_seed), "--no-browser")
    assert_one_sentence(refused, "have the same seed, 0", "other seeds")


def test_a_report_of_a_hundred_requests_is_small_enough_to_send(testbed: Testbed) -> None:
    run = testbed.up("abovenet", *MEMORY, "--no-trace", "--set", "workload.n_output_tokens=16", renders=True)
    assert (run.run_dir / "report.html").stat().st_size < 2_000_000


def test_view_of_no_run_directory_says_so(testbed: Testbed, tmp_path: Path) -> None:
    assert_one_sentence(testbed("view", str(tmp_path), "--no-browser"), "is not a run directory")
    assert_one_sentence(testbed("view", str(tmp_path / "none"), "--no-browser"), "there is no run")


def test_a_port_that_is_taken_is_one_sentence(finished: Outcome, testbed: Testbed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        view = testbed("view", str(finished.run_dir), "--port", port, "--no-browser")
        assert_one_sentence(view, f"port {port}", "give another port")
        up = testbed.up("clustered", "--page", port, *MEMORY, *FAST)
        assert_one_sentence(up, f"port {port}")
        assert list(testbed.runs.glob("*")) == []


@pytest.mark.usefixtures("fabric")
def test_a_page_beside_a_run_shows_it_takes_faults_and_ends_with_it(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", *LONG, "--page", "--network", "fabric")
    run_dir = run.serving()
    page = json.loads((run_dir / "page.json").read_text())
    assert f"page {page['url']}" in run.stderr
    assert (run_dir / "page.json").stat().st_mode & 0o077 == 0
    url = page["url"]
    assert url in [row["page"] for row in testbed("ps", "--json").json()["testbeds"]]
    status, answer = ask(url, "/api/run")
    assert answer["update"]["status"]["phase"] == "running"
    fault = json.dumps({"kind": "kill", "server": "a100-0"})
    token = {"X_Testbed_Token": token_of(url)}
    assert ask(url, "/api/faults", "POST", fault, Origin="http://evil.example", **token)[0] == 403
    assert ask(url, "/api/faults", "POST", '{"kind": "slow", "server": "a100-0"}', **token)[0] == 400
    link = {"action": "set", "a": "Cluster0", "b": "Cluster1", "loss": "150 %"}
    assert ask(url, "/api/links", "POST", json.dumps(link), **token)[0] == 400
    assert ask(url, "/api/links", "POST", json.dumps({**link, "loss": "1 %"}))[0] == 403
    assert ask(url, "/api/links", "POST", json.dumps({**link, "loss": "1 %"}), **token)[0] == 200
    assert ask(url, "/api/links", "POST", json.dumps({**link, "loss": "1 %", "a": "Mars"}), **token)[0] == 409
    status, answer = ask(url, "/api/faults", "POST", fault, **token)
    assert (status, answer) == (200, {"done": "kill a100-0"})
    status, answer = ask(url, "/api/faults", "POST", '{"kind": "kill", "server": "nobody"}', **token)
    assert status == 409
    wait_until(
        lambda: "dead" in [row[2] for row in ask(url, "/api/run")[1]["update"]["servers"]], "a dead server"
    )
    run.interrupt()
    run.wait()
    assert not (run_dir / "page.json").exists()


@pytest.mark.usefixtures("orphans", "fabric")
def test_a_page_dies_with_a_run_that_is_killed_and_clean_removes_its_address(testbed: Testbed) -> None:
    run = testbed.start_up("clustered", *LONG, "--page", "0", "--network", "fabric")
    run_dir = run.serving()
    page = json.loads((run_dir / "page.json").read_text())
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    wait_until(lambda: not Path(f"/proc/{page['pid']}").exists(), "the end of the page's process")
    said = testbed("clean", "--out", str(testbed.runs)).stdout
    assert "page.json" in said
    assert not (run_dir / "page.json").exists()
