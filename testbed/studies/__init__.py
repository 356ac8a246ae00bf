"""Commands that do many runs, and commands that measure the testbed itself.

- ``sweep``: one scenario over values of keys, policies and seeds; its workers and its store serve other
  studies, too
- ``capacity``: the highest request rate that meets objectives; ``advise``: the cheapest cluster that does
- ``explain``: which waits and delays the time of requests consists of
- ``reproduce``: the paper's evaluation; ``compare``: two runs side by side
- ``seeds``: one scenario served with several seeds
- ``helix``, ``chain``: measurements and printouts of other systems, compared with the simulation
- ``calibrate``: measures real blocks and writes a hardware profile; ``links``: checks the emulated links
  against their configuration
"""
