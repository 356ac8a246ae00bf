"""The Python API, ``import testbed as tb``: what the command line does, for programs and notebooks.

- ``scenarios``: ``scenario``
- ``runs``: ``simulate``, ``up``, ``up_async``, ``load``, and the ``Run`` that they return
- ``sweeps``: ``sweep``, and its ``Table``
- ``choices``: policies that are given by name or as objects
- ``progress``: what callbacks are told, and calls inside a running event loop

Nothing here prints. Errors are those of the command line, ``testbed.errors``.
"""
