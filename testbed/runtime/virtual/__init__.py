"""Virtual time: it stands still while any process has something to do, then jumps to the next event.

- ``loop``: event loops that follow it, in whole nanoseconds
- ``memory``: all nodes of a run in one process, on ``netem.memory``; ``processes``: such nodes; ``wire``:
  their control connections
- ``page``, ``keeper``: virtual time that is shared by processes, and moved by the network's forwarder
- ``stall``: ends a run that makes no progress any more
"""
