"""`testbed explain`: why one request took its time.

- ``account``: from a run's tables to the request's time in parts, and the best chain in hindsight
- ``command``: finds the run, or simulates the scenario; ``text``: the terminal
"""
