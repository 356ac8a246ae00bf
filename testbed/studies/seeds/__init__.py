"""``testbed up --runs``: one scenario run with several seeds."""
