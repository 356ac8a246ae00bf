"""The contract of what a run leaves: every column, key and event stands here once, with unit and meaning.

Every engine makes these records, and every reader reads them. Times are seconds, block ranges are half-open from 0.

- ``requests``: a row per request (``requests.parquet``); ``hops``: a row per token and hop (``hops.parquet``)
- ``summary``: ``summary.json``; ``plan``: ``plan.json``; ``events``: the lines of ``events.jsonl``
- ``docs``: the tables of ``docs/metrics.md``, made from the records
"""
