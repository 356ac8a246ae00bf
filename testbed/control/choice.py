"""The choice of policies on the command line: ``--policy``, or ``--placement`` and ``--routing``."""

from __future__ import annotations

from policies.problem import PolicyError
from policies.registry import resolve_pair
from testbed.control.placing import import_from_here, placement_policy, routing_policy
from testbed.errors import UserError
from testbed.experiments.policy import PolicyChoice


def chosen(policy: str | None, placement: str | None = None, routing: str | None = None) -> PolicyChoice:
    """Return the choice of these options; without any, the scenario's own policies.

    This runs the code of a ``policy`` that is not shipped. Raises ``UserError`` if it cannot be loaded, or if
    it is given beside one of the others.
    """
    if policy is None:
        return PolicyChoice(None, placement, routing)
    if placement is not None or routing is not None:
        raise UserError("--policy names both policies: give either --policy, or --placement and --routing")
    check_policy(policy)
    return PolicyChoice.of(policy)


def check_policy(name: str) -> None:
    """Raise ``UserError`` if ``name`` is neither a pair nor ``PLACEMENT+ROUTING``, or cannot be loaded."""
    choice = PolicyChoice.of(name)
    import_from_here(name)
    try:
        if choice.pair is not None:
            resolve_pair(choice.pair)
        else:
            placement_policy(choice.placement or "")
            routing_policy(choice.routing or "")
    except (PolicyError, UserError) as error:
        for method, pair in (("place()", f"PLACEMENT+{name}"), ("bind()", f"{name}+ROUTING")):
            if choice.placement == choice.routing == name and f"has no method {method}" in str(error):
                raise UserError(
                    f"policy {name}: it has no method {method}; pair it with one: {pair}"
                ) from error
        raise UserError(f"policy {name}: {error}") from error
