"""Simulates sessions that nothing disturbs: ``engine``, in closed form or with ``steps``; ``outcome``: the result."""
