"""Resolves faults, churn, recovery and membership: names become server indices, random failures are drawn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from nodes.clock import on_tick
from policies.membership import MembershipRules
from policies.rules import RecoveryRules
from policies.workload import RequestPlan
from testbed.experiments.experiment import After, Fault
from testbed.experiments.fault_tables import (
    AfterTable,
    ChurnTable,
    FaultTable,
    MembershipTable,
    RecoveryTable,
)
from testbed.experiments.limits import MAX_DURATION_S
from testbed.experiments.problems import Key, KeyedError, unknown
from testbed.faultkinds import KINDS, Join, Restart

MAX_FAULTS = 100_000


def resolve_faults(
    tables: Sequence[FaultTable],
    servers: Sequence[str],
    absent: frozenset[int],
    requests: Sequence[RequestPlan],
) -> tuple[Fault, ...]:
    """Return one ``Fault`` per table and server, in the order of the file; two where another kind ends the first.

    Raises ``KeyedError`` for a name that is no server, a server that joins although it is present from the
    start, an absent server that has faults but never joins, a request that does not exist or has too few
    output tokens, and too many faults.
    """
    numbers = {name: j for j, name in enumerate(servers)}
    joining = {name for table in tables if table.kind == Join.name for name in table.server}
    plans = {plan.index: plan for plan in requests}
    faults = []
    for index, table in enumerate(tables):
        key: Key = ("fault", index)
        after = None if table.after is None else _after(table.after, (*key, "after"), plans)
        for name in table.server:
            if name not in numbers:
                raise KeyedError((*key, "server"), unknown("server", name, servers))
            is_absent = numbers[name] in absent
            if table.kind == Join.name and not is_absent:
                raise KeyedError(
                    (*key, "server"),
                    f'"{name}" is present from the start; add present = false to its [[servers]] entry, '
                    f'or use kind = "{Restart.name}"',
                )
            if is_absent and name not in joining:
                raise KeyedError(
                    (*key, "server"),
                    f'"{name}" has present = false and never joins; add a fault of kind = "{Join.name}" for it',
                )
            end = KINDS[table.kind].undone_by if table.for_ is not None else ""
            lasts_s = None if end else table.for_
            faults.append(Fault(table.kind, numbers[name], table.at, after, lasts_s, table.factor or 1.0))
            if end:
                assert table.at is not None and table.for_ is not None, "the table has checked itself"
                faults.append(Fault(end, numbers[name], on_tick(table.at + table.for_)))
    if len(faults) > MAX_FAULTS:
        raise KeyedError(
            ("fault",), f"has {len(faults):,} faults, but at most {MAX_FAULTS:,} are allowed; remove some"
        )
    return tuple(faults)


def _after(table: AfterTable, key: Key, plans: Mapping[int, RequestPlan]) -> After:
    if table.request not in plans:
        raise KeyedError(
            (*key, "request"), f"there is no request {table.request}; requests are 0 to {len(plans) - 1}"
        )
    n_tokens = plans[table.request].n_output_tokens
    if table.tokens >= n_tokens:
        raise KeyedError(
            (*key, "tokens"),
            f"must be less than the {n_tokens} output tokens of request {table.request}, which ends with "
            f"the last, not {table.tokens}",
        )
    return After(table.request, table.tokens)


def churn_faults(
    churn: ChurnTable,
    servers: Sequence[str],
    absent: frozenset[int],
    last_arrival_at_s: float,
    rng: random.Random,
) -> list[FaultTable]:
    """Draw the failures of ``[churn]``, in the order of time.

    For each failure, the time since the previous one is drawn with the mean ``mtbf``. Then one of the servers
    that are up is chosen, all equally likely, and its repair time is drawn with the mean ``mttr``. If no
    server is up, the failure has no effect. Raises ``KeyedError`` for a name that is no server, and for too
    many failures.
    """
    for name in churn.servers or ():
        if name not in servers:
            raise KeyedError(("churn", "servers"), unknown("server", name, servers))
    names = churn.servers or [name for j, name in enumerate(servers) if j not in absent]
    until_s = last_arrival_at_s if churn.until is None else churn.until
    if until_s / churn.mtbf > MAX_FAULTS:
        raise KeyedError(
            ("churn", "mtbf"),
            f"makes about {until_s / churn.mtbf:,.0f} failures, but at most {MAX_FAULTS:,} are allowed; "
            "raise it or lower until",
        )

    def draw(mean_s: float) -> float:
        return mean_s if churn.distribution == "constant" else rng.expovariate(1 / mean_s)

    tables: list[FaultTable] = []
    back_at_s = dict.fromkeys(names, 0.0)
    at_s = on_tick(draw(churn.mtbf))
    while at_s <= until_s:
        up = [name for name in names if back_at_s[name] <= at_s]
        if up:
            name, away_s = rng.choice(up), min(max(draw(churn.mttr), 1e-6), MAX_DURATION_S)
            back_at_s[name] = on_tick(at_s + away_s)
            tables.append(FaultTable.model_construct(kind=churn.kind, server=[name], at=at_s, for_=away_s))
        at_s = on_tick(at_s + draw(churn.mtbf))
    return tables


def resolve_recovery(table: RecoveryTable, dtype: str | None) -> RecoveryTable:
    """Return ``table`` with ``replay = "auto"`` decided. ``dtype``: of real blocks, ``None`` for the stub."""
    if table.replay != "auto":
        return table
    is_rounded = dtype in ("bfloat16", "float16")
    return table.model_copy(update={"replay": "step_by_step" if is_rounded else "at_once"})


def recovery_rules(table: RecoveryTable, seed: int) -> RecoveryRules:
    assert table.replay != "auto", "resolve_recovery comes first"
    return RecoveryRules(
        mode=table.mode,
        request_timeout_s=table.request_timeout,
        connect_timeout_s=table.connect_timeout,
        retry_first_s=table.retry_first,
        retry_max_s=table.retry_max,
        give_up_s=table.give_up,
        ban_s=table.ban,
        ban_failed_servers=table.ban_failed_servers,
        replay=table.replay,
        retry_jitter_ratio=table.jitter,
        seed=seed,
    )


def membership_rules(table: MembershipTable) -> MembershipRules:
    usual = MembershipRules()
    return MembershipRules(
        kind=table.kind,
        announce_period_s=table.announce_period or usual.announce_period_s,
        expiry_s=table.expiry or usual.expiry_s,
        refresh_s=table.refresh or usual.refresh_s,
    )
