"""Pure decisions: where blocks go and which chain serves a request. No clock, no files, no network.

- ``problem``: servers, clients, model, placements, routes; ``state``: who holds cache until when
- ``interfaces``: what a placement and a routing policy must offer; ``checks``: the rules they must keep
- ``cgbp``: CG-BP with Theorem 1's bound; ``design``: |R|; ``petals``: PETALS' placement and routing
- ``wsrr``: WS-RR; ``waiting``: time until cache is free; ``registry``: policies by name
"""
