"""Links that change while requests are served: as planned by the scenario, and by hand (``testbed link``).

Settings by hand for a pair of nodes hold until they are restored, whatever the scenario changes meanwhile.
Every change is a line of ``events.jsonl``, with the resulting links where these differ from the plan.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from nodes.clock import Clock
from nodes.messages import Question
from policies.links import Link, Pair
from testbed.errors import TestbedError, UserError
from testbed.experiments.events import between, members_of, unknown_place
from testbed.experiments.experiment import Experiment
from testbed.experiments.fields import ratio
from testbed.experiments.units import DURATION, RATE
from testbed.experiments.whole import WholeNetwork
from testbed.records.events import BY_HAND, BY_SCENARIO, EventWriter, LinkRow, LinksChanged

Action = Literal["cut", "restore", "set"]
ACTIONS: tuple[Action, ...] = ("cut", "restore", "set")


class LinkChanged(msgspec.Struct, frozen=True):
    """When links were changed (scenario seconds) and how many, or the reason why none was."""

    at_s: float = 0.0
    n_links: int = 0
    why_not: str | None = None


class ChangeLink(Question[LinkChanged], frozen=True):
    """Cut, restore or set the links between the sites or nodes ``a`` and ``b``, in both directions."""

    action: Action
    a: str
    b: str
    rtt_s: float | None = None
    rate_bps: float | None = None
    loss_ratio: float | None = None


@dataclass(frozen=True)
class _ByHand:
    """Settings by hand for the link of a pair; ``None``: as the scenario has it."""

    is_cut: bool = False
    delay_s: float | None = None
    rate_bps: float | None = None
    loss_ratio: float | None = None

    def on(self, link: Link, most_bps: float) -> Link:
        """Returns ``link`` with these settings, and a rate of at most ``most_bps``."""
        delay_s = link.delay_s if self.delay_s is None else self.delay_s
        loss_ratio = link.loss_ratio if self.loss_ratio is None else self.loss_ratio
        return Link(
            delay_s,
            min(link.rate_bps if self.rate_bps is None else self.rate_bps, most_bps),
            min(link.jitter_s, delay_s),
            1.0 if self.is_cut else loss_ratio,
        )


_NOTHING = _ByHand()


class LinkChanges:
    """Changes the links of ``network`` by ``change``, which returns the instant of the change.

    ``turn`` is held during a change. ``is_used`` returns whether any traffic passes between two nodes.
    """

    def __init__(
        self,
        experiment: Experiment,
        network: WholeNetwork,
        clock: Clock,
        change: Callable[[Mapping[Pair, Link]], Awaitable[float]],
        turn: Callable[[], AbstractAsyncContextManager[Any]],
        events: EventWriter,
        is_used: Callable[[Pair], bool] = lambda _: True,
    ) -> None:
        self._sites = experiment.sites
        self._network = network
        self._clock = clock
        self._change = change
        self._turn = turn
        self._events = events
        self._is_used = is_used
        self._planned: dict[Pair, Link] = {}
        self._by_hand: dict[Pair, _ByHand] = {}
        self._one_at_a_time = asyncio.Lock()

    def link(self, pair: Pair) -> Link:
        """Returns the present link of ``pair``."""
        planned = self._planned.get(pair) or self._network.links[pair]
        return self._by_hand.get(pair, _NOTHING).on(planned, self._network.most_bps.get(pair, math.inf))

    async def run(self, *, follows_courses: bool = False) -> None:
        """Carry out the scenario's changes, each at its time; returns after the last.

        ``follows_courses``: the network transmits what is queued by the planned changes. It learns at 0 when their time begins.
        """
        if follows_courses and self._network.changes:
            await self._clock.sleep_until_s(0.0)
            async with self._one_at_a_time, self._turn():
                changing = {pair for change in self._network.changes for pair in change.links}
                await self._change({pair: self.link(pair) for pair in sorted(changing)})
        for change in self._network.changes:
            await self._clock.sleep_until_s(change.at_s)
            async with self._one_at_a_time, self._turn():
                self._planned |= change.links
                links = {pair: self.link(pair) for pair in change.links}
                done_at_s = await self._change(links)
                otherwise = {pair: link for pair, link in links.items() if link != change.links[pair]}
                self._events.write(
                    LinksChanged(
                        at_s=done_at_s,
                        planned_at_s=change.at_s,
                        late_s=done_at_s - change.at_s,
                        why=change.why,
                        n_links=len(links),
                        by=BY_SCENARIO,
                        links=_rows(otherwise) if otherwise else UNSET,
                    )
                )

    async def by_hand(self, asked: ChangeLink) -> LinkChanged:
        """Carry out a change by hand. If it was not done, the result has the reason."""
        for name in (asked.a, asked.b):
            if not members_of(name, self._sites):
                return LinkChanged(why_not=unknown_place(name[:200], self._sites))
        if (why_not := _why_not(asked)) is not None:
            return LinkChanged(why_not=why_not)
        a, b = (members_of(name, self._sites) for name in (asked.a, asked.b))
        pairs = [pair for pair in between(a, b, self._network.links) if self._is_used(pair)]
        if not pairs:
            return LinkChanged(
                why_not=f"there is no link between {asked.a} and {asked.b} that any traffic uses"
            )
        async with self._one_at_a_time, self._turn():
            before = self._by_hand
            said = {pair: _said(before.get(pair, _NOTHING), asked) for pair in pairs}
            self._by_hand = {**before, **said}
            links = {pair: self.link(pair) for pair in pairs}
            asked_at_s = self._clock.now_s()
            try:
                done_at_s = await self._change(links)
            except TestbedError as error:  # the network cannot play such a link
                self._by_hand = before
                return LinkChanged(why_not=str(error))
            self._events.write(
                LinksChanged(
                    at_s=done_at_s,
                    planned_at_s=None,
                    late_s=None,
                    why=in_words(asked),
                    n_links=len(links),
                    by=BY_HAND,
                    asked_at_s=asked_at_s,
                    links=_rows(links),
                )
            )
        return LinkChanged(done_at_s, len(links))


def _said(before: _ByHand, asked: ChangeLink) -> _ByHand:
    if asked.action == "restore":
        return _NOTHING
    if asked.action == "cut":
        return replace(before, is_cut=True)
    return _ByHand(
        is_cut=False,
        delay_s=before.delay_s if asked.rtt_s is None else asked.rtt_s / 2,
        rate_bps=before.rate_bps if asked.rate_bps is None else asked.rate_bps,
        loss_ratio=before.loss_ratio if asked.loss_ratio is None else asked.loss_ratio,
    )


def _why_not(asked: ChangeLink) -> str | None:
    """Returns what is wrong with the values of a change; ``None`` if nothing is."""
    values = (asked.rtt_s, asked.rate_bps, asked.loss_ratio)
    if asked.action != "set":
        is_bare = values == (None, None, None)
        return None if is_bare else f"--rtt, --rate and --loss are only for set, not for {asked.action}"
    if values == (None, None, None):
        return "set needs at least one of --rtt, --rate and --loss"
    if asked.rtt_s is not None and not 0 <= asked.rtt_s <= DURATION.largest:
        return f"--rtt must be from 0 s to {DURATION.format(DURATION.largest)}"
    if asked.rate_bps is not None and not 1 <= asked.rate_bps <= RATE.largest:
        return f"--rate must be from 1 bit/s to {RATE.format(RATE.largest)}"
    if asked.loss_ratio is not None and not 0 <= asked.loss_ratio < 1:
        return "--loss must be from 0 to less than 1; `testbed link cut` loses everything"
    return None


def in_words(asked: ChangeLink) -> str:
    """Returns the change as events and the command state it."""
    if asked.action != "set":
        return f"link {asked.a} and {asked.b}: {asked.action} by hand"
    said = [f"RTT {DURATION.format(asked.rtt_s)}"] if asked.rtt_s is not None else []
    said += [f"rate {RATE.format(asked.rate_bps)}"] if asked.rate_bps is not None else []
    said += [f"loss {100 * asked.loss_ratio:g} %"] if asked.loss_ratio is not None else []
    return f"link {asked.a} and {asked.b}: {', '.join(said)} by hand"


def _rows(links: Mapping[Pair, Link]) -> list[LinkRow]:
    return [
        (*pair, link.delay_s, link.rate_bps, link.jitter_s, link.loss_ratio) for pair, link in links.items()
    ]


def link_change(
    action: str, a: str, b: str, rtt: str | None, rate: str | None, loss: str | None
) -> ChangeLink:
    """Returns the change for a command's arguments, which have units. Raises ``UserError``."""
    known = next((one for one in ACTIONS if one == action), None)
    if known is None:
        raise UserError(f"unknown action {action!r} for a link; use cut, restore or set")
    asked = ChangeLink(
        known,
        a,
        b,
        _parsed("--rtt", DURATION.parse, rtt),
        _parsed("--rate", RATE.parse, rate),
        _parsed("--loss", _loss, loss),
    )
    if (why_not := _why_not(asked)) is not None:
        raise UserError(why_not)
    return asked


def _loss(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return ratio(text)
    return ratio(number)


def _parsed(option: str, parse: Callable[[str], float], text: str | None) -> float | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise UserError(f"{option} {error}") from error
