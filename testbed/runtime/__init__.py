"""A run on its stage.

- ``stage``: the clock and the network of a run; ``running``: signals, progress and ends around ``emulation``, the run itself
- ``launching``: what a run asks of whoever has its nodes: ``real`` (processes) or ``virtual`` (also all in this process)
- ``nodeset``, ``peering``: the nodes of a run, and what they know of each other; ``wiring``: their configurations
- ``programs``: the user's programs of a scenario; ``bare``: these alone on its network
- ``whereabouts``: where the nodes are, for programs that come from outside
- ``blocks``: the model of a run with real blocks; ``servermemory``: what that takes
- ``progress``, ``live``: the view of a running testbed; ``signals``
"""
