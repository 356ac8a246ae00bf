"""Simulates sessions that nobody cuts, and servers that come and go.

- ``engine``: chains, openings and closings; chooses how sessions are served
- ``meetings``: whether two sessions can wait for each other
- ``idle``: sessions that cannot, in closed form
- ``steps``, ``links``: others, step by step over the scenario's links
- ``lazy``: the links and TCP of those, with fewer events
- ``machines``: the servers that come and go
- ``outcome``: the result
"""
