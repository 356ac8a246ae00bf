"""Servers that fail while requests are served, and the recovery of the sessions on them.

- ``emulated``: all of it for one run; ``machines``: carries out faults on servers' processes, each a ``machine``
- ``schedule``: the scenario's faults, by time and by tokens; ``byhand``: faults by hand (``testbed fault``)
- ``recoveries``: clients' records of failures and replays, as lines of ``events.jsonl``
- ``leaks``: what sessions have left behind at the end
"""
