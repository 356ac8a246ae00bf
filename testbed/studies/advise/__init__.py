"""`testbed advise`: which servers to add where within a budget, and whose loss would hurt most.

- ``candidates``: what can be added, and a scenario with servers more or fewer
- ``search``: which combinations are judged; it knows nothing of runs
- ``command``: puts it together on the workers of ``testbed.studies.sweep``; ``text``: the terminal
"""
