"""One whole run with its tables.

- ``up``: ``testbed up``; ``generate``: a prompt through real blocks
- ``twin``: the same run in virtual time; ``verify``: its tokens against the whole model's
- ``inside``: programs of the user's on the nodes of a running testbed
- ``net``: the network of a scenario alone
- ``ps``: the testbeds that run on this machine
- ``clean``: what killed runs left
"""
