"""The command line, and the code that composes policies, network and nodes into runs.

Each folder imports only those below it.

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
- ``fast``: sessions that nothing disturbs, in closed form
- ``control``: decisions while requests are served, under any clock: coordinator, mover, faults
- ``experiments``: from files to an ``Experiment``
- ``records``: the contract of what a run leaves: rows, summary, plan and events
- ``faultkinds``: the kinds of fault
- ``errors``, ``rundir``, ``codeversion``, ``cluster``, ``terminal``: shared by all of them
"""
