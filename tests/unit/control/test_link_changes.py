"""Links that change as planned and by hand, without a network: the links that result, and the events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from policies.links import Link, Pair
from testbed.control.links import ChangeLink, LinkChanges
from testbed.errors import RunError, UserError
from testbed.experiments import load_experiment
from testbed.experiments.whole import whole_network
from testbed.records.events import EventWriter, LinksChanged, event_data, read_events
from testbed.runs.byhand import link_command
from tests.support.manual_clock import ManualClock

UP, DOWN = ("client-0", "a100-0"), ("a100-0", "client-0")


@dataclass
class Rig:
    changes: LinkChanges
    folder: Path
    put: list[Mapping[Pair, Link]] = field(default_factory=list)
    failure: RunError | None = None

    async def change(self, links: Mapping[Pair, Link]) -> float:
        if self.failure is not None:
            raise self.failure
        self.put.append(links)
        return 7.0

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [event_data(event) for event in read_events(self.folder, LinksChanged)]


@pytest.fixture
def rig(tmp_path: Path) -> Callable[..., Rig]:
    def make(*events: str, is_used: Callable[[Pair], bool] = lambda _: True, more: Sequence[str] = ()) -> Rig:
        planned = [f"network.event=[{', '.join(events)}]"] if events else []
        experiment = load_experiment("clustered", [*planned, *more])
        made: Rig

        async def change(links: Mapping[Pair, Link]) -> float:
            return await made.change(links)

        network, clock = whole_network(experiment), ManualClock()
        writer = EventWriter(tmp_path)
        changes = LinkChanges(experiment, network, clock, change, contextlib.nullcontext, writer, is_used)
        made = Rig(changes, tmp_path)
        return made

    return make


def asked(action: str, a: str = "client-0", b: str = "a100-0", **values: float) -> ChangeLink:
    return ChangeLink(action, a, b, **values)  # type: ignore[arg-type]


async def test_a_cut_by_hand_cuts_both_directions_and_restore_brings_the_links_back(rig: Any) -> None:
    made = rig()
    whole = made.changes.link(UP), made.changes.link(DOWN)
    answer = await made.changes.by_hand(asked("cut"))
    assert (answer.at_s, answer.n_links, answer.why_not) == (7.0, 2, None)
    assert {pair: link.loss_ratio for pair, link in made.put[0].items()} == {UP: 1.0, DOWN: 1.0}
    await made.changes.by_hand(asked("restore"))
    assert (made.put[1][UP], made.put[1][DOWN]) == whole
    assert [(line["by"], line["why"], len(line["links"])) for line in made.lines] == [
        ("hand", "link client-0 and a100-0: cut by hand", 2),
        ("hand", "link client-0 and a100-0: restore by hand", 2),
    ]


async def test_what_is_set_by_hand_replaces_only_what_is_said_and_ends_a_cut(rig: Any) -> None:
    made = rig()
    before = made.changes.link(UP)
    await made.changes.by_hand(asked("cut"))
    await made.changes.by_hand(asked("set", rtt_s=0.04))
    assert made.changes.link(UP) == Link(0.02, before.rate_bps)
    await made.changes.by_hand(asked("set", rate_bps=1e6, loss_ratio=0.01))
    assert made.changes.link(UP) == Link(0.02, 1e6, 0.0, 0.01)
    assert made.lines[-1]["why"] == "link client-0 and a100-0: rate 1 Mbit/s, loss 1 % by hand"


async def test_no_rate_by_hand_is_above_that_of_a_shared_link_on_the_way(rig: Any) -> None:
    site = load_experiment("clustered").sites[UP[0]]
    made = rig(more=[f'sites=[{{name="{site}",up="3 Mbit/s"}}]'])
    await made.changes.by_hand(asked("set", rate_bps=5e6))
    assert [made.changes.link(pair).rate_bps for pair in (UP, DOWN)] == [3e6, 5e6]
    await made.changes.by_hand(asked("set", rate_bps=1e6))
    assert [made.changes.link(pair).rate_bps for pair in (UP, DOWN)] == [1e6, 1e6]


async def test_a_planned_change_does_not_undo_what_was_done_by_hand_and_its_line_has_the_links(
    rig: Any,
) -> None:
    made = rig("{at='0 s', link=['client-0','a100-0'], rate='5 Mbit/s'}")
    await made.changes.by_hand(asked("set", rtt_s=0.04))
    await made.changes.run()
    assert made.put[-1][UP] == Link(0.02, 5e6)
    _, planned = made.lines
    assert (planned["by"], planned["planned_at_s"]) == ("scenario", 0.0)
    assert (*UP, 0.02, 5e6, 0.0, 0.0) in planned["links"]
    await made.changes.by_hand(asked("restore"))
    assert made.changes.link(UP).rate_bps == 5e6, "restored to what the scenario has now"


async def test_sites_can_be_named_for_all_their_nodes(rig: Any) -> None:
    made = rig()
    sites = whole_network(load_experiment("clustered")).links
    answer = await made.changes.by_hand(asked("cut", "Cluster0", "Cluster1"))
    assert answer.n_links == len(made.put[0]) > 2
    assert set(made.put[0]) <= set(sites)


async def test_a_link_that_the_network_cannot_play_changes_nothing(rig: Any) -> None:
    made = rig()
    before = made.changes.link(UP)
    made.failure = RunError("netem delays by at most 274 s")
    answer = await made.changes.by_hand(asked("set", rtt_s=1000.0))
    assert answer.why_not == "netem delays by at most 274 s"
    assert made.changes.link(UP) == before and made.lines == []


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (asked("cut", "client-9"), 'unknown site or node "client-9"'),
        (asked("cut", "client-0", "client-0"), "no link between client-0 and client-0"),
        (asked("cut", rtt_s=1.0), "only for set"),
        (asked("set"), "at least one of --rtt, --rate and --loss"),
        (asked("set", loss_ratio=1.0), "`testbed link cut`"),
        (asked("set", rtt_s=-1.0), "--rtt must be"),
        (asked("set", rate_bps=float("nan")), "--rate must be"),
    ],
)
async def test_what_cannot_be_done_is_answered_in_one_sentence(
    rig: Any, question: ChangeLink, expected: str
) -> None:
    made = rig()
    answer = await made.changes.by_hand(question)
    assert expected in answer.why_not
    assert made.put == [] and made.lines == []


async def test_a_pair_between_which_nothing_can_pass_is_named(rig: Any) -> None:
    made = rig(is_used=lambda pair: "client-0" in pair)
    assert (await made.changes.by_hand(asked("cut"))).why_not is None
    answer = await made.changes.by_hand(asked("cut", "a100-0", "mig-1g-0"))
    assert answer.why_not == "there is no link between a100-0 and mig-1g-0 that any traffic uses"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("clip", None, None, None), "unknown action 'clip'"),
        (("set", "40", None, None), "--rtt .*has no unit"),
        (("set", None, "fast", None), "--rate "),
        (("set", None, None, "2"), "--loss must be from 0 to 1"),
        (("set", None, None, None), "at least one"),
        (("set", "40 ms", "1 Mbit/s", "1 %"), "no testbed is running below runs/"),
        (("set", None, None, "0.01"), "no testbed is running below runs/"),
    ],
)
def test_options_are_read_before_anybody_is_asked(
    options: tuple[str, str | None, str | None, str | None],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    action, rtt, rate, loss = options
    with pytest.raises(UserError, match=expected):
        link_command(action, "a", "b", rtt, rate, loss, None)
