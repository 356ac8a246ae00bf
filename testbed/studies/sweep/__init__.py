"""`testbed sweep`: one scenario over axes of its keys, policies and seeds.

- ``axes``: values of keys and their combinations; ``study``: the study that a file or the command line
  describes
- ``runs``: one run, from its keys to its measures; ``measures``: the measures, which are columns of the
  results; ``engines``: which engines served the runs, and why
- ``pool``, ``on_ray``: executors, which hand runs to workers of this machine or of a Ray cluster; ``executors``: their names
- ``store``: the results on disk, one line per run; ``kept``: rows per request; ``progress``: the progress bar
- ``table``: writes ``results.parquet``; ``contrast``: means and paired differences with intervals
- ``documents``, ``figures``, ``webpage``: write tables, figures and ``index.html``; ``disk``: errors of the
  disk
- ``command``: the command, which uses all of these
"""
