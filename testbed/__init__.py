"""The command line and what composes policies, network and nodes into runs.

- ``cli``: every command; ``scenario``: files to ``experiment``; ``placing``: the placement policy
- ``up``, ``emulation``, ``coordinator``, ``live``: a run; ``launcher``, ``handle``: its processes
- ``wiring``: from a scenario to what network and nodes are told; ``rundir``: run directories
- ``results``: tables, model, summary, trace, report; ``linkcheck``, ``doctor``, ``clean``: the other commands
- ``simulation``: replays instances with the reference simulator's semantics
"""
