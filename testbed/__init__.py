"""The command line and what composes policies, network and nodes into runs. Each folder imports only those below it.

- ``cli``: commands, their options and help; no logic
- ``inspect``: what there is: this machine, models, topologies
- ``studies``: what runs many runs, or measures the tool itself (``reproduce``, ``calibrate``, ``compare``, ``links``)
- ``simulate``: ``testbed simulate``: which engine serves a scenario, and its tables
- ``runs``: one whole run with its tables (``up``, its ``twin``, ``generate``), and what is left of runs (``clean``)
- ``results``: from a run's logs to tables, summary, trace and report
- ``runtime``: a run on its stage: nodes and network, in real time (``real``) or in virtual time (``virtual``)
- ``fast``: sessions that nothing disturbs, in closed form
- ``control``: decisions while requests are served, under any clock: coordinator, mover, faults
- ``scenario``: from files to an ``Experiment``
- ``errors``, ``rundir``: what all of them share
"""
