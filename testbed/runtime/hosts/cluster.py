"""The machines of a run on a Ray cluster, with an agent on each. Imports ray (the extra ``[ray]``)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from testbed.cluster import check_version, connected
from testbed.codeversion import code_version
from testbed.errors import MachineLostError, RunError, UserError
from testbed.runtime.hosts.agent import Agent, AgentOptions, usual_priority
from testbed.terminal import say

if TYPE_CHECKING:  # agents, which import this module, need no experiments
    from testbed.experiments.experiment import Machine

_SOON_S = 3.0
_BEGIN_S = 120.0
"""Seconds that the cluster has to provide the machines, and a machine to start its agent, which Ray starts with a niceness of 15."""


class _Actor(Agent):
    """An agent in a process of Ray's.

    ``about`` is called first: other versions may not know the other methods.
    """

    def __init__(self) -> None:
        """``begin_for`` sets the run that it belongs to."""

    async def about(self) -> str:
        return code_version()

    async def begin_for(self, options: AgentOptions) -> int:
        """Return the niceness of this agent and its nodes."""
        niceness = usual_priority()
        super().__init__(options)
        await self.begin()
        return niceness


@dataclass
class Host:
    """A machine of the run. ``actor`` is ``None`` for the machine of this process, which needs no agent."""

    machine: Machine
    address: str
    weight: float
    """CPUs, or GPUs, of this machine that the run has."""
    actor: Any = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the agent.

        Raises ``UserError`` or ``RunError`` with the machine's name for what the agent raises, and ``MachineLostError``.
        """
        ref = getattr(self.actor, method).remote(*arguments)
        try:
            return await asyncio.wrap_future(ref.future())
        except RayTaskError as error:
            kind = UserError if isinstance(error.cause, UserError) else RunError
            raise kind(f"{self.machine.name}: {_last_line(error)}") from None
        except RayError as error:
            raise MachineLostError(f"the machine {self.machine.name} ({self.address}) was lost") from error


class Cluster:
    """The connection of this process to the Ray cluster. Raises ``UserError`` if there is none."""

    def __init__(self) -> None:
        self._connection = connected()
        self._connection.__enter__()
        self.address: str = ray.util.get_node_ip_address()
        """This machine's address, as the others reach it."""
        self._group: Any = None
        self._hosts: list[Host] = []

    async def machines(self, wanted: Sequence[Machine] | str, by_gpu: bool) -> list[Host]:
        """Reserve the ``wanted`` machines, or all with CPUs (GPUs, if ``by_gpu``), and start their agents.

        This machine has no agent. Raises ``UserError`` if the cluster does not have these machines, or if one
        of them has another version of this program.
        """
        from testbed.experiments.experiment import Machine
        from testbed.experiments.machines import ANY_SHARE

        here = ray.get_runtime_context().get_node_id()
        kind = "GPU" if by_gpu else "CPU"
        alive = [node for node in ray.nodes() if node["Alive"]]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
        if isinstance(wanted, str):
            having = {node["NodeID"]: node["Resources"].get(kind, 0) for node in alive}
            names = sorted((addresses[node], node) for node, n in having.items() if n)
            if not names:
                raise UserError(
                    f"no machine of the Ray cluster has a {kind}; `ray status` shows their resources"
                )
            wanted = [
                Machine(address, {kind: having[node] if by_gpu else 1, f"node:{address}": ANY_SHARE})
                for address, node in names
            ]
            weights = [float(having[node]) for _, node in names]
        else:
            weights = [machine.resources.get(kind, 0.0) or 1.0 for machine in wanted]
            for machine in wanted:
                _check_there_is_one(machine, {addresses[node["NodeID"]]: node["Resources"] for node in alive})
        self._group = placement_group(
            [dict(machine.resources) for machine in wanted], strategy="STRICT_SPREAD"
        )
        shown = "; ".join(f"{machine.name}: {_shown(machine)}" for machine in wanted)
        await _within(
            self._group.ready(),
            f"the Ray cluster has no free machines for {shown}",
            f"waiting until the Ray cluster has free machines for {shown}",
        )
        placed = placement_group_table(self._group)["bundles_to_node_id"]
        for number, (machine, weight) in enumerate(zip(wanted, weights, strict=True)):
            host = Host(machine, addresses[placed[number]], weight)
            self._hosts.append(host)
            if placed[number] != here:
                host.actor = self._actor(number, machine)
        others = [host for host in self._hosts if host.actor is not None]
        for host in others:
            version = await _within(host.actor.about.remote(), f"the agent on {host.address} did not start")
            check_version(version, host.address)
        return self._hosts

    def _actor(self, number: int, machine: Machine) -> Any:
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        options = {
            "num_cpus": machine.resources.get("CPU", 0),
            "num_gpus": machine.resources.get("GPU", 0),
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 1000,
            "scheduling_strategy": where,
        }
        return ray.remote(**options)(_Actor).remote()

    def close(self) -> None:
        """End all agents, with everything that they started, and release the machines."""
        for host in self._hosts:
            if host.actor is not None:
                ray.kill(host.actor)
        self._hosts.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        self._connection.__exit__(None, None, None)


async def _within(ref: Any, what: str, waiting: str = "") -> Any:
    """Return what ``ref`` comes to, or raise ``UserError`` that begins with ``what``; says ``waiting`` if it takes a while."""
    done = asyncio.wrap_future(ref.future())
    try:
        async with asyncio.timeout(_BEGIN_S):
            if waiting and not (await asyncio.wait({done}, timeout=_SOON_S))[0]:
                say(waiting)
            return await done
    except TimeoutError:
        raise UserError(f"{what} (waited {_BEGIN_S:g} s)") from None
    except RayError as error:
        raise UserError(f"{what}: {_last_line(error)}") from None
    finally:
        done.cancel()


def _check_there_is_one(machine: Machine, resources: Mapping[str, Mapping[str, float]]) -> None:
    """Raise ``UserError`` if no machine, by address, has these resources, even with no other user of the cluster."""
    asked = machine.resources.items()
    if not any(all(there.get(kind, 0) >= amount for kind, amount in asked) for there in resources.values()):
        raise UserError(
            f"no machine of the Ray cluster has the resources of {machine.name}: {_shown(machine)}; ask for less, or "
            f"for one of its machines, which are {', '.join(sorted(resources))}"
        )


def _shown(machine: Machine) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in machine.resources.items())


def _last_line(error: BaseException) -> str:
    return str(getattr(error, "cause", None) or error).strip().rpartition("\n")[2]
