"""``summary.json``: the results of a run. Every engine makes it; what only some engines have is absent in others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from testbed.errors import UserError
from testbed.records.base import Record, column

EMULATION, SIMULATION = "emulation", "simulation"
SIMULATED = "simulated"
"""The network in the plan and the summary of a simulation without nodes; of one with nodes, the reason for its clock."""
_EMULATED = "emulation"
_SIMULATED = "simulation"


class Stats(Record, kw_only=True):
    """Statistics of values; all but ``n`` are None if there is no value. ``std`` is that of the values themselves."""

    mean: float | None = None
    std: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    n: int = 0


class PolicyUsed(Record, kw_only=True):
    """The policies of a run, by name, and |R| if the placement was designed for one."""

    placement: str
    routing: str
    design_concurrency: int | None = None


class Bounds(Record, kw_only=True):
    """What the paper proves about a run's seconds per token, means over all tokens of a client's requests.

    ``applies``: whether Theorem 1 holds for the run; if not, ``why``, and it is absent. ``theorem1_per_token_s`` is the
    largest of all clients, ``lower_bound_per_token_s`` the mean over those that completed (Lemma B.1). The latter is absent where
    it does not hold. ``proven_optimal`` and ``gap_ratio`` are what a search for an optimal placement proved, if there was
    one: by which share of its objective a better one may be better. ``n_bounded`` requests have a bound on their
    completion, ``n_exceeded`` of them took longer, ``n_exceeded_by_backoff`` of these only because they asked again after a
    fixed time instead of when there was room.
    """

    applies: bool
    why: str | None = None
    theorem1_per_token_s: float | UnsetType = UNSET
    theorem1_by_client_s: dict[str, float] | UnsetType = UNSET
    theorem1_ratio: float | UnsetType = UNSET
    lower_bound_per_token_s: float | UnsetType = UNSET
    lower_bound_by_client_s: dict[str, float] | UnsetType = UNSET
    n_bounded: int | UnsetType = UNSET
    n_exceeded: int | UnsetType = UNSET
    n_exceeded_by_backoff: int | UnsetType = UNSET
    proven_optimal: bool | UnsetType = UNSET
    gap_ratio: float | UnsetType = UNSET


class CalibrationUsed(Record, kw_only=True):
    """The set of published overheads, and the constant that it adds to every first token, in seconds."""

    set: str = "none"
    session_setup_s: float = 0.0


class Admission(Record, kw_only=True):
    """How many requests were never admitted, and how long all waited for it, or until their end."""

    n_never_admitted: int = 0
    waited_s: Stats = msgspec.field(default_factory=Stats)


class Preemption(Record, kw_only=True):
    """How often sessions lost their caches to others, and how long they had no chain then."""

    cache_mode: str = "reserved"
    n_preemptions: int = 0
    n_requests: int = 0
    """Requests that were preempted at least once."""
    tokens: int = 0
    """Cached tokens lost."""
    waited_s: Stats = msgspec.field(default_factory=Stats)


class PrefixUse(Record, kw_only=True):
    """What kept caches saved: the share of all prompts' tokens that was not computed, and how many these were."""

    hit_ratio: float
    tokens_reused: int


class Speculation(Record, kw_only=True):
    """What speculative decoding came to, over all rounds of all requests."""

    drafter: str
    n_rounds: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_given_up: int = 0
    """Rounds that were sent ahead in vain (``decoding.in_flight``); they count nowhere else."""
    tokens_per_round: float | None = None
    """Output tokens per round; null: there was no round."""
    acceptance_ratio: float | None = None
    """Drafted tokens that agreed, of all drafted ones, those after a wrong one included."""


class UnusedBlocks(Record, kw_only=True):
    """Blocks that servers hold, how many of them no request used, and the servers with only unused ones.

    Counts are whole numbers for one run, means over several.
    """

    n_held: int | float
    n_unused: int | float
    servers: list[str]


class Decision(Record, kw_only=True):
    """Real seconds that policies took, in either clock."""

    placement_s: float = 0.0
    routing_s: Stats = msgspec.field(default_factory=Stats)
    control_plane_s: Stats | UnsetType = UNSET
    """The whole round trip of a client that asks; 0 in virtual time."""


class Concurrency(Record, kw_only=True):
    """Sessions at a time, from the first arrival to the last end; None if none was admitted."""

    mean: float | None = None
    max: float | None = None


class ErrorFigures(Record, kw_only=True):
    """How far times are from their truth: see ``testbed.results.errors.error``. None: there are no pairs."""

    mean_abs_ratio: float | None = None
    p99_abs_ratio: float | None = None
    max_abs_ratio: float | None = None
    mean_ratio: float | None = None
    mean_abs_s: float | None = None


class Stalls(Record, kw_only=True):
    """How often, and for how many real seconds, the whole machine stood still while it served."""

    n: int = 0
    total_real_s: float = 0.0
    max_real_s: float | None = None


class MachineState(Record, kw_only=True):
    """Another machine of a run, and what is known of its clock. Times are seconds."""

    name: str
    address: str = ""
    n_nodes: int
    rtt_s: float
    """The smallest of the latest round trips."""
    offset_s: float = 0.0
    """Its monotonic clock minus this machine's."""
    drift: float = 0.0
    """Seconds that its clock gains on this machine's per second."""
    uncertainty_s: float
    """Largest error of its nodes' instants at any time of the run; at least that of ``offset_s``."""
    is_lost: bool = False


class MemoryUse(Record, kw_only=True):
    """Real memory of servers with real blocks at its largest, beside the model's ``s_m m_j + s_c sum k``, in bytes."""

    servers: dict[str, dict[str, int | float]]
    real_bytes: float
    grown_bytes: float | None
    n_recorded: int | None = None
    """Sessions whose steps were recorded as CUDA graphs."""
    model_bytes: float
    difference_ratio: float | None
    worst_server: str | None
    worst_difference_ratio: float | None


class DecisionCounts(Record, kw_only=True):
    """Routing decisions, how many were made on a wrong view of a server, and how many chose one that was not there."""

    n_decisions: int = 0
    n_stale_decisions: int = 0
    n_misled_decisions: int = 0


MOST_LINKS = 10
"""The busiest links that a summary lists."""


class LinkWait(Record, kw_only=True):
    """How much longer messages took on a link, in seconds, than if nothing else had used it."""

    mean: float
    p99: float


class LinkRow(Record, kw_only=True):
    """Use of one link. ``use_ratio``: the share of the run's time in which it was busy."""

    from_: str = msgspec.field(name="from")
    to: str
    use_ratio: float
    wait_s: LinkWait


class MoveRow(Record, kw_only=True):
    """One server's change of blocks. Instants are scenario seconds, ranges half-open from 0.

    From ``closed_at_s`` it took new sessions only on blocks that it keeps, at ``drained_at_s`` it began to load,
    from ``open_at_s`` it served its new blocks.
    """

    server: int
    old: tuple[int, int]
    new: tuple[int, int]
    decided_at_s: float
    closed_at_s: float
    drained_at_s: float
    open_at_s: float


class WithoutSetup(Record, kw_only=True):
    """These metrics with the published setup constant subtracted from every request."""

    ttft_s: Stats
    e2e_s: Stats
    per_token_s: Stats


class AlteredToken(Record, kw_only=True):
    """An output token that is not the one of the whole model on one machine."""

    request: int
    token: int
    is_: int = msgspec.field(name="is")
    should_be: int


class Verification(Record, kw_only=True):
    """Whether the tokens of real blocks are those of the whole model on one machine (``verify.json``)."""

    n_tokens_checked: int | None = None
    n_tokens_altered: int | None = None
    n_tokens_tied: int | None = None
    tokens_unchecked_because: str | None = None
    altered: list[AlteredToken] | UnsetType = UNSET


class ClientSummary(Record, kw_only=True):
    """The requests of one client: statistics of their metrics, as of all requests.

    ``n_tokens`` counts output tokens that arrived, ``n_met`` requests that completed and met every objective.
    ``objectives``: the limits of a client that has its own, in seconds by metric.
    """

    n_requests: int
    n_completed: int
    n_failed: int = 0
    n_tokens: int
    n_met: int | UnsetType = UNSET
    objectives: dict[str, float] | UnsetType = UNSET
    metrics: dict[str, Stats]


class RunSummary(Record, kw_only=True):
    """The results of one run."""

    engine: Annotated[
        str, column("`emulation` (the system's own nodes ran, in either clock) or `simulation`")
    ]
    code: Annotated[
        str | None,
        column(
            "the testbed's version with a digest of its code, and Python's version: those of the run, also where "
            "`testbed report` wrote the summary later. The rest is in `provenance.json` "
            "([below](#where-a-run-comes-from-provenancejson))"
        ),
    ] = None
    mode: Annotated[
        str | UnsetType,
        column("`testbed` or `reference`: whose semantics were simulated", engines=_SIMULATED),
    ] = UNSET
    scenario: Annotated[str, column("the scenario's name")]
    seed: Annotated[int, column("seed of all random choices")]
    workload: Annotated[str, column("where arrivals and lengths come from, in words")] = ""
    n_requests: Annotated[
        int,
        column(
            "requests of the workload: the sum of `n_completed`, `n_failed`, `n_cancelled`, `n_interrupted` and "
            "`n_not_started`"
        ),
    ]
    n_completed: Annotated[int, column("requests with all their tokens")]
    n_failed: Annotated[int, column("requests that ended without")] = 0
    n_cancelled: Annotated[int, column("requests whose caller at the endpoint has gone")] = 0
    n_interrupted: Annotated[
        int, column("requests that the run's end cut short (`status` `interrupted` or `unfinished`)")
    ] = 0
    n_not_started: Annotated[int, column("requests that had not arrived by the end of the run")] = 0
    failed_because: Annotated[
        dict[str, int],
        column(
            "the commonest reasons of failed requests, with counts; reasons that differ in numbers alone count as one, under "
            "the first of them"
        ),
    ] = msgspec.field(default_factory=dict)
    clock: Annotated[str, column("`virtual` or `real` ([virtual-time.md](virtual-time.md))")] = "virtual"
    clock_why: Annotated[str, column("why this clock was chosen; of a simulation, why this engine")] = ""
    wall_s: Annotated[
        float | UnsetType | None,
        column(
            "from when all clients were told their requests, shortly before time zero in real time, to the end of the workload",
            "real s",
            _EMULATED,
        ),
    ] = UNSET
    scenario_s: Annotated[
        float | UnsetType | None,
        column(
            "from time zero to that end; `scenario_s / wall_s` is how many times faster than life it ran",
            "s",
            _EMULATED,
        ),
    ] = UNSET
    network: Annotated[
        str, column("what carried the messages; `simulated`: the fast or the reference engine")
    ] = SIMULATED
    compute: Annotated[str, column("`stub` or `blocks`")] = "stub"
    time_scale: Annotated[float, column("scenario seconds per real second")] = 1.0
    policy: Annotated[
        PolicyUsed, column("names of `placement` and `routing`, and `design_concurrency` (\\|R\\|)")
    ]
    bounds: Annotated[
        Bounds | UnsetType,
        column("how long a token takes at least, and by Theorem 1 at most ([below](#bounds))"),
    ] = UNSET
    calibration: Annotated[
        CalibrationUsed, column("`set` and `session_setup_s` ([below](#calibrations))")
    ] = msgspec.field(default_factory=CalibrationUsed)
    metrics: Annotated[
        dict[str, Stats],
        column(
            "statistics of every metric of the completed requests, of `token_gap_s` (all requests), and in an emulation of the parts of hops, "
            "`decision_s` (real seconds) and `schedule_lag_s`"
        ),
    ]
    model: Annotated[
        dict[str, Stats], column("the same by the closed model; in a simulation equal to `metrics`")
    ] = msgspec.field(default_factory=dict)
    model_unqueued: Annotated[
        dict[str, Stats], column("the same by the paper's closed form, each request alone")
    ] = msgspec.field(default_factory=dict)
    emulation_error: Annotated[
        dict[str, ErrorFigures] | UnsetType,
        column("how far times are from a truth ([below](#errors))", "", _EMULATED),
    ] = UNSET
    emulation_error_of: Annotated[
        str | UnsetType | None, column("which truth ([below](#errors))", "", _EMULATED)
    ] = UNSET
    emulation_error_pairing: Annotated[
        str | UnsetType,
        column("what is compared with the twin ([below](#errors))", "", "emulation with a twin"),
    ] = UNSET
    twin: Annotated[
        dict[str, Stats] | UnsetType,
        column("statistics of the twin's own times", "", "emulation with a twin"),
    ] = UNSET
    hop_model_error: Annotated[
        dict[str, ErrorFigures] | UnsetType,
        column("measured against the closed model, hop by hop and token by token", "", _EMULATED),
    ] = UNSET
    closed_model_links: Annotated[
        Literal["in turn", "in parts"] | UnsetType,
        column(
            "how its links carry messages: `in turn` or `in parts` ([The model](#the-model))", "", _EMULATED
        ),
    ] = UNSET
    closed_model_lacks: Annotated[
        list[str], column("what the run has and the closed model has not, in words")
    ] = msgspec.field(default_factory=list)
    overhead_per_hop_s: Annotated[
        float | UnsetType | None,
        column("in real time only, else null: see [The model](#the-model)", "real s", _EMULATED),
    ] = UNSET
    startup_s: Annotated[float | UnsetType | None, column("until all nodes were up", "real s", _EMULATED)] = (
        UNSET
    )
    forwarder: Annotated[
        dict[str, int | float] | UnsetType | None,
        column("counters of the network's forwarder, if it has one", "", _EMULATED),
    ] = UNSET
    machines: Annotated[
        list[MachineState] | UnsetType, column("the run's other machines at its end", "", _EMULATED)
    ] = UNSET
    stalls: Annotated[
        Stalls | UnsetType,
        column(
            "how often the whole machine stood still while it served, and for how long (real seconds; "
            "[accuracy.md](accuracy.md))",
            "",
            _EMULATED,
        ),
    ] = UNSET
    decision: Annotated[
        Decision,
        column(
            "real seconds, in either clock: `placement_s`; `routing_s` (statistics, from `plan.json`'s "
            "`routing_decisions_s` in virtual time); `control_plane_s` (emulation), the whole round trip, 0 in "
            "virtual time"
        ),
    ] = msgspec.field(default_factory=Decision)
    admission: Annotated[
        Admission,
        column(
            "`n_never_admitted`, and `waited_s`: how long every request that arrived waited until it was admitted, "
            "gave up, or the run ended"
        ),
    ] = msgspec.field(default_factory=Admission)
    preemption: Annotated[
        Preemption, column('sessions that lost their caches to others (`cache.mode = "paged"`)')
    ] = msgspec.field(default_factory=Preemption)
    prefix: Annotated[
        PrefixUse | UnsetType,
        column(
            "`hit_ratio`, the share of the tokens of all admitted prompts that were not computed, and how many these were "
            "(`tokens_reused`; [conversations.md](conversations.md))",
            engines="only with `cache.prefix`",
        ),
    ] = UNSET
    turns: Annotated[
        list[Stats] | UnsetType,
        column(
            "statistics of `ttft_s` of the completed requests of every turn of the conversations, the first turn first",
            "s",
            "only if the scenario has conversations",
        ),
    ] = UNSET
    speculation: Annotated[
        Speculation | UnsetType,
        column(
            "what drafting came to ([speculation.md](speculation.md)): output tokens per round, and the share of drafted "
            "tokens that agreed",
            engines="with `[decoding]`",
        ),
    ] = UNSET
    unused_blocks: Annotated[
        UnusedBlocks | None,
        column(
            "blocks that servers hold (`n_held`), how many of them no request went through (`n_unused`), and the "
            "`servers` that were not used at all ([statistics.md](statistics.md))"
        ),
    ] = None
    achieved_concurrency: Annotated[
        Concurrency,
        column(
            "active sessions, each from the start of the attempt that was admitted to its end: `mean` from the first "
            "arrival to the last end of any request, and `max`"
        ),
    ] = msgspec.field(default_factory=Concurrency)
    goodput_rps: Annotated[
        float | None,
        column(
            "completed requests that met all objectives of their client, per second from the first arrival to the last end "
            "of any request, also of one that failed or was cut short; null: none ended otherwise",
            "1/s",
        ),
    ] = None
    objectives: Annotated[dict[str, float], column("the limits by metric", "s")] = msgspec.field(
        default_factory=dict
    )
    clients: Annotated[
        dict[str, ClientSummary],
        column(
            "the same of each client that has requests, by name: `n_requests`, `n_completed`, `n_failed`, `n_tokens`, `n_met` (where "
            "there are objectives), `objectives` (where it has its own) and `metrics`"
        ),
    ] = msgspec.field(default_factory=dict)
    cost_per_million_tokens: Annotated[
        float | UnsetType | None,
        column(
            "what the servers cost per 1e6 output tokens, in the scenario's currency: 1e6 x sum of `cost_per_hour` x T / n "
            "over all servers. T is the time in hours from the first arrival to the last end of a request, but only "
            "while the server's `hours` last; n counts all output tokens that arrived; null: none did",
            "",
            "where `[[servers]]` have `cost_per_hour`",
        ),
    ] = UNSET
    energy_j_per_token: Annotated[
        float | UnsetType | None,
        column(
            "energy of the servers per output token: sum of (`power_idle` x T + (`power_busy` - `power_idle`) x B) / n "
            "over all servers, with T in seconds and n as above. B is the time in which the server had a step; null also "
            "where the run has too many rows of hops to know it",
            "J",
            "where `[[servers]]` have `power_idle`",
        ),
    ] = UNSET
    carbon_g_per_million_tokens: Annotated[
        float | UnsetType | None,
        column(
            "carbon dioxide per 1e6 output tokens: each server's energy in kWh x `carbon_g_per_kwh` of its site",
            "g",
            "where `[[servers]]` have `power_idle` and all their `[[sites]]` `carbon_g_per_kwh`",
        ),
    ] = UNSET
    links: Annotated[
        list[LinkRow] | UnsetType,
        column(
            "the ten busiest links: `from`, `to`, `use_ratio` (the share of the time from 0 to the last end in which it "
            "carried hidden states), and `wait_s`: how much later messages arrived than with nothing else on the link "
            "(`mean`, `p99`) ([below](#use-of-links-linksparquet))",
            "s",
            "not engine `reference`, nor network `hosts`",
        ),
    ] = UNSET
    n_link_changes_by_hand: Annotated[int, column("changes of links by `testbed link`")] = 0
    n_faults_by_hand: Annotated[int, column("those of `n_faults` that are by `testbed fault`")] = 0
    dropped_log_bytes: Annotated[int, column("size of unfinished log records", "bytes")] = 0
    n_faults: Annotated[
        int,
        column(
            "faults of servers that had an effect: those of the scenario, those by hand, and processes that ended by "
            "themselves"
        ),
    ] = 0
    n_faults_without_effect: Annotated[int, column("faults that found nothing to do")] = 0
    n_faults_never_came: Annotated[
        int,
        column(
            "faults of the scenario, `[churn]`'s included, whose time or token had not come by the end of the run"
        ),
    ] = 0
    n_replays: Annotated[
        int,
        column(
            "recoveries: a session lost one or more hops and went on with others. Further failures during the replay "
            "count as part of it"
        ),
    ] = 0
    recovery_s: Annotated[
        Stats,
        column(
            "per recovery: from the failure, or from when the session first needed the hop if that is later, until "
            "the last replacement has answered (statistics)",
            "s",
        ),
    ] = msgspec.field(default_factory=Stats)
    recovery_floor_s: Annotated[
        Stats,
        column(
            "the part that no client can avoid: noticing, one round trip to open the slowest replacement, and the "
            "modelled time of the replay. A new TCP connection starts slowly, a server may be full, a first choice "
            "may be dead as well: that is in `recovery_s` only",
            "s",
        ),
    ] = msgspec.field(default_factory=Stats)
    decisions: Annotated[
        DecisionCounts | None,
        column("routing decisions: `n_decisions`, `n_stale_decisions`, `n_misled_decisions`", "", _EMULATED),
    ] = None
    n_stale_decisions: Annotated[
        int | None,
        column(
            "routing decisions made while the routers' view was wrong about a server; `decisions.n_misled_decisions` "
            "counts those for a server that was not there",
            "",
            _EMULATED,
        ),
    ] = None
    leaks: Annotated[
        dict[str, int | float] | None,
        column(
            "what is left when all clients have ended: `sessions` and `cache_bytes` on servers that answer, open "
            "`descriptors` beyond those at the start over all nodes, network `namespaces` after the run. All should "
            "be 0",
            "",
            _EMULATED,
        ),
    ] = None
    moves: Annotated[list[MoveRow], column("changes of the placement while serving")] = msgspec.field(
        default_factory=list
    )
    n_cuts: Annotated[int, column("sessions that moves of servers cut")] = 0
    n_hop_rows: Annotated[
        int | UnsetType, column("rows that `hops.parquet` has, or would have", "", _SIMULATED)
    ] = UNSET
    hops_left_out: Annotated[
        bool, column("`hops.parquet` was not written, because it would have too many rows")
    ] = False
    memory: Annotated[
        MemoryUse | UnsetType,
        column("what servers with real blocks used, beside what the model counts", "bytes", "real blocks"),
    ] = UNSET
    without_session_setup: Annotated[
        WithoutSetup | UnsetType,
        column(
            "times without the session setup that the calibration adds: with the constant subtracted, or in a simulation "
            "simulated again without it",
            "s",
            "where there is one",
        ),
    ] = UNSET
    n_tokens_checked: Annotated[
        int | UnsetType | None,
        column("output tokens that were compared with the whole model's; null: none were", "", _EMULATED),
    ] = UNSET
    n_tokens_altered: Annotated[int | UnsetType | None, column("how many differ", "", _EMULATED)] = UNSET
    n_tokens_tied: Annotated[
        int | UnsetType | None, column("how many more differ by a tie of two logits", "", _EMULATED)
    ] = UNSET
    tokens_unchecked_because: Annotated[
        str | UnsetType | None, column("why none were compared", "", _EMULATED)
    ] = UNSET
    altered: Annotated[
        list[AlteredToken] | UnsetType, column("the tokens that differ", "", "real blocks that were compared")
    ] = UNSET


def read_summary(run_dir: Path) -> RunSummary:
    """Read ``summary.json`` of a run of this or an earlier version. Raises ``UserError`` if it cannot be read."""
    path = run_dir / "summary.json"
    try:
        return summary_from(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            f"cannot read {path} ({reason}); `testbed report {run_dir}` writes it again"
        ) from error


def summary_from(data: bytes | dict[str, Any]) -> RunSummary:
    """Return the summary in JSON text or data. Raises ``ValueError`` (``msgspec.ValidationError``)."""
    if isinstance(data, bytes):
        return msgspec.json.decode(data, type=RunSummary)
    return msgspec.convert(data, RunSummary)
