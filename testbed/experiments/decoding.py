"""``[decoding]``: how clients draft tokens."""

from __future__ import annotations

from policies.decoding import Decoding
from testbed.experiments.problems import KeyedError
from testbed.experiments.schema import DecodingTable

_USUAL_TOKENS = 5


def resolve_decoding(
    table: DecodingTable | None, seed: int, longest_output: int
) -> tuple[DecodingTable | None, Decoding | None]:
    """Return the table with its defaults filled in, and how clients draft; both are None if they do not.

    ``longest_output`` is the most output tokens of a request. Raises ``KeyedError``.
    """
    if table is None:
        return None, None
    drafter = table.drafter
    if drafter == "none":
        return None, None
    tokens = table.tokens or _USUAL_TOKENS
    acceptance = table.acceptance
    if acceptance is None:
        raise KeyedError(
            ("decoding", "acceptance"),
            "is missing: the stub drafts no text, so give the share of drafted tokens that agree, such as 0.7",
        )
    if tokens > longest_output:
        raise KeyedError(
            ("decoding", "tokens"),
            f"is {tokens}, but no request has more than {longest_output} output tokens; draft fewer per round",
        )
    table = table.model_copy(update={"tokens": tokens, "draft_token": table.draft_token or 0.0})
    return table, Decoding(drafter, tokens, acceptance, table.draft_token or 0.0, seed)
