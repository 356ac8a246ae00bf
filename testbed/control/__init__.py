"""Decisions while requests are served, under any clock and in every engine.

- ``placing``: runs the placement policy and checks policies' results; ``fixed``: fixed placements and chains
- ``coordinator``: routes requests; ``waiting_room``: its queue; ``view``: what routers see of sessions
- ``steering``: runs the online policy; ``mover``: which server moves when; ``moves``: moves a run's nodes
- ``live``: the socket of a running testbed, for faults and links by hand; ``links``: links that change
- ``faults``: faults of servers, and the recovery of the sessions on them
- ``guarded``: background work whose errors end the run
"""
