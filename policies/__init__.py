"""Pure decisions: which server holds which blocks, which chain serves a request. No clock, files or network.

Also the words that ``nodes`` and ``netem`` share with them: requests, hops, links and rules.

The input and output of policies
- ``problem``: servers, clients, model, placements, routes; ``state``: which sessions hold cache, and until
  when
- ``steps``: how long a step takes on a server; ``links``: what a link does to a message
- ``link_rates``: the rates of a problem's links; ``link_waits``: how long messages are expected to wait for them
- ``places``: where nodes are; ``outcomes``: what became of requests; ``rehearsal``: what the simulator makes of a placement;
  each for policies that want to know
- ``interfaces``: the protocols of placement and routing policies, with their traits; ``checks``: the rules for
  their results
- ``registry``: policies by name, users' own included; ``remember``: keeps results

Placement
- ``cgbp``: CG-BP and its bounds; ``greedy``: its steps, for reuse; ``design``: the design concurrency |R|
- ``petals``: PETALS' placement; ``ablations``: Optimized Order and Optimized Number; ``fixed``: given
  placements
- ``foresight``: our own placement, chosen by trial; ``foresight_sharing``: the same for servers that batch
  sessions; ``rehearsed``: the same with the last choice by rehearsals
- ``search``: trials on synthetic arrivals, and the search for |R|; ``neighbours``: small changes of a
  placement
- ``pipelines``: placements of other systems that make stages or pipelines; ``parallax``: Parallax'
- ``composition``: chains with capacities (GBP-CR, GCA, JFFC)
- ``helix``: the placement with the largest flow; ``flow``: the tokens per second that a placement can process
- ``feasibility``: error messages for placements that do not fit
- ``milp``: the exact optimum of placement and routes, its relaxation and rounding; ``milp_model``: the
  program; ``milp_paper``: the paper's own; ``milp_solver``: HiGHS; ``offline``: CG-BPRR for given requests; ``link_costs``: time per token

Routing
- ``wsrr``: WS-RR; ``petals_routing``: PETALS' routing; ``petals_search``: its search for chains
- ``optimal_rr``: the exact optimum for one request
- ``iwrr``: Helix' routing; ``swarm_routing``: SWARM's; ``parallax`` and ``pipelines`` contain Parallax'
- ``learning``: a bandit over chains, and regions first
- ``petals_code``: PETALS' routing as in its code; ``foresight_routing``: our own
- ``chains``: links and cheapest chains; ``positions``: the graph of block positions
- ``waiting``: time until cache is free; ``workload``: requests, and how refused ones wait
- ``replay``: the reference simulator's semantics; ``sharing`` and ``shared_replay``: servers that batch
  sessions

While serving
- ``rules``: what clients do about failures, and caches that grow by pages
- ``membership``: which servers the routers believe to be alive; ``bans``: servers that a client avoids for a
  while
- ``subrange``: routing over a lost range of blocks; ``joining``: servers that join later
- ``online``: when and how a placement changes; ``petals_rebalancing``: PETALS' own method
"""

from policies.interfaces import PlacementPolicy, Router, RoutingPolicy
from policies.problem import (
    BlockRange,
    Hop,
    InfeasiblePlacement,
    ModelSpec,
    Placement,
    PolicyError,
    Problem,
    RequestSpec,
    Route,
    ServerSpec,
    service_s,
)
from policies.state import SystemState

__all__ = [
    "BlockRange",
    "Hop",
    "InfeasiblePlacement",
    "ModelSpec",
    "Placement",
    "PlacementPolicy",
    "PolicyError",
    "Problem",
    "RequestSpec",
    "Route",
    "Router",
    "RoutingPolicy",
    "ServerSpec",
    "SystemState",
    "service_s",
]
