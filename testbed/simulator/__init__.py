"""``testbed simulate``: chooses the engine that serves a scenario, and makes the output and tables.

- ``command``: simulates every target under every policy; ``cases``: scenarios and ``instance`` files as cases
- ``engine``: runs one case in ``policies.replay`` (reference), ``testbed.fast`` (fast), or by the system
  itself (``virtual``); ``runs``: several seeds of one scenario
- ``answer``: the JSON object; ``text``: the terminal's text; ``tables``, ``summary``, ``hops``, ``gaps``: the
  files
- ``offline``: instances whose requests are all present from the start
"""
