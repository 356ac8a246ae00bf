"""The emulated network: nodes, and a link with delay and rate for every ordered pair that exchanges packets.

- ``topology``: sites and the links between them, and the delay and rate of delay-shortest paths
- ``spec``: the description of a network
- ``networks``: which networks there are, what each can do, and which one ``auto`` takes; ``backend``: the
  interface of every implementation whose nodes are processes
- the backends: ``kernel`` (``netem``, with ``qdiscs``, ``rtnetlink``), ``fabric`` (with ``forwarder*``,
  ``tun``), ``loopback``, and ``hosts``, which emulates nothing
- ``memory``: the network of nodes that run in one process, in virtual time
- ``flows``: what TCP does with the bytes of a connection, for ``memory`` and the simulator's engine ``fast``
- ``hostclock``: estimates the clock of another machine, for runs over several machines
- ``probe``: tests what this machine can do
- ``programs``: runs a user's programs in the network of a node
- ``tcp``: TCP's settings inside a namespace; ``syscalls``: system calls that Python lacks
"""
