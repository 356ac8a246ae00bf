"""``testbed up --runs``: runs one scenario with several seeds."""
