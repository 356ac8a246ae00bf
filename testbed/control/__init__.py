"""Decisions while requests are served, under any clock and in every engine.

- ``placing``: runs the placement policy and holds policies to the rules; ``fixed``: plans that are given
- ``coordinator``: answers routing questions; ``view``: what routers see of sessions
- ``steering``: asks the online policy; ``mover``: who moves when; ``moves``: the same with a run's nodes
- ``live``: the socket of a running testbed, for what is done by hand; ``links``: links that change
- ``faults``: what happens to servers, and what becomes of the sessions on them
"""
