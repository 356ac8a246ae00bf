"""One whole run with its tables.

- ``up``: ``testbed up``; ``generate``: a prompt through real blocks
- ``twin``: the same run in virtual time; ``verify``: its tokens against the whole model's
- ``clean``: what killed runs left
"""
