"""The page of a run, in a browser: what a run directory says, finished or still growing.

- ``header``: what never changes of a run; ``layout``: where its sites are on the map
- ``history``: what happened, append-only; ``follow`` reads it from logs as they grow, ``simulated`` from tables;
  ``servers``: what state each server was in, and since when
- ``feed``: one run for all pages that watch it; ``serve``: the HTTP server, ``guard`` who may ask it what
- ``view``: ``testbed view``; ``beside``: ``testbed up --page``, a process of its own
- ``report``: ``report.html``, the same page in one file; ``static/``: what the browser gets
"""
