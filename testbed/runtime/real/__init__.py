"""Nodes that are processes: ``launcher`` forks them into their networks, ``handle`` is the run's end of it."""
