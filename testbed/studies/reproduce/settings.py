"""The experiments of the paper as data: shipped scenarios with changes, as ``--set`` makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

PLACES = ("Cluster0", "Cluster1", "Cluster2", "AboveNet", "BellCanada", "GTS-CE")
"""Rows of the paper's tables: the clients' site, or the topology."""
TOPOLOGIES = PLACES[3:]
COLUMNS = ((0.1, 64), (0.1, 128), (0.5, 64), (0.5, 128))
"""Columns of the paper's tables: requests per second, output tokens."""
SETUP_S = 250.0
SETUP_LARGE_S = 350.0
SETUP_PROPOSED_S = 60.0
"""Session setups of the reference simulator in seconds: of PETALS and its variants, of these on large
networks, and of the proposed policy.
"""


@dataclass(frozen=True)
class Setting:
    """One experiment: a shipped ``scenario`` with ``overrides``, as ``--set`` makes them.

    - ``setup_petals_s``: session setup of PETALS and its variants in seconds
    - ``planned_rate``: request rate (requests/s) for which placements are made; None: the true one
    - ``join_order``: order in which servers join under PETALS; None: drawn by the seed
    - ``factors``: also run all combinations of PETALS and the proposed policy
    """

    id: str
    scenario: str
    overrides: Mapping[str, str | float]
    setup_petals_s: float = SETUP_S
    planned_rate: float | None = None
    join_order: tuple[int, ...] | None = None
    factors: bool = False

    def changes(self, seed: int) -> list[str]:
        """Returns the values of ``--set`` that make this experiment from its scenario."""
        return [*(f"{key}={value}" for key, value in self.overrides.items()), f"seed={seed}"]


@dataclass(frozen=True)
class TableVariant:
    """One version of the paper's tables, with a setting for each cell."""

    name: str
    title: str
    note: str
    cells: Mapping[tuple[str, int], Setting]
    """(place, index into ``COLUMNS``) -> setting. Columns may share a setting."""

    @property
    def settings(self) -> list[Setting]:
        return list({setting.id: setting for setting in self.cells.values()}.values())


@dataclass(frozen=True)
class Sweep:
    """One parameter varied on every topology. ``points``: topology -> (value, setting), with ascending
    values.
    """

    name: str
    title: str
    x_label: str
    points: Mapping[str, list[tuple[float, Setting]]] = field(repr=False)

    @property
    def settings(self) -> list[Setting]:
        return [setting for points in self.points.values() for _, setting in points]


_SCATTERED: dict[str, str | float] = {"calibration.set": "petals-scattered"}
_CLUSTERED_BRANCH: dict[str, str | float] = {
    "calibration.set": "petals-clustered",
    "workload.rate": 1.0,
    "workload.n_requests": 50,
    "workload.n_input_tokens": 10,
}
"""The settings that the reference simulator's clustered branch actually uses in every column."""
_BRANCH_ORDER = (7, 0, 1, 2, 3, 4, 5, 6, 8)
"""One of that branch's join orders: one A100 is among the first four servers, the other is the last."""


def _table(name: str, title: str, note: str, n_requests: int, branch: str | None) -> TableVariant:
    """Returns a version of the tables.

    ``branch``: clustered rows are as in the reference simulator's clustered branch, with a "fixed" or a
    "drawn" join order; None: as the paper states them.
    """
    cells = {}
    for place in PLACES:
        for column, (rate, n_output) in enumerate(COLUMNS):
            common: dict[str, str | float] = {"workload.n_output_tokens": n_output}
            stated: dict[str, str | float] = {"workload.rate": rate, "workload.n_requests": n_requests}
            if place in TOPOLOGIES:
                if branch == "drawn":
                    continue
                overrides = {**_SCATTERED, **common, **stated}
                large_s = SETUP_S if place == "AboveNet" else SETUP_LARGE_S
                setting_id = f"{name}/{place}/{rate}/{n_output}"
                setting = Setting(setting_id, place.lower(), overrides, large_s, factors=True)
            elif branch is None:
                overrides = {**_SCATTERED, "clients.site": place, **common, **stated}
                setting_id = f"{name}/{place}/{rate}/{n_output}"
                setting = Setting(setting_id, "clustered", overrides, factors=True)
            else:
                overrides = {**_CLUSTERED_BRANCH, "clients.site": place, **common}
                order = _BRANCH_ORDER if branch == "fixed" else None
                setting_id = f"{name}/{place}/{n_output}"
                setting = Setting(
                    setting_id, "clustered", overrides, join_order=order, factors=branch == "fixed"
                )
            cells[place, column] = setting
    return TableVariant(name, title, note, cells)


CLOSEST = _table(
    "closest",
    "Settings that come closest to the printed numbers",
    "Clustered rows: the reference simulator's clustered branch as published (50 requests at 1 request/s in "
    "every column, 10 input tokens, its own constants, one join order: an A100 early, the other last). "
    "Scattered rows: 50 requests at the column's rate, 20 input tokens.",
    50,
    "fixed",
)
STATED = _table(
    "stated",
    "Settings as the paper states them",
    "100 requests at the column's rate, 20 input tokens, join orders drawn; the scattered branch's constants "
    "everywhere.",
    100,
    None,
)
DRAWN = _table(
    "drawn",
    "The clustered branch with join orders drawn",
    "As the clustered rows above it, but every run draws the order in which servers join, as in the scattered rows.",
    50,
    "drawn",
)
TABLES = (CLOSEST, DRAWN, STATED)


def _sweep_setting(
    sweep: str,
    place: str,
    value: float,
    *,
    n_servers: int | None = None,
    ratio: float = 0.2,
    rate: float = 0.5,
    n_requests: int = 100,
    n_output: int = 128,
    planned_rate: float | None = None,
) -> Setting:
    """Returns a setting of C = ``n_servers`` servers, of which round(C x ``ratio``) have an A100.

    Their memory is that of the reference simulator's sweep scripts.
    """
    count = DEFAULT_SERVERS[place] if n_servers is None else n_servers
    n_a100 = round(count * ratio)
    overrides: dict[str, str | float] = {
        **_SCATTERED,
        "servers.0.hardware": "mig-1g-sweep",
        "servers.0.count": count - n_a100,
        "servers.1.hardware": "a100-sweep",
        "servers.1.count": n_a100,
        "workload.rate": rate,
        "workload.n_requests": n_requests,
        "workload.n_output_tokens": n_output,
    }
    return Setting(f"{sweep}/{place}/{value:g}", place.lower(), overrides, planned_rate=planned_rate)


DEFAULT_SERVERS = {"AboveNet": 9, "BellCanada": 19, "GTS-CE": 60}
"""Number of servers C in sweeps of other parameters: 0.4 x nodes."""
SERVER_COUNTS = {
    "AboveNet": (6, 9, 12, 15, 18, 22),
    "BellCanada": (10, 19, 26, 33, 40),
    "GTS-CE": (10, 26, 40, 60, 90),
}
A100_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
RATES = (0.1, 0.25, 0.5, 0.75, 1.0)
OUTPUT_TOKENS = (32, 64, 128, 256, 512)
ACTUAL_RATES = (0.1, 0.3, 0.5, 0.7, 0.9)
PLANNED_RATE = 0.5


def _sweeps() -> Iterator[Sweep]:
    yield Sweep(
        "servers",
        "Number of servers C (a fifth with an A100, 0.5 requests/s)",
        "servers C",
        {
            p: [(c, _sweep_setting("servers", p, c, n_servers=c)) for c in SERVER_COUNTS[p]]
            for p in TOPOLOGIES
        },
    )
    yield Sweep(
        "a100-share",
        "Fraction of servers with an A100 (C = 0.4 x nodes, 0.5 requests/s)",
        "fraction of A100 η",
        {p: [(r, _sweep_setting("a100-share", p, r, ratio=r)) for r in A100_RATIOS] for p in TOPOLOGIES},
    )
    yield Sweep(
        "rate",
        "Request rate λ (200 λ requests, C = 0.4 x nodes)",
        "request rate λ [1/s]",
        {
            p: [(r, _sweep_setting("rate", p, r, rate=r, n_requests=round(200 * r))) for r in RATES]
            for p in TOPOLOGIES
        },
    )
    yield Sweep(
        "length",
        "Output tokens (C = 0.4 x nodes, 0.5 requests/s)",
        "output tokens $l_{max}$",
        {p: [(n, _sweep_setting("length", p, n, n_output=n)) for n in OUTPUT_TOKENS] for p in TOPOLOGIES},
    )
    yield Sweep(
        "servers-and-rate",
        "Servers and load together: λ = 0.1/9 C requests/s",
        "servers C",
        {
            p: [
                (c, _sweep_setting("servers-and-rate", p, c, n_servers=c, rate=round(0.1 / 9 * c, 9)))
                for c in SERVER_COUNTS[p]
            ]
            for p in TOPOLOGIES
        },
    )
    yield Sweep(
        "actual-rate",
        "Actual request rate where |R| is planned for 0.5 requests/s (200 λ requests)",
        "actual request rate [1/s]",
        {
            p: [
                (
                    r,
                    _sweep_setting(
                        "actual-rate",
                        p,
                        r,
                        rate=r,
                        n_requests=round(200 * r),
                        planned_rate=PLANNED_RATE,
                    ),
                )
                for r in ACTUAL_RATES
            ]
            for p in TOPOLOGIES
        },
    )


SWEEPS = tuple(_sweeps())


def settings_of(only: str | None) -> list[Setting]:
    """Returns the settings that ``--only tables``, ``--only figures`` or (None) both need, in a fixed
    order.
    """
    groups: list[TableVariant | Sweep] = []
    if only != "figures":
        groups += TABLES
    if only != "tables":
        groups += SWEEPS
    return [setting for group in groups for setting in group.settings]
