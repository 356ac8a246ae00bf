"""The Python API (docs/python.md), the command line, and the code that composes policies, network and nodes into runs.

``import testbed as tb`` offers the names of ``__all__``; each is imported when it is first used.

Each folder imports only those below it.

- ``api``: ``scenario``, ``simulate``, ``up``, ``sweep``, ``score`` and ``load`` for programs and notebooks
- ``cli``: commands, their options and help; no logic
- ``inspect``: describes this machine, hardware, models, topologies and workloads
- ``studies``: many runs, or measurements of the tool itself (``reproduce``, ``calibrate``, ``compare``,
  ``links``)
- ``simulator``: ``testbed simulate``: chooses the engine that serves a scenario, and makes its tables
- ``runs``: one whole run with its tables (``up``, ``serve``, its ``twin``, ``generate``), and the removal of
  what killed runs left (``clean``)
- ``serving``: the endpoint of ``testbed serve``
- ``page``: a run in the browser, and ``report.html``
- ``results``: from a run's logs to tables, summary and trace
- ``runtime``: the nodes and the network of a run, in real time (``real``) or in virtual time (``virtual``)
- ``fast``: sessions that nobody cuts, in closed form or step by step over links
- ``control``: decisions while requests are served, under any clock: coordinator, mover, faults
- ``experiments``: from files to an ``Experiment``
- ``records``: the contract of what a run leaves: rows, summary, plan and events
- ``faultkinds``: the kinds of fault
- ``errors``, ``rundir``, ``codeversion``, ``cluster``, ``terminal``: shared by all of them
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.api.progress import Progress
    from testbed.api.runs import Run, load, simulate, up, up_async
    from testbed.api.scenarios import Scenario, scenario
    from testbed.api.scores import Score, score
    from testbed.api.sweeps import Gain, Gains, Table, sweep
    from testbed.errors import RunError, TestbedError, UserError

__all__ = [
    "Gain",
    "Gains",
    "Progress",
    "Run",
    "RunError",
    "Scenario",
    "Score",
    "Table",
    "TestbedError",
    "UserError",
    "load",
    "scenario",
    "score",
    "simulate",
    "sweep",
    "up",
    "up_async",
]
_MODULES = {
    "testbed.api.progress": ("Progress",),
    "testbed.api.runs": ("Run", "load", "simulate", "up", "up_async"),
    "testbed.api.scenarios": ("Scenario", "scenario"),
    "testbed.api.scores": ("Score", "score"),
    "testbed.api.sweeps": ("Gain", "Gains", "Table", "sweep"),
    "testbed.errors": ("RunError", "TestbedError", "UserError"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
