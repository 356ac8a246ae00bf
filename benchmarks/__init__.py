"""Speed and accuracy, measured with a baseline beside each figure: ``python -m benchmarks``.

- ``network``: RTT and rate of an emulated link against what was asked
- ``emulation``: the clustered experiment against the model, at time scale 1 and 10
- ``startup``: seconds until 9 and 60 servers serve, and their private memory
- ``dataplane``: time of one step over WebSocket, HTTP and plain TCP
- ``simulator``: small runs of the simulator beside published run times, and one with 1,000 servers
- ``gpu``: real blocks on a GPU, only when it is named; see ``docs/gpu.md``
"""
