"""Speculative decoding: how many tokens a client drafts per round, and how many of them the model confirms.

A round begins with one token that the servers have not seen. The client drafts more tokens after it and sends all of
them in one step. The model's own tokens show how many drafted ones agree: those are kept, and after them the model's
token. The servers go back to the end of what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

Drafter = Literal["ngram", "model", "petals"]
_MASK = (1 << 64) - 1


class Round(NamedTuple):
    """One round: ``drafted`` tokens, ``accepted`` of them, and ``made`` output tokens in all.

    ``sent`` hidden states go through the chain in one step.
    """

    drafted: int
    accepted: int
    made: int
    sent: int


ONE_TOKEN = Round(0, 0, 1, 1)
"""A step without drafting."""
MOST_TOKENS = 16
"""Most tokens that are drafted per round where their number is chosen."""


RoundTimes = tuple[float, ...]
"""Seconds of a session's round on its chain, by the number of drafted tokens, from 0; empty: they are not known."""


@dataclass(slots=True)
class Seen:
    """What a session has seen of its drafts: ``n_tested`` drafted tokens were compared, of which some agreed."""

    n_accepted: int = 0
    n_tested: int = 0

    def add(self, n_drafted: int, n_accepted: int) -> None:
        """Counts a round. Of its drafted tokens, those after the first that differs were not compared."""
        self.n_accepted += n_accepted
        self.n_tested += min(n_accepted + 1, n_drafted)


@dataclass(frozen=True)
class Decoding:
    """How clients draft: ``tokens`` per round, each in ``draft_token_s`` seconds of the client.

    Where drafts are not computed, each agrees with the probability ``acceptance``, drawn from ``seed``, the request
    and the token's number: so the same tokens agree in every engine, whatever the number of tokens per round.

    ``drafter`` "petals" follows PETALS: it keeps the agreeing tokens only, or the model's token if none agrees. So it
    need not send the last drafted token.

    ``rates`` has the probability of each drafted token of a round, if all before it agree, where these differ; the last
    one is that of all further tokens. ``acceptance`` is their mean then.

    With ``is_auto``, ``tokens`` is the most that a session drafts: see ``best_tokens``. It expects ``acceptance``, which counts
    for ``acceptance_weight`` drafted tokens beside those that it has seen. Much weight costs a session that expects the wrong
    acceptance up to a tenth of its time; little weight lets one give up for ever where drafts that pay begin badly.

    ``in_flight``: at most so many rounds of a session are on their way through the chain at a time; those behind the first are
    drafted on the guess that all drafted tokens before them agree. What a round is expected to cost does not count on them.
    """

    drafter: Drafter
    tokens: int
    acceptance: float
    draft_token_s: float = 0.0
    seed: int = 0
    is_auto: bool = False
    rates: tuple[float, ...] = ()
    in_flight: int = 1
    acceptance_weight: float = 1.0

    @property
    def is_petals(self) -> bool:
        return self.drafter == "petals"

    def n_drafted(self, n_left: int, round_s: RoundTimes, seen: Seen) -> int:
        """Returns how many tokens to draft for a request that lacks ``n_left`` >= 1 output tokens.

        No more than it can use: the model adds one of its own to them, except under PETALS' rule. ``round_s`` and ``seen``
        are the session's: see ``best_tokens``.
        """
        most = self.tokens
        if self.is_auto:
            known = self.acceptance * self.acceptance_weight + seen.n_accepted
            most = self.best_tokens(round_s, known / (self.acceptance_weight + seen.n_tested))
        return min(most, n_left if self.is_petals else n_left - 1)

    def best_tokens(self, round_s: RoundTimes, acceptance: float) -> int:
        """Returns how many drafted tokens per round, 0 to ``tokens``, make most tokens per second."""
        if not round_s:
            return self.tokens
        law = self if self.rates else replace(self, acceptance=acceptance)
        return max(range(self.tokens + 1), key=lambda n: law.expected_tokens(n) / round_s[n])

    def n_sent(self, n_drafted: int) -> int:
        """Returns how many hidden states a round with ``n_drafted`` drafted tokens sends."""
        return max(n_drafted, 1) if self.is_petals else n_drafted + 1

    def n_made(self, n_accepted: int) -> int:
        """Returns how many output tokens a round makes of which ``n_accepted`` drafted tokens agree."""
        return max(n_accepted, 1) if self.is_petals else n_accepted + 1

    def kept(self, chosen: Sequence[int], drafted: Sequence[int]) -> tuple[int, list[int]]:
        """Returns how many of ``drafted`` agree, and the round's output tokens: those, and the model's after them.

        ``chosen`` are the model's tokens, the first of which is compared with the first drafted one. Under PETALS'
        rule the model's token counts only if none agrees.
        """
        n_accepted = 0
        while n_accepted < len(drafted) and chosen[n_accepted] == drafted[n_accepted]:
            n_accepted += 1
        return n_accepted, list(chosen[: self.n_made(n_accepted)])

    def rate(self, number: int) -> float:
        """Returns the probability that drafted token ``number`` of a round agrees, from 0, if those before it do."""
        return self.rates[min(number, len(self.rates) - 1)] if self.rates else self.acceptance

    def agrees(self, request: int, token: int, number: int) -> bool:
        """Returns whether output token ``token`` of ``request`` agrees as drafted token ``number`` of a round, as drawn."""
        mixed = ((self.seed * 0x9E3779B97F4A7C15 + request) * 0xD1342543DE82EF95 + token) & _MASK
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # as splitmix64
            mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK
        return (mixed ^ (mixed >> 31)) < self.rate(number) * 2**64

    def drawn(self, request: int, n_done: int, drafted: int) -> Round:
        """Returns a round of ``request`` after ``n_done`` output tokens with ``drafted`` tokens, by drawn agreement."""
        accepted = 0
        while accepted < drafted and self.agrees(request, n_done + accepted, accepted):
            accepted += 1
        return Round(drafted, accepted, self.n_made(accepted), self.n_sent(drafted))

    def expected_tokens(self, n_drafted: int | None = None) -> float:
        """Returns the mean output tokens of a round with ``n_drafted`` drafted tokens (``None``: ``tokens``).

        (1 - a^(g+1)) / (1 - a) for acceptance a and g drafted tokens; under PETALS' rule a + … + a^g, and 1 - a for
        the model's token if none agrees.
        """
        kept, odds = 0.0, 1.0
        for number in range(self.tokens if n_drafted is None else n_drafted):
            odds *= self.rate(number)
            kept += odds
        if self.is_petals:
            return kept + (1 - self.rate(0)) if n_drafted != 0 else 1.0
        return kept + 1


def measured_rates(accepted: Sequence[int]) -> tuple[float, ...]:
    """Returns ``Decoding.rates`` of measured rounds, each with the number of drafted tokens that agreed.

    The largest number is taken for that of drafted tokens: of a round with so many, nothing is known beyond.
    """
    at_least = [sum(n >= number for n in accepted) for number in range(max(accepted) + 1)]
    rates = tuple(more / n for n, more in pairwise(at_least))
    return rates or (0.0,)
