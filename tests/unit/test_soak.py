"""The arithmetic of the soak benchmark: growth per role, compared by age, and what it reports as wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.stress import soak, soak_figures
from tests.stress.soak_figures import Sample, slope, without_age

WHOLE = {
    "n_requests": 3,
    "n_completed": 2,
    "n_failed": 1,
    "leaks": {"sessions": 0, "cache_bytes": 0.0, "descriptors": 0, "namespaces": 0},
}
LEVEL = {"before": 50.0, "last": 50.4}


def growth(**changed: Any) -> dict[str, Any]:
    return {"client": {"floor_mb": LEVEL, "floor_descriptors": LEVEL, **changed}}


def server(elapsed_s: float, age_s: float, rss_bytes: int) -> Sample:
    return Sample(elapsed_s, "s", "server", 1, age_s, rss_bytes, rss_bytes, 30, 1.0)


def test_a_straight_line_has_its_slope_without_doubt() -> None:
    at_s = np.arange(0.0, 1800.0, 10.0)
    found = slope(at_s, 50.0 + 4.0 * at_s / 3600)
    assert (found.per_hour, found.low, found.high) == pytest.approx((4.0, 4.0, 4.0))
    assert found.low > 0
    assert found.n == 180


def test_noise_around_a_level_is_no_growth() -> None:
    rng = np.random.default_rng(0)
    found = slope(np.arange(0.0, 1800.0, 10.0), 50.0 + rng.normal(size=180))
    assert found.low < 0 < found.high
    assert found.low <= 0


def test_samples_that_resemble_their_neighbours_count_less() -> None:
    rng = np.random.default_rng(0)
    at_s, noise = np.arange(0.0, 1800.0, 10.0), rng.normal(size=180)
    alike = np.repeat(noise[:18], 10)
    apart = alike.copy()
    rng.shuffle(apart)
    held, mixed = slope(at_s, alike), slope(at_s, apart)
    assert held.high - held.low > 2 * (mixed.high - mixed.low)


@pytest.mark.parametrize("at_s", [[1.0, 2.0], [5.0, 5.0, 5.0]])
def test_too_little_to_draw_a_line_through_is_refused(at_s: list[float]) -> None:
    with pytest.raises(ValueError, match="three samples"):
        slope(np.array(at_s), np.ones(len(at_s)))


def test_processes_of_unlike_age_are_not_compared() -> None:
    ages_s, sizes = np.array([1.0, 1.5, 30.0, 31.0]), np.array([40.0, 42.0, 50.0, 52.0])
    assert without_age(ages_s, sizes) == pytest.approx([45.0, 47.0, 45.0, 47.0])


def test_servers_that_begin_larger_and_larger_grow_though_each_lives_shortly() -> None:
    samples = [
        server(10.0 * number, age_s, round(1e6 * (40 + number / 10 + age_s)))
        for number in range(60)
        for age_s in (1.0, 8.0)
    ]
    at_s, sizes = soak_figures.series(samples, "server", "rss_bytes")
    assert len(at_s) == 60  # one value for each instant
    assert slope(at_s, sizes / 1e6).per_hour == pytest.approx(36.0)


def test_a_role_that_is_busier_at_times_comes_back_to_its_floor() -> None:
    sizes = [50, 90, 50, 60, 50, 50, 80, 50, 51]
    samples = [
        Sample(10.0 * n, "client-0", "client", 1, 10.0 * n, size * 10**6, size * 10**6, 30, 1.0)
        for n, size in enumerate(sizes)
    ]
    assert soak_figures.growth(samples, "client")["floor_mb"] == {"before": 50.0, "last": 50.0}


def test_what_comes_back_to_its_floor_does_not_grow_and_what_lifts_the_floor_does() -> None:
    rng = np.random.default_rng(0)
    at_s = np.arange(0.0, 1500.0, 10.0)
    bursts = rng.exponential(40.0, size=150) * (at_s > 750)
    assert slope(*soak_figures.floors(at_s, 50 + bursts)).low <= 0
    leaking = slope(*soak_figures.floors(at_s, 50 + bursts + 24.0 * at_s / 3600))
    assert leaking.low > 0
    assert leaking.low < 24.0 < leaking.high


def test_servers_that_only_grow_older_do_not_grow() -> None:
    samples = [server(10.0 * number, age_s, 40_000_000) for number, age_s in enumerate([1.0, 3.0, 8.0, 30.0])]
    _, sizes = soak_figures.series(samples, "server", "rss_bytes")
    assert list(sizes) == [40e6] * 4


def test_a_soak_in_which_requests_fail_with_a_reason_and_nothing_is_left_is_right() -> None:
    assert soak.judge(WHOLE, growth()) == []


@pytest.mark.parametrize(
    ("summary", "found", "reason"),
    [
        (None, growth(), "failed and has no summary"),
        ({**WHOLE, "n_failed": 0}, growth(), "1 requests neither"),
        ({**WHOLE, "leaks": {"sessions": 2}}, growth(), "left behind: 2 sessions"),
        ({**WHOLE, "leaks": None}, growth(), "left behind"),
        (
            WHOLE,
            growth(floor_mb={"before": 50.0, "last": 51.5}),
            "client grows: its lowest decile is 50.0 MB",
        ),
        (
            WHOLE,
            growth(floor_descriptors={"before": 36, "last": 37}),
            "client grow: their lowest decile is 36 ",
        ),
    ],
)
def test_a_soak_that_breaks_a_promise_is_failed_with_the_reason(
    summary: dict[str, Any] | None, found: dict[str, Any], reason: str
) -> None:
    [wrong] = soak.judge(summary, found)
    assert reason in wrong


def test_a_soak_lasts_as_many_requests_as_arrive_in_its_time() -> None:
    words = soak.command("churn", 30.0, 20.0, Path("out"))
    assert "workload.n_requests=3600" in words  # 0.1 per second of scenario time


@pytest.mark.parametrize(
    ("name", "role"),
    [("client-0", "client"), ("awake-1", None), ("still", None), ("a100-3", "server"), ("fabric", "fabric")],
)
def test_processes_are_known_by_their_names(name: str, role: str | None) -> None:
    assert soak.role_of(name) == role


def test_a_run_that_broke_early_is_said_to_have_broken(tmp_path: Path) -> None:
    found = soak.evaluate(tmp_path, [server(100.0, 5.0, 40_000_000)], 1)
    assert found["growth"] == {}
    assert found["wrong"] == ["the run failed and has no summary"]
    assert (tmp_path / "memory.png").is_file()


def test_a_soak_in_one_process_is_drawn_and_judged_too(tmp_path: Path) -> None:
    samples = [
        server(10.0 * i, 5.0, 40_000_000)._replace(role="orchestrator", name="orchestrator")
        for i in range(40)
    ]
    found = soak.evaluate(tmp_path, samples, 0)
    assert list(found["growth"]) == ["orchestrator"]
    assert (tmp_path / "memory.png").is_file()
