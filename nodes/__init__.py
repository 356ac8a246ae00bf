"""What runs inside a node of the emulated network.

- ``node``: a node process and its configuration; ``control``: its connection to the orchestrator
- ``wire``: the data plane's frames; ``server``, ``sessions``, ``cache``, ``compute``, ``limits``: a server
- ``framesizes``: how many bytes of a connection each frame takes, for the fast engine
- ``connection``, ``session``, ``chain``, ``load``: the client's connections, one request, the load generator
- ``admission``: what a server admits and how often a client tries, also for the fast engine
- ``recovery``, ``watchdog``: how a client replaces a hop that fails; ``moving``: a server that changes blocks
- ``forwarding``, ``peering``: servers that push hidden states to the next one
- ``forwarding_session``: the client's part of forwarding
- ``eventlog``: the append-only log; ``clock``, ``timers``, ``links``: time, deadlines, links that nodes play
- ``digest``: values that show whether a chain computed correctly; ``probe``: measures the network itself
- ``device``: notices when the node's own network device is removed
"""
