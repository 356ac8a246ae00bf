"""What runs inside a node of the emulated network.

- ``node``: a node process from its configuration; ``control``: how the orchestrator talks to it
- ``wire``: the data plane's frames; ``server``, ``cache``, ``compute``: sessions on a server's blocks
- ``connection``, ``session``, ``load``: the client's connections, one request, the load generator
- ``forwarding``, ``peering``: servers that push hidden states to the next one; ``forwarded``: the client's part
- ``eventlog``: the append-only log; ``clock``, ``timers``, ``links``: time, deadlines, delays in the client
- ``digest``: values that prove a chain right; ``probe``: measures the network itself
- ``device``: notices when the node's own network device is removed
"""
