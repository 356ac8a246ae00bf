"""Commands that describe something and run nothing.

``machine`` (``testbed doctor``), ``model``, ``hardware``, ``topology``, ``workload``, ``validity`` (``testbed validate``)
"""
