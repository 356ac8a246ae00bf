"""Tests that disturb whole systems for as long as they are given: ``python -m benchmarks chaos``, ``fuzz``, ``soak``.

- ``chaos``: faults, changes of links and cancelled requests, drawn from seeds, in virtual time; ``chaos_mutations``
  checks that the seeds would find broken code
- ``fuzz``: hostile input to each part that reads from others (the ``hostile_`` modules)
- ``soak``: memory and what is left behind in a long run under churn

The test suite plays a bounded share of each.
"""
