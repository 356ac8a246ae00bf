"""``[[servers]] hours``: servers that are there at some times of the day."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.control.placing import place_experiment
from testbed.experiments import changed, dump_toml, load_experiment
from testbed.experiments.experiment import Experiment, Fault
from testbed.inspect.validity import validate_command

Load = Callable[..., Experiment]
Complain = Callable[..., str]
SMALL = "model={name='m', n_blocks=8, hidden_size=64, block_size='1 GB'}"
DAYS = ("workload.n_requests=16", "workload.arrivals=constant", f"workload.rate={15 / (36 * 3600)}")
"""The last request arrives after 36 hours."""
NIGHT = (
    "count = 2",
    'count = 2\n[[servers]]\nhardware = "a100"\nsite = "A"\nname = "night"\nhours = "22:00-18:00"',
)


def night(hours: str, *more: str) -> tuple[str, str]:
    return NIGHT[0], "\n".join([NIGHT[1].replace("22:00-18:00", hours), *more])


def test_a_server_leaves_at_the_end_of_its_hours_and_comes_back_when_they_begin(load: Load) -> None:
    e = load(SMALL, *DAYS, replace=NIGHT)
    assert e.faults.absent == frozenset()
    hour_s = 3600.0
    assert e.faults.planned == (Fault("leave", 2, 18 * hour_s), Fault("restart", 2, 22 * hour_s))
    later = load(SMALL, *DAYS, "begins_at='12:00'", replace=NIGHT)
    first = (Fault("leave", 2, 6 * hour_s), Fault("restart", 2, 10 * hour_s))
    assert later.faults.planned == (*first, *(Fault(f.kind, 2, f.at_s + 86400) for f in first if f.at_s))


def test_hours_are_of_the_servers_time_zone_and_one_that_is_away_joins(load: Load) -> None:
    # 09:00 to 17:00 at UTC+9 is 00:00 to 08:00 UTC; a run that begins at 10:00 UTC begins 14 hours before it.
    tokyo = night("09:00-17:00", 'time_zone = "+09:00"')
    e = load(SMALL, *DAYS, "begins_at='10:00'", replace=tokyo)
    assert e.faults.absent == {2}
    hour_s = 3600.0
    planned = (
        Fault("join", 2, 14 * hour_s),
        Fault("leave", 2, 22 * hour_s),
        Fault("restart", 2, 38 * hour_s),
    )
    assert e.faults.planned == planned
    assert place_experiment(e).placement.ranges[2].n_blocks == 0
    assert load(SMALL, *DAYS, replace=tokyo).faults.absent == frozenset()
    ends = load(SMALL, *DAYS, "begins_at='08:00'", replace=tokyo)
    assert ends.faults.absent == {2} and ends.faults.planned[0] == Fault("join", 2, 16 * hour_s)


def test_a_stored_scenario_keeps_its_hours_and_a_longer_workload_has_more_of_them(
    load: Load, tmp_path: Path
) -> None:
    e = load(SMALL, *DAYS, replace=NIGHT)
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_toml(e))
    assert load_experiment(str(stored)).faults == e.faults
    assert len(changed(e, {"workload.n_requests": 31}).faults.planned) == 6


@pytest.mark.parametrize(
    ("replace", "options", "words"),
    [
        (
            night("22:00"),
            (),
            'servers.1.hours: must be two times of a day such as "22:00-18:00", not "22:00"',
        ),
        (night("22:00-25:00"), (), "servers.1.hours: must be two times"),
        (night("22:60-18:00"), (), "servers.1.hours: must be two times"),
        (night("00:00-24:00"), (), "which begin when they end; leave them out"),
        (
            night("22:00-18:00", 'time_zone = "KST"'),
            (),
            'time_zone: must be an offset from UTC such as "+09:00"',
        ),
        (night("22:00-18:00", "present = false"), (), "say when the server is there, and so does present"),
        (
            NIGHT,
            ("begins_at='24:00'",),
            'begins_at: must be a time of day in UTC such as "08:30", not "24:00"',
        ),
        (NIGHT, ("begins_at='noon'",), 'begins_at: must be a time of day in UTC such as "08:30", not "noon"'),
        (
            NIGHT,
            ("churn={mtbf='9 s', mttr='9 s'}",),
            "churn.servers: are all by default, with night, whose hours",
        ),
        (
            NIGHT,
            ("fault=[{kind='kill', server='night', at='9 s'}]",),
            'fault.0.server: names "night", whose hours say when it is there',
        ),
        (("count = 2", 'count = 2\ntime_zone = "+01:00"'), (), "time_zone: is that of hours"),
    ],
)
def test_what_is_malformed_or_contradicts_itself_is_refused(
    replace: tuple[str, str], options: tuple[str, ...], words: str, complaint: Complain
) -> None:
    assert words in complaint(SMALL, *options, replace=replace)


def test_servers_without_hours_may_fail_at_random_beside_others_with_hours(load: Load) -> None:
    e = load(SMALL, "churn={mtbf='9 s', mttr='9 s', servers=['a100-0']}", replace=NIGHT)
    assert {fault.server for fault in e.faults.planned} == {0}


def test_hours_that_never_have_the_whole_model_are_refused_with_the_time_and_the_blocks(
    complaint: Complain, load: Load
) -> None:
    shifts = (
        "count = 2\n",
        'memory = "4 GB"\nhours = "08:00-20:00"\n[[servers]]\nhardware = "a100"\nsite = "A"\nmemory = "4 GB"\n'
        'hours = "HOURS"\n',
    )
    never = shifts[0], shifts[1].replace("HOURS", "20:00-08:00")
    assert (
        "servers: never hold the whole model by their hours: most at 00:00 UTC, with 4 of 8 blocks"
        in complaint(SMALL, replace=never)
    )
    later = shifts[0], shifts[1].replace("HOURS", "18:00-06:00")
    sentence = complaint(SMALL, replace=later)
    assert "begins_at: is 00:00 UTC, when the servers that are there hold at most 4 of 8 blocks" in sentence
    assert "begin at 18:00, or give them more hours" in sentence


def test_validate_says_who_is_away_at_the_beginning_and_which_blocks_are_nowhere(
    load: Load, tmp_path: Path
) -> None:
    load(SMALL, *DAYS, "begins_at='20:00'", replace=NIGHT)
    answer, text = validate_command(str(tmp_path / "small.toml"), [SMALL, *DAYS, "begins_at=20:00"])
    assert answer["away_at_the_beginning"] == ["night"]
    assert "when the run begins, at 20:00 UTC, by their hours night is away" in text
    assert "nobody has" not in text
    one = ("count = 2", 'count = 1\nhours = "22:00-18:00"')
    load(SMALL, *DAYS, replace=one)
    answer, text = validate_command(str(tmp_path / "small.toml"), [SMALL, *DAYS])
    assert answer["away_at_the_beginning"] == []
    assert "when the run begins, at 00:00 UTC, by their hours no servers are away" in text
    assert "from 18:00 to 22:00 UTC nobody has blocks 0 to 7: requests wait" in text
