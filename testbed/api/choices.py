"""Policies as users give them: by name, or as objects of their program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from policies.problem import PolicyError
from policies.registry import OBJECT, PAIRS, offering
from testbed.errors import UserError

PolicyLike = Any
"""A policy pair: its name, ``"placement+routing"``, or a tuple (placement, routing) of names, objects or classes. One
object with the methods of both kinds is both. ``None``: the scenario's own policies."""
_KINDS = ("placement", "routing")


@dataclass(frozen=True)
class Chosen:
    """Policies by their names, and the objects among them, by kind and name.

    ``names`` are those of pairs in the syntax of ``--policy``, in the order in which they were given; ``None``: the
    scenario's own.
    """

    names: tuple[str | None, ...]
    objects: Mapping[tuple[str, str], object]

    def label(self, name: str) -> str:
        """Return how a pair is called where users see it: an object by its attribute ``name``."""
        shown = label_of(name)
        others = {label_of(other) for other in self.names if other is not None and other != name}
        return name if shown != name and (shown in others or shown in PAIRS) else shown


@contextmanager
def chosen_of(policies: Sequence[PolicyLike]) -> Iterator[Chosen]:
    """Yield the chosen policies; while the body runs, the objects among them can be found by their names.

    The same object or class is the same policy wherever it stands. Raises ``UserError`` for what is no policy.
    """
    made: dict[int, Any] = {}
    pairs = [_halves(policy, made) for policy in policies]
    given = [
        (kind, half)
        for pair in pairs
        if isinstance(pair, tuple)
        for kind, half in zip(_KINDS, pair, strict=True)
        if not isinstance(half, str)
    ]
    with ExitStack() as offered:
        try:
            names = offered.enter_context(offering(given))
        except PolicyError as error:
            raise UserError(str(error)) from error

        def name(pair: str | tuple[Any, Any] | None) -> str | None:
            if not isinstance(pair, tuple):
                return pair
            halves = zip(_KINDS, pair, strict=True)
            return "+".join(half if isinstance(half, str) else names[kind, id(half)] for kind, half in halves)

        yield Chosen(tuple(map(name, pairs)), {(kind, names[kind, id(half)]): half for kind, half in given})


def label_of(name: str) -> str:
    """Return a pair's name without what marks objects; an object that is both halves stands once."""
    halves = [half.removeprefix(OBJECT) for half in name.split("+")]
    return halves[0] if len(halves) == 2 and OBJECT in name and halves[0] == halves[1] else "+".join(halves)


def _halves(policy: PolicyLike, made: dict[int, Any]) -> str | tuple[Any, Any] | None:
    """Return a pair's name, or its placement and routing as names or objects."""
    if policy is None or isinstance(policy, str):
        return policy
    if isinstance(policy, tuple | list):
        if len(policy) != 2:
            raise UserError(
                f"a policy is a pair (placement, routing), but {policy!r} has {len(policy)} parts"
            )
        return _object(policy[0], made), _object(policy[1], made)
    whole = _object(policy, made)
    return whole, whole


def _object(policy: Any, made: dict[int, Any]) -> Any:
    """Return an object of ``policy`` if it is a class, which needs no arguments: one in a call."""
    if not isinstance(policy, type):
        return policy
    if id(policy) not in made:
        try:
            made[id(policy)] = policy()
        except Exception as error:  # a user's code can fail in any way
            raise UserError(
                f"making a {policy.__name__} without arguments failed ({type(error).__name__}: {error}); give an "
                "object in place of its class"
            ) from error
    return made[id(policy)]
