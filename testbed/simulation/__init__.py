"""``testbed simulate``: the same decisions and tables without a network.

- ``command``: every target under every policy; ``cases``: scenarios and ``instance`` files as cases
- ``engine``: one case in the mode reference (``policies.replay``) or ``real``
- ``real``, ``events``, ``servers``, ``serving``, ``view``, ``moving``: the testbed's behaviour as events
- ``failing``: the same while servers fail (``hub``, ``forwarded``); ``failures``, ``machines``, ``system``, ``sessions``, ``openings``, ``record``:
  its rules, processes, what sessions share, sessions, how they open and reopen hops, what is told of them
- ``answer``: the JSON object; ``text``: the terminal; ``tables``, ``summary``, ``hops``: the files
- ``offline``: instances whose requests are all there at once
"""
