"""What faults do to servers' processes, with nodes that only record what they are asked to do."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from nodes.clock import ScaledClock
from nodes.control import ControlError
from nodes.messages import Drain, GetStatus, Message, Question, Slow, Stop, WaitUntilEmpty
from testbed.control.coordinator import Coordinator
from testbed.control.faults.machines import Machines
from testbed.control.faults.schedule import Schedule
from testbed.control.placing import place_experiment
from testbed.errors import MachineLostError, TestbedError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import After, Fault
from testbed.faultkinds import IN_CHURN, IN_FILES, KINDS, FaultKind
from testbed.records.events import EventWriter
from tests.support.data_plane import status, until

LATE = [
    'servers=[{hardware="a100",site="Cluster1",count=6},{hardware="a100",site="Cluster2",name="late",present=false}]',
    'fault=[{kind="join",server="late",at="1000 s"}]',
    "churn.until=0.1 s",
]


class FakeNodes:
    """Records what is done. A process that is killed, or sent ``Stop``, ends at once."""

    def __init__(self) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.ended: Callable[[int, int], bool] = lambda server, status: False
        self.errors: list[TestbedError] = []
        self.n_sessions = 0
        self.at_s = 0.0
        self.clock = ScaledClock(-1e6)  # time began long ago, so nothing waits

    def now_s(self) -> float:
        self.at_s += 1e-6
        return self.at_s

    def descriptors(self) -> dict[str, int]:
        return {}

    async def begin_server(self, server: int) -> None:
        self.did.append(("begin", server))

    async def signal_server(self, server: int, number: int) -> None:
        self.did.append(("signal", server, signal.Signals(number).name))
        if number == signal.SIGKILL:
            self.ended(server, -9)

    async def ask_server(self, server: int, question: Question[Any]) -> Any:
        self.did.append(("ask", server, question))
        if isinstance(question, WaitUntilEmpty) and self.n_sessions:
            await asyncio.Event().wait()
        if isinstance(question, GetStatus):
            return status(n_sessions=self.n_sessions)
        return None

    def notify_server(self, server: int, message: Message) -> None:
        self.did.append(("tell", server, message))
        if isinstance(message, Stop):
            self.ended(server, 0)

    def broke(self, error: TestbedError) -> None:
        self.errors.append(error)


class Rig:
    def __init__(self, folder: Path, *settings: str) -> None:
        experiment = load_experiment("churn", [*LATE, *settings])
        self.nodes = FakeNodes()
        self._folder = folder
        self.coordinator = Coordinator(experiment, place_experiment(experiment), self.nodes.now_s)
        self.events = EventWriter(folder)
        self.machines = Machines(experiment, self.nodes, self.coordinator, self.events)
        self.nodes.ended = self.machines.ended
        self.machines.begin()

    def lines(self, event: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self._folder / "events.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == event]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    await made.machines.end()
    made.nodes.clock.close()
    made.events.close()


async def test_a_killed_server_serves_again_after_its_time(rig: Rig) -> None:
    assert await rig.machines.apply("kill", 0, for_s=20.0, planned_at_s=7.0) is None
    assert not rig.machines.answers(0)
    await until(lambda: bool(rig.lines("begun")))
    assert rig.nodes.did == [("signal", 0, "SIGKILL"), ("begin", 0)]
    assert rig.machines.answers(0)
    assert 0 in rig.coordinator.membership.alive()
    (fault,) = rig.lines("fault")
    assert (fault["kind"], fault["server"], fault["planned_at_s"], fault["for_s"]) == (
        "kill",
        "a100-0",
        7.0,
        20,
    )


@pytest.mark.parametrize(
    ("before", "kind", "why"),
    [
        (["kill"], "kill", "a100-0 is dead already"),
        (["kill"], "stop", "a100-0 is dead"),
        (["kill"], "slow", "a100-0 is dead"),
        (["kill"], "leave", "a100-0 is dead"),
        (["stop"], "stop", "a100-0 is stopped already"),
        (["stop"], "leave", "a100-0 is stopped and cannot drain"),
        ([], "cont", "a100-0 is not stopped"),
        ([], "join", "a100-0 has been there already: restart it"),
    ],
)
async def test_a_fault_that_finds_nothing_to_do_does_nothing_and_says_why(
    rig: Rig, before: list[str], kind: str, why: str
) -> None:
    for earlier in before:
        await rig.machines.apply(earlier, 0)
    did = list(rig.nodes.did)
    assert await rig.machines.apply(kind, 0) == why
    assert rig.nodes.did == did
    assert rig.lines("fault")[-1]["applies"] is False


async def test_a_fault_waits_for_the_end_of_another_that_is_planned_for_its_instant(rig: Rig) -> None:
    # All is late, as time began long ago: the kill of 10 s ends at 20 s, the next is planned for 20 s.
    first = asyncio.ensure_future(rig.machines.apply("kill", 0, for_s=10.0, planned_at_s=10.0))
    second = asyncio.ensure_future(rig.machines.apply("kill", 0, for_s=10.0, planned_at_s=20.0))
    assert await asyncio.gather(first, second) == [None, None]
    await until(lambda: len(rig.lines("begun")) == 2)
    assert [act[0] for act in rig.nodes.did] == ["signal", "begin", "signal", "begin"]
    assert [line["planned_at_s"] for line in rig.lines("begun")] == [20.0, 30.0]


async def test_a_fault_does_not_wait_for_the_end_of_another_that_is_planned_for_later(rig: Rig) -> None:
    rig.nodes.clock.origin_at = 1e9  # the process does not end
    assert await rig.machines.apply("kill", 0, for_s=10.0, planned_at_s=10.0) is None
    assert await rig.machines.apply("kill", 0, planned_at_s=19.9) == "a100-0 is dead already"


async def test_a_stopped_server_is_believed_away_and_goes_on_after_its_time(rig: Rig) -> None:
    await rig.machines.apply("stop", 1)
    assert 1 not in rig.coordinator.membership.alive()
    assert not rig.machines.answers(1)
    assert await rig.machines.apply("cont", 1) is None
    assert 1 in rig.coordinator.membership.alive()
    await rig.machines.apply("stop", 1, for_s=5.0)
    await until(lambda: bool(rig.lines("fault-over")))
    assert [act[2] for act in rig.nodes.did] == ["SIGSTOP", "SIGCONT", "SIGSTOP", "SIGCONT"]


async def test_a_stopped_server_that_is_killed_does_not_go_on_later(rig: Rig) -> None:
    rig.nodes.clock.origin_at = 1e9  # the end of the stop is far away
    await rig.machines.apply("stop", 1, for_s=5.0)
    await rig.machines.apply("kill", 1)
    assert not rig.machines.answers(1)
    assert rig.lines("fault-over") == []


async def test_a_slow_server_is_told_its_factor_and_that_it_is_over(rig: Rig) -> None:
    await rig.machines.apply("slow", 2, factor=4.0, for_s=5.0)
    await until(lambda: bool(rig.lines("fault-over")))
    assert rig.nodes.did == [("ask", 2, Slow(4.0)), ("ask", 2, Slow(1.0))]
    await rig.machines.apply("stop", 2)
    await rig.machines.apply("slow", 2, factor=2.0)
    assert rig.nodes.did[-1] == ("tell", 2, Slow(2.0)), "nothing waits for a stopped server's answer"


async def test_a_server_that_leaves_takes_no_new_sessions_and_ends_with_its_last_one(rig: Rig) -> None:
    await rig.machines.apply("leave", 0)
    assert 0 not in rig.coordinator.membership.believed(rig.nodes.at_s)
    assert await rig.machines.apply("leave", 0) == "a100-0 is leaving already"
    await until(lambda: bool(rig.lines("left")))
    assert [act[2] for act in rig.nodes.did] == [Drain(), WaitUntilEmpty(), Stop()]
    assert rig.lines("left")[0]["n_sessions"] == 0
    assert not rig.machines.answers(0)
    assert await rig.machines.apply("restart", 0) is None
    assert rig.machines.answers(0)


async def test_a_server_that_leaves_does_not_wait_for_its_sessions_for_ever(rig: Rig) -> None:
    rig.nodes.n_sessions = 2  # and its limit has passed long ago
    await rig.machines.apply("leave", 0)
    await until(lambda: bool(rig.lines("left")))
    assert [act[2] for act in rig.nodes.did] == [Drain(), WaitUntilEmpty(), GetStatus(), Stop()]
    assert rig.lines("left")[0]["n_sessions"] == 2


async def test_a_server_that_joins_gets_blocks_and_begins(rig: Rig) -> None:
    late = rig.machines.names.index("late")
    assert await rig.machines.apply("restart", late) == "late has never been there: let it join"
    assert rig.coordinator.placement.ranges[late].n_blocks == 0
    assert await rig.machines.apply("join", late) is None
    assert rig.coordinator.placement.ranges[late].n_blocks > 0
    assert rig.nodes.did == [("begin", late)]
    assert rig.lines("begun")[0]["blocks"] == list(rig.coordinator.placement.ranges[late])


async def test_a_server_that_ends_as_it_begins_is_named(rig: Rig) -> None:
    await rig.machines.apply("kill", 0)

    async def begin_and_die(server: int) -> None:
        rig.machines.ended(server, 1)
        await asyncio.Event().wait()

    rig.nodes.begin_server = begin_and_die  # type: ignore[method-assign]
    with pytest.raises(TestbedError, match="a100-0 ended as it began"):
        await rig.machines.apply("restart", 0)
    assert not rig.machines.answers(0)


async def test_a_server_whose_machine_is_lost_stays_away_and_the_run_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin_server(server: int) -> None:
        rig.nodes.did.append(("begin", server))
        raise MachineLostError("the machine rome is lost")

    monkeypatch.setattr(rig.nodes, "begin_server", begin_server)
    assert await rig.machines.apply("kill", 0, for_s=20.0, planned_at_s=7.0) is None
    await until(lambda: ("begin", 0) in rig.nodes.did)
    said = f"{rig.machines.names[0]} does not begin: the machine rome is lost"
    assert await rig.machines.apply("restart", 0, planned_at_s=30.0) == said
    assert not rig.nodes.errors and not rig.machines.answers(0) and not rig.lines("begun")


async def test_a_server_that_ends_at_the_moment_at_which_it_has_begun_is_not_taken_to_be_there(
    rig: Rig,
) -> None:
    await rig.machines.apply("kill", 0)

    async def begin_and_die(server: int) -> None:
        rig.machines.ended(server, -9)

    rig.nodes.begin_server = begin_and_die  # type: ignore[method-assign]
    with pytest.raises(TestbedError, match="a100-0 ended as it began"):
        await rig.machines.apply("restart", 0)
    assert not rig.machines.answers(0)


@pytest.mark.parametrize("question", [WaitUntilEmpty, GetStatus, Slow])
async def test_a_server_that_dies_before_the_launcher_says_so_does_not_break_the_run(
    rig: Rig, question: type[Question[Any]]
) -> None:
    ask, rig.nodes.n_sessions, is_dead = rig.nodes.ask_server, 2, False

    async def ask_until_it_dies(server: int, asked: Question[Any]) -> Any:
        nonlocal is_dead
        is_dead |= isinstance(asked, question)
        if not is_dead:
            return await ask(server, asked)
        asyncio.get_running_loop().call_later(0.05, rig.machines.ended, server, -9)
        raise ControlError("the control connection was closed")

    rig.nodes.ask_server = ask_until_it_dies  # type: ignore[method-assign]
    rig.nodes.notify_server = lambda *_: pytest.fail("it is dead")  # type: ignore[method-assign]
    faults = [Fault("leave", 0, 1.0) if question is not Slow else Fault("slow", 0, 1.0, factor=2.0)]
    await Schedule(faults, rig.machines).run()
    await until(lambda: any(line["kind"] == "died" for line in rig.lines("fault")))
    await until(lambda: not rig.machines._tasks)
    assert rig.nodes.errors == []
    assert rig.lines("left") == []


async def test_a_server_that_dies_as_it_is_told_to_leave_has_left(rig: Rig) -> None:
    def tell(server: int, message: Message) -> None:
        asyncio.get_running_loop().call_later(0.05, rig.machines.ended, server, -9)
        raise ControlError("the control connection is closed")

    rig.nodes.notify_server = tell  # type: ignore[method-assign]
    await rig.machines.apply("leave", 0)
    await until(lambda: bool(rig.lines("left")))
    assert rig.nodes.errors == []


async def test_a_process_that_a_signal_ends_is_a_fault_and_one_that_gives_up_breaks_the_run(rig: Rig) -> None:
    assert rig.machines.ended(0, -11)
    assert rig.lines("fault")[0]["kind"] == "died"
    assert 0 not in rig.coordinator.membership.alive()
    assert not rig.machines.ended(1, 1)


async def test_without_recovery_a_death_breaks_the_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "recovery.mode=off")
    assert not rig.machines.ended(0, -9)
    await rig.machines.end()
    rig.events.close()


async def test_a_node_that_does_not_do_as_it_is_told_breaks_the_run(rig: Rig) -> None:
    async def refuse(server: int, question: Question[Any]) -> Any:
        raise ControlError("no")

    rig.nodes.ask_server = refuse  # type: ignore[method-assign]
    rig.machines.in_background(Schedule([], rig.machines)._apply(Fault("slow", 0, 1.0, factor=2.0)))
    await until(lambda: bool(rig.nodes.errors))
    assert "a node did not answer: no" in str(rig.nodes.errors[0])


async def test_a_stop_during_which_another_server_dies_is_done_and_ends(rig: Rig) -> None:
    async def slow_signal(server: int, number: int) -> None:
        rig.nodes.did.append(("signal", server, signal.Signals(number).name))
        if number == signal.SIGKILL:
            rig.nodes.ended(server, -9)
        elif number == signal.SIGSTOP:
            await rig.machines.apply("kill", 1)

    rig.nodes.signal_server = slow_signal  # type: ignore[method-assign]
    faults = [Fault("stop", 0, 1.0, for_s=5.0)]
    await Schedule(faults, rig.machines).run()
    await until(lambda: len(rig.nodes.did) == 3)
    assert rig.nodes.did == [("signal", 0, "SIGSTOP"), ("signal", 1, "SIGKILL"), ("signal", 0, "SIGCONT")]
    assert sorted(line["kind"] for line in rig.lines("fault")) == ["kill", "stop"]
    assert rig.nodes.errors == []


async def test_what_nobody_has_foreseen_breaks_the_run_with_its_text(rig: Rig) -> None:
    async def stumble() -> None:
        raise ZeroDivisionError("by itself")

    rig.machines.in_background(stumble())
    await until(lambda: bool(rig.nodes.errors))
    assert str(rig.nodes.errors[0]) == "the testbed itself has failed: ZeroDivisionError: by itself"


async def test_faults_wait_for_the_tokens_that_they_name(rig: Rig) -> None:
    faults = [
        Fault("kill", 0, after=After(3, 20)),
        Fault("kill", 1, after=After(3, 5)),
        Fault("kill", 2, 0.5),
    ]
    schedule = Schedule(faults, rig.machines)
    assert schedule.watched == {3}
    await schedule.run()
    for n_tokens in range(1, 21):
        schedule.token(3, n_tokens)
        schedule.token(4, 100)
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert rig.machines.answers(1) == (n_tokens < 5)
        assert rig.machines.answers(0) == (n_tokens < 20)
    assert not rig.machines.answers(2)


def test_a_kind_that_can_end_says_how_and_others_do_not() -> None:
    for kind in KINDS.values():
        assert (type(kind).undo is not FaultKind.undo) == kind.can_end, kind.name
    assert tuple(name for name in KINDS if name != "cont") == IN_FILES
    assert IN_CHURN == ("kill", "stop")


def test_the_documentation_lists_the_kinds_of_fault() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/faults.md").read_text(encoding="utf-8")
    table = text.partition("| `kind` | what it does | `for` |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == IN_FILES
    (by_hand,) = re.findall(r"^testbed fault kill .*", text, re.MULTILINE)
    assert all(name in by_hand for name in KINDS)
    churn = re.findall(r'^kind = "kill" +# or (\w+)', text, re.MULTILINE)
    assert churn == [name for name in IN_CHURN if name != "kill"]
