"""Servers that fail while requests are served, and what becomes of the sessions on them.

- ``emulated``: all of it for one run; ``machines``: what can be done to a server's process, by a scenario or by hand
- ``schedule``: the scenario's faults, by time and by tokens
- ``recoveries``: what clients tell of failures, as lines of ``events.jsonl``
- ``byhand``: what the socket of a running testbed takes, and ``testbed fault``
- ``leaks``: what is left of sessions at the end
"""
