"""Machines that are lost while they are asked: a run goes on without them."""

from __future__ import annotations

from concurrent.futures import Future
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any

from testbed.experiments.experiment import Machine
from tests.support.ray_cluster import need_ray

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
