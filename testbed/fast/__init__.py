"""Simulates sessions that nobody cuts, and servers that come and go.

- ``engine``: chains, openings and closings; chooses how sessions are served
- ``session``, ``conversations``: a request, and what outlives it: further turns, kept caches
- ``sending``: small messages
- ``meetings``: whether two sessions can wait for each other
- ``idle``: sessions that cannot, in closed form
- ``steps``, ``links``: others, step by step over the scenario's links
- ``lazy``: the links and TCP of those, with fewer events
- ``machines``, ``moving``: the servers that come and go, or move to other blocks
- ``outcome``: the result
"""
