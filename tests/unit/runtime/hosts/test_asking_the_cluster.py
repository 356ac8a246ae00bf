"""What a Ray cluster, and the agents of its machines, are asked for: who is waited for, and who refused."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.errors import RunError, TestbedError, UserError
from testbed.experiments.experiment import Machine
from tests.support.ray_cluster import need_ray

need_ray()


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(UserError("no TUN"), UserError), (RunError("no TUN"), RunError), (OSError("no TUN"), RunError)],
)
async def test_what_a_machine_cannot_do_is_said_with_its_name(
    cause: Exception, kind: type[TestbedError]
) -> None:
    from ray.exceptions import RayTaskError

    from testbed.runtime.hosts.cluster import Host

    asked: Future[None] = Future()
    asked.set_exception(RayTaskError("open", "", cause))
    actor = SimpleNamespace(open=SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: asked)))
    with pytest.raises(kind) as refused:
        await Host(Machine("second", {}), "10.0.0.2", 1.0, actor).call("open")
    assert type(refused.value) is kind and str(refused.value) == "second: no TUN"


async def test_who_waits_for_machines_of_others_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from testbed.runtime.hosts import cluster

    said: list[str] = []
    monkeypatch.setattr(cluster, "say", said.append)
    monkeypatch.setattr(cluster, "_SOON_S", 0.01)
    monkeypatch.setattr(cluster, "_BEGIN_S", 0.1)
    asked: Future[None] = Future()
    never: Any = SimpleNamespace(future=lambda: asked)
    with pytest.raises(UserError, match=r"^no machine \(waited 0\.1 s\)$"):
        await cluster._within(never, "no machine", "waiting for a machine")
    assert said == ["waiting for a machine"]


async def test_who_no_longer_waits_for_machines_hears_nothing_of_them() -> None:
    """Else asyncio writes of an exception that nobody has retrieved."""
    from testbed.runtime.hosts import cluster

    asked: Future[None] = Future()
    never: Any = SimpleNamespace(future=lambda: asked)
    waiting = asyncio.ensure_future(cluster._within(never, "no machine", "waiting for a machine"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert asked.cancelled()


def test_the_machines_that_there_are_follow_where_one_is_not_there() -> None:
    from testbed.runtime.hosts.cluster import _check_there_is_one

    there = {"10.0.0.2": {"CPU": 2.0, "node:10.0.0.2": 1.0}, "10.0.0.1": {"CPU": 4.0}}
    _check_there_is_one(Machine("rome", {"CPU": 2, "node:10.0.0.2": 0.001}), there)
    with pytest.raises(UserError) as refused:
        _check_there_is_one(Machine("rome", {"CPU": 1, "node:10.0.0.3": 0.001}), there)
    assert str(refused.value) == (
        "no machine of the Ray cluster has the resources of rome: 1 CPU, 0.001 node:10.0.0.3; ask for less, or for one "
        "of its machines, which are 10.0.0.1, 10.0.0.2"
    )
