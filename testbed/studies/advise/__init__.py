"""`testbed advise`: which servers to add at which sites within a budget, and which server's loss would hurt
most.

- ``candidates``: servers that can be added, and the scenario with servers added or removed
- ``search``: chooses the combinations that are judged; it does not know about runs
- ``judging``: decides which runs are done, and judges combinations by their results
- ``command``: the command, on the workers of ``testbed.studies.sweep``; ``text``: its output on the terminal
"""
