"""The emulated network: nodes in namespaces, and a delay and a rate for every ordered pair.

- ``topology``: places and links, and what delay-shortest paths over them cost
- ``spec``: what a network must look like; ``backend``: what every implementation must do
- ``kernel`` (with ``qdiscs``, ``rtnetlink``): netem; ``fabric`` (with ``forwarder*``, ``tun``); ``loopback``
- ``hostclock``: another machine's clock, where nodes are on several
- ``choose``: the best that works here; ``probe``: what works here
- ``programs``: programs of the user's in the network of a node
- ``tcp``: TCP's settings inside a namespace; ``syscalls``: namespaces and process calls that Python lacks
"""
