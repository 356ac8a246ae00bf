"""Rounds of speculative decoding that are on their way through one chain at the same time.

While a round is away, the client drafts the next one on the guess that all tokens of the first agree, and sends it behind
(PipeInfer's idea, over a wide-area network). To every hop a round is sent after the one before it. If the guess was wrong, the
client gives up all rounds behind, and the next step makes the servers go back. What a server computes of a round that was given
up ends before its next block, but where it is part of a batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from nodes.records import HopRecord

Answer = tuple[bytes, list[HopRecord]]
"""The last block's hidden states of a round, and a record per message."""


class Round:
    """A step on its way: ``n_tokens`` hidden states from ``position`` on, of which ``n_drafted`` are drafted."""

    def __init__(self, position: int, n_tokens: int, n_drafted: int, payload: bytes) -> None:
        self.position = position
        self.n_tokens = n_tokens
        self.n_drafted = n_drafted
        self.payload = payload
        self.before: Round | None = None
        """The round that is sent to every hop before it; ``None``: it is the oldest."""
        self.work: asyncio.Task[Answer] | None = None
        self._n_left = self._n_passed = 0
        self._changed = asyncio.Event()

    @property
    def end(self) -> int:
        """The position after its tokens."""
        return self.position + self.n_tokens

    def left(self, at: int) -> None:
        """Notes that it has been sent to hop number ``at``."""
        self._n_left = at + 1
        self._changed.set()

    def passed(self, at: int) -> None:
        """Notes that it has come back from hop number ``at``."""
        self._n_passed = at + 1
        self._changed.set()

    def ended(self) -> None:
        """Notes that it is not away any more."""
        self._changed.set()

    async def has_way(self, at: int) -> None:
        """Waits until it may go to hop number ``at``."""
        while (before := self.before) is not None and before._n_left <= at:
            await before._change()

    async def comes_behind(self, at: int) -> None:
        """Waits until the round before it has come back from hop number ``at``. Small answers overtake large ones."""
        while (before := self.before) is not None and before._n_passed <= at:
            await before._change()

    async def is_oldest(self) -> None:
        """Waits until the rounds before it have ended."""
        while (before := self.before) is not None:
            await before._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Rounds:
    """The rounds of a session, at most ``most`` at a time.

    ``draft(behind)`` makes the next round, behind the round ``behind`` or after all tokens so far; ``None`` if there is none
    to be sent ahead. ``goes_on`` says whether the oldest that was drafted ahead follows the tokens so far. ``step`` sends a
    round through the chain. ``void(n, position, n_kept)`` is called when ``n`` rounds have been given up: the chain goes back
    to ``position``, and what was drafted is forgotten but for the oldest ``n_kept`` rounds.
    """

    def __init__(
        self,
        most: int,
        draft: Callable[[Round | None], Coroutine[Any, Any, Round | None]],
        goes_on: Callable[[], bool],
        step: Callable[[Round], Coroutine[Any, Any, Answer]],
        void: Callable[[int, int, int], None],
    ) -> None:
        self._most = most
        self._draft = draft
        self._goes_on = goes_on
        self._step = step
        self._void = void
        self._away: deque[Round] = deque()
        self._ahead: asyncio.Task[Round | None] | None = None
        """Drafts the next round while others are away."""
        self._stays_alone = False
        """Whether nothing more is sent behind the oldest round."""
        self._n_given_up = 0
        """Rounds that were sent in vain behind the oldest one."""

    @property
    def overlap(self) -> bool:
        """Whether several may be away at a time."""
        return self._most > 1

    async def next(self) -> tuple[Round, Answer]:
        """Returns the next round and its answer."""
        if not self._away and self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            round_ = await ahead
            if round_ is not None and self._goes_on():
                self._send(round_)
            else:
                self._void(0, 0, 0)
        if not self._away:
            round_ = await self._draft(None)
            assert round_ is not None, "a session that has no token more to make has ended"
            if not self.overlap:
                return round_, await self._step(round_)
            self._send(round_)
        oldest = self._away[0]
        return oldest, await self._answer(oldest)

    async def _answer(self, oldest: Round) -> Answer:
        """Waits for the answer to the oldest round; drafts others meanwhile, and sends them as far as they may be away."""
        assert oldest.work is not None, "it was sent"
        while True:
            if self._ahead is None and not self._stays_alone:
                self._ahead = asyncio.ensure_future(self._draft(self._away[-1]))
            waits: list[asyncio.Task[Any]] = [oldest.work]
            if self._ahead is not None and not self._ahead.done():
                waits.append(self._ahead)
            elif self._ahead is not None and len(self._away) < self._most:
                ahead, self._ahead = self._ahead.result(), None
                if ahead is None:
                    self._stays_alone = True
                else:
                    self._send(ahead)
                continue
            # Maybe since before: the client computed what the round before it had made.
            if oldest.work.done():
                return oldest.work.result()
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def _send(self, round_: Round) -> None:
        round_.before = self._away[-1] if self._away else None
        self._away.append(round_)
        round_.work = asyncio.ensure_future(self._step(round_))

    async def taken(self, round_: Round, *, all_agreed: bool) -> int:
        """Notes that the tokens of the oldest round are known: gives up what was drafted on a wrong guess.

        Returns how many rounds that were behind it have been given up.
        """
        if self._away:
            self._away.popleft()
            self._stays_alone = False
            if not all_agreed or (self._away and not self._goes_on()):
                await self._give_up(round_.end, 0)
            if self._away:
                self._away[0].before = None
            round_.ended()
        given_up, self._n_given_up = self._n_given_up, 0
        return given_up

    async def alone(self, round_: Round) -> None:
        """Waits until ``round_``, which has lost a hop, is the oldest; then gives up those behind it and sends no more."""
        if not self.overlap:
            return
        await round_.is_oldest()
        self._stays_alone = True
        await self._give_up(round_.end, 1)

    async def _give_up(self, position: int, n_kept: int) -> None:
        """Gives up the rounds that are away, but for the oldest ``n_kept``, and what is drafted ahead: see ``void``."""
        n_given_up = len(self._away) - n_kept
        await self.end(n_kept)
        self._n_given_up += n_given_up
        self._void(n_given_up, position, n_kept)

    async def end(self, n_kept: int = 0) -> None:
        """Waits no more for what is away, but for the oldest ``n_kept`` rounds, and drafts nothing more."""
        away = list(self._away)
        ended: list[asyncio.Task[Any]] = [each.work for each in away[n_kept:] if each.work is not None]
        if self._ahead is not None:
            ended.append(self._ahead)
        self._away, self._ahead = deque(away[:n_kept]), None
        for work in ended:
            work.cancel()
        if ended:
            await asyncio.gather(*ended, return_exceptions=True)
