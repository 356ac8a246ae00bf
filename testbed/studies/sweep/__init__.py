"""`testbed sweep`: one scenario over axes of its keys, policies and seeds.

- ``axes``: values of keys and their combinations; ``study``: what a study file or the command line asks for
- ``runs``: one run, from its keys to its measures, in a process that does many; ``measures``: the columns that result
- ``pool``: executors, which have runs done by workers; ``store``: what is measured, line by line; ``progress``
- ``table``: ``results.parquet``; ``contrast``: means and paired differences with intervals
- ``documents``, ``figures``, ``webpage``: what is written of them; ``disk`` helps
- ``command``: puts it together
"""
