"""The planned changes of links in the form in which networks follow them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from netem.spec import Course
from policies.links import Link
from testbed.experiments.experiment import NetworkChange


def courses(
    changes: Sequence[NetworkChange], links: Mapping[tuple[str, str], Link], scale: float
) -> Mapping[tuple[str, str], Course]:
    """Returns the planned changes of those of ``links`` that have any, in seconds of a clock ``scale`` times as fast.

    Each course begins with the link as it is at first, at 0.
    """
    # Most pairs have the same changes as others: what all of them have so far is one entry of ``steps``.
    steps: list[tuple[int, float, float]] = []
    number: dict[tuple[int, float, float], int] = {}
    last: dict[tuple[str, str], int] = {}

    def follow(pair: tuple[str, str], at_s: float, link: Link) -> None:
        rate_bps = 0.0 if link.loss_ratio >= 1 else link.rate_bps * scale
        step = last.get(pair, -1), at_s / scale, rate_bps
        if step not in number:
            number[step] = len(steps)
            steps.append(step)
        last[pair] = number[step]

    for change in changes:
        for pair, link in change.links.items():
            if (at_first := links.get(pair)) is not None:
                if pair not in last:
                    follow(pair, 0.0, at_first)
                follow(pair, change.at_s, link)
    found: dict[int, Course] = {}
    for end in set(last.values()):
        instants, rates_bps, n = array("d"), array("d"), end
        while n >= 0:
            n, at_s, rate_bps = steps[n]
            instants.append(at_s)
            rates_bps.append(rate_bps)
        found[end] = instants[::-1], rates_bps[::-1]
    return {pair: found[end] for pair, end in last.items()}
