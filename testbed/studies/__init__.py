"""What runs many runs, or measures the tool itself.

- ``sweep``: a scenario over keys, policies and seeds, with the workers and the store that others use, too
- ``reproduce``: the paper's evaluation; ``compare``: two runs side by side
- ``seeds``: a scenario run with several seeds
- ``helix``, ``chain``: what other systems measured or printed, beside what is simulated
- ``calibrate``: times of real blocks as a hardware profile; ``links``: the emulated links against what they should be
"""
