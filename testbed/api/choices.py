"""Policies as users give them: by name, or as objects of their program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.problem import PolicyError
from policies.registry import OBJECT, name_of_object
from testbed.errors import UserError

PolicyLike = Any
"""A policy pair: its name, ``"placement+routing"``, or a tuple (placement, routing) of names, objects or classes. One
object with the methods of both kinds is both. ``None``: the scenario's own policies."""
_METHODS = {"placement": "place", "routing": "bind"}


@dataclass(frozen=True)
class Chosen:
    """Policies by their names, and the objects among them, by kind and name.

    ``names`` are those of pairs in the syntax of ``--policy``; ``None``: the scenario's own.
    """

    names: tuple[str | None, ...]
    objects: Mapping[tuple[str, str], object]

    def label(self, name: str) -> str:
        """Return how a pair is called where users see it: an object by its attribute ``name``."""
        shown = _label(name)
        return (
            name
            if shown != name and [_label(other or "") for other in self.names].count(shown) > 1
            else shown
        )

    def name(self, label: str) -> str:
        """Return the name of the pair with that label. Raises ``UserError`` if there is none."""
        for name in self.names:
            if name is not None and label in (name, self.label(name)):
                return name
        raise UserError(
            f"{label} is none of the policies compared; valid: {', '.join(map(self.label, self.given))}"
        )

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name is not None)


def choose(policies: Sequence[PolicyLike]) -> Chosen:
    """Return the chosen policies. Raises ``UserError`` for what is no policy."""
    objects: dict[tuple[str, str], object] = {}
    try:
        names = tuple(None if policy is None else _pair(policy, objects) for policy in policies)
    except PolicyError as error:
        raise UserError(str(error)) from error
    return Chosen(names, objects)


def _pair(policy: PolicyLike, objects: dict[tuple[str, str], object]) -> str:
    if isinstance(policy, str):
        return policy
    if isinstance(policy, tuple | list):
        if len(policy) != 2:
            raise UserError(
                f"a policy is a pair (placement, routing), but {policy!r} has {len(policy)} parts"
            )
        halves = policy[0], policy[1]
    else:
        made = _made(policy)
        halves = made, made
    return "+".join(_half(kind, half, objects) for kind, half in zip(_METHODS, halves, strict=True))


def _half(kind: str, policy: Any, objects: dict[tuple[str, str], object]) -> str:
    if isinstance(policy, str):
        return policy
    policy = _made(policy)
    taken = {name: one for (of, name), one in objects.items() if of == kind}
    name = name_of_object(kind, policy, taken)
    objects[kind, name] = policy
    return name


def _made(policy: Any) -> Any:
    """Return an object of ``policy`` if it is a class, which needs no arguments."""
    if not isinstance(policy, type):
        return policy
    try:
        return policy()
    except Exception as error:  # a user's code can fail in any way
        raise UserError(
            f"making a {policy.__name__} without arguments failed ({type(error).__name__}: {error}); give an object "
            "in place of its class"
        ) from error


def _label(name: str) -> str:
    halves = [half.removeprefix(OBJECT) for half in name.split("+")]
    return halves[0] if len(halves) == 2 and OBJECT in name and halves[0] == halves[1] else "+".join(halves)
