"""``plan.json``: what was decided before a run, and what is known of its course at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from policies.problem import BlockRange, Placement
from testbed.errors import UserError
from testbed.records.base import Record, column
from testbed.records.summary import SIMULATED, DecisionCounts, MachineState

PLAN = "plan.json"
_EMULATED = "emulation"
REFERENCE = "reference"
"""The mode of a simulation with the semantics of the paper's public simulator."""


class PlacementRow(Record, kw_only=True):
    """A placement: per server its blocks, half-open from 0, and the room for caches in bytes."""

    policy: str = ""
    ranges: list[tuple[int, int]]
    cache_bytes: list[float]
    design_concurrency: int | None = None
    bounds: dict[str, float | bool | None] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, placement: Placement) -> PlacementRow:
        return cls(
            policy=placement.policy,
            ranges=[(r.first, r.last) for r in placement.ranges],
            cache_bytes=list(placement.cache_bytes),
            design_concurrency=placement.design_concurrency,
            bounds=dict(placement.bounds),
        )

    def placement(self) -> Placement:
        """Return the placement, without its bounds."""
        ranges = tuple(BlockRange(*held) for held in self.ranges)
        return Placement(self.policy, ranges, tuple(self.cache_bytes), self.design_concurrency)


class Clock(Record, kw_only=True):
    """Which clock a run had, and why."""

    name: str
    why: str


class Stall(Record, kw_only=True):
    """A time for which the whole machine stood still: when (scenario seconds), and for how many real seconds."""

    at_s: float
    real_s: float


class Plan(Record, kw_only=True):
    """The plan of a run, of every engine."""

    placement: Annotated[PlacementRow, column("per server its blocks and its room, with \\|R\\| and bounds")]
    routing: Annotated[str, column("name of the routing policy")] = ""
    mode: Annotated[str | UnsetType, column("`testbed` or `reference`", engines="simulation")] = UNSET
    servers: Annotated[list[str], column("names of the servers")] = msgspec.field(default_factory=list)
    clients: Annotated[list[str], column("names of the clients")] = msgspec.field(default_factory=list)
    devices: Annotated[list[str] | None, column("the servers' devices", engines="real blocks, else null")] = (
        None
    )
    placement_decision_s: Annotated[float, column("time that the placement took", "real s")] = 0.0
    network: Annotated[str, column("what carries the messages; `simulated`: no nodes ran")] = ""
    clock: Annotated[Clock | None, column("`name` and `why`; null before there was virtual time")] = None
    wall_s: Annotated[float | None, column("real time of serving", "real s", _EMULATED)] = None
    scenario_s: Annotated[float | None, column("scenario time of serving", "s", _EMULATED)] = None
    startup_s: Annotated[dict[str, float], column("time until each part was up", "real s", _EMULATED)] = (
        msgspec.field(default_factory=dict)
    )
    forwarder: Annotated[
        dict[str, int | float] | None, column("counters of the forwarder", "", _EMULATED)
    ] = None
    machines: Annotated[list[MachineState], column("the run's other machines", "", _EMULATED)] = (
        msgspec.field(default_factory=list)
    )
    stalls: Annotated[
        list[Stall], column("when the whole machine stood still, and for how long", "", _EMULATED)
    ] = msgspec.field(default_factory=list)
    memory: Annotated[
        dict[str, dict[str, int | float]],
        column("the largest memory of servers with real blocks", "bytes", _EMULATED),
    ] = msgspec.field(default_factory=dict)
    decisions: Annotated[DecisionCounts | None, column("routing decisions, at the end", "", _EMULATED)] = None
    routing_decisions_s: Annotated[
        list[float] | None, column("time of every routing decision, at the end", "real s", _EMULATED)
    ] = None
    leaks: Annotated[dict[str, int | float] | None, column("what is left at the end", "", _EMULATED)] = None

    @property
    def is_simulated(self) -> bool:
        """Whether no nodes ran, so that there are no logs."""
        return self.network == SIMULATED

    @property
    def is_in_real_time(self) -> bool:
        """Whether nodes ran by the machine's clock, as all did before there was virtual time."""
        return not self.is_simulated and (self.clock is None or self.clock.name != "virtual")


def find_plan(run_dir: Path) -> Plan | None:
    """Read ``plan.json``; None if there is none, or it is not one that a run writes."""
    try:
        return msgspec.json.decode((run_dir / PLAN).read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError):
        return None


def read_plan(run_dir: Path) -> Plan:
    """Read ``plan.json``. Raises ``UserError`` if it is not one that a run writes."""
    plan = find_plan(run_dir)
    if plan is None:
        raise UserError(f"cannot read {run_dir / PLAN}; give another run directory")
    return plan


def is_simulated(run_dir: Path) -> bool:
    """Whether ``run_dir`` is of a simulation without nodes, and so without logs: its plan says so."""
    plan = find_plan(run_dir)
    return plan is not None and plan.is_simulated
