"""The tables of scenario files about what servers do: ``[compute]``, ``[cache]``, ``[decoding]``, ``[calibration]``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from policies.problem import Batching
from testbed.experiments.fields import (
    NonNegativeBytes,
    PositiveSeconds,
    Seconds,
    Table,
    Tokens,
    int_or,
    rule,
)
from testbed.experiments.limits import (
    MAX_DRAFTED,
    MAX_IN_FLIGHT,
)
from testbed.experiments.problems import shown


def _device(value: Any) -> Any:
    if value == "auto":
        return value
    names = value if isinstance(value, list) and value else [value]
    for name in names:
        if not (isinstance(name, str) and re.fullmatch(r"cpu|cuda(:\d{1,3})?|(GPU|MIG)-[\w/-]{1,80}", name)):
            raise rule(
                'must be "auto", or one or a list of "cpu", "cuda", "cuda:0" (or another number) and UUIDs '
                f'such as "GPU-..." or "MIG-...", not {shown(value)}'
            )
    return value


class ComputeTable(Table):
    """``[compute]``: how servers and clients compute.

    - ``backend``: "stub" only waits for as long as a step would take; "blocks" computes with torch.
    - ``batching``: how a server computes several sessions. "none": each as if it were alone. "serial": one
      step after another (``serial = true`` means the same). "continuous": all that wait, in one step, with
      one prompt or at most ``chunk_tokens`` tokens of it.
    - ``hub_token``: the client's own time per output token (embedding, head, choice of the token). The stub's
      client waits for it; with real blocks only the model columns count it. Default: that of
      ``hardware_files``, else 0.

    The other keys are for real blocks (docs/blocks.md). ``model`` is the folder of a checkpoint or its name
    on the Hugging Face hub; it also gives the stub its sizes. A list in ``device`` is dealt out to the
    servers in turn; "auto" is the list of this machine's GPUs, or the CPU without any. ``weights`` is how
    matrices are stored ("plain": in ``dtype``), ``dtype`` the type of everything else. ``threads`` are per
    server process, ``streams`` the steps that a server computes at a time. With ``verify`` the tokens are
    compared with those of the whole model after the run.
    """

    backend: Literal["stub", "blocks"] = "stub"
    batching: Batching | None = None
    serial: bool = False
    chunk_tokens: Tokens | None = None
    hub_token: Seconds | None = None
    model: Annotated[str, Field(min_length=1)] | None = None
    random_weights: bool | None = None
    device: Annotated[str | list[str], BeforeValidator(_device)] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    weights: Literal["plain", "int8", "nf4"] | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    streams: Annotated[int, Field(ge=1, le=1024)] | None = None
    cuda_graphs: bool | None = None
    verify: bool | None = None

    @model_validator(mode="after")
    def _one_batching(self) -> Self:
        if self.serial and self.batching not in (None, "serial"):
            raise rule(
                f'is "{self.batching}", which contradicts serial = true; leave serial out',
                "batching",
            )
        if self.chunk_tokens is not None and self.batching != "continuous":
            raise rule('is only for batching = "continuous"', "chunk_tokens")
        return self


class CacheTable(Table):
    """``[cache]``: how servers allocate attention cache to sessions.

    ``mode = "reserved"``: all that a session may need, when it opens. "paged": room for the prompt, and then
    for ``page_tokens`` (default 16) tokens at a time as they are generated. New sessions are admitted up to
    the share ``high_water`` (default 0.9) of a server's room. When the room runs out, the session whose
    request arrived last loses its chain, waits for another one, and replays. ``expected_output`` is the
    number of output tokens that the coordinator counts for a session before they exist; default: half of the
    mean output in ``known_lengths``, or, if nothing is known, the longest output.

    ``prefix = "shared"``: servers keep the caches of ended sessions by pages of ``page_tokens``, until sessions need the
    room, and a prompt that begins with the same tokens is computed from there on. Each client keeps ``hub_history`` (default
    0) of the hops' inputs, and fills hops that have lost pages. "session": a conversation's chain stays
    open for ``hold`` (default 300 s) after each answer, as PETALS' sessions do, with cache for ``session_tokens`` (default:
    the longest request that the placement is designed for). "none" (the default): no cache outlives its request.
    """

    mode: Literal["reserved", "paged"] = "reserved"
    page_tokens: Tokens | None = None
    high_water: Annotated[float, Field(gt=0, le=1)] | None = None
    expected_output: Tokens | None = None
    prefix: Literal["none", "session", "shared"] | None = None
    hold: PositiveSeconds | None = None
    session_tokens: Tokens | None = None
    hub_history: NonNegativeBytes | None = None

    @model_validator(mode="after")
    def _only_paged(self) -> Self:
        if self.mode == "reserved" and self.prefix != "shared" and self.page_tokens is not None:
            raise rule('is only for mode = "paged", or prefix = "shared"', "page_tokens")
        for key in ("high_water", "expected_output"):
            if self.mode == "reserved" and getattr(self, key) is not None:
                raise rule('is only for mode = "paged"', key)
        if self.prefix != "shared" and self.hub_history is not None:
            raise rule('is only for prefix = "shared"', "hub_history")
        for key in ("hold", "session_tokens"):
            if self.prefix != "session" and getattr(self, key) is not None:
                raise rule('is only for prefix = "session"', key)
        return self


def _acceptance(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_counts = isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_DRAFTED for n in value)
    if (is_number and 0 <= value <= 1) or (is_counts and value) or (isinstance(value, str) and value):
        return value
    raise rule(
        "must be a number from 0 to 1, a list of how many drafted tokens agreed in each of some measured rounds, or a "
        f"file with one such number per line, not {shown(value)}"
    )


class DecodingTable(Table):
    """``[decoding]``: speculative decoding, where clients draft tokens that the servers verify in one step.

    - ``drafter``: "none"; "ngram" continues what followed the last tokens earlier in prompt and output; "model" is a
      small model at the client; "petals" is one with PETALS' rule: no token of the large model after drafted ones that
      agree.
    - ``tokens``: how many to draft per round (default 5). "auto": each session drafts as many as it expects to be best
      on its chain, by the acceptance that it has seen.
    - ``acceptance``: the probability that a drafted token agrees, for the stub, which drafts no text; or how many agreed
      in each of some measured rounds, as a list or a file with a number per line. With real blocks it is what policies
      expect (default 0.5).
    - ``acceptance_weight``: for how many compared drafted tokens ``acceptance`` counts beside those that a session has seen,
      with ``tokens`` "auto"; default 64 where it is stated, else 1.
    - ``draft_token``: the client's time per drafted token (default 0). Real blocks take the time that they need.
    - ``draft_model``: the folder of the small model's checkpoint, for real blocks with "model" or "petals".
    - ``in_flight``: how many rounds of a session may be away at a time (default 1). Those behind the first are drafted on
      the guess that all tokens before them agree.
    """

    drafter: Literal["none", "ngram", "model", "petals"] = "none"
    tokens: Annotated[int | Literal["auto"], int_or("auto", most=MAX_DRAFTED)] | None = None
    acceptance: Annotated[float | list[int] | str, BeforeValidator(_acceptance)] | None = None
    acceptance_weight: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] | None = None
    draft_token: Seconds | None = None
    draft_model: Annotated[str, Field(min_length=1)] | None = None
    in_flight: Annotated[int, Field(ge=1, le=MAX_IN_FLIGHT)] = 1

    @model_validator(mode="after")
    def _with_drafter(self) -> Self:
        if self.model_fields_set and "drafter" not in self.model_fields_set:
            raise rule(
                "is of speculative decoding; name a drafter, or leave this out", min(self.model_fields_set)
            )
        return self


class CalibrationTable(Table):
    """``[calibration]``: published overheads that are added to the emulated network's times.

    ``set`` names a shipped set; values given here replace those of the set. ``token_overhead`` is added to
    every decode step of a hop, be it a token or a round of drafts, ``input_overhead_base`` plus
    ``input_overhead_per_token`` per prompt token to every prefill of a hop, ``initial_delay`` to every session. ``session_setup = true`` also adds
    ``session_setup_petals`` (PETALS and its variants) or ``session_setup_proposed`` (other placements) to
    every request's first token; ``policy.session_setup`` chooses another one.
    """

    set: str = "none"
    session_setup: bool = False
    token_overhead: Seconds | None = None
    input_overhead_base: Seconds | None = None
    input_overhead_per_token: Seconds | None = None
    initial_delay: Seconds | None = None
    session_setup_petals: Seconds | None = None
    session_setup_proposed: Seconds | None = None
