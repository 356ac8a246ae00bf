"""`testbed capacity`: the highest rate of requests at which a policy keeps objectives.

- ``measures``: the measures of one run; ``verdict``: whether runs with several seeds keep the objectives at
  one rate
- ``search``: chooses the rates that are judged; it does not know about runs
- ``seeds``: how many seeds an interval needs
- ``command``: the command, on the workers of ``testbed.studies.sweep``; ``text``: its output on the terminal
"""
