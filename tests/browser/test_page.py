"""What a person sees and does on the page of a run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support.browser import need_browser
from tests.support.runs import FAST, LONG, MEMORY, Testbed, assert_one_sentence, wait_until

need_browser()

from playwright.sync_api import expect  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

PARTS = ("block-bar", "map", "sessions", "events", "charts", "time-slider")


def go_to(page: Page, t: float) -> None:
    """Move the slider, as a hand does."""
    end = float(page.locator(".time-slider .end").inner_text().split()[1])
    page.get_by_label("Time in the run").evaluate(
        "(range, value) => { range.value = value; range.dispatchEvent(new Event('input')); }",
        str(round(10000 * t / end)),
    )


def test_the_page_of_a_finished_run_has_all_its_parts(page: Page, served: str) -> None:
    page.goto(served)
    for part in PARTS:
        expect(page.get_by_test_id(part)).to_be_visible()
    expect(page.get_by_test_id("phase")).to_have_text(re.compile(r"replay at [\d.]+ s; run has ended"))
    assert page.locator("tr[data-server]").count() == 15
    assert page.locator(".chart").count() == 6
    expect(page.get_by_test_id("map").locator("svg .server")).to_have_count(15)
    titles = page.locator(".map-frame .link title")
    expect(titles.filter(has_text=re.compile(r" busy now, .* over the run \(")).first).to_be_attached()


def test_the_slider_shows_what_was_so_at_its_instant(shown: Page) -> None:
    row = shown.locator("tr[data-server='a100-5']")
    go_to(shown, 5)
    expect(row).to_have_attribute("data-state", "online")
    expect(shown.get_by_test_id("events").locator("li")).to_have_count(2)
    go_to(shown, 15)
    expect(row).to_have_attribute("data-state", "dead")
    expect(row.locator(".track")).to_have_attribute("aria-label", re.compile(r"blocks \d+.69, dead"))
    expect(shown.get_by_test_id("events").locator("li").first).to_contain_text("a100-5: kill, for 20.0 s")
    go_to(shown, 35)
    expect(row).to_have_attribute("data-state", "online")


def test_play_moves_on_and_pause_stops_by_keyboard_alone(shown: Page) -> None:
    go_to(shown, 3)
    now = shown.locator(".time-slider .now")
    play = shown.get_by_role("button", name="Play")
    play.focus()
    shown.keyboard.press("Enter")
    expect(now).not_to_have_text("3.0 s")
    shown.get_by_role("button", name="Pause").focus()
    shown.keyboard.press("Space")
    expect(shown.get_by_role("button", name="Play")).to_be_visible()
    shown.get_by_label("Time in the run").focus()
    shown.keyboard.press("Home")
    expect(now).to_have_text("0.0 s")
    shown.keyboard.press("ArrowRight")
    shown.keyboard.press("Shift+ArrowRight")
    expect(now).to_have_text("11.0 s")


def test_a_session_opens_its_waterfall(shown: Page) -> None:
    go_to(shown, 1e9)
    shown.get_by_label("Hops of request 0", exact=True).click()
    dialog = shown.get_by_test_id("waterfall")
    expect(dialog.get_by_role("heading", name="Request 0")).to_be_visible()
    dialog.get_by_label("Token").focus()
    shown.keyboard.press("Home")
    expect(dialog.locator("output")).to_contain_text("token 0 of 32 (prefill)")
    shares = [float(text.split("·")[1].split()[0]) for text in dialog.locator(".took").all_inner_texts()]
    assert len(shares) >= 2
    assert sum(shares) == pytest.approx(100, abs=len(shares))
    shown.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_faults_are_disabled_in_a_replay(shown: Page) -> None:
    shown.get_by_role("button", name="a100-5").click()
    dialog = shown.get_by_test_id("server")
    for kind in ("kill", "stop", "cont", "slow", "restart", "leave", "join"):
        expect(dialog.get_by_role("button", name=kind, exact=True)).to_be_disabled()
    expect(dialog).to_contain_text("Possible only while a run in real time serves.")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_nothing_is_wider_than_the_screen(width: int, scheme: Literal["light", "dark"], shown: Page) -> None:
    shown.set_viewport_size({"width": width, "height": 844})
    shown.emulate_media(color_scheme=scheme)
    shown.reload()
    expect(shown.get_by_test_id("block-bar")).to_be_visible()
    assert shown.evaluate(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
    assert shown.evaluate("document.documentElement.scrollWidth") == width


def test_everything_that_can_be_done_has_a_name(shown: Page) -> None:
    expect(shown.get_by_test_id("block-bar")).to_be_visible()
    unnamed = shown.evaluate(
        """() => [...document.querySelectorAll('button, select, input, [role=img], svg[role]')]
            .filter((e) => !e.getAttribute('aria-label') && !e.textContent.trim())
            .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []


def test_text_of_a_run_directory_is_shown_as_text(
    page: Page, churned: Path, tmp_path: Path, command: Testbed
) -> None:
    """Run directories may come from anybody."""
    foreign = tmp_path / "foreign"
    shutil.copytree(churned, foreign)
    bad = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"
    scenario = (foreign / "scenario.toml").read_text()
    scenario = re.sub(r"^description = .*$", f"description = {json.dumps(bad)}", scenario, flags=re.M)
    (foreign / "scenario.toml").write_text(scenario)
    lines = [
        {"event": bad, "at_s": 1.0, bad: bad},
        {"event": "broken", "at_s": 1.0, "reason": bad},
        {"event": "fault", "at_s": 1.0, "server": bad, "kind": bad},
        {"event": "detected", "at_s": 1.0, "servers": [bad], "blocks": [bad, bad], "reason": {bad: bad}},
    ]
    with (foreign / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    viewing = command.start("view", str(foreign), "--port", "0", "--no-browser")
    page.goto(wait_until(lambda: viewing.stdout.strip(), "the page's address"))
    expect(page.locator(".description")).to_have_text(bad)
    go_to(page, 2)
    expect(page.get_by_test_id("events")).to_contain_text(bad)
    expect(page.get_by_test_id("phase")).to_contain_text("run broke")
    assert page.locator("#app img, #app script").count() == 0
    assert page.title().startswith("churn ")


def test_a_report_is_the_page_in_one_file(page: Page, churned: Path) -> None:
    asked: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    page.on("request", note)
    page.goto((churned / "report.html").as_uri())
    for part in PARTS:
        expect(page.get_by_test_id(part)).to_be_visible()
    expect(page.get_by_test_id("phase")).to_have_text(re.compile(r"replay at [\d.]+ s; run has ended"))
    expect(page.get_by_role("heading", name="Summary")).to_be_visible()
    assert page.locator(".chart canvas").count() == 6
    page.locator(".chart[data-chart='rate'] .u-over").hover()
    page.locator(".chart[data-chart='rate'] .u-over").click()
    middle = float(page.locator(".time-slider .end").inner_text().split()[1]) / 2
    now = float(page.locator(".time-slider .now").inner_text().split()[0])
    assert now == pytest.approx(middle, rel=0.05)
    page.get_by_test_id("sessions").locator("button.link").first.click()
    expect(page.get_by_test_id("waterfall").locator(".bar").first).to_be_visible()
    page.remove_listener("request", note)
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len(asked) == 1 + sum(url.startswith(("data:", "blob:")) for url in asked)


def test_a_map_shows_land_where_the_scenario_knows_coordinates(page: Page, command: Testbed) -> None:
    run_dir = command.up("gts-ce", *MEMORY, *FAST).run_dir
    viewing = command.start("view", str(run_dir), "--port", "0", "--no-browser")
    page.goto(wait_until(lambda: viewing.stdout.strip(), "the page's address"))
    expect(page.locator(".shore")).to_have_attribute("d", re.compile("^M"))
    expect(page.get_by_test_id("map")).to_contain_text("Sites at their coordinates.")


def test_a_link_that_is_down_is_shown_while_it_is(page: Page, command: Testbed) -> None:
    event = 'network.event=[{link=["Cluster0","Cluster1"], at="2 s", for="2 s", down=true}]'
    run_dir = command.up("clustered", *MEMORY, *FAST, "--set", event).run_dir
    viewing = command.start("view", str(run_dir), "--port", "0", "--no-browser")
    page.goto(wait_until(lambda: viewing.stdout.strip(), "the page's address"))
    down = page.locator(".map-frame .link.down")
    for t, n_down in ((1, 0), (3, 1), (5, 0)):
        go_to(page, t)
        expect(down).to_have_count(n_down)


def test_links_show_how_busy_they_are(page: Page, command: Testbed) -> None:
    long = (
        "workload.n_requests=4",
        "workload.n_output_tokens=2",
        "workload.n_input_tokens=50",
        "workload.rate=20",
    )
    run_dir = command.up("clustered", *MEMORY, *(f"--set={value}" for value in long)).run_dir
    (most, *_) = json.loads((run_dir / "summary.json").read_text())["links"]
    assert most["use_ratio"] > 0.05
    page.goto((run_dir / "report.html").as_uri())
    page.get_by_test_id("map").locator("summary").click()
    rows = page.locator("table.links tbody tr")
    of_run = rows.first.locator("td").nth(4)
    expect(of_run).to_have_text(f"{round(100 * most['use_ratio'])} %")
    expect(rows.last.locator("td").nth(4)).to_have_text("0 %")
    used = page.locator(".map-frame .link.used")
    rows_of = pq.read_table(run_dir / "links.parquet").to_pylist()
    busiest = next(row for row in rows_of if row["use_ratio"] == 1.0)
    go_to(page, (busiest["start_s"] + busiest["end_s"]) / 2)
    expect(used).to_have_count(1)
    expect(used.locator("title")).to_contain_text("100 % busy now")
    expect(page.get_by_role("heading", name="Busiest links")).to_be_visible()


def test_a_preempted_session_waits_until_it_has_a_chain_again(page: Page, command: Testbed) -> None:
    few = ("workload.n_requests=24", "workload.n_output_tokens=32", "workload.rate=3")
    settings = [*few, "policy.design_concurrency=10", "cache.mode=paged"]
    run_dir = command.up("clustered", *MEMORY, *(f"--set={value}" for value in settings)).run_dir
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    lost = [event for event in events if event["event"] == "preempted"]
    assert lost
    request, at_s = lost[-1]["request"], lost[-1]["at_s"]
    back_s = next(e["at_s"] for e in events if e["event"] == "resumed" and e["request"] == request)
    viewing = command.start("view", str(run_dir), "--port", "0", "--no-browser")
    page.goto(wait_until(lambda: viewing.stdout.strip(), "the page's address"))
    row = (
        page.get_by_test_id("sessions")
        .locator("tbody tr")
        .filter(has=page.get_by_label(f"Hops of request {request}", exact=True))
    )
    go_to(page, (at_s + back_s) / 2)
    expect(row.locator(".state")).to_have_text("preempted")
    expect(row.locator(".hop")).to_have_count(0)
    expect(row.locator("td.number").last).to_have_text("1")
    preemptions = page.locator(".tiles div", has_text="preemptions").locator("dd")
    expect(preemptions).to_have_text(str(len(lost)))
    shares = page.locator(".meter-text", has_text="%").all_inner_texts()
    assert shares and all(float(share.split()[0]) <= 100 for share in shares)
    go_to(page, back_s + 0.5)
    expect(row.locator(".state")).to_have_text("active")
    page.get_by_label(f"Hops of request {request}", exact=True).click()
    expect(page.get_by_test_id("waterfall").locator(".story")).to_contain_text("has a chain again")


@pytest.mark.usefixtures("fabric")
def test_two_pages_follow_a_run_do_a_fault_change_a_link_and_see_its_end(
    browser: Browser, page: Page, testbed: Testbed
) -> None:
    few = ("--set", "workload.n_requests=6", "--set", "workload.n_output_tokens=600", "--time-scale", "5")
    run = testbed.start_up("clustered", *LONG, *few, "--page", "--network", "fabric")
    run_dir = run.serving()
    url = json.loads((run_dir / "page.json").read_text())["url"]
    other = browser.new_context(reduced_motion="reduce").new_page()
    for one in (page, other):
        one.goto(url)
        expect(one.get_by_test_id("phase")).to_have_text("running")
    page.get_by_role("button", name="mig-1g-0").click()
    of_server = page.get_by_test_id("server")
    of_server.get_by_role("button", name="stop", exact=True).click()
    expect(of_server.get_by_role("status")).to_have_text("stop mig-1g-0: done")
    for one in (page, other):
        expect(one.locator("tr[data-server='mig-1g-0']")).to_have_attribute("data-state", "halted")
    of_server.get_by_role("button", name="cont", exact=True).click()
    expect(of_server.get_by_role("status")).to_have_text("cont mig-1g-0: done")
    page.keyboard.press("Escape")

    for one in (page, other):
        one.get_by_text("Links (2)").click()
    page.get_by_role("button", name=re.compile("Cluster0 . Cluster1")).click()
    of_link = page.get_by_test_id("link")
    rows = [
        one.locator("table.links tr", has_text=re.compile("Cluster0 . Cluster1")) for one in (page, other)
    ]
    of_link.get_by_label("RTT").fill("40")
    of_link.get_by_role("button", name="set", exact=True).click()
    expect(of_link.get_by_role("status")).to_have_text("set Cluster0 and Cluster1: done")
    for row in rows:
        expect(row).to_contain_text("40")
        expect(row).to_contain_text("by hand")
    of_link.get_by_role("button", name="cut", exact=True).click()
    for row in rows:
        expect(row).to_contain_text("down")
    of_link.get_by_role("button", name="restore", exact=True).click()
    for row in rows:
        expect(row).to_contain_text("100")
        expect(row).not_to_contain_text("by hand")

    run.interrupt()
    run.wait()
    for one in (page, other):
        expect(one.get_by_test_id("phase")).to_contain_text(re.compile("interrupted|ended"))
    expect(of_link.get_by_role("button", name="cut", exact=True)).to_be_disabled()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="mig-1g-0").click()
    expect(of_server.get_by_role("button", name="kill", exact=True)).to_be_disabled()
    other.context.close()


def test_several_runs_give_charts_the_interval_of_their_mean(page: Page, testbed: Testbed) -> None:
    runs = [testbed.runs / f"seed-{seed}" for seed in (1, 2, 3)]
    for seed, run in enumerate(runs, 1):
        arguments = ("simulate", "clustered", "--set", f"seed={seed}", "--set", "workload.n_requests=12")
        assert testbed(*arguments, "--out", str(run)).code == 0
    viewing = testbed.start("view", *map(str, runs), "--port", "0", "--no-browser")
    page.goto(str(wait_until(lambda: viewing.stdout.strip(), "the page's address")))
    charts = page.get_by_test_id("charts")
    expect(charts).to_contain_text("95 % interval of the mean over 3 runs")
    expect(charts.locator("[data-chart=requests] .values")).to_contain_text("interval from")
    found = page.evaluate(
        "import('/js/series.js').then((m) => m.interval([[1, 5, null], [2, null, 3], [4, null, 3]]))"
    )
    # Mean 7/3, standard deviation 1.5275, Student's t of two degrees of freedom 4.303; of one value there is none.
    assert found[0] == [0, None, 3] and found[1][1:] == [None, 3]
    assert found[1][0] == pytest.approx(7 / 3 + 4.303 * 1.52753 / 3**0.5, rel=1e-4)


def test_quantiles_are_those_of_the_summary(shown: Page) -> None:
    for values in ([7.0], [1.0, 2.0], [1.0, 2.0, 4.0], [float(n * n) for n in range(20)]):
        for share in (0.5, 0.95):
            code = f"import('/js/series.js').then((m) => m.quantile({values}, {share}))"
            assert shown.evaluate(code) == pytest.approx(np.quantile(values, share))
    assert shown.evaluate("import('/js/series.js').then((m) => m.quantile([], 0.5))") is None


def test_an_interval_over_the_same_run_twice_is_refused(testbed: Testbed) -> None:
    runs = [testbed.runs / name for name in ("a", "b", "c", "d")]
    for run, seed in zip(runs, (1, 2, 3, 3), strict=True):
        options = ("--seed", str(seed), "--set", "workload.n_requests=3", "--set", "workload.draw=first")
        testbed("simulate", "trace-replay", *options, "--out", str(run))
    again = testbed("view", *map(str, runs[:3]), "--no-browser")
    assert_one_sentence(again, "the same requests and times", "other seeds")
    assert_one_sentence(testbed("view", *map(str, runs[2:]), "--no-browser"), "have the same seed, 3")
    assert_one_sentence(testbed("view", str(runs[0]), str(runs[0]), "--no-browser"), "given twice")


def test_clients_have_a_row_each_and_objectives_a_line(page: Page, command: Testbed) -> None:
    clients = "{site='Cluster0',name='client-0',share=1}"
    clients += ",{site='Cluster0',name='client-1',share=2,slo='ttft=1min'}"
    two = ("--set", f"clients=[{clients}]", "--set", 'workload.slo="ttft=1min,tpot=1ms"')
    run_dir = command.up("clustered", *MEMORY, *two, "--set", "workload.n_requests=6", *FAST).run_dir
    viewing = command.start("view", str(run_dir), "--port", "0", "--no-browser")
    page.goto(wait_until(lambda: viewing.stdout.strip(), "the page's address"))
    go_to(page, 1e9)
    rows = page.get_by_test_id("clients").locator("tbody tr")
    expect(rows).to_have_count(2)
    requests = pq.read_table(run_dir / "requests.parquet").to_pylist()
    for row, name in zip(rows.all(), ("client-0", "client-1"), strict=True):
        n_own = sum(request["client"] == name for request in requests)
        cells = row.locator("td").all_inner_texts()
        assert cells[1:5] == ["0", "0", str(n_own), "0"]
        assert n_own and cells[-1] == ("0 %" if name == "client-0" else "100 %"), "no token comes within 1 ms"
    expect(page.locator(".chart[data-chart='ttft'] .values")).to_contain_text("objective 60.0 s")
    expect(page.locator(".chart[data-chart='rate'] .values")).not_to_contain_text("objective")
    expect(page.get_by_test_id("phase")).to_have_text("run has ended")
