"""Machines that are lost while they are asked: a run goes on without them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.experiments.experiment import Machine
from testbed.runtime.hosts.messages import AgentStream, NodeStream, pack
from testbed.runtime.hosts.sealed import connect, new_key
from tests.support.ray_cluster import need_ray
from tests.support.runs import PATIENCE_S

need_ray()


class Here:
    """The launcher of this machine."""

    async def update(self, links: Any) -> float:
        return 5.0

    async def stats(self) -> dict[str, float]:
        return {"n_packets": 3}

    async def stalls(self) -> list[tuple[float, float]]:
        return [(1.0, 2.0)]

    async def keep_awake(self, on: bool) -> None:
        pass


class Lost:
    """An agent that ends before it has done anything that it is asked for."""

    def __getattr__(self, method: str) -> Any:
        from ray.exceptions import RayActorError

        asked: Future[None] = Future()
        asked.set_exception(RayActorError())
        return SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: asked))


async def test_what_all_machines_are_asked_for_is_done_without_one_that_is_lost_meanwhile() -> None:
    from testbed.runtime.hosts.cluster import Host
    from testbed.runtime.hosts.launcher import HostsLauncher, _Remote

    ended: list[tuple[str, int]] = []

    def launcher() -> HostsLauncher:
        there = _Remote(Host(Machine("second", {}), "10.0.0.2", 1.0, Lost()), nodes={"a100-0"})
        made = object.__new__(HostsLauncher)
        vars(made).update(_local=Here(), _remotes={"second": there}, _elsewhere={7: (there, 1)})
        vars(made).update(_is_ending=False, _on_exit=lambda *node: ended.append(node))
        return made

    assert await launcher().update({}) == 5.0
    assert await launcher().stats() == {"n_packets": 3}
    assert await launcher().stalls() == [(1.0, 2.0)]
    await launcher().keep_awake(True)
    await launcher().kill(7, SIGKILL)
    assert ended == [("a100-0", -SIGKILL)] * 5


class Silent:
    """A machine that is cut off: its connections stay open, and nothing comes over them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        from testbed.runtime.hosts import launcher
        from testbed.runtime.hosts.cluster import Host

        monkeypatch.setattr(launcher, "SILENCE_S", 0.2)
        self.said: list[str] = []
        monkeypatch.setattr(launcher, "say", self.said.append)
        self.ended: list[tuple[str, int]] = []
        machine = launcher._Remote(Host(Machine("second", {}), "10.0.0.2", 1.0), nodes={"a100-0"})
        self._launcher = object.__new__(launcher.HostsLauncher)
        self._control, self._key = folder / "control.sock", new_key()
        vars(self._launcher).update(_remotes={"second": machine}, key=self._key)
        vars(self._launcher).update(_control_path=self._control, _is_ending=False)
        vars(self._launcher).update(_on_exit=lambda *node: self.ended.append(node))

    async def cut_off(self) -> None:
        """Returns when the orchestrator's end of the node's control connection has ended."""
        node_is_gone = asyncio.Event()

        async def orchestrator(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(1000):
                pass
            writer.close()
            node_is_gone.set()

        async with (
            await asyncio.start_unix_server(orchestrator, str(self._control)),
            await asyncio.start_server(self._launcher._accept, "127.0.0.1", 0) as server,
        ):
            port = server.sockets[0].getsockname()[1]
            streams = [await connect("127.0.0.1", port, self._key) for _ in range(2)]
            for stream, first in zip(streams, (NodeStream("second"), AgentStream("second")), strict=True):
                stream.send(pack(first))
            await asyncio.wait_for(node_is_gone.wait(), PATIENCE_S)
            for stream in streams:
                stream.close()


async def test_the_control_connections_of_a_machine_that_is_cut_off_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who asks a node there would wait for ever: all other machines' clocks were no longer followed."""
    machine = Silent(monkeypatch, tmp_path)
    await machine.cut_off()
    assert machine.ended == [("a100-0", -SIGKILL)]
    assert machine.said == ["the machine second (10.0.0.2) is lost: nothing has come from it for 0.2 s"]


async def test_a_machine_that_does_not_answer_at_the_end_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from testbed.runtime.hosts import launcher
    from testbed.runtime.hosts.cluster import Host

    class Stuck:
        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *_: SimpleNamespace(future=Future))

    monkeypatch.setattr(launcher, "SILENCE_S", 0.01)
    said: list[str] = []
    monkeypatch.setattr(launcher, "say", said.append)
    made = object.__new__(launcher.HostsLauncher)
    there = launcher._Remote(Host(Machine("second", {}), "10.0.0.2", 1.0, Stuck()))
    vars(made).update(_remotes={"second": there}, _tasks=set(), _server=None, _cluster=None)
    vars(made).update(_local=SimpleNamespace(close=lambda: None))
    await made.end()
    assert said == ["the logs of second are missing: it does not answer"]
