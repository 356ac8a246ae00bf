"""``[decoding]``: how clients draft tokens."""

from __future__ import annotations

import logging
from pathlib import Path

from policies.decoding import MOST_TOKENS, Decoding, measured_rates
from policies.problem import Problem
from testbed.errors import UserError
from testbed.experiments.checkpoints import find_checkpoint, read_config
from testbed.experiments.compute_tables import DecodingTable
from testbed.experiments.filesread import note_file
from testbed.experiments.limits import MAX_DRAFTED
from testbed.experiments.problems import Key, KeyedError
from testbed.experiments.schema import Scenario

_log = logging.getLogger(__name__)
_USUAL_TOKENS = 5
_STATED_WEIGHT = 64.0
"""The default ``acceptance_weight`` of a stated ``acceptance``."""
_EXPECTED = 0.5
"""The share of drafted tokens that policies expect to agree if real blocks draft and nothing is stated."""


def resolve_decoding(
    scenario: Scenario, longest_output: int, folder: Path
) -> tuple[DecodingTable | None, Decoding | None]:
    """Return the table with its defaults filled in, and how clients draft; both are None if they do not.

    ``longest_output`` is the most output tokens of a request; a relative path starts at ``folder``. Raises
    ``KeyedError``.
    """
    table = scenario.decoding
    if table is None:
        return None, None
    drafter = table.drafter
    if drafter == "none":
        return None, None
    is_real = scenario.compute.backend == "blocks"
    weight = table.acceptance_weight or (_STATED_WEIGHT if table.acceptance is not None else 1.0)
    tokens, acceptance = table.tokens or min(_USUAL_TOKENS, longest_output), table.acceptance
    if isinstance(acceptance, str):
        acceptance = _counts(acceptance, folder)
    if acceptance is None and is_real:
        acceptance = _EXPECTED
    if acceptance is None:
        raise _wrong(
            "acceptance",
            "is missing: the stub drafts no text, so give the share of drafted tokens that agree, such as 0.7",
        )
    if tokens != "auto" and tokens > longest_output:
        raise _wrong(
            "tokens",
            f"is {tokens}, but no request has more than {longest_output} output tokens; draft fewer per round",
        )
    _check_in_flight(scenario, table)
    draft_model = table.draft_model
    if draft_model is not None and drafter == "ngram":
        raise _wrong("draft_model", 'is only for drafter = "model" or "petals"')
    if is_real and drafter != "ngram":
        if draft_model is None:
            raise _wrong(
                "draft_model", f'is missing: give the checkpoint that drafts for drafter = "{drafter}"'
            )
        draft_model = _checkpoint(draft_model, folder, is_resolved=scenario.resolved)
    update = {
        "tokens": tokens,
        "acceptance": acceptance,
        "acceptance_weight": weight,
        "draft_token": table.draft_token or 0.0,
        "draft_model": draft_model,
        "in_flight": table.in_flight,
    }
    is_auto = tokens == "auto"
    most = MOST_TOKENS if tokens == "auto" else tokens
    rates: tuple[float, ...] = ()
    if isinstance(acceptance, list):
        rates = measured_rates(acceptance)
        acceptance = sum(rates) / len(rates)
    draft_s, seed = table.draft_token or 0.0, scenario.seed
    decoding = Decoding(
        drafter,
        most,
        acceptance,
        draft_s,
        seed,
        is_auto=is_auto,
        rates=rates,
        in_flight=table.in_flight,
        acceptance_weight=weight,
    )
    return table.model_copy(update=update), decoding


def warn_of_costs(problem: Problem) -> None:
    """Warn if a fixed number of drafted tokens makes tokens slower than none."""
    decoding = problem.decoding
    if decoding is None or decoding.is_auto:
        return
    round_s = problem.usual_round_s
    with_s = round_s[-1] / decoding.expected_tokens()
    if with_s > round_s[0]:
        _log.warning(
            "decoding: with %d drafted tokens per round a token takes about %.3g times as long as without, on a chain of servers "
            "of medium speed: these take as long for a draft as for a prompt of its length; draft where that is less, or set "
            'tokens = "auto"',
            *(decoding.tokens, with_s / round_s[0]),
        )


def _check_in_flight(scenario: Scenario, table: DecodingTable) -> None:
    """Raise ``KeyedError`` if several rounds shall be away at a time where that is not known."""
    if table.in_flight == 1:
        return
    instead = "leave it out, or "
    if table.drafter == "petals":
        instead += 'choose drafter = "model": PETALS\' rule has no token of the model to guess'
    elif scenario.cache is not None and scenario.cache.hub_history:
        instead += "leave out cache.hub_history"
    else:
        return
    raise _wrong("in_flight", f"is {table.in_flight}, but then rounds go one at a time: {instead}")


def _counts(name: str, folder: Path) -> list[int]:
    """Return the numbers in a file. Raises ``KeyedError``."""
    path = note_file(folder / name)
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(
            "acceptance", f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not lines or not all(line.isdecimal() and int(line) <= MAX_DRAFTED for line in lines):
        what = (
            f"must have a line per measured round with how many drafted tokens agreed, 0 to {MAX_DRAFTED:,}"
        )
        raise _wrong("acceptance", f"{path} {what}")
    return [int(line) for line in lines]


def _checkpoint(draft_model: str, folder: Path, *, is_resolved: bool) -> str:
    try:
        found = find_checkpoint(draft_model, folder)
        read_config(found)
    except UserError as error:
        if not is_resolved:  # a stored run can be read without its checkpoint
            raise _wrong("draft_model", str(error)) from None
        return draft_model
    return found


def _wrong(key: str, what: str) -> KeyedError:
    path: Key = ("decoding", key)
    return KeyedError(path, what)
