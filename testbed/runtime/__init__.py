"""Runs a scenario: its clock, its network, its nodes and programs.

- ``setup``: what is run where; ``stage``: chooses clock and network; ``emulation``: the phases of a run; ``phases``: goes through them;
  ``running``: signals, progress and timeouts around it; ``reports``: what nodes ask and report
- ``launching``: the interface of launchers, which start the nodes: ``real`` (as processes), ``virtual`` (also
  all in this process), ``hosts`` (on several machines)
- ``nodeset``, ``peering``: starts and connects the nodes; ``wiring``: their configurations; ``processes``:
  the open network and the processes on it
- ``programs``: the user's programs of a scenario; ``bare``: a network with these programs only
- ``whereabouts``: the nodes' addresses, for programs that are started from outside; ``guests``, ``reception``:
  requests from outside
- ``blocks``, ``gpus``: the model and the devices of a run with real blocks; ``servermemory``: the memory it
  uses
- ``progress``, ``live``: the view of a running testbed; ``quota``: CPU limits of a container; ``signals``
"""
