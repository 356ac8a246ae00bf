"""Virtual time: it stands still while anything has something to do, and jumps to the next event when nothing has.

- ``loop``: event loops that keep it, in whole nanoseconds
- ``memory``: all nodes of a run in one process, over ``netem.memory``; ``processes``: what such a node is
- ``page``, ``keeper``: nodes in processes of their own share it, and the network's forwarder moves it
- ``stall``: ends a run in which nothing moves any more
"""
