"""`testbed explain`: why one request took its time.

- ``account``: divides the request's time into parts, from a run's tables, and finds the best chain in
  hindsight
- ``waits``: which messages and steps met others, and how long messages waited for links
- ``command``: reads the run, or simulates the scenario first; ``text``: the output on the terminal
"""
