"""Nodes that are processes: ``launcher`` forks them into their networks, ``handle`` sends it commands."""
