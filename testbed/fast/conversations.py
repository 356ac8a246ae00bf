"""What outlives a request: the next turn of its conversation, its tokens, and the inputs that its hub keeps.

Servers keep caches by their own code (``nodes.admission``), and hubs inputs by theirs (``nodes.prefixes``).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from nodes.prefixes import MAX_PAGES, HubHistory, page_ids, reusable, split_ids
from nodes.request import known_answer, made_up_prompt
from policies.problem import Hop
from policies.workload import RequestPlan
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import kept_tokens

_OUTPUT_BYTES = 6
"""Of the number with which a request's output tokens begin: less than a signed token has."""


class Conversations:
    """The conversations of a run. ``hold_s``: how long a chain stays open for the next turn; ``None``: it is closed.

    ``page_tokens``: tokens of a page that servers keep; ``None``: they keep none.
    """

    def __init__(self, experiment: Experiment) -> None:
        prefix, requests = experiment.compute.prefix, experiment.workload.requests
        self.hold_s = prefix.hold_s if prefix is not None and prefix.kind == "session" else None
        self._session_tokens = 0 if prefix is None else prefix.session_tokens
        self.page_tokens = kept_tokens(experiment)
        self._next = {r.turn.after: r for r in requests if r.turn is not None and r.turn.after is not None}
        self._tokens: dict[int, list[int]] = {}
        """Of requests that have not ended, and of those that another turn follows: known only where pages are kept."""
        self.histories: list[HubHistory] = []
        """By client; none if hubs keep nothing."""
        if prefix is not None and prefix.history_bytes:
            self.histories = [HubHistory(prefix.history_bytes) for _ in experiment.problem.clients]
        self._token_bytes = experiment.problem.model.token_bytes

    @property
    def outlive(self) -> bool:
        """Whether any cache outlives its request."""
        return self.hold_s is not None or self.page_tokens is not None

    def after(self, index: int) -> RequestPlan | None:
        """Returns the turn after request ``index``, if there is one."""
        return self._next.get(index)

    def reserved_tokens(self, plan: RequestPlan) -> int:
        """Returns the tokens that servers reserve cache for (``nodes.request.Request.n_reserved_tokens``)."""
        return max(plan.known.n_tokens, 0 if plan.turn is None else self._session_tokens)

    def prompt_pages(self, plan: RequestPlan) -> list[bytes]:
        """Returns the ids of the prompt's pages that servers may have kept."""
        if (size := self.page_tokens) is None:
            return []
        before = None if plan.turn is None or plan.turn.after is None else self._tokens.pop(plan.turn.after)
        self._tokens[plan.index] = tokens = made_up_prompt(plan, before or ())
        return split_ids(page_ids(tokens, size, min(MAX_PAGES, reusable(len(tokens), size))))

    def all_pages(self, plan: RequestPlan) -> list[bytes] | None:
        """Returns the ids of all pages of a request that has ended, which servers may keep; ``None``: they keep none.

        No output is computed here: equal prompts have equal ones, and others have others, unless it is known.
        """
        if (size := self.page_tokens) is None:
            return None
        tokens = self._tokens[plan.index] if plan.index in self._next else self._tokens.pop(plan.index)
        digest = blake2b(array("q", tokens).tobytes(), digest_size=_OUTPUT_BYTES).digest()
        first = -1 - (int.from_bytes(digest) << 8)
        known = known_answer(plan)
        tokens += known
        tokens += range(first, first - (plan.n_output_tokens - len(known)), -1)
        return split_ids(page_ids(tokens[:-1], size))

    def fill(
        self, client: int, found: Mapping[int, int], pages: Sequence[bytes]
    ) -> tuple[int, dict[int, int]]:
        """Returns how many tokens of a prompt are not computed, and how many the hub must send each hop for it.

        ``found``: how many tokens each hop has found, by its first block.
        """
        if self.page_tokens is None or not self.histories:
            return min(found.values()), {}
        size = self.page_tokens
        reached, lacking = self.histories[client].reach(found, pages, size)
        return reached, {first: size * len(inputs) for first, inputs in lacking.items()}

    def begins(self, client: int, hops: Sequence[Hop], pages: Sequence[bytes], n_reused: int) -> list[int]:
        """Returns where the inputs begin that the hub has of each hop."""
        if self.page_tokens is None or not self.histories or not n_reused:
            return [0] * len(hops)
        ids, history = pages[: n_reused // self.page_tokens], self.histories[client]
        return [0, *(history.begins_at(hop.first, ids, n_reused)[0] for hop in hops[1:])]

    def remember(
        self, client: int, hops: Sequence[Hop], begins: Sequence[int], pages: Sequence[bytes]
    ) -> None:
        """Lets the hub keep the inputs of hops, from where each begins."""
        if self.page_tokens is None or not self.histories:
            return
        for hop, begins_at in zip(hops, begins, strict=True):
            for number, page_id in enumerate(pages):
                if number * self.page_tokens >= begins_at:
                    self.histories[client].add(hop.first, page_id, b"", self.page_tokens * self._token_bytes)
