"""Shipped data, no code.

- ``*.toml``: scenarios
- ``profiles/``: models, hardware, calibrations
- ``topologies/``: places and links of real networks
"""
