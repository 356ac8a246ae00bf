"""``testbed simulate``: which engine serves a scenario, and its answers and tables.

- ``command``: every target under every policy; ``cases``: scenarios and ``instance`` files as cases
- ``engine``: one case by ``policies.replay`` (reference), ``testbed.fast``, or the system itself (``virtual``)
- ``answer``: the JSON object; ``text``: the terminal; ``tables``, ``summary``, ``hops``: the files
- ``offline``: instances whose requests are all there at once
"""
