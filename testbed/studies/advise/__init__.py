"""`testbed advise`: which servers to add or links to widen at which sites within a budget, and which server's
loss would hurt most.

- ``candidates``: what can be added, and the scenario with that added, or with a server removed
- ``search``: chooses the combinations that are judged; it does not know about runs
- ``judging``: decides which runs are done, and judges combinations by their results
- ``command``: the command, on the workers of ``testbed.studies.sweep``; ``text``: its output on the terminal
"""
