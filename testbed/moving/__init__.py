"""Placements that change while requests are served.

``steering`` asks the online policy and checks what it answers, for emulation and simulation alike;
``emulated`` brings an emulation's servers to what it decides (``testbed.simulation.moving`` a simulation's).
"""
