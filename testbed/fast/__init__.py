"""Simulates sessions that nothing disturbs.

- ``engine``: chains, openings and closings; chooses how sessions are served
- ``meetings``: whether two sessions can wait for each other
- ``idle``: sessions that cannot, in closed form
- ``steps``, ``links``: others, step by step over the scenario's links
- ``outcome``: the result
"""
