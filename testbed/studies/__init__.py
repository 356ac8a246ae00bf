"""What runs many runs, or measures the tool itself.

- ``reproduce``: the paper's evaluation; ``compare``: two runs side by side
- ``helix``, ``chain``: what other systems measured or printed, beside what is simulated
- ``calibrate``: times of real blocks as a hardware profile; ``links``: the emulated links against what they should be
"""
