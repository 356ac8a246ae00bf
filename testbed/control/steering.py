"""Runs an online policy, in every engine: passes it the load, and checks the placement that it returns."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Any

from policies.checks import check_placement, is_number, plain
from policies.interfaces import trait
from policies.online import OnlinePolicy, SystemView, TwoTimeScale, moves, rolling_order
from policies.problem import BlockRange, Placement, PolicyError, Problem
from policies.registry import resolve_online
from testbed.control.placing import placement_policy, policy_code, prepare_users_code
from testbed.experiments.experiment import Experiment
from testbed.experiments.policy import FIXED


class Load:
    """Counts the requests in the system, for a ``SystemView``."""

    def __init__(self) -> None:
        self.n_active = 0
        self._n_arrived = 0
        self._integral = 0.0
        self._changed_at_s = 0.0
        self._since_s = 0.0

    def arrive(self, now_s: float) -> None:
        self._n_arrived += 1
        self._change(1, now_s)

    def end(self, now_s: float) -> None:
        self._change(-1, now_s)

    def _change(self, change: int, now_s: float) -> None:
        self._integral += self.n_active * (now_s - self._changed_at_s)
        self._changed_at_s = now_s
        self.n_active += change

    def take(self, now_s: float) -> tuple[float, float]:
        """Returns (mean number of requests in the system, arrivals per second) since the last call."""
        self._change(0, now_s)
        elapsed_s = now_s - self._since_s
        answer = (self._integral / elapsed_s, self._n_arrived / elapsed_s) if elapsed_s else (0.0, 0.0)
        self._integral, self._n_arrived, self._since_s = 0.0, 0, now_s
        return answer


def online_policy(experiment: Experiment) -> OnlinePolicy | None:
    """Returns the online policy of a scenario; ``None`` if it has none.

    A policy that runs a placement policy again uses the scenario's. Raises ``PolicyError``, also if the
    scenario sets a period or a patience that the policy does not have.
    """
    if experiment.policy.online is None:
        return None
    prepare_users_code(experiment)
    policy = resolve_online(experiment.policy.online)
    if isinstance(policy, TwoTimeScale) and not experiment.policy.placement.startswith(FIXED):
        policy = replace(policy, placement=placement_policy(experiment.policy.placement))
    for key in ("drains", "at_once"):
        if not hasattr(policy, key):
            setattr(policy, key, trait(policy, OnlinePolicy, key))
    for key, value_s in (
        ("period_s", experiment.policy.online_period_s),
        ("patience_s", experiment.policy.online_patience_s),
    ):
        if value_s is not None:
            if not hasattr(policy, key):
                raise PolicyError(
                    f"online policy {policy.name} has no {key}; leave out policy.online_{key[:-2]}"
                )
            policy = copy(policy)
            setattr(policy, key, value_s)
    return policy


class Steering:
    """One run's controller. ``target`` is the placement that was last decided, to which servers move."""

    def __init__(self, problem: Problem, placement: Placement, policy: OnlinePolicy) -> None:
        self.policy = policy
        self.target = placement
        self.decided_at_s = 0.0
        self._asked_for_s = 0.0
        self._problem = problem
        with policy_code("online", policy.name):
            seen = problem.as_seen(counts_drafts=trait(policy, OnlinePolicy, "counts_drafts"))
            self._controller = policy.bind(seen, placement)

    def next_check_at_s(self) -> float:
        """Returns the instant of the next check, infinite if there is none.

        On a busy machine it may have passed already. Raises ``PolicyError`` if it is no number, or not after the last one.
        """
        with policy_code("online", self.policy.name):
            at_s: Any = self._controller.next_check_at_s
        if not is_number(at_s):
            raise PolicyError(
                f"online policy {self.policy.name} states next_check_at_s = {at_s!r}; it must be a number of seconds"
            )
        if not at_s > self._asked_for_s:
            raise PolicyError(
                f"online policy {self.policy.name} wants to be asked at {at_s} s after it was at "
                f"{self._asked_for_s} s; next_check_at_s must be later after every check"
            )
        self._asked_for_s = plain(at_s)
        return self._asked_for_s

    def check(
        self, now_s: float, load: Load, moving: Iterable[int], alive: frozenset[int] | None = None
    ) -> list[int]:
        """Ask the policy. Returns the servers that must move to ``target`` now, in the order of their moves.

        ``moving`` are those that still move. Raises ``PolicyError`` if the policy fails, or if its placement
        is invalid, moves a server that still moves, or cannot be reached.
        """
        mean_active, request_rate = load.take(now_s)
        moving = tuple(sorted(moving))
        view = SystemView(load.n_active, mean_active, request_rate, self.target, moving, alive)
        name = self.policy.name
        with policy_code("online", name):
            new = self._controller.check(now_s, view)
        if new is None:
            return []
        new = check_placement(self._problem, new, name)
        changing = moves(self.target, new)
        names = [self._problem.servers[j].name for j in changing if j in moving]
        if names:
            raise PolicyError(f"online policy {name} moves {names[0]} again before it has arrived")
        there = order = [j for j in changing if alive is None or j in alive]
        if self.policy.drains:
            order = rolling_order(
                self.target.ranges, new.ranges, changing, self._problem.model.n_blocks, alive
            )
            if len(order) < len(there):
                raise PolicyError(
                    f"online policy {name} asks for a placement that cannot be reached one server after "
                    "another without leaving a block on no server"
                )
        self.target, self.decided_at_s = new, now_s
        return order

    def settle(self, server: int, held: BlockRange, cache_bytes: float) -> None:
        """Set ``target`` to what ``server`` really holds: it has joined, or its move was dropped."""
        if (self.target.ranges[server], self.target.cache_bytes[server]) == (held, cache_bytes):
            return
        ranges, rooms = list(self.target.ranges), list(self.target.cache_bytes)
        ranges[server], rooms[server] = held, cache_bytes
        self.target = replace(self.target, ranges=tuple(ranges), cache_bytes=tuple(rooms))
