"""Admission without clock, connections or asyncio: what a server admits, and how often a client tries.

Servers and sessions use these machines, and so does the fast engine: both decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from nodes.cache import ROUNDING, CacheAccount, NoCapacityError
from nodes.clock import on_tick
from nodes.prefixes import KeptPages, Page
from nodes.request import SessionError
from nodes.wire import NEVER_FITS, NO_CAPACITY
from policies.rules import MAX_ATTEMPTS, PagingRules

Key = TypeVar("Key", bound=Hashable)
NO_ROUTE = "no route covers the model"
"""Why an attempt failed for which there was no chain."""


@dataclass(frozen=True)
class HostedBlocks:
    """The blocks ``[first, last)`` that a server holds, and the attention cache for sessions on them (bytes).

    ``paging`` ``None``: all cache that a session may need is reserved when it opens. ``kept_tokens``: tokens of a page that
    is kept for later sessions; ``None``: none is. ``copies_kept``: a session has caches of its own for what it finds in kept
    pages, too.
    """

    first: int
    last: int
    cache_bytes: float
    cache_bytes_per_token: float
    """Attention cache of one token in one block."""
    paging: PagingRules | None = None
    kept_tokens: int | None = None
    copies_kept: bool = False

    def holds(self, first: int, last: int) -> bool:
        """Returns whether blocks ``[first, last)`` are here, at least one."""
        return self.first <= first < last <= self.last


class Need(NamedTuple):
    """What a session needs in each block: cache for ``first_tokens`` at once, for ``most_tokens`` in the end.

    ``came`` is (arrival of its request, name). Of requests that arrived at the same time, the one with the
    greater name counts as the later one.
    """

    first_tokens: int
    most_tokens: int
    came: tuple[float, str] = (0.0, "")


class Refused(NamedTuple):
    """Why a server refused a session.

    ``is_final``: the session can never fit, and the server has never moved.
    """

    reason: str
    is_final: bool

    @property
    def code(self) -> str:
        """The error's code on the wire."""
        return NEVER_FITS if self.is_final else NO_CAPACITY


@dataclass(slots=True)
class _Held:
    """A session's blocks ``[first, last)``. It has cache for ``cached_tokens`` now, of which it shares ``pages``."""

    first: int
    last: int
    need: Need
    cached_tokens: int
    pages: list[Page] = field(default_factory=list)


class Admission(Generic[Key]):
    """What one server offers new sessions (blocks, room for caches), and what its sessions hold.

    ``on_change(n_bytes)`` is called whenever cache is reserved or, below 0, released;
    ``on_preempted(session)`` when a session has lost its cache to one whose request arrived earlier, and
    ``on_evicted(page)`` when a kept page has lost its room to a session.

    Kept pages are free room: they are evicted for sessions. Those that sessions use count once, however many use them.
    """

    def __init__(
        self,
        hosted: HostedBlocks,
        on_preempted: Callable[[Key], None],
        on_change: Callable[[float], None] | None = None,
        on_evicted: Callable[[Page], None] | None = None,
    ) -> None:
        self.hosted = hosted
        """What new sessions can have."""
        self.has_moved = False
        """Whether it has ever offered other blocks: then clients may ask for some that it no longer has."""
        self.account = CacheAccount(hosted.cache_bytes)
        self.kept = None if hosted.kept_tokens is None else KeptPages(hosted.kept_tokens, on_evicted)
        """Pages of ended sessions; ``None``: none is kept."""
        self._held: dict[Key, _Held] = {}
        self._leaves = False
        self._on_preempted = on_preempted
        self._on_change = on_change

    def admit(
        self, session: Key, first: int, last: int, need: Need, pages: Sequence[bytes] = ()
    ) -> Refused | None:
        """Reserves cache for ``session`` on blocks ``[first, last)``; it shares those of ``pages`` (ids) that are kept.

        Returns the reason if it is refused, else ``None``.
        """
        hosted = self.hosted
        if not hosted.holds(first, last):
            return Refused("its blocks are not here any more", False)
        found = [] if self.kept is None else self.kept.find(first, last, pages)
        try:
            n_bytes = self._reserve(session, first, last, need, found)
        except NoCapacityError as error:
            if not (found and hosted.copies_kept):
                return self.refusal(str(error), first, last, need)
            try:  # without the pages, which lose their room to it
                n_bytes = self._reserve(session, first, last, need, [])
            except NoCapacityError as still:
                return self.refusal(str(still), first, last, need)
        if self.kept is not None:
            self.kept.n_queries += self.kept.page_tokens * len(pages)
            self.kept.n_hits += self.found_tokens(session)
            self._fit()
        if self._on_change:
            self._on_change(n_bytes)
        return None

    def _reserve(self, session: Key, first: int, last: int, need: Need, found: list[Page]) -> float:
        """Reserves a new session's cache beside the kept pages ``found``.

        Returns the bytes that are in use more than before. Raises ``NoCapacityError``.
        """
        hosted, n_tokens, shared_bytes = self.hosted, need.most_tokens, 0.0
        each_bytes = hosted.cache_bytes_per_token * (last - first)
        if hosted.paging is not None:
            n_tokens = hosted.paging.paged(need.first_tokens, n_tokens)
        own_bytes = each_bytes * n_tokens
        if self.kept is not None and found:
            page_bytes = each_bytes * self.kept.page_tokens
            shared_bytes = page_bytes * self.kept.n_idle(found)
            if not hosted.copies_kept:
                own_bytes -= page_bytes * len(found)
        if hosted.paging is not None:
            most_bytes = each_bytes * need.most_tokens
            self.account.leave_room(own_bytes + shared_bytes, most_bytes, hosted.paging.high_water)
        self.account.shared_bytes += shared_bytes
        try:
            self.account.reserve(session, own_bytes)
        except NoCapacityError:
            self.account.shared_bytes -= shared_bytes
            raise
        self._held[session] = _Held(first, last, need, n_tokens, found)
        if self.kept is not None:
            self.kept.use(found)
        return own_bytes + shared_bytes

    def found_tokens(self, session: Key) -> int:
        """Returns how many tokens of its prompt ``session`` found in kept pages."""
        held = self._held.get(session)
        return 0 if held is None else len(held.pages) * (self.hosted.kept_tokens or 0)

    def keep(self, session: Key, pages: Sequence[bytes]) -> list[tuple[int, Page]]:
        """As ``release``, but keeps its cache of ``pages`` (their ids, from its first token on) for later sessions.

        Returns the pages that are kept now and were not before, each with its number in the session.
        """
        held = self._held.get(session)
        assert held is not None and self.kept is not None, "it has a session, and keeps pages"
        whole = [Page(held.first, held.last, each) for each in pages]
        new = [(number, page) for number, page in enumerate(whole) if page not in self.kept]
        self.release(session)
        page_bytes = self.hosted.cache_bytes_per_token * (held.last - held.first) * self.kept.page_tokens
        self.kept.keep(whole, page_bytes)
        self._fit()
        return [(number, page) for number, page in new if page in self.kept]

    def _fit(self) -> None:
        """Evicts kept pages that have no room beside the sessions."""
        if self.kept is not None:
            self.kept.fit(self.account.capacity_bytes - self.account.used_bytes)

    def refusal(self, reason: str, first: int, last: int, need: Need) -> Refused:
        """Returns the refusal of such a session for ``reason``."""
        most_bytes = self.hosted.cache_bytes_per_token * (last - first) * need.most_tokens
        return Refused(reason, not self.has_moved and most_bytes > self.hosted.cache_bytes * ROUNDING)

    def grow(self, session: Key, n_tokens: int) -> bool:
        """Reserves cache for ``n_tokens`` in total; sessions whose requests arrived last are preempted for it.

        Returns False if ``session`` has no cache here, because it was itself preempted now or before.
        """
        held, paging = self._held.get(session), self.hosted.paging
        if held is None or paging is None or n_tokens <= held.cached_tokens:
            return held is not None
        wanted = paging.paged(n_tokens, held.need.most_tokens)
        each_bytes = self.hosted.cache_bytes_per_token * (held.last - held.first)
        more_bytes = each_bytes * (wanted - held.cached_tokens)
        if not self.account.make_room(session, more_bytes, self._came, self._preempt):
            return False
        self._fit()
        held.cached_tokens = wanted
        if self._on_change:
            self._on_change(more_bytes)
        return True

    def go_back(self, session: Key, n_tokens: int) -> None:
        """Releases the pages that ``session`` does not need for ``n_tokens``, if it has more."""
        held, paging = self._held.get(session), self.hosted.paging
        if held is None or paging is None:
            return
        wanted = paging.paged(n_tokens, held.need.most_tokens)
        if wanted >= held.cached_tokens:
            return
        each_bytes = self.hosted.cache_bytes_per_token * (held.last - held.first)
        less_bytes = each_bytes * (held.cached_tokens - wanted)
        self.account.shrink(session, less_bytes)
        held.cached_tokens = wanted
        if self._on_change:
            self._on_change(-less_bytes)

    def _came(self, session: Key) -> tuple[float, str]:
        return self._held[session].need.came

    def _preempt(self, session: Key) -> None:
        self.release(session)
        self._on_preempted(session)

    def cached_tokens(self, session: Key) -> int:
        """Returns the tokens for which ``session`` has cache; 0 if it has none here."""
        held = self._held.get(session)
        return 0 if held is None else held.cached_tokens

    def release(self, session: Key) -> None:
        """Releases what ``session`` holds, if anything."""
        held = self._held.pop(session, None)
        if held is None:
            return
        n_bytes = self.account.held_bytes(session)
        self.account.release(session)
        if held.pages and self.kept is not None:
            page_bytes = self.hosted.cache_bytes_per_token * (held.last - held.first) * self.kept.page_tokens
            shared_bytes = page_bytes * self.kept.leave(held.pages, page_bytes)
            left_bytes = self.account.shared_bytes - shared_bytes
            self.account.shared_bytes = left_bytes if self.kept.n_used else 0.0
            n_bytes += shared_bytes
            self._fit()
        if self._on_change:
            self._on_change(-n_bytes)

    def offer(self, first: int, last: int, cache_bytes: float) -> None:
        """Offer new sessions these blocks and this room from now on; those that are there stay."""
        self.has_moved = True
        self.hosted = replace(self.hosted, first=first, last=last, cache_bytes=cache_bytes)
        if not self._leaves:
            self.account.capacity_bytes = cache_bytes
        if self.kept is not None:
            self.kept.drop(self.hosted.holds)
            self._fit()

    def leave(self) -> None:
        """Refuses new sessions from now on, whatever is offered later. Open sessions keep their cache."""
        self._leaves = True
        self.account.capacity_bytes = 0.0
        self._fit()

    def leaving(self) -> list[Key]:
        """Returns the sessions that cannot stay: their blocks go, or earlier sessions use up the room."""
        leaving, used_bytes = [], self.account.shared_bytes
        for session, held in self._held.items():
            n_bytes = self.account.held_bytes(session)
            has_room = used_bytes + n_bytes <= self.hosted.cache_bytes * ROUNDING
            if has_room and self.hosted.holds(held.first, held.last):
                used_bytes += n_bytes
            else:
                leaving.append(session)
        return leaving


class Attempts:
    """A client's attempts to open one session, after its request's arrival or a preemption at ``since_s``.

    ``waits_s`` yields the seconds after each refusal. The client gives up ``give_up_s`` after ``since_s``. 0:
    it waits for room for ever, but gives up ``final_give_up_s`` after ``since_s`` where waiting may never
    help. ``most`` is how many attempts there are at all.
    """

    def __init__(
        self,
        waits_s: Iterator[float],
        since_s: float,
        give_up_s: float,
        final_give_up_s: float,
        most: int = MAX_ATTEMPTS,
    ) -> None:
        self.since_s = since_s
        self._waits_s = waits_s
        self._give_up_s = give_up_s
        self._final_give_up_s = final_give_up_s
        self._most = most
        self.n = 0
        """How many have failed."""

    def failed(self, now_s: float, reason: str, *, is_final: bool) -> float:
        """Returns how many seconds to wait after an attempt that failed at ``now_s``.

        ``is_final``: it may be no help to wait for other sessions to end. Raises ``SessionError`` if the
        client gives up.
        """
        self.n += 1
        give_up_s, wait_s = self._give_up_s, next(self._waits_s)
        if is_final:
            give_up_s = give_up_s or self._final_give_up_s
        if give_up_s and now_s + wait_s > self.since_s + give_up_s:
            raise SessionError(f"no room at the last attempt within {give_up_s:g} s ({reason})")
        if self.n >= self._most:
            raise SessionError(f"{self.n} attempts to open a session failed ({reason})")
        return wait_s


def name_of_attempt(name: str, number: int) -> str:
    """Returns the name of a session in attempt ``number`` from 0: servers may still hold an earlier one's."""
    return f"{name}.{number}" if number else name


def ready_at_s(asked_at_s: float, opened_at_s: float, initial_delay_s: float, setup_s: float) -> float:
    """Returns when the prompt can be sent: opening takes ``initial_delay_s`` or longer, and setup follows."""
    return on_tick(max(opened_at_s, asked_at_s + initial_delay_s) + setup_s)
