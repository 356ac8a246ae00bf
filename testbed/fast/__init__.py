"""Sessions that nothing disturbs: ``engine`` serves them in closed form, on ``events`` and ``servers``."""
