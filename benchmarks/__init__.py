"""Benchmarks of speed and accuracy, with baselines: ``python -m benchmarks``.

- ``network``, ``fabric``: RTT and rate of emulated links compared with the requested ones
- ``emulation``, ``virtual``: runs in real and in virtual time compared with the model
- ``startup``: seconds until 9 and 60 servers serve, and their private memory
- ``dataplane``: time of one step over WebSocket, HTTP and plain TCP
- ``simulator``: small runs of the simulator compared with published run times, and one with 1,000 servers
- ``results``, ``endpoint``, ``page``: costs of the tables, of the endpoint of ``testbed serve``, and of the
  page
- ``gpu``: transformer blocks on a GPU, only if it is named; see ``docs/gpu.md``
- ``chaos``, ``chaos-mutations``, ``fuzz`` and ``soak`` are commands, too: their modules are in ``tests/stress/``
- the others are commands of their own: see their modules
"""
