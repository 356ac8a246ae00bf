"""Pure decisions: where blocks go and which chain serves a request. No clock, no files, no network.

What policies see and answer
- ``problem``: servers, clients, model, placements, routes; ``state``: who holds cache until when
- ``interfaces``: what a placement and a routing policy must offer; ``checks``: the rules they must keep
- ``registry``: policies by name, users' own included

Placement
- ``cgbp``: CG-BP and its bounds; ``greedy``: its steps, for reuse; ``design``: |R|
- ``petals``: PETALS' placement; ``ablations``: Optimized Order and Number; ``fixed``: as given
- ``foresight``: our own, by trial; ``search``: trials on synthetic arrivals, |R| searched; ``neighbours``:
  small changes of a placement
- ``pipelines``: those of other systems that make stages or pipelines; ``parallax``: Parallax'; ``helix``: the
  largest flow; ``flow``: what a placement can pass
- ``feasibility``: words for what does not fit
- ``milp``: the exact optimum of placement and routes, its relaxation and rounding that; ``milp_model``: the
  program; ``milp_solver``: HiGHS; ``offline``: CG-BPRR for given requests; ``link_costs``: time per token

Routing
- ``wsrr``: WS-RR; ``petals_routing``: PETALS' routing; ``petals_search``: its search for chains
- ``optimal_rr``: exact for one request
- ``iwrr``: Helix' routing; ``swarm_routing``: SWARM's; ``parallax`` and ``pipelines`` have Parallax'
- ``petals_code``: PETALS' routing as its code does it; ``foresight_routing``: our own
- ``chains``: links and cheapest chains; ``positions``: the graph of block positions
- ``waiting``: time until cache is free; ``replay``: the reference simulator's semantics; ``workload``: requests

While serving
- ``membership``: which servers routers believe to be there; ``bans``: whom a client leaves out for a while
- ``subrange``: routing over a lost range among those that are left; ``joining``: servers that come later
- ``online``: when and how a placement changes; ``petals_rebalancing``: PETALS' own way
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
