"""`testbed capacity`: the highest rate of requests at which a policy keeps objectives.

- ``measures``: what is measured of a run; ``verdict``: what runs with several seeds at one rate come to
- ``search``: which rates are judged; it knows nothing of runs
- ``command``: puts it together on the workers of ``testbed.studies.sweep``; ``text``: the terminal
"""
