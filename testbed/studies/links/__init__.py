"""``testbed links``: compares the emulated links with the scenario's.

``check`` measures every link, ``report`` writes the differences, ``plot`` draws them.
"""
