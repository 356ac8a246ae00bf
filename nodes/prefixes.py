"""Pages of attention caches that servers keep after their sessions have ended, for sessions that begin with the same tokens.

A page has the cache of ``page_tokens`` tokens in one range of blocks. Its id is a digest of its tokens and of all tokens
before them, so that equal ids mean equal caches. The hub, which knows the tokens, computes the ids; servers only compare
them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

PAGE_ID_BYTES = 8
MAX_PAGES = 4096
"""Pages of a prompt beyond these are not looked for."""


def page_ids(tokens: Sequence[int], page_tokens: int, most: int = MAX_PAGES) -> bytes:
    """Returns the ids of all whole pages of ``tokens``, one after another, but at most ``most``."""
    ids, last = [], b""
    for begin in range(0, min(len(tokens), most * page_tokens) - page_tokens + 1, page_tokens):
        page = array("q", tokens[begin : begin + page_tokens]).tobytes()
        last = blake2b(last + page, digest_size=PAGE_ID_BYTES).digest()
        ids.append(last)
    return b"".join(ids)


def split_ids(ids: bytes) -> list[bytes]:
    """Returns joined ids one by one."""
    return [ids[at : at + PAGE_ID_BYTES] for at in range(0, len(ids), PAGE_ID_BYTES)]


def reusable(n_tokens: int, page_tokens: int) -> int:
    """Returns how many whole pages a prompt may find: its last token is always computed, for the first output token."""
    return (n_tokens - 1) // page_tokens


class Page(NamedTuple):
    """A kept page of the cache of blocks ``[first, last)``."""

    first: int
    last: int
    id: bytes


class KeptPages:
    """Which pages a server keeps, by use; sizes in bytes.

    A page that open sessions use stays. The others are evicted for room, the least recently used first, and of one
    session's the last first: no page can be found without those before it. ``on_evicted`` is called with each.
    """

    def __init__(self, page_tokens: int, on_evicted: Callable[[Page], None] | None = None) -> None:
        self.page_tokens = page_tokens
        self._on_evicted = on_evicted
        self._n_uses: dict[Page, int] = {}
        self._idle: OrderedDict[Page, float] = OrderedDict()
        self.idle_bytes = 0.0
        self.n_queries = self.n_hits = 0
        """Tokens of prompts that were looked for, and those that were found."""

    def __contains__(self, page: Page) -> bool:
        return page in self._idle or page in self._n_uses

    def __len__(self) -> int:
        return len(self._idle) + len(self._n_uses)

    def find(self, first: int, last: int, ids: Iterable[bytes]) -> list[Page]:
        """Returns the longest beginning of ``ids`` that is there."""
        found = []
        for each in ids:
            page = Page(first, last, each)
            if page not in self:
                break
            found.append(page)
        return found

    @property
    def n_used(self) -> int:
        """How many pages open sessions use."""
        return len(self._n_uses)

    def n_idle(self, pages: Iterable[Page]) -> int:
        """Returns how many of ``pages`` no session uses."""
        return sum(page in self._idle for page in pages)

    def use(self, pages: Iterable[Page]) -> None:
        """Notes that one more session uses ``pages``, which are there."""
        for page in pages:
            if page in self._idle:
                page_bytes = self._idle.pop(page)
                self.idle_bytes = self.idle_bytes - page_bytes if self._idle else 0.0
            self._n_uses[page] = self._n_uses.get(page, 0) + 1

    def leave(self, pages: Sequence[Page], page_bytes: float) -> int:
        """Notes that one session less uses ``pages`` of ``page_bytes`` each. Returns how many nobody uses now."""
        n_idle = 0
        for page in reversed(pages):
            self._n_uses[page] -= 1
            if not self._n_uses[page]:
                del self._n_uses[page]
                self._idle[page] = page_bytes
                self.idle_bytes += page_bytes
                n_idle += 1
        return n_idle

    def keep(self, pages: Sequence[Page], page_bytes: float) -> None:
        """Adds those of ``pages`` that are not there, and marks all as the most recently used."""
        for page in reversed(pages):
            if page in self._idle:
                self._idle.move_to_end(page)
            elif page not in self._n_uses:
                self._idle[page] = page_bytes
                self.idle_bytes += page_bytes

    def fit(self, n_bytes: float) -> None:
        """Evicts pages until those that nobody uses have at most ``n_bytes``."""
        while self._idle and self.idle_bytes > n_bytes:
            page, page_bytes = self._idle.popitem(last=False)
            self._evicted(page, page_bytes)

    def drop(self, holds: Callable[[int, int], bool]) -> None:
        """Evicts the pages that nobody uses of blocks that are not held any more."""
        for page in [page for page in self._idle if not holds(page.first, page.last)]:
            self._evicted(page, self._idle.pop(page))

    def _evicted(self, page: Page, page_bytes: float) -> None:
        self.idle_bytes = self.idle_bytes - page_bytes if self._idle else 0.0
        if self._on_evicted is not None:
            self._on_evicted(page)


class HubHistory:
    """The inputs of hops that a hub keeps after its sessions: a hop that has lost a page is filled with them.

    They are kept by the block that they enter and the page's id, at most ``most_bytes`` of hidden states; the least recently
    used go first.
    """

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = most_bytes
        self._pages: OrderedDict[tuple[int, bytes], tuple[bytes, int]] = OrderedDict()
        self._n_bytes = 0

    def pages(self, first: int, ids: Iterable[bytes]) -> list[bytes]:
        """Returns what ``add`` got of the longest beginning of ``ids`` that is there, before block ``first``."""
        found = []
        for each in ids:
            page = self._pages.get((first, each))
            if page is None:
                break
            self._pages.move_to_end((first, each))
            found.append(page[0])
        return found

    def reach(
        self, found: Mapping[int, int], ids: Sequence[bytes], size: int
    ) -> tuple[int, dict[int, list[bytes]]]:
        """Returns how many tokens of a prompt all hops of a chain can have, and the inputs of those that each lacks.

        ``found``: how many tokens each hop has found, by its first block. ``ids`` are those of the prompt's pages of ``size`` tokens.
        """
        kept = {first: self.pages(first, ids[n_found // size :]) for first, n_found in found.items()}
        reached = min(n_found + size * len(kept[first]) for first, n_found in found.items())
        lacking = {
            first: kept[first][: max(0, reached - n_found) // size] for first, n_found in found.items()
        }
        return reached, {first: pages for first, pages in lacking.items() if pages}

    def begins_at(self, first: int, ids: Sequence[bytes], n_reused: int) -> tuple[int, list[bytes]]:
        """Returns where the inputs of a hop begin that the hub has after ``n_reused`` tokens were reused, and those before."""
        known = self.pages(first, ids)
        return (0, known) if len(known) == len(ids) else (n_reused, [])

    def add(self, first: int, page_id: bytes, inputs: bytes, n_bytes: int) -> None:
        """Keeps ``inputs``, as ``HubModel.remember`` returns them, of hidden states of ``n_bytes``."""
        _, before = self._pages.pop((first, page_id), (b"", 0))
        self._pages[first, page_id] = inputs, n_bytes
        self._n_bytes += n_bytes - before
        while self._n_bytes > self._most_bytes:
            self._n_bytes -= self._pages.popitem(last=False)[1][1]
