"""Decisions while requests are served, under any clock and in every engine.

``coordinator`` answers routing questions and keeps what routers see (``view``); ``steering`` asks the online
policy and checks what it answers, and ``mover`` brings the servers to it.
"""
