"""Commands that make one run with its tables, or deal with the runs of this machine.

- ``session``: one run from its checks to its tables, whoever starts it
- ``up``: ``testbed up``; ``serve``: ``testbed serve``; ``generate``: a prompt through real blocks
- ``twin``: the same run in virtual time; ``verify``: compares its tokens with the whole model's
- ``inside``: the user's programs on nodes of a running testbed
- ``byhand``: faults and links of a running testbed, by hand
- ``net``: only the network of a scenario
- ``ps``: lists the testbeds that run on this machine
- ``clean``: removes what killed runs left
"""
