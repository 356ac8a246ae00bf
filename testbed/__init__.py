"""The command line and what composes policies, network and nodes into runs.

- ``cli`` (with ``cli_blocks``, ``cli_measure``): every command; ``scenario``: files to ``experiment``; ``placing``: the policies; ``fixed``: given plans
- ``up``, ``emulation``, ``coordinator``, ``live``: a run; ``launcher``, ``handle``, ``nodeset``: its processes
- ``wiring``: from a scenario to what network and nodes are told; ``rundir``: run directories
- ``peering``: tells forwarding servers where the others are
- ``timeline``: links as they change; ``results``: tables, model, summary, trace, report
- ``linkcheck`` (with ``linkreport``, ``linkplot``), ``topology``, ``doctor``, ``clean``: the other commands
- ``faults``, ``moving``: what happens to servers while they serve
- ``real``, ``generate``, ``model``, ``verify``, ``calibrate``: real blocks; ``compare``: two runs side by side
- ``simulation``: the same without a network; ``reproduce``: the paper's evaluation with it
"""
