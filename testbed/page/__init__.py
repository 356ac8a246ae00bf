"""The page of a run in a browser, live or after its end.

- ``header``: the constant part of a run; ``layout``: where its sites are on the map
- ``history``: what happened, append-only; ``follow`` reads it from growing logs, ``simulated`` from tables;
  ``servers``: the states of servers over time; ``others``: the histories of further runs; ``waterfall``: the
  hops of one request
- ``feed``: one run, for all pages that watch it; ``serve``: the HTTP server; ``guard``: which requests it
  refuses
- ``view``: ``testbed view``; ``beside``: ``testbed up --page``, as a process of its own
- ``report``: ``report.html``, the same page in one file; ``static/``: the files for the browser
"""
